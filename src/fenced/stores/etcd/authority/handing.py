"""Handing over: a release grants the name to the waiter directly behind it, if both are of one client and program.

It saves the waiter's own transaction: without it a hand-over among waiters of one client takes twice as long.
"""

from __future__ import annotations

from fenced.stores.etcd.authority import transactions
from fenced.stores.etcd.authority.attempts import Attempts, EtcdAttempt, PendingGrant
from fenced.stores.etcd.authority.keys import KeyRecord, Phase
from fenced.stores.etcd.authority.leases import EtcdLease, LeasePool
from fenced.stores.etcd.authority.namespace import Namespace
from fenced.stores.etcd.authority.watching import EtcdWakeups


class HandingOver:
    """Ends an attempt and grants its name to another one, in one transaction."""

    def __init__(self, space: Namespace, pool: LeasePool, attempts: Attempts, wakeups: EtcdWakeups) -> None:
        self._space = space
        self._pool = pool
        self._attempts = attempts
        self._wakeups = wakeups

    async def hand_over(self, attempt: EtcdAttempt, record_lease: EtcdLease, until: float) -> bool:
        """True: it is released, and the waiter behind it holds the name. False: nothing was written."""
        heir = self._attempts.live.get(self._attempts.heirs.pop_heir(attempt.public))
        # A grant that nobody takes would keep the name from the others: so only while this client listens.
        if heir is None or not self._wakeups.listening or not _may_follow(attempt.record, heir.record):
            return False
        space = self._space
        leases = await self._pool.take(heir.record.ttl, until)
        record = heir.record.granted(leases.hold.id, leases.hold.seconds, 0, space.meta.offset)
        doubts = space.doubts
        request = transactions.hand_over(
            space.keys,
            attempt.public,
            attempt.record,
            record_lease.id,
            (heir.public, record, heir.record_lease.id),
            space.raw,
        )
        # The deletion of the key ahead must not wake the heir before the outcome is known: its ask would find the
        # transaction half-told. `finally` wakes it whatever the outcome is, so no wake-up is lost.
        self._wakeups.forget(heir.public)
        try:
            reply = await space.run(request, until)
            # The transaction has compared the heir's place and its lease. So whatever happened to it meanwhile, either
            # nothing was written, or the heir holds the name: its next ask takes the grant, or its lease ends it.
            if reply.succeeded:
                self._attempts.forget(attempt)
                granted = EtcdAttempt(
                    heir.public, record, reply.header.revision, heir.record_lease, leases, heir.queue
                )
                self._attempts.heirs.hand(PendingGrant(heir, granted, reply))
                # If the waiter has ended or changed meanwhile, no ask would remove this entry.
                if self._attempts.live.get(heir.public) is not heir:
                    self._attempts.heirs.take(heir.public)
            elif doubts == space.doubts:
                self._pool.give(leases)  # nothing was written on it, for certain
            return reply.succeeded
        finally:
            self._wakeups.notify(heir.public)  # it takes its grant, or asks again


def _may_follow(record: KeyRecord, waiting: KeyRecord) -> bool:
    """Whether a hand-over is possible: one name, the same of both, no delay, and both of one program.

    Of another program, whose requests reach this client through a service, nobody knows whether it is still alive.
    """
    return (
        record.phase is Phase.GRANTED
        and waiting.phase is Phase.WAITING
        and len(record.names) == 1
        and record.names == waiting.names
        and record.ticket <= waiting.ticket
        and not record.delay
        and not waiting.delay
        and record.holder is not None
        and waiting.holder is not None
        and record.holder.id == waiting.holder.id
    )
