"""A lease as its holder sees it: held, in jeopardy, lost for a reason, or released.

The deadline moves only by a confirmed renewal, and never again once it has passed: `lost` is final.
Reading takes no lock and does no I/O, so `check()` is cheap enough for every loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from fenced import timing
from fenced.contracts import Runtime, Wakeup
from fenced.core.callbacks import call_user_callback
from fenced.errors import LeaseLost, Misuse, NotEnoughTime
from fenced.model import Granted, Stamp, grant_id


class State(StrEnum):
    """The holder's view. `held` means "may go on", never "is safe": the guard decides that."""

    HELD = "held"
    JEOPARDY = "jeopardy"
    LOST = "lost"
    RELEASED = "released"


class GrantState:
    """One grant, with the holder's local doubt about it."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        realm: str,
        names: tuple[str, ...],
        secret: str,
        granted: Granted,
        sent: float,
        jitter: float = 0.0,
        max_hold: float | None = None,
        on_end: Callable[[GrantState, str], None] | None = None,
    ) -> None:
        self.runtime = runtime
        self.realm = realm
        self.names = names
        self.secret = secret
        self.grant = grant_id(secret)
        self.token = granted.token
        self.ttl = granted.ttl
        self.acquired = sent
        self._jitter = jitter
        self.owner = runtime.whoami()
        self._changed: Wakeup | None = None
        self.lost_reason: str | None = None
        self.released = False
        self.in_doubt = False
        self.give_up = None if max_hold is None else sent + max_hold
        self._sequence = itertools.count(1)
        self._callbacks: list[Callable[[str], Any]] = []
        self._on_end = on_end
        self._set_times(sent, granted.remaining)

    def _set_times(self, sent: float, remaining: float) -> None:
        deadline = timing.local_deadline(sent, remaining)
        self.deadline = deadline if self.give_up is None else min(deadline, self.give_up)
        self.overdue = sent + timing.overdue_after(self.ttl)
        self.renew_at = sent + timing.renew_after(self.ttl, self._jitter)

    @property
    def due(self) -> float:
        """When the keeper must act on it: renew it, or mark it lost."""
        return min(self.renew_at, self.deadline)

    # What a program asks.

    @property
    def state(self) -> State:
        if self.lost_reason is not None:
            return State.LOST
        if self.released:
            return State.RELEASED
        now = self.runtime.now()
        if now >= self.deadline:
            self.expire()
            return State.LOST
        return State.JEOPARDY if self.in_doubt or now >= self.overdue else State.HELD

    def remaining(self) -> float:
        if self.lost_reason is not None or self.released:
            return 0.0
        return max(0.0, self.deadline - self.runtime.now())

    def check(self, need: float = 0.0) -> None:
        state = self.state
        if state is State.RELEASED:
            raise Misuse(f"{self} was released")
        if state is State.LOST:
            raise self.lost_error()
        if need and (remaining := self.remaining()) < need:
            raise NotEnoughTime(
                f"{self}: {remaining:.3f} s remain, {need:.3f} s are needed",
                remaining=remaining,
                need=need,
            )

    def lost_error(self) -> LeaseLost:
        reason = self.lost_reason or "expired"
        return LeaseLost(f"{self} is lost: {reason}", reason=reason)

    def next_stamp(self) -> Stamp:
        """The stamp of the next operation. A lost lease still stamps: the guard decides, not we."""
        return self._stamp(self.next_seq())

    def next_seq(self) -> int:
        """The number of the next operation; only the lease allots it."""
        if self.released:
            raise self._released_error()
        return next(self._sequence)

    def announcement(self) -> Stamp:
        return self._stamp(0)

    def bare_stamp(self) -> Stamp:
        """A stamp without seq, to hand to a child or another service; good for rule `retry` only."""
        return self._stamp(None)

    def _stamp(self, seq: int | None) -> Stamp:
        if self.released:
            raise self._released_error()
        return Stamp(self.realm, self.names, self.token, seq, self.grant)

    def _released_error(self) -> Misuse:
        return Misuse(f"{self} was released; nothing can be stamped with it")

    def on_lost(self, call: Callable[[str], Any]) -> None:
        """Call `call(reason)` once when the lease is lost; at once if it is lost already."""
        self._callbacks.append(call)
        if self.lost_reason is not None:
            self._call_on_lost()

    async def wait_lost(self, until: float | None) -> bool:
        """Wait for the loss (True); False when released, or when `until` comes first."""
        # The flag is there before the state is looked at, so that no change falls in between.
        changed = self._changed = self._changed or self.runtime.wakeup()
        while self.state not in (State.LOST, State.RELEASED):
            if until is not None and self.runtime.now() >= until:
                return False
            await self.runtime.wait(changed, _earlier(self.deadline, until))
        return self.state is State.LOST

    # What the keeper and the release do to it.

    def confirm(self, sent: float, remaining: float) -> None:
        """A renewal was confirmed. After the local deadline it comes too late and revives nothing."""
        if self.state in (State.LOST, State.RELEASED):
            return
        self.in_doubt = False
        self._set_times(sent, remaining)

    def expire(self) -> None:
        """The deadline has passed."""
        given_up = self.give_up is not None and self.runtime.now() >= self.give_up
        self.lose("max_hold" if given_up else "expired")

    def lose(self, reason: str) -> None:
        if self.lost_reason is not None or self.released:
            return
        self.lost_reason = reason
        if self._on_end is not None:
            self._on_end(self, reason)
        self._notify()
        self._call_on_lost()

    def forked(self) -> None:
        """In a forked child: over, and nobody is told; the callbacks' locks may be held by absent threads."""
        if not self.released:
            self.lost_reason = "forked"
        self._callbacks.clear()

    def end(self) -> None:
        """The program gave it back: nobody acts under it any more, whether or not the authority has answered."""
        self.released = True
        self._notify()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()

    def _call_on_lost(self) -> None:
        while self._callbacks:
            try:
                call = self._callbacks.pop()
            except IndexError:  # another thread has called it
                return
            call_user_callback(call, self.lost_reason or "expired")

    def __str__(self) -> str:
        return f"lease of {', '.join(self.names)} (token {self.token})"


def _earlier(deadline: float, until: float | None) -> float:
    return deadline if until is None else min(deadline, until)
