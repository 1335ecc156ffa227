"""The proxy in a world: shipped proxies that share a store, in front of an upstream that knows nothing of fencing.

`FencingProxy` runs as it is, on an event loop of the world: its HTTP server, its gate, its connections to the upstream.
Proxies are stopped and die, connections are cut, the store answers late or not at all. Clients are peers that send
several requests at once, in pieces, and some that are none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from fenced.errors import Indeterminate, Unavailable
from fenced.guards.cells import Swapped
from fenced.http1.bodies import body_of
from fenced.http1.connections import ServerConnection
from fenced.http1.heads import HEAD_END, request_head
from fenced.proxy.gate import Gate
from fenced.proxy.server import FencingProxy, ProxyOptions
from fenced.runtime.aio import AioRuntime
from fenced.stores.memory.guard import MemoryCells, MemoryValues
from fenced.values.contracts import Runtime
from fenced.values.model import Stamp
from fenced_testkit.runtime.loop import SimulatedLoop
from fenced_testkit.runtime.network import SimulatedConnection, SimulatedNetwork
from fenced_testkit.runtime.world import Process, World
from fenced_testkit.worlds.peers import PipedRequest, PipeliningPeer, hiding, two_lengths

REALM = "00000000000000aa"
NAME = "orders/42"
SETTLE = 5.0
PORT = 80
HOLDERS = 8
LAST_TOKEN = 100
_NUMBER = re.compile(rb"[?]n=([0-9]+)")


def stamp_of(token: int, name: str = NAME, seq: int | None = None) -> Stamp:
    return Stamp(REALM, (name,), token, seq, f"{token:032x}")


class FaultyCells:
    """The shared cells as one proxy reaches them: late, and now and then without a reply."""

    def __init__(self, cells: MemoryCells, runtime: Runtime, world: World, faults: float) -> None:
        self.blobs = cells.blobs
        self.faults = faults
        self._cells = cells
        self._runtime = runtime
        self._world = world

    async def _way(self) -> None:
        await self._runtime.wait(
            self._runtime.wakeup(), self._runtime.now() + self._world.rng.random() * 0.02
        )

    async def get(self, key: str) -> tuple[int, bytes | None]:
        return (await self.get_many([key]))[0]

    async def get_many(self, keys: Sequence[str]) -> list[tuple[int, bytes | None]]:
        await self._way()
        if self._world.rng.random() < self.faults:
            raise Unavailable("the store cannot be reached")
        found = await self._cells.get_many(keys)
        await self._way()
        return found

    async def swap(self, changes: Sequence[tuple[str, int, bytes | None]]) -> Swapped:
        await self._way()
        lost = self._world.rng.random()
        if lost < self.faults / 2:
            raise Indeterminate("no reply: the request was lost")
        swapped = await self._cells.swap(changes)
        await self._way()
        if lost < self.faults:
            raise Indeterminate("no reply: it was lost")
        return swapped

    async def keys(self) -> list[str]:
        return list(self.blobs)

    async def close(self) -> None:
        return


class WorldRuntime(AioRuntime):
    """asyncio's, with the randomness of the world. Its clock is the process's while that runs."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.random = world.rng.random

    def secret(self) -> str:
        return f"{self._world.rng.getrandbits(128):032x}"


@dataclass
class ProxyOutcome:
    """What came of a world."""

    broken: list[str] = field(default_factory=list)
    """Requests that reached the upstream although a newer one had, or while an older one ran; and wrong answers."""
    arrived: int = 0
    answered: int = 0
    final: bool = False
    """The last holder got through."""


class Upstream:
    """Notes what arrives, works on it for less than SETTLE, whatever becomes of the proxy, and then answers."""

    def __init__(self, world: World, outcome: ProxyOutcome) -> None:
        self._world = world
        self._outcome = outcome
        self._unread: dict[SimulatedConnection, bytes] = {}
        self._running: list[tuple[int, float]] = []
        """Tokens, and when their requests end."""
        self._highest = 0

    def on_open(self, connection: SimulatedConnection) -> None:
        self._unread[connection] = b""

    def on_close(self, connection: SimulatedConnection) -> None:
        del self._unread[connection]

    def on_bytes(self, connection: SimulatedConnection, data: bytes) -> None:
        data = self._unread[connection] + data
        while (end := data.find(HEAD_END) + 4) > 3:
            head = request_head(data[:end])
            _, rest = body_of(head.length).feed(data[end:])
            if rest is None:
                break
            stamp = next((value for name, value in head.headers() if name == b"fenced-stamp"), None)
            number = _NUMBER.search(head.target)
            if head.target == b"/hidden" or number is None:
                self._outcome.broken.append(f"the body of a request has become one: {head.target!r}")
            else:
                self._arrive(connection, stamp, number[1])
            data = bytes(rest)
        self._unread[connection] = data

    def _arrive(self, connection: SimulatedConnection, stamp: bytes | None, number: bytes) -> None:
        now, rng = self._world.now, self._world.rng
        ends = now + rng.choice((0.01, 0.1, 1.5, SETTLE * 0.99)) * rng.random()
        if stamp is not None:
            token = int(stamp.split(b":")[2])
            self._running = [(t, end) for t, end in self._running if end > now]
            others = sorted({running for running, _ in self._running} - {token})
            if others or token < self._highest:
                self._outcome.broken.append(
                    f"{now:.3f}: {token} arrived while {others} ran, after {self._highest}"
                )
            self._highest = max(self._highest, token)
            self._running.append((token, ends))
            self._outcome.final |= token == LAST_TOKEN
            if token == LAST_TOKEN:
                ends = now + 0.01
        self._outcome.arrived += 1
        if rng.random() < 0.1 and stamp is not None and self._highest < LAST_TOKEN:
            connection.close()  # without an answer
            return
        body = b"n=%b;" % number
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
        if rng.random() < 0.3:
            head, body = (
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
                b"%x\r\n%b\r\n0\r\n\r\n"
                % (
                    len(body),
                    body,
                ),
            )
        self._world.at(ends, lambda: connection.send(head + body))


