"""The live attempts that a client knows. What it remembers may be old: every transaction compares it with etcd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fenced.stores.etcd.authority.keys import KeyRecord, Phase
from fenced.stores.etcd.authority.leases import EtcdLease, HoldLeases
from fenced.stores.etcd.authority.namespace import Namespace
from fenced.stores.etcd.authority.watching import EtcdWakeups
from fenced.stores.etcd.wire.messages import KeyValue, TxnReply, get


@dataclass(slots=True, eq=False)
class EtcdAttempt:
    """A live attempt as this client knows it: its record, the revision that wrote it, and its etcd leases."""

    public: str
    record: KeyRecord
    revision: int
    record_lease: EtcdLease
    held: HoldLeases | None = None
    """The etcd leases of its claims; None while it waits."""
    queue: EtcdLease | None = None
    """The etcd lease of its places, if it has or had any."""

    @property
    def phase(self) -> Phase:
        return self.record.phase

    @property
    def lease(self) -> EtcdLease:
        """The etcd lease that it lives by: that of its claims, or while it waits that of its places."""
        lease = self.held.hold if self.held is not None else self.queue
        assert lease is not None
        return lease

    def is_in_time(self, now: float) -> bool:
        """Whether its claims are certainly still there, by the last confirmation."""
        return self.held is not None and self.held.hold.until > now


class PendingGrant(NamedTuple):
    """A grant that another attempt of this client wrote when it ended. The waiter gets it with its next ask."""

    waited: EtcdAttempt
    granted: EtcdAttempt
    reply: TxnReply


class Heirs:
    """Waiters of this client directly behind attempts of this client, and grants that were handed over to them.

    Safe from many threads: each step is one atomic operation on a dictionary, and a grant is taken once.
    """

    def __init__(self) -> None:
        self._behind: dict[str, str] = {}
        self._grants: dict[str, PendingGrant] = {}

    def clear(self) -> None:
        self._behind.clear()
        self._grants.clear()

    def follow(self, ahead: str, waiter: str) -> None:
        self._behind[ahead] = waiter

    def pop_heir(self, ahead: str) -> str:
        """The waiter behind it, or "". Once only: if the hand-over fails, the waiter watches the next key itself."""
        return self._behind.pop(ahead, "")

    def hand(self, grant: PendingGrant) -> None:
        self._grants[grant.waited.public] = grant

    def is_pending(self, waiter: EtcdAttempt) -> bool:
        """Whether a release has granted it: its next ask takes the grant."""
        grant = self._grants.get(waiter.public)
        return grant is not None and grant.waited is waiter

    def take(self, public: str) -> PendingGrant | None:
        return self._grants.pop(public, None)

    def forget(self, public: str) -> None:
        self._behind.pop(public, None)
        self._grants.pop(public, None)


class Attempts:
    """All live attempts that one client knows, by public id. Each step is one atomic operation on a dictionary."""

    def __init__(self, space: Namespace, wakeups: EtcdWakeups) -> None:
        self._space = space
        self._wakeups = wakeups
        self.live: dict[str, EtcdAttempt] = {}
        self.heirs = Heirs()

    def clear(self) -> None:
        self.live.clear()
        self.heirs.clear()

    def forget(self, attempt: EtcdAttempt) -> None:
        self.live.pop(attempt.public, None)
        self.heirs.forget(attempt.public)
        self._wakeups.forget(attempt.public)

    async def load(self, public: str, until: float) -> tuple[EtcdAttempt | None, KeyRecord | None]:
        """The attempt, if it is live by its record, and its record, if there is one."""
        if (known := self.live.get(public)) is not None:
            return known, known.record
        return await self.stored(public, until)

    async def stored(self, public: str, until: float) -> tuple[EtcdAttempt | None, KeyRecord | None]:
        """The same, but as etcd has it now."""
        reply = await self._space.read([get(self._space.keys.attempt(public))], until)
        found = reply.found[0].first
        if found is None:
            return None, None
        return adopted(public, found), KeyRecord.read(found.value)


def adopted(public: str, found: KeyValue) -> EtcdAttempt | None:
    """The attempt of a stored record, which another client may have begun; None if it has ended."""
    record = KeyRecord.read(found.value)
    if not record.phase.is_live:
        return None
    held = None
    if record.phase is Phase.GRANTED:
        held = HoldLeases(
            EtcdLease(record.hold, record.seconds), EtcdLease(record.delayed, 0) if record.delayed else None
        )
    queue = EtcdLease(record.queue, 0) if record.queue else None
    return EtcdAttempt(public, record, found.modified, EtcdLease(found.lease, 0), held, queue)
