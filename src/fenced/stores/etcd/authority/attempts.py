"""Asking for a lease: which transactions are sent, and what their answers mean."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

from fenced.errors import FencedError, Indeterminate, Unavailable
from fenced.leases.rules import QUEUE_MAX, reused_attempt
from fenced.stores.etcd.authority import transactions
from fenced.stores.etcd.authority.ending import Ending
from fenced.stores.etcd.authority.keys import GRANTED, WAITING, ClaimInfo, KeyRecord
from fenced.stores.etcd.authority.known import EtcdAttempt
from fenced.stores.etcd.authority.leases import EtcdLease, EtcdSession
from fenced.stores.etcd.authority.looking import QueueView
from fenced.stores.etcd.authority.watching import Target
from fenced.stores.etcd.wire.cluster import LeaseGone, NoSpace
from fenced.stores.etcd.wire.messages import KeyValue, TxnReply, delete, get, txn
from fenced.values import timing
from fenced.values.model import Ask, AskAnswer, Busy, Ended, Granted, Waiting, grant_id

ROUNDING_SECONDS = 1.0
"""etcd floors TimeToLive to whole seconds and expires a lease slightly late: add one second."""


class Attempts(Ending):
    """The asks of one client."""

    async def ask(self, ask: Ask, until: float) -> AskAnswer:
        """Ask. An ask that may have written something keeps its sign of life, and expires by it if nobody renews it."""
        public, doubts, prolonged = grant_id(ask.secret), self._space.doubts, self._sessions.prolonged
        if (known := self.signs.get(public)) is not None and known.is_due(self._now()):
            await self.end_late(known, until)
        if (mine := self.live.get(public)) is not None and not _is_same(ask, mine.record):
            await self._refuse_other_use(ask, mine, until)
        sign = self.signs.asked(public, timing.waiter_ttl(ask.ttl) if ask.wait else ask.ttl, until)
        try:
            try:
                answer = await self._ask(ask, public, until)
            except NoSpace as error:
                answer = await self._granted_despite(error, public, until)
        except Indeterminate:
            raise
        except FencedError as error:
            if public in self.live and isinstance(error, Unavailable):  # it is queued, so something happened
                raise Indeterminate(str(error)) from error
            if not sign.end and doubts == self._space.doubts:
                self.signs.drop(public)
            raise
        finally:
            sign.under_way = -math.inf
        sign.stored = sign.stored or isinstance(answer, Granted | Waiting)
        if isinstance(answer, Granted):
            sign.ttl = answer.ttl
        elif isinstance(answer, Ended) or (isinstance(answer, Busy) and doubts == self._space.doubts):
            self.forget_sign(public)
        if self._sessions.prolonged != prolonged:
            await self.settle(until)
        return answer

    async def _refuse_other_use(self, ask: Ask, mine: EtcdAttempt, until: float) -> None:
        """Misuse, unless etcd has forgotten the attempt. Its sign of life stays: the attempt goes on as it is."""
        _, record = await self.stored_now(mine.public, until)
        if record is not None and record.names:
            _check_same(ask, record)
        self.forget(mine)

    async def _granted_despite(self, error: NoSpace, public: str, until: float) -> AskAnswer:
        """Our own write may have used the last space: read the record, and answer with the grant if there is one."""
        mine, _ = await self.stored_now(public, until)
        if mine is not None:
            self.live[public] = mine
            if mine.granted and (answer := await self._known(mine, until)) is not None:
                return answer
        raise error

    async def _ask(self, ask: Ask, public: str, until: float) -> AskAnswer:
        began = self._now()
        while True:
            mine = self.live.get(public)
            given = self._given.pop(public, None)
            if given is not None and given.waited is mine and given.granted.lives(began):
                return await self._take(given.granted, given.reply, began, until)
            try:
                if mine is not None and mine.granted:
                    answer = await self._repeated(ask, mine, until)
                elif mine is None:
                    answer = await self._first(ask, public, began, until)
                else:
                    answer = await self._promote(mine, ask, began, until)
            except LeaseGone as gone:
                self._sessions.forget_all()
                if self._now() >= until:
                    raise Indeterminate(f"leases end as soon as they are made: {gone}") from gone
                continue
            if answer is not None:
                return answer
            if self._now() >= until:
                raise Indeterminate("each try met a concurrent change: neither granted nor queued in time")

    async def _repeated(self, ask: Ask, mine: EtcdAttempt, until: float) -> AskAnswer | None:
        """The answer to an ask that was granted before: what is stored is the truth. Reading it prolongs no lease."""
        self.forget(mine)
        reply = await self._space.read([get(self._keys.attempt(mine.public))], until)
        found = reply.found[0].first
        return None if found is None else await self._stored(ask, mine.public, found, until)

    async def _first(self, ask: Ask, public: str, began: float, until: float) -> AskAnswer | None:
        """Grant it in one transaction if all its names are free; None: look again."""
        session = await self._sessions.holding(ask.holder, ask.ttl, ask.lock_delay, until)
        memory = await self._sessions.memory(ask.ttl, until)
        space, raw = self._space, self._space.raw
        record = self._granted(KeyRecord(GRANTED, ask.names, ask.ttl, ask.lock_delay, ask.holder), session)
        floor, learn = self._floor(ask.names), self._floors.unknown(ask.names)
        request = transactions.grant(self._keys, public, record, memory.id, raw, floor, learn=learn)
        reply = await space.run(request, until)
        if reply.succeeded:
            if learn:
                self._floors.learn(ask.names, reply.found[0].first, reply.header.revision)
            mine = EtcdAttempt(
                public, record, reply.header.revision, session.hold, session.delayed, None, memory
            )
            self._floors.was_free(ask.names, reply.header.revision)
            return await self._take(mine, reply, began, until)
        found, meta = (each.first for each in reply.found)
        if found is not None:
            return await self._stored(ask, public, found, until)
        if space.is_new(meta) or raw != space.raw:
            return None
        space.refuse_next(reply.header)
        ends = [self._keys.behind(name) for name in ask.names]
        view = await self._reader.ahead(ask.names, ends, until, floor)
        if view.blocker is None:
            return None  # free again
        if not ask.wait or view.ahead >= QUEUE_MAX:
            return Busy(view.ahead, await self._reader.held_by(view.claim, until))
        await self._enqueue(public, record, session, memory, view, until)
        return None

    async def _take(self, mine: EtcdAttempt, reply: TxnReply, began: float, until: float) -> Granted:
        """Hand a grant out, unless it was made in another history than the one its tokens belong to."""
        try:
            self._space.refuse_strange(reply.header)
        except FencedError:
            self.live[mine.public] = mine
            with contextlib.suppress(FencedError):  # `settle` retries it
                await self._end(self.signs.given_up(mine.public, "withdrawn", until), until)
            raise
        assert mine.hold is not None
        self.live[mine.public] = mine
        self._held.update(dict.fromkeys(mine.record.names, mine.public))
        self._wakeups.forget(mine.public)
        left = min(mine.hold.until - began, float(mine.hold.seconds))
        return Granted(reply.header.revision + mine.record.offset, left, float(mine.hold.seconds))

    async def _enqueue(
        self,
        public: str,
        record: KeyRecord,
        session: EtcdSession,
        memory: EtcdLease,
        view: QueueView,
        until: float,
    ) -> None:
        """Take a place in all queues at once, under one ticket: the revision in which another attempt was ahead.

        If that one is gone by now, nothing is written: look again.
        """
        assert record.holder is not None and view.blocker is not None
        queue = await self._sessions.queueing(record.holder, record.ttl, until)
        record = replace(record, state=WAITING, queue=queue.id, ticket=view.revision)
        request = transactions.enqueue(self._keys, public, record, memory.id, view.blocker)
        reply = await self._space.run(request, until)
        if reply.succeeded:
            self.live[public] = EtcdAttempt(
                public, record, reply.header.revision, session.hold, session.delayed, queue, memory
            )

    def _places(self, mine: EtcdAttempt) -> list[bytes]:
        return self._keys.places_of(mine.record.names, mine.record.ticket, mine.public)

    async def _promote(self, mine: EtcdAttempt, ask: Ask, began: float, until: float) -> AskAnswer | None:
        """Grant it if no key is ahead of any of its places; None: read the queues again."""
        space, raw = self._space, self._space.raw
        session = await self._sessions.holding(ask.holder, ask.ttl, mine.record.delay, until)
        memory = await self._sessions.memory(ask.ttl, until)
        record = self._granted(mine.record, session)
        floor = min(self._floor(record.names), record.ticket)
        store = self._floors.should_store(record.names, record.ticket)
        request = transactions.promote(self._keys, mine.public, record, memory.id, raw, floor, store=store)
        reply = await space.run(request, until)
        if reply.succeeded:
            revision = reply.header.revision
            self._floors.let_in(record.names, record.ticket, stored=store)
            queue = mine.queue
            place = reply.found[0].first
            if queue is None or not self.carries(mine) or place is None or place.lease != queue.id:
                # Another client carries its places, and nobody needs them: they could outlive its claims.
                await space.run(txn((), [delete(each) for each in self._places(mine)]), until)
                queue = None
            granted = EtcdAttempt(mine.public, record, revision, session.hold, session.delayed, queue, memory)
            return await self._take(granted, reply, began, until)
        found, meta, place = (each.first for each in reply.found)
        if found is None or found.modified != mine.revision:
            self.forget(mine)
            return Ended("expired") if found is None else None
        if space.is_new(meta) or raw != space.raw:
            return None
        if place is None:  # its session expired while it waited
            self.forget(mine)
            return Ended("expired")
        space.refuse_next(reply.header)
        view = await self.look_ahead(mine, until)
        return None if view.blocker is None else await self._waiting(view, until)

    async def _waiting(self, view: QueueView, until: float) -> Waiting:
        """How long it may take: what is left of the etcd lease of the holder, or of the key directly ahead."""
        assert view.blocker is not None
        held_by = await self._reader.held_by(view.claim, until)
        if held_by is not None:
            left = held_by.remaining
        else:
            left = max(0, await self._sessions.leases.left(view.blocker.lease, until))
        return Waiting(left + ROUNDING_SECONDS, view.ahead, held_by)

    async def look_ahead(self, mine: EtcdAttempt, until: float) -> QueueView:
        """The keys ahead of a waiter. From now on it watches the one that is directly ahead."""
        floor = min(self._floor(mine.record.names), mine.record.ticket)
        view = await self._reader.ahead(mine.record.names, self._places(mine), until, floor)
        if view.claim is not None and len(mine.record.names) == 1:
            ticket = ClaimInfo.read(view.claim.value).ticket
            if ticket:
                self._floors.let_in(mine.record.names, ticket)
        if view.blocker is not None and ClaimInfo.read(view.blocker.value).public == mine.public:
            return QueueView()  # its own claim: it was granted meanwhile
        if view.blocker is not None:
            await self.follow(mine, view.blocker, view.revision, until)
        return view

    async def follow(self, mine: EtcdAttempt, ahead: KeyValue, revision: int, until: float) -> None:
        """Watch what is directly ahead, as of a revision. If it is ours, it can hand over when it ends."""
        public = ClaimInfo.read(ahead.value).public
        if public in self.live:
            self._behind[public] = mine.public
        await self._wakeups.watch(mine.public, Target(ahead.key, revision + 1), until)

    # What is stored.

    async def _stored(self, ask: Ask, public: str, found: KeyValue, until: float) -> AskAnswer | None:
        """The same attempt was here before."""
        record = KeyRecord.read(found.value)
        if record.names:
            _check_same(ask, record)
        mine = self.adopt(public, record, found)
        if mine is None:
            return Ended(record.state)
        if not mine.granted:
            self.live[public] = mine
            return None
        return await self._known(mine, until)

    async def _known(self, mine: EtcdAttempt, until: float) -> AskAnswer | None:
        """The answer to a repeated ask of an attempt that was granted."""
        found, claim = await self._record_if_held(mine, until)
        if found is None:
            return Ended("expired")
        if found.modified != mine.revision:
            return None  # ended meanwhile
        if claim is None:
            return Ended(await self.reason(mine, until))
        self.carried_by(mine, claim)
        assert mine.hold is not None
        left = await self._sessions.leases.left(mine.hold.id, until)
        if left < 0:
            return Ended("expired")
        # The client that carries it may be about to end it: only on our own etcd lease does it last as long as we say.
        if not self.carries(mine) and not await self.take_over(mine, until):
            return None
        self.live[mine.public] = mine
        return Granted(mine.revision + mine.record.offset, float(left), float(mine.record.seconds))

    async def _record_if_held(
        self, mine: EtcdAttempt, until: float
    ) -> tuple[KeyValue | None, KeyValue | None]:
        """The record of an attempt, and the claim on its first name if it has all its claims."""
        proof = transactions.holds(self._keys, mine.public, mine.record)
        record, claim = get(self._keys.attempt(mine.public)), get(self._keys.claim(mine.record.names[0]))
        reply = await self._space.run(txn(proof, [record, claim], [record]), until)
        if not reply.succeeded:
            return reply.found[0].first, None
        self._held.update(dict.fromkeys(mine.record.names, mine.public))
        return reply.found[0].first, reply.found[1].first

    async def holds(self, mine: EtcdAttempt, keys: set[bytes], until: float) -> bool:
        """Whether these keys, which hang on its lease, are its claims.

        Another attempt of the same client may have the name by now, on the same lease.
        """
        names = mine.record.names
        if not all(self._keys.claim(name) in keys for name in names):
            return False
        if any(name not in self._held for name in names):  # another client has made it
            await self._record_if_held(mine, until)
        return all(self._held.get(name) == mine.public for name in names)


def _is_same(ask: Ask, record: KeyRecord) -> bool:
    return (record.names, record.ttl) == (ask.names, ask.ttl)


def _check_same(ask: Ask, record: KeyRecord) -> None:
    """Misuse if the attempt was used before for something else."""
    if not _is_same(ask, record):
        raise reused_attempt()
