"""Redis in a world: the shipped client over simulated streams, against in-memory nodes that run the shipped scripts.

A third of the worlds has a replica, which lags. There the replica may be promoted, once, under the same address, as
when a DNS name is changed. The clients must detect that, and get no grants until an operator, who uses the shipped
client too, has raised the floor. Leases that were granted before the promotion are best-effort, so L3 does not judge
them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fenced.errors import FencedError, Misconfigured
from fenced.stores.redis.authority.authority import RedisAuthority
from fenced.values.contracts import Authority
from fenced_testkit.runtime.network import SimulatedConnection
from fenced_testkit.runtime.simulated import SimulatedRuntime
from fenced_testkit.runtime.world import Process
from fenced_testkit.worlds.backend import AuthorityBackend
from fenced_testkit.worlds.redis_node import RedisNode, packed, requests

if TYPE_CHECKING:
    from fenced_testkit.worlds.site import Site

ENDPOINT = ("redis", 6379)
URL = "redis://redis:6379"
META = b"fenced:{default}:meta"
ATTEMPTS = b"fenced:{default}:attempts"
EPOCH = 1_700_000_000
MARGIN = 100
"""How far above the highest known token the operator raises the floor: some replies may not have arrived yet."""


class NodeServer:
    """A node and its process: connections in, replies out."""

    node_type: type[RedisNode] = RedisNode

    def __init__(self, backend: RedisBackend, name: str, endpoint: tuple[str, int] = ENDPOINT) -> None:
        self.backend = backend
        self.endpoint = endpoint
        self.world = backend.world
        self.node = self.node_type(name, backend.now_us, lambda: f"{self.world.rng.getrandbits(160):040x}")
        self.node.send = self._push
        self.process = Process(self.world, name)
        self._sent: dict[SimulatedConnection, bytearray] = {}
        self._waiting: dict[SimulatedConnection, int] = {}

    def listen(self) -> None:
        self.backend.site.streams.listen(self.process, self.endpoint, self)

    def restart(self, down: float) -> None:
        """Crash, and come back with the data on the disk."""
        self.process.crash()
        self._sent.clear()
        self._waiting.clear()
        self.world.after(down, self._start)

    def _start(self) -> None:
        if not self.backend.is_primary(self):
            return  # its replica was promoted meanwhile
        self.process = Process(self.world, self.process.name)
        self.node.restarted()
        for replica in self.node.replicas:
            replica.follow(self.node)
        self.listen()

    # Connections.

    def on_open(self, connection: SimulatedConnection) -> None:
        self._sent[connection] = bytearray()

    def on_close(self, connection: SimulatedConnection) -> None:
        self._sent.pop(connection, None)
        self._waiting.pop(connection, None)
        self.node.forget(connection)

    def on_bytes(self, connection: SimulatedConnection, data: bytes) -> None:
        sent = self._sent.setdefault(connection, bytearray())
        sent += data
        for words in requests(sent):
            if words[0].upper() == b"WAIT":
                self._wait(connection, int(words[2]) / 1000)
            else:
                before = len(self.node.effects)
                connection.send(self.node.execute(connection, words))
                if len(self.node.effects) > before:
                    self._replicate()

    def _push(self, session: object, data: bytes) -> None:
        assert isinstance(session, SimulatedConnection)
        session.send(data)

    # Replication.

    def _replicate(self) -> None:
        upto = len(self.node.effects)
        for replica in self.node.replicas:
            self.world.after(self.backend.lag(), partial(self._arrived, replica, upto))

    def _arrived(self, replica: RedisNode, upto: int) -> None:
        if self.backend.is_primary(self) and self.process.alive:
            replica.replicate(self.node, upto)
            self.world.after(0.0005, lambda: self.process.deliver(self._acknowledge))

    def _wait(self, connection: SimulatedConnection, seconds: float) -> None:
        """Reply when a replica has all writes up to now, or when the time is over."""
        self._waiting[connection] = offset = len(self.node.effects)
        self._acknowledge()

        def give_up() -> None:
            if self._waiting.get(connection) == offset:
                del self._waiting[connection]
                connection.send(packed(0))

        self.world.after(seconds, lambda: self.process.deliver(give_up))

    def _acknowledge(self) -> None:
        have = max((replica.applied for replica in self.node.replicas), default=-1)
        for connection in [each for each, offset in self._waiting.items() if offset <= have]:
            del self._waiting[connection]
            connection.send(packed(1))


class RedisBackend(AuthorityBackend):
    """One node, or a primary and its replica."""

    name = "redis"
    traits = RedisAuthority.traits
    url = URL
    authority_type: type[RedisAuthority] = RedisAuthority

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        rng = self.world.rng
        self.primary = NodeServer(self, "redis-1")
        self.primary.listen()
        self.replica: NodeServer | None = None
        self._lag = rng.choice((0.001, 0.05, 0.5))
        self._promoted = False
        if rng.random() < 1 / 3:
            self.guarantee = "best-effort"
            self.replica = NodeServer(self, "redis-2")
            self.replica.node.follow(self.primary.node)

    def is_primary(self, server: NodeServer) -> bool:
        return server is self.primary

    def now_us(self) -> int:
        return int((EPOCH + self.world.now) * 1e6)

    def lag(self) -> float:
        return 0.001 if self.site.healed else self.world.rng.random() * self._lag

    def authority(self, process: Process, runtime: SimulatedRuntime) -> Authority:
        return self.authority_type.at(self.url, runtime, "default")

    def processes(self) -> Sequence[Process]:
        return (self.primary.process,)

    def holds(self, grant: str, names: tuple[str, ...]) -> bool | None:
        record = self.primary.node.keyspace.hget(ATTEMPTS, grant.encode())
        if record is None:
            return False
        expires, _, state = struct.unpack_from(">QQ1s", record)
        return bool(state == b"g" and expires > self.now_us())

    def excuses(self, error: Misconfigured) -> bool:
        # A reply may arrive after the floor was raised. L2 judges whether clients are granted leases again.
        return self._promoted and "a replica was promoted" in str(error)

    # Faults.

    def faults(self) -> Sequence[Callable[[], None]]:
        found = [self._restart, self._freeze, self._forget_scripts]
        # A release that the replica lacks keeps a name until its lease expires, so the leases must be short.
        # A replica without the namespace would start another realm, which every client refuses.
        if (
            self.replica is not None
            and self.site.ttl <= self.site.pace
            and META in self.replica.node.keyspace.data
        ):
            found.append(self._promote)
        return found

    def _restart(self) -> None:
        if self.primary.process.alive:
            self.site.judge.say(f"{self.primary.process.name} restarts")
            self.primary.restart(self.world.rng.uniform(0.05, 2 * self.site.pace))

    def _freeze(self) -> None:
        seconds = self.world.rng.uniform(0.2, 2 * self.site.pace)
        self.site.judge.say(f"{self.primary.process.name} stands still for {seconds:.2f} s")
        self.primary.process.pause(seconds)

    def _forget_scripts(self) -> None:
        self.site.judge.say("the script cache is flushed")
        self.primary.node.scripts.clear()

    def _promote(self) -> None:
        assert self.replica is not None
        self.site.judge.say("the primary dies, and its replica is promoted")
        self.primary.process.crash()
        self.primary, self.replica = self.replica, None
        self.primary.node.promoted()
        self.primary.listen()
        self._promoted = True
        self.site.judge.pardon(self.site.judge.highest + MARGIN)
        self.site.trace.forgiven = self.world.now
        self.world.after(self.world.rng.uniform(0.1, 2.0), self._start_operator)

    def _start_operator(self) -> None:
        runtime = SimulatedRuntime(Process(self.world, "operator"), self.site.streams)
        authority = RedisAuthority.at(URL, runtime, "default")

        async def raise_floor() -> None:
            while True:
                try:
                    await authority.open()
                    floor = await authority.raise_floor(self.site.judge.highest + MARGIN)
                    self.site.judge.say(f"the operator has raised the floor to {floor}")
                    return
                except FencedError as error:
                    self.site.judge.say(f"operator: {error!r}")
                    await runtime.wait(runtime.wakeup(), runtime.now() + 0.2)

        runtime.spawn(raise_floor, "operator")
