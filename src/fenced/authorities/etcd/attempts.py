"""Asking for a lease and ending it: which transaction says what, and what its answer means."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from fenced import timing
from fenced.authorities.etcd import steps
from fenced.authorities.etcd.floors import Floors
from fenced.authorities.etcd.keys import EXPIRED, GRANTED, WAITING, About, Record
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
    put,
    txn,
    valued,
)
from fenced.authorities.etcd.namespace import Namespace
from fenced.authorities.etcd.signs import Sign, Signs
from fenced.authorities.etcd.watching import Ears, Target
from fenced.authorities.etcd.wire import LeaseGone, NoSpace
from fenced.contracts import Runtime
from fenced.errors import FencedError, Indeterminate, Misuse, Unavailable, Unsupported
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

    @property
    def lease(self) -> int:
        """What its names or places hang on."""
        lease = self.hold if self.granted else self.queue
        return lease.id if lease is not None else 0

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
        self.signs = Signs(runtime.now)
        self._held: dict[str, str] = {}
        self._behind: dict[str, str] = {}
        """Who waits directly behind an attempt, as far as both are of this client."""
        self._given: dict[str, Given] = {}
        self._floors = Floors(runtime.now)

    def forked(self) -> None:
        for known in (self.live, self._held, self._behind, self._given):
            known.clear()
        self._floors.clear()
        self.signs.clear()

    def _floor(self, names: tuple[str, ...]) -> int:
        return self._floors.of(names, self._space.raw)

    # Asking.

    async def ask(self, ask: Ask, until: float) -> AskAnswer:
        """What cannot be sure to have left nothing behind keeps its sign, and lapses by it."""
        public, doubts, prolonged = grant_id(ask.secret), self._space.doubts, self._sessions.prolonged
        sign = self.signs.asked(public, timing.waiter_ttl(ask.ttl) if ask.wait else ask.ttl, until)
        try:
            try:
                answer = await self._ask(ask, public, until)
            except NoSpace as error:
                answer = await self._done_all_the_same(public, error, until)
        except Indeterminate:
            raise
        except FencedError as error:
            if public in self.live and isinstance(error, Unavailable):  # it has a place
                raise Indeterminate(str(error)) from error
            if not sign.end and doubts == self._space.doubts:
                self.signs.drop(public)
            raise
        finally:
            sign.under_way = -math.inf
        if isinstance(answer, Granted):
            sign.ttl = answer.ttl
        elif isinstance(answer, Ended) or (isinstance(answer, Busy) and doubts == self._space.doubts):
            self.over(public)
        if self._sessions.prolonged != prolonged:
            await self.settle(until)
        return answer

    def over(self, public: str) -> None:
        """Nothing is left of it, unless its names are kept free for a while."""
        sign = self.signs.get(public)
        if sign is not None and not sign.delays:
            self.signs.drop(public)

    async def _done_all_the_same(self, public: str, error: NoSpace, until: float) -> AskAnswer:
        """There is no space any more, and perhaps it was the last of it that we have used: that can be read."""
        mine, _ = await self._stored_now(public, until)
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
            self.live[mine.public] = mine
            with contextlib.suppress(FencedError):  # then it is repeated
                await self._end(self.signs.given_up(mine.public, "withdrawn", until), until)
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
        return await self._stored_now(public, until)

    async def _stored_now(self, public: str, until: float) -> tuple[Attempt | None, Record | None]:
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
        """End an attempt by its owner's wish. If that fails, it is repeated when a lease is prolonged."""
        return await self._end(self.signs.given_up(grant_id(secret), state, until), until)

    async def _end(self, sign: Sign, until: float) -> ReleaseAnswer:
        """End it as its owner wishes, and forget it when that is certain."""
        try:
            while True:
                if sign.freed:
                    return Released()
                answer = await self._try_to_end(sign, until)
                if answer is not None:
                    break
                if self._now() >= until:
                    raise Indeterminate("others were always quicker: it is not known to have ended")
        finally:
            sign.under_way = -math.inf
        if not sign.freed:
            self.over(sign.public)
        return answer

    async def _try_to_end(self, sign: Sign, until: float) -> ReleaseAnswer | None:
        """None: it has changed, or a lease that was to be used is gone."""
        public, state = sign.public, sign.end
        mine, record = await self.load(public, until)
        try:
            if mine is not None:
                return await self._finish(mine, sign, state, until)
            if record is not None:
                return Released() if record.state in ("released", "withdrawn") else Ended(record.state)
            return Gone() if state == "released" else await self._tombstone(public, state, until)
        except LeaseGone:
            self._sessions.forget_all()
            return None

    async def _tombstone(self, public: str, state: str, until: float) -> Released | None:
        memory = await self._sessions.memory(0.0, until)
        key = self._keys.attempt(public)
        write = put(key, Record(state, (), 0.0).written(), memory.id)
        reply = await self._space.run(txn([absent(key)], [write]), until)
        return Released() if reply.succeeded else None

    async def _finish(self, mine: Attempt, sign: Sign, state: str, until: float) -> ReleaseAnswer | None:
        """None: its record has changed."""
        try:
            memory = await self._sessions.memory(mine.record.ttl, until)
            if state == "released" and await self._hand_over(mine, memory, until):
                return Released()
            reply = await self._give_back(mine, state, memory.id, until)
        except NoSpace:  # what only deletes is still done, and its record stands for a tombstone meanwhile
            reply = await self._give_back(mine, state, 0, until)
            sign.freed = reply.succeeded
        self.forget(mine)
        if reply.succeeded:
            return Released()
        found = reply.found[0].first
        if found is None or found.modified != mine.revision:
            return None
        for name in mine.record.names:
            await self._space.run(steps.clear(self._keys, mine.public, mine.record, name), until)
        self._expired(mine, sign)
        return Ended(await self.reason(mine, until))

    async def _give_back(self, mine: Attempt, state: str, memory: int, until: float) -> TxnReply:
        request, rest = steps.finish(self._keys, mine.public, mine.record, mine.revision, state, memory)
        if rest:  # places of who holds its names: nobody needs them
            await self._space.run(txn((), rest), until)
        return await self._space.run(request, until)

    # What is over, although nobody has said so.

    async def settle(self, until: float) -> None:
        """End what was given up in vain, and what was not renewed in time although its lease was prolonged.

        Never for longer than a part of the time of who calls, whose own concern is another. What fails is for the next.
        """
        over = self.signs.over()
        if not over:
            return
        now = self._now()
        until = now + (until - now) / 4
        crowded = False
        for sign in over:
            if self._now() >= until:
                return
            if sign.freed and crowded:
                continue
            sign.under_way = until  # nobody else tries at the same time
            try:
                await self._settle(sign, until)
            except NoSpace:
                crowded = True
            except FencedError:
                return
            finally:
                sign.under_way = -math.inf

    async def _settle(self, sign: Sign, until: float) -> None:
        if sign.freed:
            await self._write_down(sign, until)
        elif sign.delays:
            for key, value in sign.delays:
                await self._space.run(txn([valued(key, value)], [delete(key)]), until)
            self.signs.drop(sign.public)
        elif sign.end:
            await self._end(sign, until)
        else:
            await self._lapse(sign, until)

    async def _write_down(self, sign: Sign, until: float) -> None:
        """Its names are free; now there may be space for how it ended."""
        mine, record = await self._stored_now(sign.public, until)
        if mine is not None and record is not None:
            memory = await self._sessions.memory(record.ttl, until)
            key, value = self._keys.attempt(sign.public), record.ended(sign.end).written()
            same = modified_at(key, mine.revision)
            await self._space.run(txn([same], [put(key, value, memory.id)]), until)
        self.signs.drop(sign.public)

    async def _lapse(self, sign: Sign, until: float) -> None:
        """Nobody has asked for it or renewed it. What became of it says its record, not what we know."""
        mine, record = await self._stored_now(sign.public, until)
        if record is None:  # its request may still be under way
            await self._tombstone(sign.public, EXPIRED, until)
        elif mine is not None and mine.lease in self._sessions.made:
            if mine.granted and self._now() < sign.since + record.seconds:
                sign.ttl = float(record.seconds)
                return
            await self._finish(mine, sign, EXPIRED, until)
            if sign.freed:
                sign.end = EXPIRED
                return
            self._expired(mine, sign)
        if not sign.delays:
            self.signs.drop(sign.public)

    def _expired(self, mine: Attempt, sign: Sign) -> None:
        """Its lock_delay goes by from when it should have ended."""
        if mine.granted and (delays := steps.delays(self._keys, mine.public, mine.record)):
            sign.ttl, sign.delay, sign.end = float(mine.record.seconds), mine.record.delay, ""
            sign.delays = delays

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
        if rest := writes[TXN_OPS_MAX:]:  # its places, which only keep others from being woken in vain
            await space.run(txn((), rest), until)
        try:
            reply = await space.run(txn(proof, writes[:TXN_OPS_MAX]), until, repeatable=False)
        except NoSpace as error:
            raise Indeterminate(str(error)) from error
        if not reply.succeeded:
            return None
        space.refuse_strange(reply.header)
        return reply.header.revision + space.meta.offset
