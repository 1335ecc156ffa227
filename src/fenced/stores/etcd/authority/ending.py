"""Ending attempts: released or withdrawn by their owner, or revoked by an operator. etcd ends those that expire.

A release whose outcome is unknown may be repeated. If nobody does, the etcd lease of the attempt ends its names.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fenced.errors import Indeterminate
from fenced.stores.etcd.authority import transactions
from fenced.stores.etcd.authority.attempts import Attempts, EtcdAttempt
from fenced.stores.etcd.authority.handing import HandingOver
from fenced.stores.etcd.authority.keys import ClaimInfo, KeyRecord, Phase
from fenced.stores.etcd.authority.leases import EtcdLease, HoldLeases, LeasePool
from fenced.stores.etcd.authority.looking import QueueReader
from fenced.stores.etcd.authority.namespace import Namespace
from fenced.stores.etcd.wire.cluster import LeaseGone, NoSpace
from fenced.stores.etcd.wire.messages import TXN_OPS_MAX, TxnReply, absent, get, put, txn, valued
from fenced.values.model import Ended, Gone, ReleaseAnswer, Released


class Ending:
    """Ends attempts."""

    def __init__(
        self,
        space: Namespace,
        pool: LeasePool,
        attempts: Attempts,
        handing: HandingOver,
        reader: QueueReader,
        now: Callable[[], float],
    ) -> None:
        self._space = space
        self._keys = space.keys
        self._pool = pool
        self._attempts = attempts
        self._handing = handing
        self._reader = reader
        self._now = now

    async def finish(self, public: str, phase: Phase, until: float, keep: float = 0.0) -> ReleaseAnswer:
        """Release or withdraw an attempt. With `keep`, nobody is granted its names for so many seconds."""
        taken_until = self._now() + keep
        while True:
            try:
                answer = await self._try_to_finish(public, phase, taken_until, until)
            except LeaseGone:
                self._pool.clear()
                answer = None
            if answer is not None:
                return answer
            if self._now() >= until:
                raise Indeterminate(
                    "each try met a concurrent change: whether the attempt has ended is unknown"
                )

    async def _try_to_finish(
        self, public: str, phase: Phase, taken_until: float, until: float
    ) -> ReleaseAnswer | None:
        """None: try again, its record has changed."""
        attempt, record = await self._attempts.load(public, until)
        if attempt is not None:
            return await self._finish(attempt, phase, taken_until, until)
        if record is not None:
            ended = record.phase in (Phase.RELEASED, Phase.WITHDRAWN)
            return Released() if ended else Ended(record.phase.value)
        return Gone() if phase is Phase.RELEASED else await self._tombstone(public, phase, until)

    async def _tombstone(self, public: str, phase: Phase, until: float) -> Released | None:
        """Its ask may still be on its way: this record stops it."""
        lease = await self._pool.of_record(0.0, until)
        key = self._keys.attempt(public)
        write = put(key, KeyRecord(phase, (), 0.0).written(), lease.id)
        reply = await self._space.run(txn([absent(key)], [write]), until)
        return Released() if reply.succeeded else None

    async def _finish(
        self, attempt: EtcdAttempt, phase: Phase, taken_until: float, until: float
    ) -> ReleaseAnswer | None:
        """None: its record has changed."""
        released = attempt.phase is Phase.GRANTED and phase is Phase.RELEASED
        keep = taken_until - self._now() if released else 0.0
        try:
            lease = await self._pool.of_record(attempt.record.ttl, until)
            if keep > 0:
                reply = await self._keep_taken(attempt, lease, keep, until)
            elif released and await self._handing.hand_over(attempt, lease, until):
                self._give(attempt)
                return Released()
            else:
                reply = await self._give_back(attempt, phase, lease.id, until)
        except NoSpace:
            if keep > 0:  # nothing could keep its names taken: the lease lasts until its ttl has passed
                raise
            # A transaction that only deletes still works. The record of the grant stays, and stops a late ask.
            reply = await self._give_back(attempt, phase, 0, until)
        self._attempts.forget(attempt)
        if reply.succeeded:
            self._give(attempt)
            return Released()
        found = reply.found[0].first
        if found is None or found.modified != attempt.revision:
            return None
        for name in attempt.record.names:
            await self._space.run(transactions.clear(self._keys, attempt.public, attempt.record, name), until)
        return Ended(await self.why_lost(attempt, until))

    def _give(self, attempt: EtcdAttempt) -> None:
        """Its etcd leases may be used again: one transaction, this client's, has deleted all its keys.

        No earlier request can write them again: a grant requires that there is no record, a promotion that there is a
        place.
        """
        if attempt.held is not None:
            self._pool.give(attempt.held)
        if attempt.queue is not None:
            self._pool.give(HoldLeases(attempt.queue))

    async def _give_back(
        self, attempt: EtcdAttempt, phase: Phase, record_lease: int, until: float
    ) -> TxnReply:
        request, rest = transactions.finish(
            self._keys, attempt.public, attempt.record, attempt.revision, phase, record_lease
        )
        if rest:  # the holder's own places in the queues: nobody needs them, so they may be deleted first
            await self._space.run(txn((), rest), until)
        return await self._space.run(request, until)

    async def _keep_taken(
        self, attempt: EtcdAttempt, record_lease: EtcdLease, keep: float, until: float
    ) -> TxnReply:
        """End it, and write lock_delay keys on an etcd lease that nobody keeps alive: they end by themselves."""
        lease = await self._pool.leases.grant(math.ceil(keep), until)
        *before, last = transactions.keep_taken(
            self._keys, attempt.public, attempt.record, record_lease.id, lease.id
        )
        for request in before:
            await self._space.run(request, until)
        return await self._space.run(last, until)

    async def why_lost(self, attempt: EtcdAttempt, until: float) -> str:
        """Why an attempt has lost its key although its record does not say that it ended."""
        lives = await self._pool.leases.left(attempt.lease.id, until) >= 0
        return (Phase.REVOKED if lives else Phase.EXPIRED).value

    async def force(self, name: str, token: int, until: float) -> int | None:
        """Take a name from the holder that has this token. Returns the token of the transaction that did it."""
        space = self._space
        view = await self._reader.ahead((name,), [self._keys.behind(name)], until)
        if view.claim is None:
            return None
        public = ClaimInfo.read(view.claim.value).public
        attempt, _ = await self._attempts.stored(public, until)
        if attempt is None or attempt.phase is not Phase.GRANTED:
            return None
        if attempt.revision + attempt.record.offset != token:
            return None
        reply = await space.read([get(self._keys.meta)], until)
        space.is_new(reply.found[0].first)
        space.refuse_next(reply.header)
        lease = await self._pool.of_record(attempt.record.ttl, until)
        writes = transactions.ends(self._keys, public, attempt.record, Phase.REVOKED, lease.id)
        proof = [valued(view.claim.key, view.claim.value), valued(self._keys.meta, space.raw)]
        if rest := writes[TXN_OPS_MAX:]:  # its places: deleting them early only wakes waiters in vain
            await space.run(txn((), rest), until)
        try:
            reply = await space.run(txn(proof, writes[:TXN_OPS_MAX]), until, repeatable=False)
        except NoSpace as error:
            raise Indeterminate(str(error)) from error
        except LeaseGone:
            self._pool.clear()  # the next try makes new ones
            raise
        if not reply.succeeded:
            return None
        space.refuse_strange(reply.header)
        return reply.header.revision + space.meta.offset