class SimulatedProxy:
    """One shipped proxy and its process."""

    def __init__(self, world: ProxyWorld, name: str) -> None:
        rng = world.world.rng
        self.process = Process(world.world, name, rate=rng.uniform(0.999, 1.001), offset=rng.random() * 1000)
        self.name = name
        self.loop = loop = SimulatedLoop(self.process, world.network)
        runtime = WorldRuntime(world.world)
        self.cells = FaultyCells(world.cells, runtime, world.world, world.faults)
        options = ProxyOptions(
            f"http://upstream:{PORT}",
            ("orders/{path.id}",),
            "memory:",
            settle=SETTLE,
            timeout=2.0,
            alone=world.alone,
        )
        self.proxy: FencingProxy = loop.run(FencingProxy, options)
        self.proxy.runtime.close()
        self.proxy.runtime = runtime
        guard = MemoryValues(cells=self.cells, runtime=runtime)  # type: ignore[arg-type]
        self.proxy.gate = loop.run(partial(Gate, guard, runtime, settle=SETTLE, alone=world.alone))
        loop.listen((name, PORT), partial(world.connection_type, self.proxy.server))
        for work in (self.proxy.server._sweeping, self.proxy._sweeping):
            loop.start(work)


class ProxyWorld:
    """Some proxies, a store, an upstream, and holders that come one after the other."""

    connection_type: type[ServerConnection] = ServerConnection

    def __init__(self, seed: int, *, alone: bool = False, faults: float = 0.03) -> None:
        self.world = World(f"shipped proxy {seed}")
        self.network = SimulatedNetwork(self.world)
        self.alone = alone
        self.faults = faults
        self.cells = MemoryCells()
        self.outcome = ProxyOutcome()
        self.network.listen(
            Process(self.world, "upstream"), ("upstream", PORT), Upstream(self.world, self.outcome)
        )
        self._clients = Process(self.world, "clients")
        self._peers: list[PipeliningPeer] = []
        self._numbers = 0
        self._proxies = [SimulatedProxy(self, f"p{number}") for number in range(1 if alone else 3)]

    def run(self) -> ProxyOutcome:
        rng, at = self.world.rng, 0.1
        for token in range(1, HOLDERS + 1):
            for _ in range(rng.randint(1, 4)):
                self.world.at(at + rng.random() * 2, partial(self._send, token))
            at += rng.choice((0.01, 0.3, 2.0))
        for _ in range(rng.randint(0, 3)):
            self.world.at(rng.random() * at, self._trouble)
        # The last holder comes when all that went wrong must have settled, and nothing else goes wrong.
        self.world.at(at + 40, self._send_last)
        self.world.run(at + 80)
        for proxy in self._proxies:
            proxy.loop.close()
        self.outcome.answered = sum(peer.answered for peer in self._peers)
        return self.outcome

    def _trouble(self) -> None:
        rng = self.world.rng
        at = rng.randrange(len(self._proxies))
        proxy = self._proxies[at]
        match rng.choice(("stops", "dies", "is cut off")):
            case "stops":
                proxy.process.pause(rng.choice((0.5, 2.5, 12.0)))
            case "dies":
                proxy.process.crash()
                self._proxies[at] = SimulatedProxy(self, f"{proxy.name}'")
            case _:
                self.network.cut(proxy.process, self._clients)

    def _send_last(self) -> None:
        self.faults = 0.0
        for proxy in self._proxies:
            proxy.cells.faults = 0.0
        self._meet([self._put(LAST_TOKEN)])

    def _send(self, token: int) -> None:
        """A holder sends requests, or somebody else who shares its connection."""
        rng = self.world.rng
        kinds: list[Callable[[], PipedRequest]] = [
            partial(self._put, token),
            self._get,
            partial(hiding, b"/nothing", (400,)),
            partial(two_lengths, b"/x"),
        ]
        self._meet([rng.choices(kinds, (6, 3, 1, 1))[0]() for _ in range(rng.randint(1, 4))])

    def _put(self, token: int) -> PipedRequest:
        self._numbers += 1
        body = b"x" * self.world.rng.choice((0, 5, 500))
        head = b'PUT /orders/42?n=%d HTTP/1.1\r\nHost: a\r\nFenced-Stamp: "%b"\r\nContent-Length: %d\r\n\r\n'
        data = head % (self._numbers, str(stamp_of(token, seq=1)).encode(), len(body)) + body
        return PipedRequest(data, (200, 412), b"n=%d;" % self._numbers)

    def _get(self) -> PipedRequest:
        self._numbers += 1
        return PipedRequest(
            b"GET /orders/43?n=%d HTTP/1.1\r\nHost: a\r\n\r\n" % self._numbers,
            (200,),
            b"n=%d;" % self._numbers,
        )

    def _meet(self, requests: Sequence[PipedRequest]) -> None:
        peer = PipeliningPeer(self._clients, self.network, requests, self.outcome.broken.append)
        self._peers.append(peer)
        peer.send((self.world.rng.choice(self._proxies).name, PORT))
