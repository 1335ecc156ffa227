"""The attempts that a client remembers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fenced.errors import Unsupported
from fenced.stores.etcd.authority.keys import GRANTED, WAITING, KeyRecord
from fenced.stores.etcd.authority.leases import EtcdLease, EtcdSession, Sessions
from fenced.stores.etcd.authority.looking import QueueReader
from fenced.stores.etcd.authority.namespace import Namespace
from fenced.stores.etcd.authority.progress import QueueProgress
from fenced.stores.etcd.authority.signs import Signs
from fenced.stores.etcd.authority.watching import EtcdWakeups
from fenced.stores.etcd.wire.messages import TXN_OPS_MAX, KeyValue, TxnReply
from fenced.values.contracts import Runtime


@dataclass(slots=True, eq=False)
class EtcdAttempt:
    """A live attempt as this client knows it: its record, the revision that wrote it, and its etcd leases."""

    public: str
    record: KeyRecord
    revision: int
    hold: EtcdLease | None = None
    delayed: EtcdLease | None = None
    queue: EtcdLease | None = None
    memory: EtcdLease | None = None
    carrier: KeyValue | None = None
    """The key under its first name, if it was read from etcd: its claim or its place."""
    settled: bool = False
    """No waiter with an earlier ticket can still take a place ahead of it."""

    @property
    def granted(self) -> bool:
        return self.record.state == GRANTED

    @property
    def lease(self) -> int:
        """The id of the etcd lease that its names or places are attached to."""
        lease = self.hold if self.granted else self.queue
        return lease.id if lease is not None else 0

    def lives(self, now: float) -> bool:
        return self.hold is not None and self.hold.until > now

    def leases(self, now: float) -> list[EtcdLease]:
        """The etcd leases to keep alive for it: the lock_delay's before the hold's, and only while the hold's lives."""
        kept = (self.delayed if self.lives(now) else None, self.hold, self.queue)
        return [lease for lease in kept if lease is not None]


class PendingGrant(NamedTuple):
    """A grant that another attempt of this client wrote when it ended. The waiter gets it with its next ask."""

    waited: EtcdAttempt
    granted: EtcdAttempt
    reply: TxnReply


class Known:
    """All attempts of one client."""

    def __init__(
        self,
        space: Namespace,
        sessions: Sessions,
        reader: QueueReader,
        wakeups: EtcdWakeups,
        runtime: Runtime,
    ) -> None:
        self._space = space
        self._keys = space.keys
        self._sessions = sessions
        self._reader = reader
        self._wakeups = wakeups
        self._now = runtime.now
        self.live: dict[str, EtcdAttempt] = {}
        self.signs = Signs(runtime.now)
        self._held: dict[str, str] = {}
        self._behind: dict[str, str] = {}
        """The waiter directly behind an attempt, if both are of this client."""
        self._given: dict[str, PendingGrant] = {}
        self._floors = QueueProgress(runtime.now)

    def forked(self) -> None:
        for known in (self.live, self._held, self._behind, self._given):
            known.clear()
        self._floors.clear()
        self.signs.clear()

    def _floor(self, names: tuple[str, ...]) -> int:
        return self._floors.of(names, self._space.raw)

    def _granted(self, record: KeyRecord, session: EtcdSession) -> KeyRecord:
        delayed = session.delayed.id if session.delayed is not None else 0
        if delayed and len(record.names) >= TXN_OPS_MAX // 2:
            raise Unsupported(f"with lock_delay an etcd lease covers at most {TXN_OPS_MAX // 2 - 1} names")
        return KeyRecord(
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

    def adopt(self, public: str, record: KeyRecord, found: KeyValue) -> EtcdAttempt | None:
        """An attempt that another client may have begun, or None if it has ended."""
        if record.state not in (GRANTED, WAITING):
            return None
        mine = EtcdAttempt(public, record, found.modified)
        if record.state == WAITING:  # its record names a lease for its names, too, but they are not on it yet
            mine.queue = EtcdLease(record.queue, 0)
        else:
            mine.hold = EtcdLease(record.hold, record.seconds)
            mine.delayed = EtcdLease(record.delayed, 0) if record.delayed else None
        mine.memory = EtcdLease(found.lease, 0)
        return mine

    async def reason(self, mine: EtcdAttempt, until: float) -> str:
        """Why an attempt has lost its key although its record does not say that it ended."""
        lease = mine.hold if mine.granted else mine.queue
        assert lease is not None
        return "revoked" if await self._sessions.leases.left(lease.id, until) >= 0 else "expired"

    def forget(self, mine: EtcdAttempt) -> None:
        self.live.pop(mine.public, None)
        self._behind.pop(mine.public, None)
        self._given.pop(mine.public, None)
        self._wakeups.forget(mine.public)
        for name in mine.record.names:
            if self._held.get(name) == mine.public:
                self._held.pop(name, None)

    def forget_sign(self, public: str) -> None:
        """It has ended: forget its sign of life, unless its lock_delay keys still have to be deleted."""
        sign = self.signs.get(public)
        if sign is not None and sign.delays:
            sign.expiring, sign.end = False, ""  # the delay still counts, although the owner has given it up
        else:
            self.signs.drop(public)
