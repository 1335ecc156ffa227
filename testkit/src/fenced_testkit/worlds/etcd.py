"""The etcd authority in a world: its shipped client code, over simulated streams, and a cluster in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import ClassVar

from fenced.stores.etcd.authority.authority import EtcdAuthority
from fenced.stores.etcd.authority.keys import ClaimInfo, Keys
from fenced.values.contracts import Authority
from fenced_testkit.runtime.network import SimulatedConnection
from fenced_testkit.runtime.simulated import SimulatedRuntime
from fenced_testkit.runtime.world import Process
from fenced_testkit.worlds.backend import AuthorityBackend
from fenced_testkit.worlds.etcd_cluster import EXPIRY_CHECK_SECONDS, EtcdMember, InMemoryEtcd
from fenced_testkit.worlds.site import Site

PORT = 2379
NAMESPACE = "default"
LAGS = (0.0, 0.003, 0.05, 0.4)
"""By how many seconds a member may apply committed changes later than the leader."""
SETTLE_SECONDS = 1.0
"""How long clients have after the last fault until every hand-over must be prompt."""


class EtcdBackend(AuthorityBackend):
    """One member or three. The judge's questions are answered from the keys of the cluster."""

    name = "etcd"
    traits = EtcdAuthority.traits
    sizes: ClassVar[tuple[int, ...]] = (1, 3, 3)
    ttls = (1.0, 2.0)
    # In whole seconds; and a renewal that reaches etcd after the lease has ended still prolongs its lock_delay.
    keep_lateness = 1.0 + 2 * EXPIRY_CHECK_SECONDS + 2.0
    lateness = 2.0  # a leader looks for expired leases every half second, and a new leader prolongs leases
    authority_type: type[EtcdAuthority] = EtcdAuthority

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        size = self.world.rng.choice(self.sizes)
        self.cluster = InMemoryEtcd(size, lambda: self.world.now, self.world.at, self.world.rng)
        self._keys = Keys(NAMESPACE)
        self._faults = itertools.count()
        self.hosts = [EtcdHost(self, member) for member in self.cluster.members]

    def authority(self, process: Process, runtime: SimulatedRuntime) -> Authority:
        names = [host.name for host in self.world.rng.sample(self.hosts, len(self.hosts))]
        return self.authority_type.at(f"etcd://{','.join(names)}", runtime, NAMESPACE)

    def place_seconds(self, ttl: float) -> float:
        # A place is attached to an etcd lease that may have been prolonged a third of its time ago.
        return super().place_seconds(ttl) * 2 / 3

    def processes(self) -> Sequence[Process]:
        return [host.process for host in self.hosts if host.process.alive]

    def holds(self, grant: str, names: tuple[str, ...]) -> bool | None:
        found = [self.cluster.store.get(self._keys.claim(name)) for name in names]
        return all(each is not None and ClaimInfo.read(each.value).public == grant for each in found)

    # Faults.

    def faults(self) -> Sequence[Callable[[], None]]:
        return (self._break_something,) * 3  # more often than the resource

    def _break_something(self) -> None:
        """One fault, or several at once at different members: most bugs need two."""
        for _ in range(self.world.rng.choice((1, 1, 2, 3))):
            longest = min(2 * self.site.pace, self.site.healed_at - self.world.now)
            self._break(self.world.rng.choice(self.hosts), self.world.rng.uniform(0.0, longest))

    def _break(self, host: EtcdHost, seconds: float) -> None:
        faults: tuple[Callable[[], None], ...] = (
            lambda: host.freeze(seconds),
            lambda: host.restart(seconds),
            lambda: host.isolate(seconds),
            host.lag,
            host.send_goaway,
            lambda: self._change_leader(host),
            lambda: self._expire_late(seconds),
            self._compact,
        )
        self.world.rng.choice(faults)()

    def heal(self) -> None:
        self.cluster.expiry_delay_max = EXPIRY_CHECK_SECONDS
        for host in self.hosts:
            host.member.lag = LAGS[1]
        self.world.at(self.site.judge.prompt_from - SETTLE_SECONDS, self._cut_all)

    def _cut_all(self) -> None:
        """The last fault: every stream breaks once. Waiters must still be woken by the next release (L6)."""
        self.site.judge.say("every stream breaks")
        for process in self.site.processes:
            for host in self.hosts:
                self.site.streams.cut(process, host.process)

    def _change_leader(self, host: EtcdHost) -> None:
        self.site.judge.say(f"{host.name} becomes the leader")
        self.cluster.disturb(host.member)

    def _expire_late(self, seconds: float) -> None:
        """The leader is slow to delete expired leases."""
        self.site.judge.say(f"leases expire up to {seconds:.2f} s late")
        self.cluster.expiry_delay_max = seconds

    def _compact(self) -> None:
        self.site.judge.say("the history is compacted")
        self.cluster.store.compacted = self.cluster.store.revision

    def away(self, member: EtcdMember, seconds: float) -> None:
        """This member is out of contact with the others for a while. Several such periods may overlap."""
        why = next(self._faults)
        member.leave(why)
        self.world.after(seconds, lambda: member.come_back(why))


class EtcdHost:
    """The process of one member: it listens for clients, and it freezes and restarts."""

    def __init__(self, backend: EtcdBackend, member: EtcdMember) -> None:
        self.name = f"etcd-{member.number}"
        self.member = member
        self._backend = backend
        self._world = backend.world
        self._say = backend.site.judge.say
        self._start()
        self.lag()

    def _start(self) -> None:
        self.process = Process(self._world, self.name)
        self.member.deliver = self.process.deliver
        self._backend.site.streams.listen(self.process, (self.name, PORT), self)

    def on_open(self, connection: SimulatedConnection) -> None:
        return

    def on_bytes(self, connection: SimulatedConnection, data: bytes) -> None:
        self.member.on_bytes(connection, data)

    def on_close(self, connection: SimulatedConnection) -> None:
        self.member.on_close(connection)

    def freeze(self, seconds: float) -> None:
        if self.process.alive:
            self._say(f"{self.name} stands still for {seconds:.2f} s")
            self.process.pause(seconds)
            self._backend.away(self.member, seconds)

    def restart(self, down: float) -> None:
        if self.process.alive:
            self._say(f"{self.name} is down for {down:.2f} s")
            self.process.crash()
            self.member.crash()
            self._backend.away(self.member, down)
            self._world.after(down, self._start)

    def isolate(self, seconds: float) -> None:
        self._say(f"{self.name} has lost its peers for {seconds:.2f} s")
        self._backend.away(self.member, seconds)

    def lag(self) -> None:
        self.member.lag = self._world.rng.choice(LAGS)
        self._say(f"{self.name} lags by {self.member.lag:.3f} s")

    def send_goaway(self) -> None:
        self._say(f"{self.name} sends GOAWAY")
        self.process.deliver(self.member.send_goaway)
