"""The keeper: one loop per client that renews all its leases and queue entries, in batches.

It is a thread, in asyncio too: there it also watches the event loop, and says what blocks it.

Leases that are due at about the same time are renewed together, so a thousand leases cost one request a round. If a
renewal fails, its leases are in jeopardy and the keeper retries soon. If the keeper itself fails, every lease is lost.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fenced.core.callbacks import Reporter
from fenced.core.holding import GrantState
from fenced.core.renewing import Renewer
from fenced.core.settling import Settler
from fenced.core.waiting import QueueEntry
from fenced.core.watching import LoopWatch
from fenced.errors import FencedError, Indeterminate, Unavailable
from fenced.events import KeeperFailed, LeaseInJeopardy, LeaseSaved, LoopBlocked, RenewalRound
from fenced.values import timing
from fenced.values.contracts import Task
from fenced.values.model import Ended, Gone, Kept, RenewAnswer, Unknown, Waiting

BATCH_MAX = 5000
CALL_SECONDS_MIN = 0.01
IDLE_SECONDS = 5.0
"""The keeper's longest sleep. A new lease wakes it only if it is due before that sleep ends."""
STILL_SECONDS = 0.25
"""If the keeper wakes so much later than it wanted, the whole process did not run."""
PAUSES_MAX = 8


class Standstill(NamedTuple):
    """A time in which the process did not run, and when it ran again."""

    seconds: float
    ended: float


