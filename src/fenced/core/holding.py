"""A lease as its holder sees it: held, in jeopardy, lost for a reason, or released.

Only a confirmed renewal moves the deadline. Once the deadline has passed, nothing moves it: `lost` is final.
Reading takes no lock and does no I/O, so a loop can call `check()` in every iteration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from fenced.core.callbacks import call_user_callback
from fenced.errors import LeaseLost, Misuse, NotEnoughTime
from fenced.values import timing
from fenced.values.contracts import Runtime, Wakeup
from fenced.values.model import Granted, Stamp, grant_id


class State(StrEnum):
    """The holder's view. `held` means "may go on", never "is safe": the guard decides that."""

    HELD = "held"
    JEOPARDY = "jeopardy"
    LOST = "lost"
    RELEASED = "released"


class GrantState:
    """One grant, and how long the holder may believe in it."""

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
        at_least_for: float = 0.0,
        on_end: Callable[[GrantState, str], None] | None = None,
        notes: Callable[[float], Iterable[str]] | None = None,
    ) -> None:
        """`notes`: what people should know of a lease that was lost, and had been confirmed at that time."""
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
        self.hold_until = None if max_hold is None else sent + max_hold
        self.taken_until = sent + at_least_for
        """After a release, nobody is granted its names before this time."""
        self._sequence = itertools.count(1)
        self._callbacks: list[Callable[[str], Any]] = []
        self._on_end = on_end
        self._notes = notes
        self._set_times(sent, granted.remaining)

    def _set_times(self, sent: float, remaining: float) -> None:
        self.confirmed = sent
        deadline = timing.local_deadline(sent, remaining)
        self.deadline = deadline if self.hold_until is None else min(deadline, self.hold_until)
        # An ask whose answer was lost, and which is tried again, is told of what is left by then.
        left = min(self.ttl, remaining)
        self.overdue = sent + timing.overdue_after(left)
        self.renew_at = sent + timing.renew_after(left, self._jitter)

    @property
    def due(self) -> float:
        """When the keeper must act on it: renew it, or mark it lost."""
        return min(self.renew_at, self.deadline)

    # Called by the program.

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

    def error_if_lost(self) -> LeaseLost | None:
        return self.lost_error() if self.state is State.LOST else None

    def lost_error(self) -> LeaseLost:
        reason = self.lost_reason or "expired"
        error = LeaseLost(f"{self} is lost: {reason}", reason=reason)
        for note in self._notes(self.confirmed) if self._notes is not None else ():
            error.add_note(note)
        return error

    def next_stamp(self) -> Stamp:
        """The stamp of the next operation. A lost lease still makes stamps: the guard refuses stale ones."""
        if self.released:
            raise self._released_error()
        return Stamp(self.realm, self.names, self.token, next(self._sequence), self.grant)

    def next_seq(self) -> int:
        """The sequence number of the next operation."""
        if self.released:
            raise self._released_error()
        return next(self._sequence)

    def announcement(self) -> Stamp:
        return self._stamp(0)

    def bare_stamp(self) -> Stamp:
        """A stamp without seq, for a child process or another service; rule `retry` alone accepts it."""
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
        """Wait until the lease is lost (True), or until it is released or `until` is reached (False)."""
        # The flag exists before the state is read, so a change after the read sets the flag and the wait returns.
        changed = self._changed = self._changed or self.runtime.wakeup()
        while self.state not in (State.LOST, State.RELEASED):
            if until is not None and self.runtime.now() >= until:
                return False
            await self.runtime.wait(changed, _earlier(self.deadline, until))
        return self.state is State.LOST

    # Called by the keeper and by the release.

    def confirm(self, sent: float, remaining: float) -> None:
        """Move the deadline after a confirmed renewal. Ignored once the lease is lost or released."""
        if self.state in (State.LOST, State.RELEASED):
            return
        self.in_doubt = False
        self._set_times(sent, remaining)

    def expire(self) -> None:
        """Mark the lease lost: its deadline has passed."""
        given_up = self.hold_until is not None and self.runtime.now() >= self.hold_until
        self.lose("max_hold" if given_up else "expired")

    def lose(self, reason: str) -> None:
        if self.lost_reason is not None or self.released:
            return
        # Written before anybody is told, so whoever is told finds it. The keeper and the program's thread may both get
        # here at once: then the event is emitted twice, and each callback is still called once.
        self.lost_reason = reason
        if self._on_end is not None:
            self._on_end(self, reason)
        self._notify()
        self._call_on_lost()

    def forked(self) -> None:
        """In a forked child: mark the lease lost and call no callback: the parent's threads may hold its locks."""
        if not self.released:
            self.lost_reason = "forked"
        self._callbacks.clear()

    def end(self) -> None:
        """Mark the lease released: the program no longer acts under it, whether or not the authority has answered."""
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
            self.runtime.deliver(call_user_callback, call, self.lost_reason or "expired")

    def __str__(self) -> str:
        return f"lease of {', '.join(self.names)} (token {self.token})"


def _earlier(deadline: float, until: float | None) -> float:
    return deadline if until is None else min(deadline, until)
