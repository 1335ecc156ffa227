"""etcd's leases: one for the names of each attempt, one for its places in queues; others, shared, for records.

So etcd itself ends an attempt that nobody renews, and any client that reads the record of an attempt can renew it.
After a release that certainly deleted its keys, an etcd lease has none and is used again: an acquire then makes none.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fenced.stores.etcd.wire import messages
from fenced.stores.etcd.wire.cluster import EtcdWire, LeaseExists
from fenced.values import timing
from fenced.values.contracts import Runtime

BUCKET_SECONDS = 10
"""Records of attempts that end within this many seconds share one etcd lease, and are deleted together."""


@dataclass(slots=True, eq=False)
class EtcdLease:
    """One etcd lease: the ttl that the server granted, and when it was last confirmed."""

    id: int
    seconds: int
    confirmed: float = -math.inf
    asked: int = 0
    """The ttl that this client asked for when it made the lease; 0: another client has made it."""

    @property
    def until(self) -> float:
        return self.confirmed + self.seconds


class HoldLeases(NamedTuple):
    """The etcd lease of an attempt's names; with a lock_delay, also the lease that blocks them afterwards."""

    hold: EtcdLease
    delayed: EtcdLease | None = None

    @property
    def delay_id(self) -> int:
        return self.delayed.id if self.delayed is not None else 0


class Leases:
    """Asks the server about leases."""

    def __init__(self, wire: EtcdWire, runtime: Runtime) -> None:
        self._wire = wire
        self._runtime = runtime
        self._now = runtime.now

    async def grant(self, seconds: int, until: float) -> EtcdLease:
        """A new lease. We choose its id, so that a repeated request creates no second one."""
        lease = 1 << 62 | int(self._runtime.secret(), 16) >> 66
        sent = self._now()
        try:
            reply = await self._wire.call(messages.LEASE_GRANT, messages.lease_grant(lease, seconds), until)
        except LeaseExists:
            return EtcdLease(lease, seconds, sent, seconds)
        _, given = messages.lease_reply(reply)
        return EtcdLease(lease, given, sent, seconds)

    async def keep_alive(self, leases: Iterable[EtcdLease], until: float) -> set[int]:
        """Prolong them all, in one stream and in this order; returns the ids of those that are alive."""
        chosen = {lease.id: lease for lease in leases}
        if not chosen:
            return set()
        sent = self._now()
        requests = [messages.lease_id(lease) for lease in chosen]
        replies = await self._wire.exchange(messages.LEASE_KEEP_ALIVE, requests, until)
        alive = set()
        for lease, seconds in map(messages.lease_reply, replies):
            # For a lease that is gone, the reply is a time of 0, not an error.
            if seconds > 0 and lease in chosen:
                chosen[lease].seconds, chosen[lease].confirmed = seconds, sent
                alive.add(lease)
        return alive

    async def left(self, lease: int, until: float) -> int:
        """The remaining whole seconds of a lease, by the server's clock; negative if it is gone."""
        reply = await self._wire.call(messages.LEASE_TIME_TO_LIVE, messages.time_to_live(lease), until)
        return messages.lease_reply(reply)[1]


class LeasePool:
    """The etcd leases that this client has made and no attempt uses, and those of the records.

    Safe from many threads: an idle lease is taken out by one atomic operation, so no two attempts get the same one.
    """

    def __init__(self, leases: Leases, runtime: Runtime) -> None:
        self.leases = leases
        self._now = runtime.now
        self.clear()

    def clear(self) -> None:
        """Forget them all: one of them is gone at the server, or they are those of a parent process."""
        self._idle: dict[tuple[int, int], deque[HoldLeases]] = {}
        self._of_records: dict[int, tuple[EtcdLease, float]] = {}
        """By ttl: the lease, and when it was made. It is confirmed later for attempts that live on."""

    async def take(self, ttl: float, until: float, delay: float = 0.0) -> HoldLeases:
        """Leases without any keys, confirmed recently, so that most of their time is left."""
        key = (math.ceil(ttl), math.ceil(delay))
        if (idle := self._idle.get(key)) is not None:
            while idle:
                try:
                    found = idle.pop()
                except IndexError:  # another thread has taken the last one
                    break
                if self.is_fresh(found.hold):
                    return found
        # In this order: the lease of a delay begins later, so it outlives that of the names by the whole delay.
        hold = await self.leases.grant(key[0], until)
        delayed = await self.leases.grant(hold.seconds + key[1], until) if key[1] else None
        return HoldLeases(hold, delayed)

    def give(self, leases: HoldLeases) -> None:
        """Take these back. Only for leases whose keys are certainly deleted, and of which no write is under way.

        Otherwise another attempt would live on keys that are not its own. In doubt a lease is dropped: etcd ends it.
        """
        hold, delayed = leases
        if not hold.asked:  # another client made it, for a ttl that we do not know
            return
        key = (hold.asked, delayed.asked - hold.seconds if delayed is not None else 0)
        idle = self._idle.setdefault(key, deque())
        while idle and not self.is_fresh(idle[0].hold):
            try:
                # If another thread was faster, this drops a fresh one: nothing is lost but a later request.
                idle.popleft()
            except IndexError:
                break
        idle.append(leases)

    def is_fresh(self, lease: EtcdLease) -> bool:
        """Whether it was confirmed recently, so that at least two thirds of its time are left."""
        return self._now() - lease.confirmed <= lease.seconds / 3

    async def of_record(self, ttl: float, until: float) -> EtcdLease:
        """The etcd lease for the record of an attempt that begins or ends now."""
        seconds = math.ceil(timing.remember_for(ttl)) + BUCKET_SECONDS
        known = self._of_records.get(seconds)
        if known is not None and self._now() - known[1] < BUCKET_SECONDS:
            return known[0]
        lease = await self.leases.grant(seconds, until)
        self._of_records[seconds] = (lease, lease.confirmed)
        return lease

    def needs_keeping(self, record_lease: EtcdLease) -> bool:
        """Whether this lease would end before a record of a live attempt may be deleted."""
        return self._now() - record_lease.confirmed > BUCKET_SECONDS
