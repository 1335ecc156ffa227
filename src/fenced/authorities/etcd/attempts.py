"""Asking for a lease and ending it: which transaction says what, and what its answer means."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fenced.authorities.etcd.keys import GRANTED, WAITING, About, Record
from fenced.authorities.etcd.leases import Lease, Session, Sessions
from fenced.authorities.etcd.looking import Looker, Sight
from fenced.authorities.etcd.messages import (
    TXN_OPS_MAX,
    KeyValue,
    TxnReply,
    absent,
    delete,
    get,
    modified_at,
    present,
    put,
    valued,
)
from fenced.authorities.etcd.namespace import Namespace
from fenced.authorities.etcd.watching import Ears
from fenced.authorities.etcd.wire import LeaseGone
from fenced.contracts import Runtime
from fenced.errors import FencedError, Indeterminate, Misuse, Unsupported
from fenced.model import (
    Ask,
    AskAnswer,
    Busy,
    Ended,
    Gone,
    Granted,
    ReleaseAnswer,
    Released,
    Waiting,
    grant_id,
)

QUEUE_MAX = 10_000
ROUNDING_SECONDS = 1.0
"""The server tells the rest of a lease in whole seconds, rounded down, and ends it a little late."""


@dataclass(slots=True, eq=False)
class Attempt:
    """An attempt that lives, as this client knows it: its record, the revision that wrote it, and its leases."""

    public: str
    record: Record
    revision: int
    hold: Lease | None = None
    delayed: Lease | None = None
    queue: Lease | None = None
    memory: Lease | None = None

    @property
    def granted(self) -> bool:
        return self.record.state == GRANTED

    def leases(self) -> list[Lease]:
        """All that has to be kept alive for it, a delay before the lease that it follows."""
        return [lease for lease in (self.delayed, self.hold, self.queue) if lease is not None]


class Attempts:
    """All attempts of one client."""

    def __init__(
        self, space: Namespace, sessions: Sessions, looker: Looker, ears: Ears, runtime: Runtime
    ) -> None:
        self._space = space
        self._keys = space.keys
        self._sessions = sessions
        self._looker = looker
        self._ears = ears
        self._now = runtime.now
        self.live: dict[str, Attempt] = {}

    # Asking.

    async def ask(self, ask: Ask, until: float) -> AskAnswer:
        began = self._now()
        public = grant_id(ask.secret)
        while True:
            mine = self.live.get(public)
            try:
                if mine is None:
                    answer = await self._first(ask, public, began, until)
                elif (mine.record.names, mine.record.ttl) != (ask.names, ask.ttl):
                    raise Misuse("the same attempt was used before with other names or another ttl")
                elif mine.granted:
                    self.live.pop(public, None)  # a repeated one: what is stored is the truth
                    answer = await self._known(mine, began, until)
                else:
                    answer = await self._promote(mine, ask, began, until)
            except LeaseGone as gone:
                self._sessions.forget_all()
                if self._now() >= until:
                    raise Indeterminate(f"leases end as soon as they are made: {gone}") from gone
                continue
            if answer is not None:
                return answer

    async def _first(self, ask: Ask, public: str, began: float, until: float) -> AskAnswer | None:
        """Grant it in one transaction if all its names are free; None: look again."""
        session = await self._sessions.holding(ask.holder, ask.ttl, ask.lock_delay, until)
        memory = await self._sessions.memory(ask.ttl, until)
        space, record_key = self._space, self._keys.attempt(public)
        record = self._granted(Record(GRANTED, ask.names, ask.ttl, ask.lock_delay, ask.holder), session)
        free = [absent(self._keys.under(name), self._keys.behind(name)) for name in ask.names]
        raw = space.raw
        reply = await space.txn(
            [absent(record_key), valued(self._keys.meta, raw), *free],
            self._claims(public, record, session, memory),
            [get(record_key), get(self._keys.meta)],
            until=until,
        )
        if reply.succeeded:
            mine = Attempt(public, record, reply.header.revision, session.hold, session.delayed, None, memory)
            return await self._take(mine, reply, began, until)
        found, meta = reply.found[0].first, reply.found[1].first
        if found is not None:
            return await self._stored(ask, public, found, began, until)
        if space.is_new(meta) or raw != space.raw:
            return None
        space.refuse_next(reply.header)
        sight = await self._look(ask.names, [self._keys.behind(name) for name in ask.names], until)
        if sight.blocker is None:
            return None  # free again
        if not ask.wait or sight.ahead >= QUEUE_MAX:
            return Busy(sight.ahead, await self._looker.held_by(sight.claim, until))
        await self._enqueue(ask, public, session, memory, reply.header.revision, until)
        return None

    def _granted(self, record: Record, session: Session) -> Record:
        delayed = session.delayed.id if session.delayed is not None else 0
        if delayed and len(record.names) >= TXN_OPS_MAX // 2:
            raise Unsupported(f"with lock_delay an etcd lease covers at most {TXN_OPS_MAX // 2 - 1} names")
        return replace(
            record,
            state=GRANTED,
            hold=session.hold.id,
            seconds=session.hold.seconds,
            delayed=delayed,
            offset=self._space.meta.offset,
        )

    def _claims(self, public: str, record: Record, session: Session, memory: Lease) -> list[bytes]:
        """What a grant writes: the record, and for each name a claim that lives as long as the session."""
        assert record.holder is not None
        about = About(
            record.holder, record.ttl, len(record.names) > 1, record.offset, bool(record.ticket)
        ).written()
        writes = [put(self._keys.attempt(public), record.written(), memory.id)]
        writes += [put(self._keys.claim(name, public), about, session.hold.id) for name in record.names]
        if session.delayed is not None:
            lease = session.delayed.id
            writes += [put(self._keys.delay(name, public), about, lease) for name in record.names]
        return writes

    async def _take(self, mine: Attempt, reply: TxnReply, began: float, until: float) -> Granted:
        """Hand a grant out, unless it was made in another history than the one its tokens belong to."""
        try:
            self._space.refuse_strange(reply.header)
        except FencedError:
            await self._space.txn((), self._ends(mine, "withdrawn"), until=until)
            raise
        assert mine.hold is not None
        self.live[mine.public] = mine
        self._ears.forget(mine.public)
        left = min(mine.hold.until - began, float(mine.hold.seconds))
        return Granted(reply.header.revision + mine.record.offset, left, float(mine.hold.seconds))

    async def _enqueue(
        self, ask: Ask, public: str, session: Session, memory: Lease, ticket: int, until: float
    ) -> None:
        """Take a place in all queues at once, under one ticket: the revision in which it was turned away.

        One who was turned away earlier stands ahead. If it takes its place later than we ours, it is let in before
        us all the same, and nobody who holds the name is disturbed.
        """
        queue = await self._sessions.queueing(ask.holder, ask.ttl, until)
        record = Record(
            WAITING,
            ask.names,
            ask.ttl,
            ask.lock_delay,
            ask.holder,
            queue=queue.id,
            ticket=ticket,
            hold=session.hold.id,
            seconds=session.hold.seconds,
            delayed=session.delayed.id if session.delayed is not None else 0,
        )
        key = self._keys.attempt(public)
        about = About(ask.holder, ask.ttl, len(ask.names) > 1).written()
        writes = [put(key, record.written(), memory.id)]
        writes += [put(self._keys.place(name, ticket, public), about, queue.id) for name in ask.names]
        reply = await self._space.txn([absent(key)], writes, until=until)
        if reply.succeeded:
            revision = reply.header.revision
            self.live[public] = Attempt(
                public, record, revision, session.hold, session.delayed, queue, memory
            )

    def _places(self, mine: Attempt) -> list[bytes]:
        ticket = mine.record.ticket
        return [self._keys.place(name, ticket, mine.public) for name in mine.record.names]

    async def _promote(self, mine: Attempt, ask: Ask, began: float, until: float) -> AskAnswer | None:
        """Grant it if nothing stands ahead of any of its places; None: look again."""
        space, record_key, places = self._space, self._keys.attempt(mine.public), self._places(mine)
        session = await self._sessions.holding(ask.holder, ask.ttl, mine.record.delay, until)
        memory = await self._sessions.memory(ask.ttl, until)
        record = self._granted(mine.record, session)
        raw = space.raw
        first = [
            absent(self._keys.under(name), place)
            for name, place in zip(mine.record.names, places, strict=True)
        ]
        reply = await space.txn(
            [
                modified_at(record_key, mine.revision),
                valued(self._keys.meta, raw),
                present(places[0]),  # its session may have expired while it waited
                *first,
            ],
            self._claims(mine.public, record, session, memory),
            [get(record_key), get(self._keys.meta), get(places[0])],
            until=until,
        )
        if reply.succeeded:
            granted = Attempt(
                mine.public,
                record,
                reply.header.revision,
                session.hold,
                session.delayed,
                mine.queue,
                memory,
            )
            return await self._take(granted, reply, began, until)
        found, meta, place = (each.first for each in reply.found)
        if found is None or found.modified != mine.revision:
            self._forget(mine)
            return Ended("expired") if found is None else None
        if space.is_new(meta) or raw != space.raw:
            return None
        if place is None:
            self._forget(mine)
            return Ended("expired")
        space.refuse_next(reply.header)
        sight = await self.look_ahead(mine, until)
        if sight.blocker is None:
            return None
        return await self._waiting(sight, until)

    async def _waiting(self, sight: Sight, until: float) -> Waiting:
        """How long it may take, told by the lease of the holder, or of what else is directly ahead."""
        assert sight.blocker is not None
        held_by = await self._looker.held_by(sight.claim, until)
        if held_by is not None:
            left = held_by.remaining
        else:
            left = max(0, await self._sessions.leases.left(sight.blocker.lease, until))
        return Waiting(left + ROUNDING_SECONDS, sight.ahead, held_by)

    async def look_ahead(self, mine: Attempt, until: float) -> Sight:
        """What stands ahead of a waiter; the one key that is directly ahead is watched from now on."""
        sight = await self._look(mine.record.names, self._places(mine), until)
        if (target := sight.target) is not None:
            await self._ears.watch(mine.public, target)
        return sight

    async def _look(self, names: tuple[str, ...], ends: list[bytes], until: float) -> Sight:
        return await self._looker.ahead(names, ends, until)

    # What is stored.

    async def _stored(
        self, ask: Ask, public: str, found: KeyValue, began: float, until: float
    ) -> AskAnswer | None:
        """The same attempt was here before."""
        record = Record.read(found.value)
        if record.names and (record.names, record.ttl) != (ask.names, ask.ttl):
            raise Misuse("the same attempt was used before with other names or another ttl")
        mine = self.adopt(public, record, found)
        if mine is None:
            return Ended(record.state)
        if not mine.granted:
            self.live[public] = mine
            return None
        return await self._known(mine, began, until)

    def adopt(self, public: str, record: Record, found: KeyValue) -> Attempt | None:
        """An attempt that another client may have begun, or None if it is over."""
        if record.state not in (GRANTED, WAITING):
            return None
        mine = Attempt(public, record, found.modified)
        mine.hold = Lease(record.hold, record.seconds)
        mine.queue = Lease(record.queue, 0) if record.queue else None
        mine.delayed = Lease(record.delayed, 0) if record.delayed else None
        mine.memory = Lease(found.lease, 0)
        return mine

    async def load(self, public: str, until: float) -> tuple[Attempt | None, Record | None]:
        """The attempt if it lives, as far as its record goes, and its record if there is one."""
        if (mine := self.live.get(public)) is not None:
            return mine, mine.record
        reply = await self._space.read([get(self._keys.attempt(public))], until)
        found = reply.found[0].first
        if found is None:
            return None, None
        record = Record.read(found.value)
        return self.adopt(public, record, found), record

    async def _known(self, mine: Attempt, began: float, until: float) -> AskAnswer | None:
        """The answer to a repeated ask of an attempt that was granted."""
        key, claim_key = self._keys.attempt(mine.public), self._keys.claim(mine.record.names[0], mine.public)
        reply = await self._space.read([get(key), get(claim_key)], until)
        found, claim = (each.first for each in reply.found)
        if found is None:
            return Ended("expired")
        if found.modified != mine.revision:
            return None  # ended meanwhile
        if claim is None or claim.modified != mine.revision:
            return Ended(await self.reason(mine, until))
        assert mine.hold is not None
        left = await self._sessions.leases.left(mine.hold.id, until)
        if left < 0:
            return Ended("expired")
        self.live.setdefault(mine.public, mine)
        return Granted(mine.revision + mine.record.offset, float(left), float(mine.record.seconds))

    async def reason(self, mine: Attempt, until: float) -> str:
        """Why an attempt whose record says nothing of an end has lost its key."""
        lease = mine.hold if mine.granted else mine.queue
        assert lease is not None
        return "revoked" if await self._sessions.leases.left(lease.id, until) > 0 else "expired"

    def _forget(self, mine: Attempt) -> None:
        self.live.pop(mine.public, None)
        self._ears.forget(mine.public)

    # Ending.

    def _ends(self, mine: Attempt, state: str, memory: Lease | None = None) -> list[bytes]:
        """What an end writes: the record, and that its claims and places are gone. The most urgent stands first."""
        lease = memory or mine.memory
        assert lease is not None
        record = mine.record.ended(state).written()
        return [put(self._keys.attempt(mine.public), record, lease.id), *self._frees(mine, delays=True)]

    def _frees(self, mine: Attempt, *, delays: bool) -> list[bytes]:
        names, public = mine.record.names, mine.public
        writes = []
        if mine.granted:
            writes += [delete(self._keys.claim(name, public)) for name in names]
            if delays and mine.record.delay:
                writes += [delete(self._keys.delay(name, public)) for name in names]
        if mine.record.ticket:
            writes += [delete(place) for place in self._places(mine)]
        return writes

    async def finish(self, secret: str, state: str, until: float) -> ReleaseAnswer:
        """End an attempt by its owner's wish."""
        public = grant_id(secret)
        while True:
            mine, record = await self.load(public, until)
            try:
                if mine is not None:
                    answer = await self._finish(mine, state, until)
                elif record is not None:
                    over = record.state in ("released", "withdrawn")
                    return Released() if over else Ended(record.state)
                elif state == "released":
                    return Gone()
                else:
                    answer = await self._tombstone(public, state, until)
            except LeaseGone:
                self._sessions.forget_all()
                continue
            if answer is not None:
                return answer

    async def _tombstone(self, public: str, state: str, until: float) -> Released | None:
        memory = await self._sessions.memory(0.0, until)
        key = self._keys.attempt(public)
        write = put(key, Record(state, (), 0.0).written(), memory.id)
        reply = await self._space.txn([absent(key)], [write], until=until)
        return Released() if reply.succeeded else None

    async def _finish(self, mine: Attempt, state: str, until: float) -> ReleaseAnswer | None:
        """Its keys are its own, so they are deleted whatever became of it. None: its record has changed."""
        names, public = mine.record.names, mine.public
        memory = await self._sessions.memory(mine.record.ttl, until)
        key = self._keys.attempt(public)
        proof = self._keys.claim(names[0], public) if mine.granted else self._places(mine)[0]
        writes = self._ends(mine, state, memory)
        reply = await self._space.txn(
            [modified_at(key, mine.revision), present(proof)],
            writes[:TXN_OPS_MAX],
            [get(key), *self._frees(mine, delays=False)][:TXN_OPS_MAX],
            until=until,
        )
        self._forget(mine)
        if reply.succeeded:
            if rest := writes[TXN_OPS_MAX:]:
                await self._space.txn((), rest, until=until)
            return Released()
        found = reply.found[0].first
        if found is None:
            return Gone()
        if found.modified != mine.revision:
            return None
        return Ended(await self.reason(mine, until))

    async def force(self, name: str, until: float) -> int | None:
        """Take a name from its holder. The token is that of the transaction that did it."""
        sight = await self._look((name,), [self._keys.behind(name)], until)
        if sight.claim is None:
            return None
        public = self._keys.spot(sight.claim.key).public
        mine, _ = await self.load(public, until)
        if mine is None or not mine.granted:
            return None
        reply = await self._space.read([get(self._keys.meta)], until)
        self._space.is_new(reply.found[0].first)
        self._space.refuse_next(reply.header)
        memory = await self._sessions.memory(mine.record.ttl, until)
        writes = self._ends(mine, "revoked", memory)
        reply = await self._space.txn(
            [
                modified_at(self._keys.attempt(public), mine.revision),
                present(sight.claim.key),
                valued(self._keys.meta, self._space.raw),
            ],
            writes[:TXN_OPS_MAX],
            until=until,
            repeatable=False,
        )
        if not reply.succeeded:
            return None
        if rest := writes[TXN_OPS_MAX:]:
            await self._space.txn((), rest, until=until)
        self._space.refuse_strange(reply.header)
        return reply.header.revision + self._space.meta.offset
