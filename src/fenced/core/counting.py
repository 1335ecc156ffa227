"""Counts the attempts of a client, and says up to which number they are over.

An authority may forget an ended attempt as soon as nobody will ever send it again. Only its client knows that, so only
its client may say it: its count has a secret name.
"""

from __future__ import annotations

from fenced.values import timing
from fenced.values.contracts import Runtime


class AttemptCounter:
    """The attempts of one client that are not over yet, in the order of their numbers."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.series = runtime.secret()
        self._last = 0
        self._open: dict[str, tuple[int, float]] = {}
        # Numbers are entered in their order: a number that is drawn but not entered yet would count as settled.
        self._lock = runtime.lock()

    def begin(self, secret: str, ttl: float) -> tuple[int, int]:
        """The number of a new attempt, and the number up to which all attempts are over."""
        now = self._runtime.now()
        with self._lock:
            settled = self._settled(now)
            self._last += 1
            self._open[secret] = (self._last, now + timing.remember_for(ttl))
            return self._last, settled

    def over(self, secret: str) -> None:
        """The authority has said how it ended, or never got it, and this client will not send it again.

        Takes no lock, because a finalizer may call it in a thread that holds it: a deletion is one step.
        """
        self._open.pop(secret, None)

    def _settled(self, now: float) -> int:
        """An attempt that is open for very long, such as a lease that is held for hours, is no longer waited for. An
        authority must not forget it before it has ended, and remembers its end for a while, as without any count."""
        while True:
            try:
                secret, (number, forget_at) = next(iter(self._open.items()), ("", (self._last + 1, now + 1)))
            except RuntimeError:
                continue  # another thread has deleted one meanwhile
            if forget_at > now:
                return number - 1
            self.over(secret)
