"""Renewing leases and places: one keep-alive for each etcd lease, and a check that the keys still exist.

A keep-alive succeeds even if an administrator has deleted a name, so a renewal also reads the keys that are attached
to the lease. A wake-up may be lost, so it also reads the key that each waiter watches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fenced.errors import FencedError
from fenced.stores.etcd.authority.attempts import Attempts
from fenced.stores.etcd.authority.keys import GRANTED, WAITING, ClaimInfo, KeyRecord, Keys
from fenced.stores.etcd.authority.known import EtcdAttempt
from fenced.stores.etcd.authority.leases import Sessions
from fenced.stores.etcd.authority.namespace import Namespace
from fenced.stores.etcd.authority.watching import EtcdWakeups
from fenced.stores.etcd.wire.messages import TXN_OPS_MAX, get
from fenced.values.model import Ended, Gone, Kept, RenewAnswer, Unknown, Waiting

_WAITER_OPS = 2


class EtcdRenewal:
    """One batch."""

    def __init__(
        self,
        space: Namespace,
        sessions: Sessions,
        attempts: Attempts,
        wakeups: EtcdWakeups,
        now: Callable[[], float],
        until: float,
    ) -> None:
        self._now = now
        self._space = space
        self._keys: Keys = space.keys
        self._sessions = sessions
        self._attempts = attempts
        self._wakeups = wakeups
        self._until = until
        self._answers: dict[str, RenewAnswer] = {}

    async def run(self, publics: Sequence[str]) -> list[RenewAnswer]:
        for sign in self._attempts.signs.renewed(publics):
            try:
                await self._attempts.end_late(sign, self._until)
            except FencedError as error:
                self._answers[sign.public] = Unknown(str(error))
        live = await self._load([public for public in publics if public not in self._answers])
        gone = await self._take_over([mine for mine in live if not self._attempts.carries(mine)])
        leases = [lease for mine in live if mine.public not in gone for lease in mine.leases(self._now())]
        leases += [
            mine.memory
            for mine in live
            if mine.memory is not None and self._sessions.needs_keeping(mine.memory)
        ]
        alive = await self._sessions.leases.keep_alive(leases, self._until)
        # For attempts adopted from another client we only now know whether the lease is alive.
        late = [mine.delayed for mine in live if mine.delayed and mine.delayed not in leases]
        ours = {mine.delayed for mine in live if mine.hold is not None and mine.hold.id in alive}
        await self._sessions.leases.keep_alive([lease for lease in late if lease in ours], self._until)
        lost = await self._held([mine for mine in live if mine.granted])
        lost += await self._queued([mine for mine in live if not mine.granted])
        await self._answer_lost(lost)
        for public, answer in self._answers.items():
            if isinstance(answer, Ended | Gone):
                self._attempts.forget_sign(public)
        await self._attempts.settle(self._until)
        return [self._answers[public] for public in publics]

    async def _load(self, publics: Sequence[str]) -> list[EtcdAttempt]:
        """Returns the attempts that are live by their records, and answers the others."""
        # A copy: meanwhile another call may end one of them and forget it.
        known = {public: mine for public in publics if (mine := self._attempts.live.get(public)) is not None}
        unknown = [public for public in publics if public not in known]
        adopted: list[EtcdAttempt] = []
        for start in range(0, len(unknown), TXN_OPS_MAX):
            part = unknown[start : start + TXN_OPS_MAX]
            reply = await self._space.read([get(self._keys.attempt(public)) for public in part], self._until)
            for public, found in zip(part, reply.found, strict=True):
                if found.first is None:
                    self._answers[public] = Gone()
                    continue
                record = KeyRecord.read(found.first.value)
                mine = self._attempts.adopt(public, record, found.first)
                if mine is None:
                    self._answers[public] = Ended(record.state)
                else:
                    self._attempts.live[public] = known[public] = mine
                    adopted.append(mine)
        for start in range(0, len(adopted), TXN_OPS_MAX):
            some = adopted[start : start + TXN_OPS_MAX]
            gets = [get(self._attempts.carrier_key(mine.public, mine.record)) for mine in some]
            reply = await self._space.read(gets, self._until)
            for mine, found in zip(some, reply.found, strict=True):
                self._attempts.carried_by(mine, found.first)
        return [known[public] for public in publics if public in known]

    async def _take_over(self, others: list[EtcdAttempt]) -> set[str]:
        """Take over what other clients carry, in at most half of the time of this call.

        The rest stays on the etcd leases of those clients, which this renewal prolongs; the next one takes it over. One
        that cannot be taken over has lost a key, or its record has changed: it is answered as lost.
        """
        now, gone = self._now(), set()
        limit = now + (self._until - now) / 2
        for mine in others:
            if self._now() >= limit:
                break
            if not await self._attempts.take_over(mine, self._until):
                gone.add(mine.public)
        return gone

    async def _held(self, mine: list[EtcdAttempt]) -> list[EtcdAttempt]:
        """Answer the attempts whose claims exist; returns the others."""
        keys: dict[int, set[bytes]] = {}
        lost = []
        for each in mine:
            assert each.hold is not None
            lease = each.hold.id
            if lease not in keys:
                keys[lease] = await self._sessions.leases.keys(lease, self._until)
            if await self._attempts.holds(each, keys[lease], self._until):
                self._answers[each.public] = Kept(float(each.hold.seconds))
            else:
                lost.append(each)
        return lost

    async def _queued(self, mine: list[EtcdAttempt]) -> list[EtcdAttempt]:
        """Answer the attempts that still have their places; returns the others."""
        lost, free = [], []
        at_once = TXN_OPS_MAX // _WAITER_OPS
        for start in range(0, len(mine), at_once):
            part = mine[start : start + at_once]
            gets = [read for each in part for read in self._reads(each)]
            reply = await self._space.read(gets, self._until)
            for each, place, ahead in zip(part, reply.found[::2], reply.found[1::2], strict=True):
                assert each.queue is not None
                if place.first is None or place.first.lease != each.queue.id:
                    lost.append(each)  # or another client carries it
                    continue
                if ahead.first is not None:
                    blocked = ClaimInfo.read(ahead.first.value).public != each.public
                    if blocked and not each.settled:
                        await self._attempts.follow(each, ahead.first, reply.header.revision, self._until)
                else:
                    blocked = await self._blocked(each)
                each.settled = True
                self._answers[each.public] = Waiting(float(each.queue.seconds) if blocked else 0.0)
                if not blocked and not self._attempts.is_handed_over(each):
                    free.append(each)
        return lost + await self._granted_meanwhile(free)

    async def _granted_meanwhile(self, free: list[EtcdAttempt]) -> list[EtcdAttempt]:
        """Nobody is ahead of these waiters: returns those that an ask has granted, here or at another client."""
        granted = []
        for start in range(0, len(free), TXN_OPS_MAX):
            part = free[start : start + TXN_OPS_MAX]
            gets = [get(self._keys.attempt(each.public)) for each in part]
            reply = await self._space.read(gets, self._until)
            for each, found in zip(part, reply.found, strict=True):
                if found.first is None or found.first.modified != each.revision:
                    granted.append(each)
        return granted

    def _reads(self, mine: EtcdAttempt) -> tuple[bytes, bytes]:
        """Reads of its place and of the key that it waits for; the first time, of the key directly ahead of it."""
        name, known = mine.record.names[0], self._wakeups.target(mine.public)
        place = self._keys.place(name, mine.record.ticket, mine.public)
        if known is not None and (mine.settled or len(mine.record.names) > 1):
            mine.settled = True
            return get(place), get(known.key)
        return get(place), get(self._keys.under(name), place, last=True)

    async def _blocked(self, mine: EtcdAttempt) -> bool:
        """The key that it waited for is gone, or was unknown: check whether another key is ahead."""
        view = await self._attempts.look_ahead(mine, self._until)
        return view.blocker is not None

    async def _answer_lost(self, lost: list[EtcdAttempt]) -> None:
        """Answer attempts whose keys are gone: by their records, or else by the likely reason."""
        for start in range(0, len(lost), TXN_OPS_MAX):
            part = lost[start : start + TXN_OPS_MAX]
            reply = await self._space.read(
                [get(self._keys.attempt(each.public)) for each in part], self._until
            )
            for each, found in zip(part, reply.found, strict=True):
                self._attempts.forget(each)
                record = None if found.first is None else KeyRecord.read(found.first.value)
                if record is None:
                    self._answers[each.public] = Gone()
                elif record.state not in (GRANTED, WAITING):
                    self._answers[each.public] = Ended(record.state)
                else:
                    self._answers[each.public] = await self._again(each)

    async def _again(self, lost: EtcdAttempt) -> RenewAnswer:
        """It is not where we believed it to be. Another client may carry it, or an ask has granted it meanwhile."""
        attempts = self._attempts
        mine, record = await attempts.stored_now(lost.public, self._until)
        if mine is None:
            return Gone() if record is None else Ended(record.state)
        if mine.carrier is None or not await attempts.take_over(mine, self._until):
            attempts.expired(lost)
            return Ended(await attempts.reason(lost, self._until))
        alive = await self._sessions.leases.keep_alive(mine.leases(self._now()), self._until)
        if mine.lease not in alive:
            return Ended("expired")
        if mine.granted:
            return Kept(float(mine.record.seconds))
        assert mine.queue is not None
        return Waiting(float(mine.queue.seconds) if await self._blocked(mine) else 0.0)
