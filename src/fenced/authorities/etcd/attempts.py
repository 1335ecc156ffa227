"""Asking for a lease and ending it: which transaction says what, and what its answer means."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from fenced.authorities.etcd import steps
from fenced.authorities.etcd.floors import Floors
from fenced.authorities.etcd.keys import GRANTED, WAITING, About, Record
from fenced.authorities.etcd.leases import Lease, Session, Sessions
from fenced.authorities.etcd.looking import Looker, Sight
from fenced.authorities.etcd.messages import (
    TXN_OPS_MAX,
    KeyValue,
    TxnReply,
    absent,
    get,
    put,
    txn,
    valued,
)
from fenced.authorities.etcd.namespace import Namespace
from fenced.authorities.etcd.watching import Ears, Target
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
    settled: bool = False
    """Nobody is expected any more who was turned away earlier and takes a place ahead of it later."""

    @property
    def granted(self) -> bool:
        return self.record.state == GRANTED

    def lives(self, now: float) -> bool:
        return self.hold is not None and self.hold.until > now

    def leases(self, now: float) -> list[Lease]:
        """All that has to be kept alive for it: a delay before the lease that it follows, and not without it."""
        kept = (self.delayed if self.lives(now) else None, self.hold, self.queue)
        return [lease for lease in kept if lease is not None]


class Given(NamedTuple):
    """A grant that another attempt of this client has written when it ended; its owner has not asked since."""

    waited: Attempt
    granted: Attempt
    reply: TxnReply


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
        self._held: dict[str, str] = {}
        self._behind: dict[str, str] = {}
        """Who waits directly behind an attempt, as far as both are of this client."""
        self._given: dict[str, Given] = {}
        self._floors = Floors(runtime.now)

    def forked(self) -> None:
        for known in (self.live, self._held, self._behind, self._given):
            known.clear()
        self._floors.clear()

    def _floor(self, names: tuple[str, ...]) -> int:
        return self._floors.of(names, self._space.raw)

    # Asking.

    async def ask(self, ask: Ask, until: float) -> AskAnswer:
        began = self._now()
        public = grant_id(ask.secret)
        while True:
            mine = self.live.get(public)
            given = self._given.pop(public, None)
            if given is not None and given.waited is mine and given.granted.lives(began):
                return await self._take(given.granted, given.reply, began, until)
            if mine is not None and (
                mine.granted or (mine.record.names, mine.record.ttl) != (ask.names, ask.ttl)
            ):
                self.forget(mine)  # a repeated one: what is stored is the truth
                mine = None
            try:
                if mine is None:
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
                raise Indeterminate("others were always quicker: neither granted nor queued in time")

    async def _first(self, ask: Ask, public: str, began: float, until: float) -> AskAnswer | None:
        """Grant it in one transaction if all its names are free; None: look again."""
        session = await self._sessions.holding(ask.holder, ask.ttl, ask.lock_delay, until)
        memory = await self._sessions.memory(ask.ttl, until)
        space, raw = self._space, self._space.raw
        record = self._granted(Record(GRANTED, ask.names, ask.ttl, ask.lock_delay, ask.holder), session)
        floor, learn = self._floor(ask.names), self._floors.unknown(ask.names)
        request = steps.grant(self._keys, public, record, memory.id, raw, floor, learn=learn)
        reply = await space.run(request, until)
        if reply.succeeded:
            if learn:
                self._floors.learn(ask.names, reply.found[0].first, reply.header.revision)
            mine = Attempt(public, record, reply.header.revision, session.hold, session.delayed, None, memory)
            self._floors.was_free(ask.names, reply.header.revision)
            return await self._take(mine, reply, began, until)
        found, meta = (each.first for each in reply.found)
        if found is not None:
            return await self._stored(ask, public, found, until)
        if space.is_new(meta) or raw != space.raw:
            return None
        space.refuse_next(reply.header)
        ends = [self._keys.behind(name) for name in ask.names]
        sight = await self._looker.ahead(ask.names, ends, until, floor)
        if sight.blocker is None:
            return None  # free again
        if not ask.wait or sight.ahead >= QUEUE_MAX:
            return Busy(sight.ahead, await self._looker.held_by(sight.claim, until))
        await self._enqueue(public, record, session, memory, sight, until)
        return None

    def _granted(self, record: Record, session: Session) -> Record:
        delayed = session.delayed.id if session.delayed is not None else 0
        if delayed and len(record.names) >= TXN_OPS_MAX // 2:
            raise Unsupported(f"with lock_delay an etcd lease covers at most {TXN_OPS_MAX // 2 - 1} names")
        return Record(
            GRANTED,
            record.names,
            record.ttl,
            record.delay,
            record.holder,
            session.hold.id,
            session.hold.seconds,
            record.queue,
            record.ticket,
            delayed,
            self._space.meta.offset,
        )

    async def _take(self, mine: Attempt, reply: TxnReply, began: float, until: float) -> Granted:
        """Hand a grant out, unless it was made in another history than the one its tokens belong to."""
        try:
            self._space.refuse_strange(reply.header)
        except FencedError:
            assert mine.memory is not None
            undo, _ = steps.finish(
                self._keys, mine.public, mine.record, mine.revision, "withdrawn", mine.memory.id
            )
            await self._space.run(undo, until)
            raise
        assert mine.hold is not None
        self.live[mine.public] = mine
        self._held.update(dict.fromkeys(mine.record.names, mine.public))
        self._ears.forget(mine.public)
        left = min(mine.hold.until - began, float(mine.hold.seconds))
        return Granted(reply.header.revision + mine.record.offset, left, float(mine.hold.seconds))

    async def _enqueue(
        self, public: str, record: Record, session: Session, memory: Lease, sight: Sight, until: float
    ) -> None:
        """Take a place in all queues at once, under one ticket: the revision in which somebody was in the way.

        If that one is gone by now, nothing is written: look again.
        """
        assert record.holder is not None and sight.blocker is not None
        queue = await self._sessions.queueing(record.holder, record.ttl, until)
        record = replace(record, state=WAITING, queue=queue.id, ticket=sight.revision)
        request = steps.enqueue(self._keys, public, record, memory.id, sight.blocker)
        reply = await self._space.run(request, until)
        if reply.succeeded:
            self.live[public] = Attempt(
                public, record, reply.header.revision, session.hold, session.delayed, queue, memory
            )

    def _places(self, mine: Attempt) -> list[bytes]:
        return self._keys.places_of(mine.record.names, mine.record.ticket, mine.public)

    async def _promote(self, mine: Attempt, ask: Ask, began: float, until: float) -> AskAnswer | None:
        """Grant it if nothing stands ahead of any of its places; None: look again."""
        space, raw = self._space, self._space.raw
        session = await self._sessions.holding(ask.holder, ask.ttl, mine.record.delay, until)
        memory = await self._sessions.memory(ask.ttl, until)
        record = self._granted(mine.record, session)
        floor = min(self._floor(record.names), record.ticket)
        tell = self._floors.to_tell(record.names, record.ticket)
        request = steps.promote(self._keys, mine.public, record, memory.id, raw, floor, tell=tell)
        reply = await space.run(request, until)
        if reply.succeeded:
            revision = reply.header.revision
            self._floors.let_in(record.names, record.ticket, told=tell)
            granted = Attempt(
                mine.public, record, revision, session.hold, session.delayed, mine.queue, memory
            )
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
        sight = await self.look_ahead(mine, until)
        return None if sight.blocker is None else await self._waiting(sight, until)

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
        floor = min(self._floor(mine.record.names), mine.record.ticket)
        sight = await self._looker.ahead(mine.record.names, self._places(mine), until, floor)
        if sight.claim is not None and len(mine.record.names) == 1:
            ticket = About.read(sight.claim.value).ticket
            if ticket:
                self._floors.let_in(mine.record.names, ticket)
        if sight.blocker is not None and About.read(sight.blocker.value).public == mine.public:
            return Sight()  # its own claim: it was granted meanwhile
        if sight.blocker is not None:
            await self.follow(mine, sight.blocker, sight.revision, until)
        return sight

    async def follow(self, mine: Attempt, ahead: KeyValue, revision: int, until: float) -> None:
        """Watch what is directly ahead, as of a revision. If it is ours, it can hand over when it ends."""
        public = About.read(ahead.value).public
        if public in self.live:
            self._behind[public] = mine.public
        await self._ears.watch(mine.public, Target(ahead.key, revision + 1), until)

    # What is stored.

    async def _stored(self, ask: Ask, public: str, found: KeyValue, until: float) -> AskAnswer | None:
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
        return await self._known(mine, until)

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

    async def _known(self, mine: Attempt, until: float) -> AskAnswer | None:
        """The answer to a repeated ask of an attempt that was granted."""
        found = await self._record_if_held(mine, until)
        if found is None:
            return Ended("expired")
        if found.modified != mine.revision:
            return None  # ended meanwhile
        if self._held.get(mine.record.names[0]) != mine.public:
            return Ended(await self.reason(mine, until))
        assert mine.hold is not None
        left = await self._sessions.leases.left(mine.hold.id, until)
        if left < 0:
            return Ended("expired")
        self.live.setdefault(mine.public, mine)
        return Granted(mine.revision + mine.record.offset, float(left), float(mine.record.seconds))

    async def _record_if_held(self, mine: Attempt, until: float) -> KeyValue | None:
        """The record of an attempt; whether it has its claims is known afterwards."""
        proof, mine_key = steps.holds(self._keys, mine.public, mine.record), self._keys.attempt(mine.public)
        reply = await self._space.run(txn(proof, [get(mine_key)], [get(mine_key)]), until)
        if reply.succeeded:
            self._held.update(dict.fromkeys(mine.record.names, mine.public))
        return reply.found[0].first

    async def holds(self, mine: Attempt, keys: set[bytes], until: float) -> bool:
        """Whether these keys, which hang on its lease, are its claims.

        Another attempt of the same client may have the name by now, on the same lease.
        """
        names = mine.record.names
        if not all(self._keys.claim(name) in keys for name in names):
            return False
        if any(name not in self._held for name in names):  # another client has made it
            await self._record_if_held(mine, until)
        return all(self._held.get(name) == mine.public for name in names)

    async def reason(self, mine: Attempt, until: float) -> str:
        """Why an attempt whose record says nothing of an end has lost its key."""
        lease = mine.hold if mine.granted else mine.queue
        assert lease is not None
        return "revoked" if await self._sessions.leases.left(lease.id, until) >= 0 else "expired"

    def forget(self, mine: Attempt) -> None:
        self.live.pop(mine.public, None)
        self._behind.pop(mine.public, None)
        self._given.pop(mine.public, None)
        self._ears.forget(mine.public)
        for name in mine.record.names:
            if self._held.get(name) == mine.public:
                self._held.pop(name, None)

    # Ending.

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
        reply = await self._space.run(txn([absent(key)], [write]), until)
        return Released() if reply.succeeded else None

    async def _finish(self, mine: Attempt, state: str, until: float) -> ReleaseAnswer | None:
        """None: its record has changed."""
        memory = await self._sessions.memory(mine.record.ttl, until)
        if state == "released" and await self._hand_over(mine, memory, until):
            return Released()
        request, rest = steps.finish(self._keys, mine.public, mine.record, mine.revision, state, memory.id)
        reply = await self._space.run(request, until)
        self.forget(mine)
        if reply.succeeded:
            if rest:
                await self._space.run(txn((), rest), until)
            return Released()
        found = reply.found[0].first
        if found is None or found.modified != mine.revision:
            return None
        for name in mine.record.names:
            await self._space.run(steps.clear(self._keys, mine.public, mine.record, name), until)
        return Ended(await self.reason(mine, until))

    async def _hand_over(self, mine: Attempt, memory: Lease, until: float) -> bool:
        """End it and grant its name to the one directly behind, in one transaction, if both are of this client."""
        heir = self.live.get(self._behind.get(mine.public, ""))
        if heir is None or heir.granted or not mine.granted or not self._ears.listening:
            return False
        if heir.record.names != mine.record.names or len(heir.record.names) > 1:
            return False
        if heir.record.ticket < mine.record.ticket:
            return False
        if heir.record.delay or mine.record.delay or heir.memory is None or heir.record.holder is None:
            return False
        self._behind.pop(mine.public, None)  # once only: its lease may be gone
        session = await self._sessions.holding(heir.record.holder, heir.record.ttl, 0.0, until)
        record = self._granted(heir.record, session)
        follower = (heir.public, record, heir.memory.id)
        floor = min(self._floor(record.names), mine.record.ticket or record.ticket)
        tell = self._floors.to_tell(record.names, record.ticket)
        request = steps.hand_over(
            self._keys, mine.public, mine.record, memory.id, follower, self._space.raw, floor, tell=tell
        )
        self._ears.forget(heir.public)  # it is told when there is something to be told
        try:
            reply = await self._space.run(request, until)
            if reply.succeeded:
                self.forget(mine)
                self._floors.let_in(record.names, record.ticket, told=tell)
                granted = Attempt(
                    heir.public, record, reply.header.revision, session.hold, None, heir.queue, heir.memory
                )
                self._given[heir.public] = Given(heir, granted, reply)
                if self.live.get(heir.public) is not heir:  # it has ended, and found that out by itself
                    self._given.pop(heir.public, None)
            return reply.succeeded
        finally:
            self._ears.tell(heir.public)  # to take its grant, or to look again

    async def force(self, name: str, until: float) -> int | None:
        """Take a name from its holder. The token is that of the transaction that did it."""
        space = self._space
        sight = await self._looker.ahead((name,), [self._keys.behind(name)], until)
        if sight.claim is None:
            return None
        public = About.read(sight.claim.value).public
        mine, _ = await self.load(public, until)
        if mine is None or not mine.granted:
            return None
        reply = await space.read([get(self._keys.meta)], until)
        space.is_new(reply.found[0].first)
        space.refuse_next(reply.header)
        memory = await self._sessions.memory(mine.record.ttl, until)
        writes = steps.ends(self._keys, public, mine.record, "revoked", memory.id)
        proof = [valued(sight.claim.key, sight.claim.value), valued(self._keys.meta, space.raw)]
        reply = await space.run(txn(proof, writes[:TXN_OPS_MAX]), until, repeatable=False)
        if not reply.succeeded:
            return None
        if rest := writes[TXN_OPS_MAX:]:
            await space.run(txn((), rest), until)
        space.refuse_strange(reply.header)
        return reply.header.revision + space.meta.offset
