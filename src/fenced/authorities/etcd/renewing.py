"""Renewing leases and places: one keep-alive for each etcd lease, and a check that the keys still exist.

A keep-alive succeeds even if an administrator has deleted a name, so a renewal also reads the keys that are attached
to the lease. A wake-up may be lost, so it also reads the key that each waiter watches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fenced.authorities.etcd.attempts import Attempts
from fenced.authorities.etcd.keys import ClaimInfo, KeyRecord, Keys
from fenced.authorities.etcd.known import EtcdAttempt
from fenced.authorities.etcd.leases import Sessions
from fenced.authorities.etcd.namespace import Namespace
from fenced.authorities.etcd.watching import EtcdWakeups
from fenced.errors import FencedError
from fenced.model import Ended, Gone, Kept, RenewAnswer, Unknown, Waiting
from fenced.wire.etcd.messages import TXN_OPS_MAX, get

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
        leases = [lease for mine in live for lease in mine.leases(self._now())]
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
        unknown = [public for public in publics if public not in self._attempts.live]
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
                    self._attempts.live[public] = mine
        return [mine for public in publics if (mine := self._attempts.live.get(public)) is not None]

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
        lost = []
        at_once = TXN_OPS_MAX // _WAITER_OPS
        for start in range(0, len(mine), at_once):
            part = mine[start : start + at_once]
            gets = [read for each in part for read in self._reads(each)]
            reply = await self._space.read(gets, self._until)
            for each, place, ahead in zip(part, reply.found[::2], reply.found[1::2], strict=True):
                if place.first is None:
                    lost.append(each)
                    continue
                if ahead.first is not None:
                    blocked = (
                        ClaimInfo.read(ahead.first.value).public != each.public
                    )  # or it was granted meanwhile
                    if blocked and not each.settled:
                        await self._attempts.follow(each, ahead.first, reply.header.revision, self._until)
                else:
                    blocked = await self._blocked(each)
                each.settled = True
                assert each.queue is not None
                self._answers[each.public] = Waiting(float(each.queue.seconds) if blocked else 0.0)
        return lost

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
                self._answers[each.public] = await self._end(each, found.first and found.first.value)

    async def _end(self, mine: EtcdAttempt, value: bytes | None) -> RenewAnswer:
        if value is None:
            return Gone()
        record = KeyRecord.read(value)
        if record.state not in ("granted", "waiting"):
            return Ended(record.state)
        if record.state != mine.record.state:
            return Waiting(0.0)  # granted meanwhile, by an ask whose reply has not arrived yet
        self._attempts.expired(mine)
        return Ended(await self._attempts.reason(mine, self._until))
