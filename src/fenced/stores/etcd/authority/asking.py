"""Asking for a lease: which transactions are sent, and what their answers mean."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from fenced.errors import FencedError, Indeterminate, Unavailable, Unsupported
from fenced.leases.rules import QUEUE_MAX, reused_attempt
from fenced.stores.etcd.authority import transactions
from fenced.stores.etcd.authority.attempts import Attempts, EtcdAttempt, adopted
from fenced.stores.etcd.authority.ending import Ending
from fenced.stores.etcd.authority.keys import ClaimInfo, KeyRecord, Phase
from fenced.stores.etcd.authority.leases import EtcdLease, HoldLeases, LeasePool
from fenced.stores.etcd.authority.looking import QueueReader, QueueView
from fenced.stores.etcd.authority.namespace import Namespace
from fenced.stores.etcd.authority.watching import EtcdWakeups, Target
from fenced.stores.etcd.wire.cluster import LeaseGone, NoSpace
from fenced.stores.etcd.wire.messages import TXN_OPS_MAX, KeyValue, TxnReply, get, txn
from fenced.values import timing
from fenced.values.model import Ask, AskAnswer, Busy, Ended, Granted, Waiting, grant_id

ROUNDING_SECONDS = 1.0
"""etcd floors TimeToLive to whole seconds and expires a lease slightly late: add one second."""


class Asking:
    """The asks of one client."""

    def __init__(
        self,
        space: Namespace,
        pool: LeasePool,
        attempts: Attempts,
        ending: Ending,
        reader: QueueReader,
        wakeups: EtcdWakeups,
        now: Callable[[], float],
    ) -> None:
        self._space = space
        self._keys = space.keys
        self._pool = pool
        self._attempts = attempts
        self._ending = ending
        self._reader = reader
        self._wakeups = wakeups
        self._now = now

    async def ask(self, ask: Ask, until: float) -> AskAnswer:
        public = grant_id(ask.secret)
        known = self._attempts.live.get(public)
        if known is not None and not _is_same(ask, known.record):
            self._attempts.forget(known)  # misuse, unless etcd has forgotten it: what is stored decides
        try:
            try:
                return await self._ask(ask, public, until)
            except NoSpace as error:
                return await self._granted_despite(error, public, until)
        except Unavailable as error:
            if public in self._attempts.live:  # it is queued, so something happened
                raise Indeterminate(str(error)) from error
            raise

    async def _granted_despite(self, error: NoSpace, public: str, until: float) -> AskAnswer:
        """Our own write may have used the last space: read the record, and answer with the grant if there is one."""
        attempt, _ = await self._attempts.stored(public, until)
        if attempt is not None:
            self._attempts.live[public] = attempt
            if attempt.phase is Phase.GRANTED and (answer := await self._known(attempt, until)) is not None:
                return answer
        raise error

    async def _ask(self, ask: Ask, public: str, until: float) -> AskAnswer:
        began = self._now()
        while True:
            attempt = self._attempts.live.get(public)
            # Taken by one ask only. One whose lease may be over is not told: what is stored decides then.
            pending = self._attempts.heirs.take(public)
            if pending is not None and pending.waited is attempt and pending.granted.is_in_time(began):
                return await self._take(pending.granted, pending.reply, began, until)
            try:
                if attempt is None:
                    answer = await self._first(ask, public, began, until)
                elif attempt.phase is Phase.GRANTED:
                    answer = await self._repeated(ask, attempt, until)
                else:
                    answer = await self._promote(attempt, began, until)
            except LeaseGone as gone:
                self._pool.clear()
                if self._now() >= until:
                    raise Indeterminate(f"leases end as soon as they are made: {gone}") from gone
                continue
            if answer is not None:
                return answer
            if self._now() >= until:
                raise Indeterminate("each try met a concurrent change: neither granted nor queued in time")

    # A first ask.

    async def _first(self, ask: Ask, public: str, began: float, until: float) -> AskAnswer | None:
        """Grant it in one transaction if all its names are free; None: look again."""
        space, raw, doubts = self._space, self._space.raw, self._space.doubts
        leases = await self._pool.take(ask.ttl, until, ask.lock_delay)
        record_lease = await self._pool.of_record(ask.ttl, until)
        record = KeyRecord(Phase.WAITING, ask.names, ask.ttl, ask.lock_delay, ask.holder)
        granted = self._granted(record, leases)
        # All names are free and the attempt has no record, or nothing is written: so neither a look that is old by now
        # nor a copy that arrives late grants anything.
        reply = await space.run(transactions.grant(self._keys, public, granted, record_lease.id, raw), until)
        if reply.succeeded:
            attempt = EtcdAttempt(public, granted, reply.header.revision, record_lease, leases)
            return await self._take(attempt, reply, began, until)
        self._give_unused(leases, doubts)
        found, meta = (each.first for each in reply.found)
        if found is not None:
            return await self._stored(ask, public, found, until)
        if space.is_new(meta) or raw != space.raw:
            return None
        space.refuse_next(reply.header)
        view = await self._reader.ahead(ask.names, [self._keys.behind(name) for name in ask.names], until)
        if view.blocker is None:
            return None  # free again
        if not ask.wait or view.ahead >= QUEUE_MAX:
            return Busy(view.ahead, await self._reader.held_by(view.claim, until))
        await self._enqueue(public, record, record_lease, view, until)
        return None

    def _granted(self, record: KeyRecord, leases: HoldLeases) -> KeyRecord:
        if leases.delayed is not None and len(record.names) >= TXN_OPS_MAX // 2:
            raise Unsupported(f"with lock_delay an etcd lease covers at most {TXN_OPS_MAX // 2 - 1} names")
        return record.granted(leases.hold.id, leases.hold.seconds, leases.delay_id, self._space.meta.offset)

    def _give_unused(self, leases: HoldLeases, doubts: int) -> None:
        """The transaction that would have used them was refused: give them back, unless an earlier copy may arrive."""
        if doubts == self._space.doubts:
            self._pool.give(leases)

    async def _take(self, attempt: EtcdAttempt, reply: TxnReply, began: float, until: float) -> Granted:
        """Hand a grant out, unless it was made in another history than the one its tokens belong to."""
        self._attempts.live[attempt.public] = attempt
        try:
            self._space.refuse_strange(reply.header)
        except FencedError:
            with contextlib.suppress(FencedError):  # then nobody renews it, and etcd ends it
                await self._ending.finish(attempt.public, Phase.WITHDRAWN, until)
            raise
        self._wakeups.forget(attempt.public)
        # It has what is left of its etcd lease, which was confirmed before this ask if it was used before.
        left = min(attempt.lease.until - began, float(attempt.lease.seconds))
        return Granted(reply.header.revision + attempt.record.offset, left, float(attempt.lease.seconds))

    async def _enqueue(
        self, public: str, record: KeyRecord, record_lease: EtcdLease, view: QueueView, until: float
    ) -> None:
        """Take a place in all queues at once, under one ticket: the revision in which another attempt was ahead.

        If that one is gone by now, nothing is written: look again. The etcd lease of a place is shorter than that of a
        claim: a silent waiter loses its place early.
        """
        assert view.blocker is not None
        doubts = self._space.doubts
        leases = await self._pool.take(timing.waiter_ttl(record.ttl), until)
        record = replace(record, queue=leases.hold.id, ticket=view.revision)
        request = transactions.enqueue(self._keys, public, record, record_lease.id, view.blocker)
        reply = await self._space.run(request, until)
        if reply.succeeded:
            self._attempts.live[public] = EtcdAttempt(
                public, record, reply.header.revision, record_lease, queue=leases.hold
            )
        else:
            self._give_unused(leases, doubts)

    # An ask of an attempt that has a place.

    async def _promote(self, attempt: EtcdAttempt, began: float, until: float) -> AskAnswer | None:
        """Grant it if no key is ahead of any of its places; None: read the queues again."""
        space, raw, doubts, waiting = self._space, self._space.raw, self._space.doubts, attempt.record
        leases = await self._pool.take(waiting.ttl, until, waiting.delay)
        record_lease = await self._pool.of_record(waiting.ttl, until)
        record = self._granted(waiting, leases)
        # The transaction compares that nothing stands ahead: what woke it, or what it has read, decides nothing.
        request = transactions.promote(self._keys, attempt.public, record, record_lease.id, raw)
        reply = await space.run(request, until)
        if reply.succeeded:
            granted = EtcdAttempt(
                attempt.public, record, reply.header.revision, record_lease, leases, attempt.queue
            )
            return await self._take(granted, reply, began, until)
        self._give_unused(leases, doubts)
        found, meta, place = (each.first for each in reply.found)
        if found is None or found.modified != attempt.revision:
            self._attempts.forget(attempt)
            # Record and place gone: so long ago that etcd has forgotten the attempt, and this ask is a first one.
            return Ended(Phase.EXPIRED.value) if found is None and place is not None else None
        if space.is_new(meta) or raw != space.raw:
            return None
        # If the etcd lease of its places has ended while it waited, or ends now, it has lost them.
        if place is None or not await self._prolong(attempt.lease, until):
            self._attempts.forget(attempt)
            return Ended(Phase.EXPIRED.value)
        space.refuse_next(reply.header)
        view = await self.look_ahead(attempt, until)
        return None if view.blocker is None else await self._waiting(view, until)

    async def _prolong(self, lease: EtcdLease, until: float) -> bool:
        """A waiter that asks keeps its place: prolong its etcd lease, unless that was done a moment ago."""
        return self._pool.is_fresh(lease) or lease.id in await self._pool.leases.keep_alive([lease], until)

    async def _waiting(self, view: QueueView, until: float) -> Waiting:
        """How long it may take: what is left of the etcd lease of the holder, or of the key directly ahead."""
        assert view.blocker is not None
        held_by = await self._reader.held_by(view.claim, until)
        if held_by is not None:
            left = held_by.remaining
        else:
            left = max(0, await self._pool.leases.left(view.blocker.lease, until))
        return Waiting(left + ROUNDING_SECONDS, view.ahead, held_by)

    async def look_ahead(self, attempt: EtcdAttempt, until: float) -> QueueView:
        """The keys ahead of a waiter. From now on it watches the one that is directly ahead."""
        record = attempt.record
        places = self._keys.places_of(record.names, record.ticket, attempt.public)
        view = await self._reader.ahead(record.names, places, until)
        if view.blocker is None:
            return view
        ahead = ClaimInfo.read(view.blocker.value).public
        if ahead == attempt.public:
            return QueueView()  # its own claim: it was granted meanwhile
        if ahead in self._attempts.live:
            self._attempts.heirs.follow(ahead, attempt.public)
        # From the revision after this look on: a deletion that came meanwhile is still told.
        target = Target(view.blocker.key, view.revision + 1)
        await self._wakeups.watch(attempt.public, target, until)
        return view

    # What is stored.

    async def _repeated(self, ask: Ask, attempt: EtcdAttempt, until: float) -> AskAnswer | None:
        """The answer to an ask that was granted before: what is stored is the truth. Reading it prolongs no lease."""
        self._attempts.forget(attempt)
        reply = await self._space.read([get(self._keys.attempt(attempt.public))], until)
        found = reply.found[0].first
        return None if found is None else await self._stored(ask, attempt.public, found, until)

    async def _stored(self, ask: Ask, public: str, found: KeyValue, until: float) -> AskAnswer | None:
        """The same attempt was here before."""
        record = KeyRecord.read(found.value)
        if record.names and not _is_same(ask, record):
            raise reused_attempt()
        attempt = adopted(public, found)
        if attempt is None:
            return Ended(record.phase.value)
        if attempt.phase is Phase.GRANTED:
            return await self._known(attempt, until)
        self._attempts.live[public] = attempt
        return None

    async def _known(self, attempt: EtcdAttempt, until: float) -> AskAnswer | None:
        """The answer to a repeated ask of an attempt that was granted, if it still has all its claims."""
        proof = transactions.holds(self._keys, attempt.public, attempt.record)
        stored = get(self._keys.attempt(attempt.public))
        reply = await self._space.run(txn(proof, [stored], [stored]), until)
        found = reply.found[0].first
        if found is None:
            return Ended(Phase.EXPIRED.value)
        if found.modified != attempt.revision:
            return None  # ended meanwhile
        if not reply.succeeded:
            return Ended(await self._ending.why_lost(attempt, until))
        left = await self._pool.leases.left(attempt.lease.id, until)
        if left < 0:
            return Ended(Phase.EXPIRED.value)
        self._attempts.live[attempt.public] = attempt
        return Granted(attempt.revision + attempt.record.offset, float(left), float(attempt.record.seconds))


def _is_same(ask: Ask, record: KeyRecord) -> bool:
    return (record.names, record.ttl) == (ask.names, ask.ttl)
