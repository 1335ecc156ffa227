"""Ending attempts: released or withdrawn by their owner, revoked by an operator, or expired."""

from __future__ import annotations

import math

from fenced.errors import FencedError, Indeterminate
from fenced.stores.etcd.authority import transactions
from fenced.stores.etcd.authority.carrying import Carrying
from fenced.stores.etcd.authority.keys import EXPIRED, ClaimInfo, KeyRecord
from fenced.stores.etcd.authority.known import EtcdAttempt, PendingGrant
from fenced.stores.etcd.authority.leases import EtcdLease
from fenced.stores.etcd.authority.signs import Sign
from fenced.stores.etcd.wire.cluster import LeaseGone, NoSpace
from fenced.stores.etcd.wire.messages import (
    TXN_OPS_MAX,
    TxnReply,
    absent,
    delete,
    get,
    modified_at,
    put,
    txn,
    valued,
)
from fenced.values.model import Ended, Gone, ReleaseAnswer, Released, grant_id


class Ending(Carrying):
    """Ends attempts of one client."""

    async def finish(self, secret: str, state: str, until: float, keep: float = 0.0) -> ReleaseAnswer:
        """Release or withdraw an attempt. If that fails, `settle` retries it when an etcd lease is prolonged."""
        taken_until = self._now() + keep
        return await self._end(self.signs.given_up(grant_id(secret), state, until, taken_until), until)

    async def _end(self, sign: Sign, until: float) -> ReleaseAnswer:
        """End it in the state that its owner chose, and forget it once that is certain."""
        try:
            while True:
                if sign.freed:
                    return Released()
                answer = await self._try_to_end(sign, until)
                if answer is not None:
                    break
                if self._now() >= until:
                    raise Indeterminate(
                        "each try met a concurrent change: whether the attempt has ended is unknown"
                    )
        finally:
            sign.under_way = -math.inf
        if not sign.freed:
            self.forget_sign(sign.public)
        return answer

    async def _try_to_end(self, sign: Sign, until: float) -> ReleaseAnswer | None:
        """Try once. None: try again, its record has changed or an etcd lease that the transaction uses is gone."""
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
        write = put(key, KeyRecord(state, (), 0.0).written(), memory.id)
        reply = await self._space.run(txn([absent(key)], [write]), until)
        return Released() if reply.succeeded else None

    async def _finish(self, mine: EtcdAttempt, sign: Sign, state: str, until: float) -> ReleaseAnswer | None:
        """None: its record has changed."""
        keep = sign.taken_until - self._now() if mine.granted and state == "released" else 0.0
        try:
            memory = await self._sessions.memory(mine.record.ttl, until)
            if keep > 0:
                reply = await self._keep_taken(mine, memory, keep, until)
            elif state == "released" and await self._hand_over(mine, memory, until):
                return Released()
            else:
                reply = await self._give_back(mine, state, memory.id, until)
        except NoSpace:
            if keep > 0:  # nothing could keep its names taken: the lease lasts until its ttl has passed
                raise
            # A transaction that only deletes still works. The old record serves as a tombstone meanwhile.
            reply = await self._give_back(mine, state, 0, until)
            sign.freed = reply.succeeded
        self.forget(mine)
        if reply.succeeded:
            if state != EXPIRED:
                sign.delays = ()  # deleted with its claims
            return Released()
        found = reply.found[0].first
        if found is None or found.modified != mine.revision:
            return None
        if state == EXPIRED and mine.carrier is not None:
            return None  # another client has taken it over, or it has lost a key: nothing is left to do here
        for name in mine.record.names:
            await self._space.run(transactions.clear(self._keys, mine.public, mine.record, name), until)
        self.expired(mine)
        return Ended(await self.reason(mine, until))

    async def _give_back(self, mine: EtcdAttempt, state: str, memory: int, until: float) -> TxnReply:
        carrier = mine.carrier if state == EXPIRED else None
        request, rest = transactions.finish(
            self._keys, mine.public, mine.record, mine.revision, state, memory, carrier
        )
        if rest:  # the holder's own places in the queues: nobody needs them, so they may be deleted first
            await self._space.run(txn((), rest), until)
        return await self._space.run(request, until)

    async def _keep_taken(self, mine: EtcdAttempt, memory: EtcdLease, keep: float, until: float) -> TxnReply:
        """End it, and write lock_delay keys on an etcd lease that nobody keeps alive: they end by themselves."""
        lease = await self._sessions.leases.grant(math.ceil(keep), until)
        *before, last = transactions.keep_taken(self._keys, mine.public, mine.record, memory.id, lease.id)
        for request in before:
            await self._space.run(request, until)
        return await self._space.run(last, until)

    async def _hand_over(self, mine: EtcdAttempt, memory: EtcdLease, until: float) -> bool:
        """End it and grant its name to the waiter directly behind it in one transaction, if both are one program's.

        Of another program, whose requests reach this client through a service, nobody knows whether it is still alive.
        """
        heir = self.live.get(self._behind.get(mine.public, ""))
        if heir is None or heir.granted or not mine.granted or not self._wakeups.listening:
            return False
        if heir.record.names != mine.record.names or len(heir.record.names) > 1:
            return False
        if heir.record.ticket < mine.record.ticket:
            return False
        if heir.record.delay or mine.record.delay or heir.memory is None:
            return False
        holder, before = heir.record.holder, mine.record.holder
        if holder is None or before is None or holder.id != before.id:
            return False
        if (sign := self.signs.get(heir.public)) is None or not self.carries(heir):
            return False
        sign.since = (
            self._now()
        )  # its ttl begins now, although its last renewal may have reached another client
        self._behind.pop(mine.public, None)  # once only: its lease may be gone
        session = await self._sessions.holding(holder, heir.record.ttl, 0.0, until)
        record = self._granted(heir.record, session)
        follower = (heir.public, record, heir.memory.id)
        floor = min(self._floor(record.names), mine.record.ticket or record.ticket)
        store = self._floors.should_store(record.names, record.ticket)
        request = transactions.hand_over(
            self._keys, mine.public, mine.record, memory.id, follower, self._space.raw, floor, store=store
        )
        # Suppress its watch until the hand-over transaction has an outcome (see `finally`).
        self._wakeups.forget(heir.public)
        try:
            reply = await self._space.run(request, until)
            if reply.succeeded:
                self.forget(mine)
                self._floors.let_in(record.names, record.ticket, stored=store)
                granted = EtcdAttempt(
                    heir.public, record, reply.header.revision, session.hold, None, heir.queue, heir.memory
                )
                self._given[heir.public] = PendingGrant(heir, granted, reply)
                # If the waiter has ended or changed meanwhile, no ask would remove this entry.
                if self.live.get(heir.public) is not heir:
                    self._given.pop(heir.public, None)
            return reply.succeeded
        finally:
            self._wakeups.notify(heir.public)  # wake it: it takes its grant, or asks again

    def is_handed_over(self, mine: EtcdAttempt) -> bool:
        """Whether a release has granted it: its next ask takes the grant."""
        given = self._given.get(mine.public)
        return given is not None and given.waited is mine

    async def force(self, name: str, token: int, until: float) -> int | None:
        """Take a name from the holder that has this token. Returns the token of the transaction that did it."""
        space = self._space
        view = await self._reader.ahead((name,), [self._keys.behind(name)], until)
        if view.claim is None:
            return None
        public = ClaimInfo.read(view.claim.value).public
        mine, _ = await self.stored_now(public, until)
        if mine is None or not mine.granted or mine.revision + mine.record.offset != token:
            return None
        reply = await space.read([get(self._keys.meta)], until)
        space.is_new(reply.found[0].first)
        space.refuse_next(reply.header)
        memory = await self._sessions.memory(mine.record.ttl, until)
        writes = transactions.ends(self._keys, public, mine.record, "revoked", memory.id)
        proof = [valued(view.claim.key, view.claim.value), valued(self._keys.meta, space.raw)]
        if rest := writes[TXN_OPS_MAX:]:  # its places: deleting them early only wakes waiters in vain
            await space.run(txn((), rest), until)
        try:
            reply = await space.run(txn(proof, writes[:TXN_OPS_MAX]), until, repeatable=False)
        except NoSpace as error:
            raise Indeterminate(str(error)) from error
        except LeaseGone:
            self._sessions.forget_all()  # the next try makes new ones
            raise
        if not reply.succeeded:
            return None
        space.refuse_strange(reply.header)
        return reply.header.revision + space.meta.offset

    # Attempts that are due to end.

    async def settle(self, until: float) -> None:
        """End attempts whose release failed, and attempts that nobody renewed while their etcd lease was prolonged.

        Uses at most a quarter of the caller's time: the caller's own answer matters more. The next call does the rest.
        """
        due = self.signs.due()
        if not due:
            return
        now = self._now()
        until = now + (until - now) / 4
        no_space = False
        for sign in due:
            if self._now() >= until:
                return
            if sign.freed and no_space:
                continue
            sign.under_way = until  # no other thread ends it at the same time
            try:
                await self._settle(sign, until)
            except NoSpace:
                no_space = True
            except LeaseGone:
                self._sessions.forget_all()
                return
            except FencedError:
                return
            finally:
                sign.under_way = -math.inf

    async def end_late(self, sign: Sign, until: float) -> None:
        """An ask or a renewal came too late: end the attempt first, unless its record has a longer ttl."""
        await self._settle(sign, until)
        sign.since = self._now()

    async def _settle(self, sign: Sign, until: float) -> None:
        if sign.freed:
            await self._record_end(sign, until)
        elif sign.delays and not sign.expiring:
            for key, value in sign.delays:
                await self._space.run(txn([valued(key, value)], [delete(key)]), until)
            self.signs.drop(sign.public)
        elif sign.end:
            await self._end(sign, until)
        else:
            await self._expire(sign, until)

    async def _record_end(self, sign: Sign, until: float) -> None:
        """Its names were freed without space for a record: write the record now, if there is space."""
        mine, record = await self.stored_now(sign.public, until)
        if mine is not None and record is not None:
            memory = await self._sessions.memory(record.ttl, until)
            key, value = self._keys.attempt(sign.public), record.ended(sign.end).written()
            same = modified_at(key, mine.revision)
            await self._space.run(txn([same], [put(key, value, memory.id)]), until)
        self.signs.drop(sign.public)

    async def _expire(self, sign: Sign, until: float) -> None:
        """Nobody asked for it or renewed it for its ttl. Its record in etcd decides, not what this client remembers."""
        mine, record = await self.stored_now(sign.public, until)
        if record is None:
            if (known := self.live.get(sign.public)) is not None:
                self.forget(known)  # etcd has forgotten it, too
            if not sign.stored:  # its first ask may still reach the server: the tombstone stops it
                await self._tombstone(sign.public, EXPIRED, until)
        elif mine is None or not self.carries(mine):
            if (known := self.live.get(sign.public)) is not None:
                self.forget(known)  # it has ended elsewhere, or another client carries it
        else:
            if mine.granted and self._now() < sign.since + record.seconds:
                sign.ttl = float(record.seconds)
                return
            # Before the request: if its reply is lost, only this records which keys it has left in place.
            self.expired(mine)
            sign.expiring = True
            await self._finish(mine, sign, EXPIRED, until)
            if sign.freed and not sign.delays:
                sign.end = EXPIRED
                return
            sign.freed = False
        self.forget_sign(sign.public)

    def expired(self, mine: EtcdAttempt) -> None:
        """It has expired: its lock_delay counts from when its ttl ended."""
        sign = self.signs.get(mine.public)
        if sign is not None and mine.granted and mine.record.delayed:
            sign.ttl, sign.delay, sign.end = float(mine.record.seconds), mine.record.delay, ""
            sign.delays = transactions.delays(self._keys, mine.public, mine.record)