class Keeper:
    """Renews leases and queue entries, from `keep` to `drop`."""

    def __init__(self, renewer: Renewer, emit: Reporter, settler: Settler) -> None:
        self._runtime = runtime = renewer.runtime
        # One jitter for the whole client: clients renew at different times, the leases of one client together.
        self.jitter = runtime.random()
        self._renewer = renewer
        self._emit = emit
        self._settler = settler
        self._leases: dict[str, GrantState] = {}
        self._entries: dict[str, QueueEntry] = {}
        self._kick = runtime.wakeup()
        self._asleep_until = -math.inf
        self._task: Task | None = None
        self._starting = runtime.lock()
        self._closed = False
        self._watch: LoopWatch | None = None
        self._pauses: tuple[Standstill, ...] = ()
        """The last ones, each shorter than the one in front of it. Replaced, never changed: any thread may read it."""

    def keep(self, item: GrantState | QueueEntry) -> None:
        """Start renewing. Wakes the loop only when it would sleep past the first renewal, or past `max_hold`."""
        # The watch first: whoever finds the item finds the watch over its event loop, not over one that was closed.
        if self._watch is None or self._watch.over:
            self._watch = self._renewer.watch()
        # Stored before the loop is looked at: a loop that runs finds it in its next round, whether or not it is kicked.
        if isinstance(item, GrantState):
            self._leases[item.secret] = item
        else:
            self._entries[item.secret] = item
        if self._task is None:
            with self._starting:  # two first leases at the same time must not start two loops
                if self._task is None:
                    self._task = self._renewer.spawn(self._run, "fenced-keeper")
        elif item.due < self._asleep_until:
            self._kick.set()

    def drop(self, secret: str) -> None:
        # No lock: each deletion is one step, and the loop works on copies. A renewal of it that is on its way changes
        # nothing any more: `confirm` ignores a lease that is released or lost.
        self._leases.pop(secret, None)
        self._entries.pop(secret, None)

    def leases(self) -> list[GrantState]:
        """A copy, made in one step: threads of the program add and drop leases while the loop looks at them."""
        return list(self._leases.values())

    def stop(self) -> None:
        """End the loop. Leases that it still keeps become lost("closed")."""
        self._closed = True
        self._kick.set()

    async def close(self, until: float) -> None:
        """Stop, and wait at most until `until` for a running renewal."""
        self.stop()
        for entry in list(self._entries.values()):
            entry.wake()  # it finds that the client is closed
        if (task := self._task) is not None:
            await task.join(until)

    def fail(self, why: str) -> None:
        """Mark every lease lost and wake every waiter, because nobody renews them any more."""
        # A lease that is stored in between is in neither: it ends by its own deadline, which `state` compares.
        leases, self._leases = self.leases(), {}
        for lease in leases:
            lease.lose("keeper")
        for entry in list(self._entries.values()):
            entry.wake()
        self._emit(KeeperFailed(why))

    async def _run(self) -> None:
        try:
            while not self._closed:
                # Set first: `_next_due` sees a new lease, or the new lease kicks.
                self._asleep_until = math.inf
                now = self._runtime.now()
                self._asleep_until = until = min(self._next_due(), now + IDLE_SECONDS)
                if not await self._runtime.wait(self._kick, until):
                    self._note_late(max(until, now))
                # Cleared before the round looks at the leases: a kick from now on is about one that it may not see,
                # and ends the next sleep at once.
                self._kick.clear()
                self._asleep_until = -math.inf
                if not self._closed:
                    await self._round()
        except Exception as error:
            if not self._closed:
                self.fail(f"the keeper failed with {type(error).__name__}: {error}")
            raise
        finally:  # closed, cancelled or failed: the next lease starts another loop
            self._task = None
            # After `_task`: a lease that was stored before is marked here. One that comes later starts a loop, which
            # finds `_closed` and marks it.
            if self._closed:
                for lease in self.leases():
                    lease.lose("closed")

    def _note_late(self, wanted: float) -> None:
        """The keeper wanted to go on at that time. Nothing but the whole process can hold it up for long."""
        now = self._runtime.now()
        if now - wanted > STILL_SECONDS:
            # An earlier one that was no longer is never the longest any more, whatever the time that is asked about.
            longer = [pause for pause in self._pauses if pause.seconds > now - wanted]
            self._pauses = (*longer, Standstill(now - wanted, now))[-PAUSES_MAX:]
            if self._watch is not None:
                self._watch.discount(now - wanted)

    def paused_seconds(self, since: float) -> float:
        """The longest time after `since` in which the process did not run; 0.0 if the keeper noticed none."""
        longest = max((pause.seconds for pause in self._pauses if pause.ended > since), default=0.0)
        overdue = self._runtime.now() - self._asleep_until
        if STILL_SECONDS < overdue < math.inf:  # it is over, and the keeper has not come round yet
            longest = max(longest, overdue)
        return longest

    def notes(self, since: float) -> list[str]:
        """What people should know of a lease that was confirmed then, and lost."""
        found = [] if self._watch is None else [self._watch.note(since)]
        if seconds := self.paused_seconds(since):
            found.append(
                f"this process did not run for {seconds:.1f} s (stopped, swapped, or C code that kept the GIL)"
            )
        return [note for note in found if note]

    def _next_due(self) -> float:
        due = math.inf if self._watch is None else self._watch.look_at
        for lease in self.leases():
            due = min(due, lease.due)
        for entry in list(self._entries.values()):
            due = min(due, entry.due)
        return due

    async def _round(self) -> None:
        """Mark leases lost whose deadline has passed, then renew in batches all that is due or nearly due."""
        now = self._runtime.now()
        leases, entries = self.leases(), list(self._entries.values())
        if (watch := self._watch) is not None:  # read after the items: see `keep`
            self._look(watch, leases, entries)
        for lease in leases:
            if now >= lease.deadline:
                lease.expire()
            if lease.lost_reason is not None:
                self.drop(lease.secret)
        items: list[GrantState | QueueEntry] = [*self.leases(), *entries]
        if any(item.renew_at <= now for item in items):
            due = [item for item in items if item.renew_at <= now + 0.15 * item.ttl]
            for start in range(0, len(due), BATCH_MAX):
                await self._renew(due[start : start + BATCH_MAX])
        self._settler.start_if_due()

    def _look(self, watch: LoopWatch, leases: list[GrantState], entries: list[QueueEntry]) -> None:
        """Look whether the program's event loop runs, and ask it for another sign of life."""
        if watch.over:  # nobody acts under these leases any more, so nobody should wait for them
            for entry in entries:
                self.drop(entry.secret)
            for lease in leases:
                self.drop(lease.secret)
                lease.lose("abandoned")
            return
        block = watch.look(min((lease.ttl for lease in leases), default=timing.TTL_MAX))
        if block is not None:
            self._emit(LoopBlocked(block.seconds, block.where))
        if leases:
            watch.ask()

    async def _renew(self, items: list[GrantState | QueueEntry]) -> None:
        sent = self._runtime.now()
        # Wait at most half of the shortest time left, so that no lease expires during this request.
        patience = min(_time_left(item, sent) for item in (*self.leases(), *items)) / 2
        until = sent + min(max(patience, CALL_SECONDS_MIN), timing.CALL_SECONDS)
        try:
            if not self._renewer.ready:
                await self._renewer.open(until)
                return  # that took time: the next round, which comes at once, looks at the clock again
            answers = await self._renewer.authority.renew([item.secret for item in items], until)
            if not all(isinstance(answer, Unknown) for answer in answers):
                self._emit.reached()
        except FencedError as error:
            if isinstance(error, Unavailable | Indeterminate):
                self._emit.reached(error)
            answers = [Unknown(str(error))] * len(items)
        self._note_late(until)
        count = _RoundCount(sent, self._runtime.now()) if self._emit.observed else None
        for item, answer in zip(items, answers, strict=True):
            if isinstance(item, GrantState):
                before = item.confirmed
                self._apply(item, answer, sent)
                if count is not None:
                    count.add(item, answer, before)
            else:
                self._apply_to_entry(item, answer, sent)
        if count is not None and (told := count.told()) is not None:
            self._emit(told)

    def _apply(self, lease: GrantState, answer: RenewAnswer, sent: float) -> None:
        match answer:
            case Kept(remaining):
                doubted = lease.in_doubt
                lease.confirm(sent, remaining)
                if doubted and not lease.in_doubt and self._emit.observed:
                    self._emit(LeaseSaved(lease.names, lease.token, lease.grant))
            case Unknown(why):
                lease.renew_at = self._runtime.now() + timing.retry_after(lease.ttl)
                self._doubt(lease, why)
            case Ended("released" | "withdrawn"):
                # This client released it: the answer to the release has not arrived yet.
                self.drop(lease.secret)
            case Ended(reason):
                lease.lose(reason)
            case Gone() | Waiting():
                lease.lose("gone")
        if lease.lost_reason is not None:
            self.drop(lease.secret)

    def _apply_to_entry(self, entry: QueueEntry, answer: RenewAnswer, sent: float) -> None:
        match answer:
            case Waiting(check_in):
                entry.renew_at = sent + timing.renew_after(entry.ttl, self.jitter)
                entry.check_at = sent + check_in
                entry.last_reply = sent
                if check_in <= 0:
                    entry.wake()
            case Unknown():
                entry.renew_at = self._runtime.now() + timing.retry_after(entry.ttl)
            case Kept() | Ended() | Gone():
                # Already granted (a reply was lost) or no longer in the queue: the waiter's next ask finds out. Perhaps
                # it has: then a lease with the same secret is kept by now, and goes on being kept.
                self._entries.pop(entry.secret, None)
                entry.wake()

    def _doubt(self, lease: GrantState, why: str) -> None:
        if lease.in_doubt:
            return
        lease.in_doubt = True
        self._emit(LeaseInJeopardy(lease.names, lease.token, lease.grant, lease.remaining(), why))


class _RoundCount:
    """What one request has done for the leases that it was about."""

    def __init__(self, sent: float, answered: float) -> None:
        self._sent = sent
        self._answered = answered
        self._kept = self._unknown = self._ended = 0
        self._used = 0.0

    def add(self, lease: GrantState, answer: RenewAnswer, before: float) -> None:
        """A lease to which the answer was applied; `before`: when it had been confirmed until then."""
        if isinstance(answer, Unknown):
            self._unknown += 1
        elif lease.confirmed == self._sent:  # else the answer came too late: the lease was lost or released
            self._kept += 1
            self._used = max(self._used, (self._answered - before) / lease.ttl)
        else:
            self._ended += 1

    def told(self) -> RenewalRound | None:
        """None: there were only entries of queues."""
        if not self._kept + self._unknown + self._ended:
            return None
        used = self._used if self._kept else None
        return RenewalRound(self._kept, self._unknown, self._ended, used)


def _time_left(item: GrantState | QueueEntry, now: float) -> float:
    return item.deadline - now if isinstance(item, GrantState) else item.ttl / 2
