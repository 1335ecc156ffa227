"""Renewing leases and places: keep-alives for their etcd leases in one stream, and a check that their keys exist.

A keep-alive succeeds even if an administrator has deleted a name, so a renewal also reads the claims. A wake-up may be
lost, so it also reads the key that each waiter watches. Any client may renew any attempt: its record has its leases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fenced.stores.etcd.authority.asking import Asking
from fenced.stores.etcd.authority.attempts import Attempts, EtcdAttempt, adopted
from fenced.stores.etcd.authority.keys import ClaimInfo, KeyRecord, Phase
from fenced.stores.etcd.authority.leases import EtcdLease, LeasePool
from fenced.stores.etcd.authority.namespace import Namespace
from fenced.stores.etcd.authority.watching import EtcdWakeups
from fenced.stores.etcd.wire.messages import TXN_OPS_MAX, KeyValue, get
from fenced.values.model import Ended, Gone, Kept, RenewAnswer, Waiting


class Renewing:
    """Renews attempts in batches."""

    def __init__(
        self,
        space: Namespace,
        pool: LeasePool,
        attempts: Attempts,
        asking: Asking,
        wakeups: EtcdWakeups,
        now: Callable[[], float],
    ) -> None:
        self._space = space
        self._keys = space.keys
        self._pool = pool
        self._attempts = attempts
        self._asking = asking
        self._wakeups = wakeups
        self._now = now

    async def renew(self, publics: Sequence[str], until: float) -> list[RenewAnswer]:
        answers: dict[str, RenewAnswer] = {}
        rest = publics
        while rest:  # ends: a record changes at most twice, when it is granted and when it ends
            answers |= await self._round(rest, until)
            rest = [public for public in rest if public not in answers]
        return [answers[public] for public in publics]

    async def _round(self, publics: Sequence[str], until: float) -> dict[str, RenewAnswer]:
        """The answers; none for attempts whose records are not as this client remembered them."""
        answers: dict[str, RenewAnswer] = {}
        attempts = await self._load(publics, answers, until)
        alive = await self._keep_alive(attempts, until)
        # Read after the keep-alives: a key that is there now is on a lease that was prolonged.
        found = await self._read((key for each in attempts for key in self._needed(each)), until)
        lost: list[EtcdAttempt] = []
        for attempt in attempts:
            answer = None
            if attempt.lease.id in alive:
                check = self._held if attempt.phase is Phase.GRANTED else self._queued
                answer = await check(attempt, found, until)
            if answer is not None:
                answers[attempt.public] = answer
            else:
                lost.append(attempt)
        answers |= await self._answers_to_lost(lost, alive, until)
        return answers

    async def _load(
        self, publics: Sequence[str], answers: dict[str, RenewAnswer], until: float
    ) -> list[EtcdAttempt]:
        """Returns the attempts that are live by their records, and answers the others."""
        # A copy: meanwhile another call may end one of them and forget it.
        known = {public: each for public in publics if (each := self._attempts.live.get(public)) is not None}
        unknown = {public: self._keys.attempt(public) for public in publics if public not in known}
        found = await self._read(unknown.values(), until)
        for public, key in unknown.items():
            if (stored := found.get(key)) is None:
                answers[public] = Gone()
            elif (attempt := adopted(public, stored)) is None:
                answers[public] = Ended(KeyRecord.read(stored.value).phase.value)
            else:
                self._attempts.live[public] = known[public] = attempt
        return [known[public] for public in dict.fromkeys(publics) if public in known]

    async def _keep_alive(self, attempts: Sequence[EtcdAttempt], until: float) -> set[int]:
        """Prolong all their etcd leases; returns the ids of those that are alive.

        The lease of a lock_delay only with that of its names, and before it: so it always outlives it, and a renewal
        that is sent too late prolongs no delay (one that is sent in time and reaches etcd late does). Of an attempt of
        another client we know only afterwards whether it lives.
        """
        now = self._now()
        leases: list[EtcdLease] = []
        late: list[tuple[EtcdLease, EtcdLease]] = []
        for attempt in attempts:
            if attempt.held is not None:
                hold, delayed = attempt.held
                if delayed is not None and attempt.is_in_time(now):
                    leases.append(delayed)
                elif delayed is not None:
                    late.append((hold, delayed))
                leases.append(hold)
            if attempt.queue is not None:
                leases.append(attempt.queue)
            if self._pool.needs_keeping(attempt.record_lease):
                leases.append(attempt.record_lease)
        alive = await self._pool.leases.keep_alive(leases, until)
        await self._pool.leases.keep_alive((delayed for hold, delayed in late if hold.id in alive), until)
        return alive

    async def _read(self, keys: Iterable[bytes], until: float) -> dict[bytes, KeyValue]:
        """The keys that exist, by as many transactions as are needed."""
        wanted, found = list(dict.fromkeys(keys)), {}
        for start in range(0, len(wanted), TXN_OPS_MAX):
            part = wanted[start : start + TXN_OPS_MAX]
            reply = await self._space.read([get(key) for key in part], until)
            found.update({kv.key: kv for each in reply.found if (kv := each.first) is not None})
        return found

    def _needed(self, attempt: EtcdAttempt) -> list[bytes]:
        """The keys by which an attempt is checked."""
        if attempt.phase is Phase.GRANTED:
            return [self._keys.claim(name) for name in attempt.record.names]
        keys = [self._keys.attempt(attempt.public), self._place(attempt)]
        if (target := self._wakeups.target(attempt.public)) is not None:
            keys.append(target.key)
        return keys

    def _place(self, attempt: EtcdAttempt) -> bytes:
        return self._keys.place(attempt.record.names[0], attempt.record.ticket, attempt.public)

    async def _held(
        self, attempt: EtcdAttempt, found: dict[bytes, KeyValue], until: float
    ) -> RenewAnswer | None:
        """None: it has lost a claim."""
        about = ClaimInfo.of(attempt.public, attempt.record).written()
        claims = (found.get(self._keys.claim(name)) for name in attempt.record.names)
        if all(claim is not None and claim.value == about for claim in claims):
            return Kept(float(attempt.lease.seconds))
        return None

    async def _queued(
        self, attempt: EtcdAttempt, found: dict[bytes, KeyValue], until: float
    ) -> RenewAnswer | None:
        """None: it has lost its place, or was granted: at another client, or a reply to us was lost."""
        if self._attempts.heirs.is_pending(attempt):
            return Waiting(0.0)
        stored = found.get(self._keys.attempt(attempt.public))
        if stored is None or stored.modified != attempt.revision or self._place(attempt) not in found:
            return None
        target = self._wakeups.target(attempt.public)
        blocked = target is not None and target.key in found
        if not blocked:
            # The key that it watched is gone, or it watched none: whatever is ahead now is watched.
            blocked = (await self._asking.look_ahead(attempt, until)).blocker is not None
        return Waiting(float(attempt.lease.seconds) if blocked else 0.0)

    async def _answers_to_lost(
        self, lost: Sequence[EtcdAttempt], alive: set[int], until: float
    ) -> dict[str, RenewAnswer]:
        """Answers by their records; if a record is as it was, its keys are gone, and its etcd lease shows why.

        If a record has changed and is still live, the attempt was granted meanwhile: no answer, look again.
        """
        answers: dict[str, RenewAnswer] = {}
        found = await self._read((self._keys.attempt(each.public) for each in lost), until)
        for attempt in lost:
            self._attempts.forget(attempt)
            stored = found.get(self._keys.attempt(attempt.public))
            phase = KeyRecord.read(stored.value).phase if stored is not None else None
            if stored is None or phase is None:
                answers[attempt.public] = Gone()
            elif not phase.is_live:
                answers[attempt.public] = Ended(phase.value)
            elif stored.modified == attempt.revision:
                why = Phase.REVOKED if attempt.lease.id in alive else Phase.EXPIRED
                answers[attempt.public] = Ended(why.value)
        return answers
