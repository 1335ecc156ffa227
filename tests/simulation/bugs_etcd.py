"""Planted bugs in the shipped etcd client that a world must find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fenced.net.pool import ConnectionBroken
from fenced.stores.etcd.authority.authority import EtcdAuthority
from fenced.stores.etcd.authority.keys import Keys
from fenced.stores.etcd.authority.leases import EtcdLease, LeasePool
from fenced.stores.etcd.authority.namespace import Namespace
from fenced.stores.etcd.authority.watching import EtcdWakeups
from fenced.stores.etcd.wire.cluster import EtcdWire
from fenced.stores.etcd.wire.connection import EtcdConnection
from fenced.stores.etcd.wire.http2 import GrpcConnection
from fenced.stores.etcd.wire.messages import TxnReply
from fenced.stores.etcd.wire.protobuf import fields, integer, message, raw
from fenced.values.contracts import Selector
from fenced_testkit.worlds.etcd import EtcdBackend
from fenced_testkit.worlds.site import Site
from tests.planted import bugs
from tests.simulation.planting import over, with_authority


class AnyStream(GrpcConnection):
    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return super()._frame(kind, flags, self._stream if stream else 0, payload)


class RepeatingConnection(EtcdConnection):
    async def call(self, path: str, requests: Sequence[bytes], until: float, token: str = "") -> list[bytes]:
        soon = self._now() + (until - self._now()) / 4
        try:
            return await super().call(path, requests, soon, token)
        except ConnectionBroken:
            return await super().call(path, requests, until, token)


class RepeatingWire(EtcdWire):
    async def _connect(self, until: float) -> EtcdConnection:
        connection = await super()._connect(until)
        connection.__class__ = RepeatingConnection
        connection._grpc.__class__ = AnyStream
        return connection


class AnyReplyIsTaken(EtcdAuthority):
    """A call without an answer is repeated on the same connection, and a reply is taken whatever its stream is."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._wire.__class__ = RepeatingWire
        self._wire._pool._connect = self._wire._connect


class ForgetfulWakeups(EtcdWakeups):
    opened = False

    async def _open(self, bell: Selector, until: float) -> None:
        targets = self._targets
        if self.opened:
            self._targets = {}
        self.opened = True
        try:
            await super()._open(bell, until)
        finally:
            self._targets = targets


class WatchesAreNotResumed(EtcdAuthority):
    """When the watch stream breaks, a new one is opened, and what was watched is watched no more."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._wakeups.__class__ = ForgetfulWakeups


class TrustingPool(LeasePool):
    def is_fresh(self, lease: EtcdLease) -> bool:
        lease.confirmed = self._now()
        return True


class LeaseIsBelievedToLive(EtcdAuthority):
    """A client attaches names to an idle etcd lease that it has, and believes without asking that the lease lives."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pool.__class__ = TrustingPool


class SerializableNamespace(Namespace):
    async def read(self, gets: Sequence[bytes], until: float) -> TxnReply:
        parts = [raw(part) for each in gets for _, part in fields(each)]
        return await super().read([message(1, part + integer(7, 1)) for part in parts], until)


class ReadsAreSerializable(EtcdAuthority):
    """Reads are answered by the member that is asked, from what it happens to have applied."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._space.__class__ = SerializableNamespace


class KeysWithoutPlaces(Keys):
    def behind(self, name: str) -> bytes:
        return self.places(name) if name else super().behind(name)


class BargingAuthority(EtcdAuthority):
    """A name without a claim is granted to whoever asks next: its range of keys ends before the places."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._space.keys.__class__ = KeysWithoutPlaces


class Barging(EtcdBackend):
    """A free name goes to whoever asks next, not to the head of the queue."""

    authority_type = BargingAuthority


class Failing(EtcdBackend):
    """One member, which often dies with requests under way and is then not there."""

    sizes = (1,)

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        site.faults.server_fault_every = 0.3

    def _break_something(self) -> None:
        self.hosts[0].restart(self.world.rng.uniform(0.05, 0.5 * self.site.pace))


PLANTED = [
    *(
        with_authority(bug, EtcdBackend)
        for bug in (AnyReplyIsTaken, WatchesAreNotResumed, LeaseIsBelievedToLive, ReadsAreSerializable)
    ),
    over(bugs.Barging, Barging),
    over(bugs.DeadlineFromTheReply, EtcdBackend, engine_type=bugs.engine_with(bugs.DeadlineFromTheReply)),
    over(bugs.UnavailableIsBelieved, Failing, engine_type=bugs.UnavailableIsBelieved),
]
