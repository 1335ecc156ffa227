"""etcd's leases: per client and ttl, one for all held names and one for places in queues; others for records.

A holder believes in a name until the end of the lease's last confirmed keep-alive, however late the name was attached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fenced.stores.etcd.wire import messages
from fenced.stores.etcd.wire.cluster import EtcdWire, LeaseExists
from fenced.values import timing
from fenced.values.contracts import Runtime
from fenced.values.model import Holder

BUCKET_SECONDS = 10
"""Records of attempts that end within this many seconds share one etcd lease, and are deleted together."""


@dataclass(slots=True, eq=False)
class EtcdLease:
    """One etcd lease: the ttl that the server granted, and when it was last confirmed."""

    id: int
    seconds: int
    confirmed: float = -math.inf

    @property
    def until(self) -> float:
        return self.confirmed + self.seconds


class EtcdSession(NamedTuple):
    """The etcd lease for the names of one client; with a lock_delay, also the lease that blocks them afterwards."""

    hold: EtcdLease
    delayed: EtcdLease | None

    def all(self) -> list[EtcdLease]:
        """In the order in which they are kept alive: so the lease of a delay always outlives the lease of the names."""
        return [self.hold] if self.delayed is None else [self.delayed, self.hold]


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
            return EtcdLease(lease, seconds, sent)
        _, given = messages.lease_reply(reply)
        return EtcdLease(lease, given, sent)

    async def keep_alive(self, leases: Iterable[EtcdLease], until: float) -> set[int]:
        """Prolong them all, in one stream; returns the ids of those that are alive."""
        chosen = {lease.id: lease for lease in leases}
        if not chosen:
            return set()
        sent = self._now()
        requests = [messages.lease_id(lease) for lease in chosen]
        replies = await self._wire.exchange(messages.LEASE_KEEP_ALIVE, requests, until)
        alive = set()
        for lease, seconds in map(messages.lease_reply, replies):
            if (
                seconds > 0 and lease in chosen
            ):  # for a lease that is gone, the reply is a time of 0, not an error
                chosen[lease].seconds, chosen[lease].confirmed = seconds, sent
                alive.add(lease)
        return alive

    async def left(self, lease: int, until: float) -> int:
        """The remaining whole seconds of a lease, by the server's clock; negative if it is gone."""
        reply = await self._wire.call(messages.LEASE_TIME_TO_LIVE, messages.time_to_live(lease), until)
        return messages.lease_reply(reply)[1]

    async def keys(self, lease: int, until: float) -> set[bytes]:
        """The keys that are attached to a lease; none if it is gone."""
        request = messages.time_to_live(lease, keys=True)
        reply = await self._wire.call(messages.LEASE_TIME_TO_LIVE, request, until)
        return messages.attached_keys(reply) if messages.lease_reply(reply)[1] >= 0 else set()


class Sessions:
    """This client's etcd leases, by purpose. Created when needed, forgotten when gone."""

    def __init__(self, leases: Leases, runtime: Runtime) -> None:
        self.leases = leases
        self._now = runtime.now
        self.made: set[int] = set()
        """Ids of all etcd leases that ever carried names or places of this client: a few, plus one per expiry."""
        self.prolonged = 0
        """Counts how often an ask prolonged a lease."""
        self.forget_all()

    def forked(self) -> None:
        self.made.clear()
        self.forget_all()

    def forget_all(self) -> None:
        self._sessions: dict[tuple[str, int, int], EtcdSession] = {}
        self._memories: dict[int, tuple[EtcdLease, float]] = {}

    async def holding(self, holder: Holder, ttl: float, delay: float, until: float) -> EtcdSession:
        """A session of this ttl, confirmed recently, so that most of its time is left."""
        key = (holder.id, math.ceil(ttl), math.ceil(delay))
        session = self._sessions.get(key)
        if session is not None and session.hold.until > self._now():  # an expired one would restart its delay
            fresh = self._now() - session.hold.confirmed <= session.hold.seconds / 3
            if fresh:
                return session
            self.prolonged += 1
            if len(await self.leases.keep_alive(session.all(), until)) == len(session.all()):
                return session
        hold = await self.leases.grant(key[1], until)
        delayed = await self.leases.grant(hold.seconds + key[2], until) if key[2] else None
        self.made.add(hold.id)
        session = self._sessions[key] = EtcdSession(hold, delayed)
        return session

    async def queueing(self, holder: Holder, ttl: float, until: float) -> EtcdLease:
        """The etcd lease of places in queues. It is shorter than a hold's: a silent waiter loses its place early."""
        return (await self.holding(holder, timing.waiter_ttl(ttl), 0.0, until)).hold

    async def memory(self, ttl: float, until: float) -> EtcdLease:
        """The etcd lease for the record of an attempt that begins or ends now."""
        seconds = math.ceil(timing.remember_for(ttl)) + BUCKET_SECONDS
        known = self._memories.get(seconds)
        if known is not None and self._now() - known[1] < BUCKET_SECONDS:
            return known[0]
        lease = await self.leases.grant(seconds, until)
        self._memories[seconds] = (lease, lease.confirmed)
        return lease

    def needs_keeping(self, memory: EtcdLease) -> bool:
        """Whether this lease would end before a record of a live attempt may be deleted."""
        return self._now() - memory.confirmed > BUCKET_SECONDS
