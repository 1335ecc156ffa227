"""etcd's leases: one per client and length carries all its names, another its places in queues, others its memory.

A name is believed in until its lease's last confirmed keep-alive says so, however late it was granted on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fenced import timing
from fenced.contracts import Runtime
from fenced.model import Holder
from fenced.wire.etcd import messages
from fenced.wire.etcd.cluster import EtcdWire, LeaseExists

BUCKET_SECONDS = 10
"""Ended attempts are forgotten together, by so many seconds' worth of them. They all hang on one lease."""


@dataclass(slots=True, eq=False)
class EtcdLease:
    """One lease of etcd's: for how long the server gave it, and when it was last asked for and confirmed."""

    id: int
    seconds: int
    confirmed: float = -math.inf

    @property
    def until(self) -> float:
        return self.confirmed + self.seconds


class EtcdSession(NamedTuple):
    """What the names of one client hang on; with a lock_delay also what keeps them free afterwards."""

    hold: EtcdLease
    delayed: EtcdLease | None

    def all(self) -> list[EtcdLease]:
        """In the order in which they are kept alive: a delay never begins before its lease ends."""
        return [self.hold] if self.delayed is None else [self.delayed, self.hold]


class Leases:
    """Asks the server about leases."""

    def __init__(self, wire: EtcdWire, runtime: Runtime) -> None:
        self._wire = wire
        self._runtime = runtime
        self._now = runtime.now

    async def grant(self, seconds: int, until: float) -> EtcdLease:
        """A new lease. Its id is ours, so that a repeated request makes no second one."""
        lease = 1 << 62 | int(self._runtime.secret(), 16) >> 66
        sent = self._now()
        try:
            reply = await self._wire.call(messages.LEASE_GRANT, messages.lease_grant(lease, seconds), until)
        except LeaseExists:
            return EtcdLease(lease, seconds, sent)
        _, given = messages.lease_reply(reply)
        return EtcdLease(lease, given, sent)

    async def keep_alive(self, leases: Iterable[EtcdLease], until: float) -> set[int]:
        """Prolong them all, in one stream; the ids of those that are alive."""
        chosen = {lease.id: lease for lease in leases}
        if not chosen:
            return set()
        sent = self._now()
        requests = [messages.lease_id(lease) for lease in chosen]
        replies = await self._wire.exchange(messages.LEASE_KEEP_ALIVE, requests, until)
        alive = set()
        for lease, seconds in map(messages.lease_reply, replies):
            if seconds > 0 and lease in chosen:  # no error, but a time of 0, says that a lease is gone
                chosen[lease].seconds, chosen[lease].confirmed = seconds, sent
                alive.add(lease)
        return alive

    async def left(self, lease: int, until: float) -> int:
        """Whole seconds that are left of a lease, by the server's clock; negative if it is gone."""
        reply = await self._wire.call(messages.LEASE_TIME_TO_LIVE, messages.time_to_live(lease), until)
        return messages.lease_reply(reply)[1]

    async def keys(self, lease: int, until: float) -> set[bytes]:
        """The keys that hang on a lease; none if it is gone."""
        request = messages.time_to_live(lease, keys=True)
        reply = await self._wire.call(messages.LEASE_TIME_TO_LIVE, request, until)
        return messages.attached_keys(reply) if messages.lease_reply(reply)[1] >= 0 else set()


class Sessions:
    """This client's own leases, by what they are for. Made when they are needed, forgotten when they are gone."""

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
        """A session of this length, confirmed so lately that most of it is left."""
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
        """What the record of an attempt hangs on that begins or ends now."""
        seconds = math.ceil(timing.remember_for(ttl)) + BUCKET_SECONDS
        known = self._memories.get(seconds)
        if known is not None and self._now() - known[1] < BUCKET_SECONDS:
            return known[0]
        lease = await self.leases.grant(seconds, until)
        self._memories[seconds] = (lease, lease.confirmed)
        return lease

    def needs_keeping(self, memory: EtcdLease) -> bool:
        """Whether a record that lives on would be forgotten too early."""
        return self._now() - memory.confirmed > BUCKET_SECONDS
