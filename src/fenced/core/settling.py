"""The settler: retries the withdrawal of attempts that the program gave up, until the authority answers.

A release or a withdrawal can fail, or be cancelled or interrupted, while the authority still counts the attempt as
held or waiting. The settler records the attempt before the first request is sent. If that request gets no answer,
the settler's loop retries the withdrawal through the renewer. That loop is separate from the keeper's, so a withdrawal
that hangs delays no renewal.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from fenced.core.renewing import Renewer
from fenced.errors import FencedError, Indeterminate, Unavailable
from fenced.values import timing
from fenced.values.contracts import Authority, Task

OWNER_TRY_SECONDS = timing.CALL_SECONDS + 1.0
"""How long the settler leaves an attempt to the caller that is ending it; longer than that caller's request lasts."""


STILL_SECONDS = 3 * OWNER_TRY_SECONDS
"""If the loop has not come round for so long, the whole process stood still."""


class GivenUp:
    """An attempt that the program gave up. The authority may still count it as held or waiting."""

    __slots__ = ("forget_at", "retry_at", "secret", "taken_until", "ttl")

    def __init__(self, secret: str, ttl: float, now: float, taken_until: float) -> None:
        self.secret = secret
        self.ttl = ttl
        self.taken_until = taken_until
        self.retry_at = now + OWNER_TRY_SECONDS
        self.forget_at = self.retry_at + timing.repeat_for(ttl)


class Settler:
    """Records attempts that were given up. Its loop runs only while a withdrawal has to be retried."""

    def __init__(self, authority: Authority, renewer: Renewer, over: Callable[[str], None]) -> None:
        """`over` is called with the secret of each attempt that the authority has ended."""
        self._authority = authority
        self._renewer = renewer
        self._over = over
        self._runtime = runtime = renewer.runtime
        self._given_up: dict[str, GivenUp] = {}
        self._kick = runtime.wakeup()
        self._task: Task | None = None
        self._starting = runtime.lock()
        self._closed = False
        self._came_round = -math.inf

    def give_up(self, secret: str, ttl: float, taken_until: float = -math.inf) -> GivenUp:
        """Record that this attempt has to end. The caller itself sends the first request.

        `taken_until`: it is a lease that succeeded, and nobody is granted its names before that.
        """
        # No lock: this is one step, and the loop works on copies.
        given_up = self._given_up[secret] = GivenUp(secret, ttl, self._runtime.now(), taken_until)
        return given_up

    async def end(self, given_up: GivenUp, until: float) -> None:
        """The caller's own try to end the attempt, held or waiting."""
        await self._end(self._authority, given_up, until)

    async def _end(self, authority: Authority, given_up: GivenUp, until: float) -> None:
        """Nothing is left to do once the authority has answered."""
        keep = given_up.taken_until - self._runtime.now()
        if keep > 0:
            await authority.release(given_up.secret, until, keep=keep)
        else:
            await authority.withdraw(given_up.secret, until)
        self.forget(given_up)

    def forget(self, given_up: GivenUp) -> None:
        """Delete the record: the authority has answered."""
        # The caller and the loop may both get here: the second finds nothing, and `over` may be repeated.
        self._given_up.pop(given_up.secret, None)
        self._over(given_up.secret)

    def retry_now(self, given_up: GivenUp) -> None:
        """Let the loop retry until the authority answers or the attempt has expired: the caller got no answer."""
        now = given_up.retry_at = self._runtime.now()
        # Counted from here: the attempt may have been prolonged for as long as its request was on the way.
        given_up.forget_at = now + timing.repeat_for(given_up.ttl)
        self._start()

    def start_if_due(self) -> None:
        """Start the loop for an attempt whose caller was interrupted before it could call `retry_now`."""
        if self._given_up and self._task is None and self._next_due() <= self._runtime.now():
            self._start()

    def _start(self) -> None:
        if self._closed:
            return
        # The loop ends only under this lock and only if no attempt is left. So an attempt that is given up at that
        # moment is either seen by the ending loop or starts a new one here.
        with self._starting:
            if self._task is None:
                self._came_round = self._runtime.now()
                self._task = self._renewer.spawn(self._run, "fenced-settler")
        self._kick.set()

    async def close(self, until: float) -> None:
        """End the loop, then try each remaining withdrawal once more, at most until `until`."""
        self.stop()
        if (task := self._task) is not None:
            await task.join(until)
        for given_up in list(self._given_up.values()):
            if not await self._try(self.end, given_up, until):
                return

    def stop(self) -> None:
        """End the loop and send nothing more."""
        self._closed = True
        self._kick.set()

    async def _run(self) -> None:
        try:
            while True:
                with self._starting:
                    if self._closed or not self._given_up:
                        self._task = None
                        return
                await self._runtime.wait(
                    self._kick, min(self._next_due(), self._runtime.now() + OWNER_TRY_SECONDS)
                )
                self._kick.clear()  # before the round: an attempt that is given up during it kicks again
                await self._round()
        except BaseException:  # for example, the program's event loop ends
            self._task = None
            raise

    def _next_due(self) -> float:
        return min((given_up.retry_at for given_up in list(self._given_up.values())), default=math.inf)

    async def _round(self) -> None:
        """Retry what is due. The first try without an answer ends the round: the next would meet the same silence.

        Time in which the process stood still does not count: an authority that stood still, too, or whose leader has
        changed, has not expired the attempts in it.
        """
        now, before = self._runtime.now(), self._came_round
        self._came_round = now
        if now - before > STILL_SECONDS:
            for given_up in list(self._given_up.values()):
                given_up.forget_at += now - before
        for given_up in list(self._given_up.values()):
            now = self._runtime.now()
            late = now >= given_up.forget_at
            if self._closed or (given_up.retry_at > now and not late):
                continue
            answered = await self._try(self._repeat, given_up, now + timing.CALL_SECONDS)
            if late and given_up.secret in self._given_up:
                self.forget(given_up)  # the authority has expired it by now, or else that was the last try
            if not answered:
                return

    async def _repeat(self, given_up: GivenUp, until: float) -> None:
        """The loop's try: it runs where the keeper runs."""
        if not self._renewer.ready:
            await self._renewer.open(until)
        await self._end(self._renewer.authority, given_up, until)

    async def _try(
        self, end: Callable[[GivenUp, float], Awaitable[None]], given_up: GivenUp, until: float
    ) -> bool:
        """Try to end the attempt. Returns whether the authority answered."""
        try:
            await end(given_up, until)
        except FencedError as error:
            given_up.retry_at = self._runtime.now() + timing.retry_after(given_up.ttl)
            return not isinstance(error, Unavailable | Indeterminate)
        return True
