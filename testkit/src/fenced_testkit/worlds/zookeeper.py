"""ZooKeeper in a world: the shipped client code, over simulated streams, to an ensemble in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from fenced.stores.zookeeper.authority.authority import ZooKeeperAuthority
from fenced.stores.zookeeper.authority.tree import Paths
from fenced.values import timing
from fenced.values.contracts import Authority
from fenced_testkit.runtime.simulated import SimulatedRuntime
from fenced_testkit.runtime.world import Process
from fenced_testkit.worlds.backend import AuthorityBackend
from fenced_testkit.worlds.faults import NEVER
from fenced_testkit.worlds.zookeeper_ensemble import Ensemble, Replica

if TYPE_CHECKING:
    from fenced_testkit.worlds.site import Site

NAMESPACE = "default"


class ZooKeeperBackend(AuthorityBackend):
    """One member, or three. Members restart, freeze, are cut off and lag; streams stall, and are cut within a frame."""

    name = "zookeeper"
    traits = ZooKeeperAuthority.traits
    tokens_per_name = True
    delay_noticed = True  # the trait of that name
    lateness = 1.0  # a session lasts a third longer than its leases, and ends on a tick
    authority_type: type[ZooKeeperAuthority] = ZooKeeperAuthority
    sizes: ClassVar[tuple[int, ...]] = (1, 3, 3)
    sync_limits: ClassVar[tuple[int, ...]] = (5, 12)
    isolates_every: ClassVar[tuple[float, ...]] = (1.0, 2.5, NEVER)
    breaks_every: ClassVar[tuple[float, ...]] = (1.5, 5.0, NEVER)

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        rng = self.world.rng
        self.workers = rng.choice((1, 1, 2))
        self.ensemble = Ensemble(self.world, rng.choice(self.sizes), sync_limit=rng.choice(self.sync_limits))
        site.streams.delay = self._delay
        for replica in self.ensemble.replicas:
            self._listen(replica)
        self.url = f"zookeeper://{','.join(replica.process.name for replica in self.ensemble.replicas)}"
        site._plan(rng.choice(self.isolates_every), self._isolate_a_client)
        site._plan(rng.choice(self.breaks_every), self._break_a_member)

    def _listen(self, replica: Replica) -> None:
        self.site.streams.listen(replica.process, (replica.process.name, 2181), replica.member)

    def authority(self, process: Process, runtime: SimulatedRuntime) -> Authority:
        return self.authority_type.at(self.url, runtime, NAMESPACE)

    def processes(self) -> Sequence[Process]:
        return [replica.process for replica in self.ensemble.replicas]

    def _delay(self, _source: Process, _target: Process) -> float:
        rng, faults = self.world.rng, self.site.faults
        if self.site.healed:
            return 0.0005 + rng.random() * 0.001
        longest = min(faults.delay_max, 0.2 * self.site.pace)
        lost = rng.random() < faults.loss / 4  # what is lost is sent again
        return (
            0.0005 + rng.random() ** 3 * longest + (rng.uniform(0.1, 0.3) * self.site.pace if lost else 0.0)
        )

    def place_seconds(self, ttl: float) -> float:
        # A place ends with its session, which lasts 4/3 of the ttl from the last request that the leader has heard of.
        # An answered request is up to 0.46 of that younger, and a waiter's answers say nothing about it.
        return 0.7 * timing.waiter_ttl(ttl)

    def holds(self, grant: str, names: tuple[str, ...]) -> bool | None:
        """Whether its nodes exist in the newest state that a majority has."""
        newest = max(self.ensemble.replicas, key=lambda replica: replica.tree.zxid)
        return Paths("", NAMESPACE).attempt(grant) in newest.tree.nodes

    # Faults.

    def faults(self) -> Sequence[Callable[[], None]]:
        everywhere = (self._restart, self._freeze)
        if len(self.ensemble.replicas) == 1:
            return everywhere
        return (*everywhere, self._cut_off_some, self._change_leader, self._freeze_leader, self._lag)

    def _break_a_member(self) -> None:
        self.world.rng.choice(self.faults())()

    def _some(self) -> Replica:
        return self.world.rng.choice(self.ensemble.replicas)

    def _seconds(self) -> float:
        return self.world.rng.uniform(0.1, 2.0) * self.site.pace

    def _say(self, text: str) -> None:
        self.site.judge.say(text)

    def _restart(self) -> None:
        replica = self._some()
        if replica.process.alive:
            self._say(f"{replica.process.name} restarts")
            replica.crash()
            self.world.after(self._seconds(), lambda: self._start(replica))

    def _start(self, replica: Replica) -> None:
        replica.restart()
        self._listen(replica)

    def _freeze(self) -> None:
        self._pause(self._some())

    def _freeze_leader(self) -> None:
        self._pause(self.ensemble.leader() or self._some())

    def _pause(self, replica: Replica) -> None:
        seconds = self._seconds()
        self._say(f"{replica.process.name} freezes for {seconds:.2f} s")
        replica.process.pause(seconds)

    def _cut_off_some(self) -> None:
        self._cut_off(self._some())

    def _cut_off(self, replica: Replica) -> None:
        self._say(f"{replica.process.name} is cut off from the other members")
        replica.cut = True
        self.world.after(self._seconds(), lambda: self._join(replica))

    def _join(self, replica: Replica) -> None:
        replica.cut = False

    def _change_leader(self) -> None:
        if (leader := self.ensemble.leader()) is not None:
            self._say(f"{leader.process.name} leads no more")
            leader.leave()

    def _lag(self) -> None:
        self.ensemble.lag = self.world.rng.choice((0.05, 0.4 * self.site.pace))
        self._say(f"followers lag by {self.ensemble.lag:.2f} s")
        self.world.after(self._seconds(), self._catch_up)

    def _catch_up(self) -> None:
        self.ensemble.lag = 0.0

    def _isolate_a_client(self) -> None:
        """A client reaches no member, or only one, which may itself be cut off from the others."""
        rng, seconds = self.world.rng, self._seconds()
        client = rng.choice(self.site.processes)
        left = rng.choice((None, *self.ensemble.replicas))
        self._say(
            f"{client.name} reaches {left.process.name if left else 'nobody'} alone for {seconds:.2f} s"
        )
        for replica in self.ensemble.replicas:
            if replica is not left:
                self.site.streams.stall(client, replica.process, seconds)
        if left is not None and len(self.ensemble.replicas) > 1 and rng.random() < 0.7:
            self._cut_off(left)

    def jumped(self) -> None:
        """A majority ends sessions meanwhile. Without one, the next election would restart the time of them all: a
        dead client would keep its names for as long as a session of this world lasts, which may be hours."""
        self.ensemble.lapse()

    def heal(self) -> None:
        self._catch_up()
        for replica in self.ensemble.replicas:
            replica.cut = False
