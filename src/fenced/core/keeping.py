"""The keeper: one loop per client that renews all its leases and places in queues, in batches.

Neighbours in time are renewed together, so a thousand leases cost one request a round. What fails is
tried again soon, and puts its leases in jeopardy. A keeper that dies takes every lease with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fenced import timing
from fenced.contracts import Authority, Runtime, Task
from fenced.core.holding import GrantState
from fenced.core.settling import Settler
from fenced.core.waiting import QueueEntry
from fenced.errors import FencedError
from fenced.events import Event, KeeperFailed, LeaseInJeopardy
from fenced.model import Ended, Gone, Kept, RenewAnswer, Unknown, Waiting

BATCH_MAX = 5000
CALL_SECONDS_MIN = 0.01
IDLE_SECONDS = 5.0
"""A keeper with nothing to renew looks again by then, so that a lease that is soon released need not wake it."""


class Keeper:
    """Renews what it is given until it is taken away again."""

    def __init__(
        self, authority: Authority, runtime: Runtime, emit: Callable[[Event], None], settler: Settler
    ) -> None:
        # One jitter for the whole client: it spreads clients apart, and keeps one client's leases together.
        self.jitter = runtime.random()
        self._authority = authority
        self._runtime = runtime
        self._emit = emit
        self._settler = settler
        self._holds: dict[str, GrantState] = {}
        self._places: dict[str, QueueEntry] = {}
        self._kick = runtime.wakeup()
        self._asleep_until = -math.inf
        self._task: Task | None = None
        self._starting = runtime.lock()
        self._closed = False

    def keep(self, item: GrantState | QueueEntry) -> None:
        """Start renewing. Wakes the loop only when it would sleep past the first renewal, or past `max_hold`."""
        if isinstance(item, GrantState):
            self._holds[item.secret] = item
        else:
            self._places[item.secret] = item
        if self._task is None:
            with self._starting:
                if self._task is None:
                    self._task = self._runtime.spawn(self._run, "fenced-keeper")
        elif item.due < self._asleep_until:
            self._kick.set()

    def drop(self, secret: str) -> None:
        self._holds.pop(secret, None)
        self._places.pop(secret, None)

    def holds(self) -> list[GrantState]:
        return list(self._holds.values())

    def stop(self) -> None:
        """End the loop. Leases that it still keeps become lost("closed")."""
        self._closed = True
        self._kick.set()

    async def close(self, until: float) -> None:
        """Stop, and wait at most until `until` for a renewal that is under way."""
        self.stop()
        for place in list(self._places.values()):
            place.wake()
        if (task := self._task) is not None:
            await task.join(until)

    def fail(self, why: str) -> None:
        """Nobody renews any more: say so to every lease at once."""
        holds, self._holds = self.holds(), {}
        for hold in holds:
            hold.lose("keeper")
        for place in list(self._places.values()):
            place.wake()
        self._emit(KeeperFailed(why))

    async def _run(self) -> None:
        try:
            while not self._closed:
                self._asleep_until = math.inf  # from here on a newcomer kicks
                self._asleep_until = min(self._next_due(), self._runtime.now() + IDLE_SECONDS)
                await self._runtime.wait(self._kick, self._asleep_until)
                self._kick.clear()
                self._asleep_until = -math.inf
                if not self._closed:
                    await self._round()
        except Exception as error:
            if not self._closed:
                self.fail(f"the keeper met {type(error).__name__}: {error}")
            raise
        finally:  # ended by its loop, or by an error: the next lease starts another one
            self._task = None
            if self._closed:
                for hold in self.holds():
                    hold.lose("closed")

    def _next_due(self) -> float:
        due = math.inf
        for hold in self.holds():
            due = min(due, hold.due)
        for place in list(self._places.values()):
            due = min(due, place.due)
        return due

    async def _round(self) -> None:
        """Expire what is over, then renew all that is due or nearly so, in one batch."""
        now = self._runtime.now()
        for hold in self.holds():
            if now >= hold.deadline:
                hold.expire()
            if hold.lost_reason is not None:
                self.drop(hold.secret)
        items: list[GrantState | QueueEntry] = [*self.holds(), *list(self._places.values())]
        if any(item.renew_at <= now for item in items):
            due = [item for item in items if item.renew_at <= now + 0.15 * item.ttl]
            for start in range(0, len(due), BATCH_MAX):
                await self._renew(due[start : start + BATCH_MAX])
        self._settler.start_if_due()

    async def _renew(self, items: list[GrantState | QueueEntry]) -> None:
        sent = self._runtime.now()
        # Nobody's deadline may pass while the keeper waits here for others.
        patience = min(_time_left(item, sent) for item in (*self.holds(), *items)) / 2
        until = sent + min(max(patience, CALL_SECONDS_MIN), timing.CALL_SECONDS)
        try:
            answers = await self._authority.renew([item.secret for item in items], until)
        except FencedError as error:
            answers = [Unknown(str(error))] * len(items)
        for item, answer in zip(items, answers, strict=True):
            if isinstance(item, GrantState):
                self._apply(item, answer, sent)
            else:
                self._apply_place(item, answer, sent)

    def _apply(self, hold: GrantState, answer: RenewAnswer, sent: float) -> None:
        match answer:
            case Kept(remaining):
                hold.confirm(sent, remaining)
            case Unknown(why):
                hold.renew_at = self._runtime.now() + timing.retry_after(hold.ttl)
                self._doubt(hold, why)
            case Ended("released" | "withdrawn"):
                self.drop(hold.secret)  # our own doing: the release is on its way back
            case Ended(reason):
                hold.lose(reason)
            case Gone() | Waiting():
                hold.lose("gone")
        if hold.lost_reason is not None:
            self.drop(hold.secret)

    def _apply_place(self, place: QueueEntry, answer: RenewAnswer, sent: float) -> None:
        match answer:
            case Waiting(check_in):
                place.renew_at = sent + timing.renew_after(place.ttl, self.jitter)
                place.check_at = sent + check_in
                place.heard = sent
                if check_in <= 0:
                    place.wake()
            case Unknown():
                place.renew_at = self._runtime.now() + timing.retry_after(place.ttl)
            case Kept() | Ended() | Gone():
                # Granted already (a lost reply) or no longer in the queue: its own ask finds out.
                self.drop(place.secret)
                place.wake()

    def _doubt(self, hold: GrantState, why: str) -> None:
        if hold.in_doubt:
            return
        hold.in_doubt = True
        self._emit(LeaseInJeopardy(hold.names, hold.token, hold.grant, hold.remaining(), why))


def _time_left(item: GrantState | QueueEntry, now: float) -> float:
    return item.deadline - now if isinstance(item, GrantState) else item.ttl / 2
