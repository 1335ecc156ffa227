"""What the bindings of the outage kit share: one server, a proxy in front of it, and authorities on both ways."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import pytest

from fenced.client.registry import authority
from fenced.drills.relay import Proxy
from fenced.net import heartbeat
from fenced.testing import COLOURS
from fenced.testing.kit import asking, granted
from fenced.values.contracts import Authority, NamedValues, Runtime
from fenced.values.model import Waiting, grant_id
from fenced_testkit import OUTAGE_CHECKS
from fenced_testkit.servers.base import Endpoint, Server
from tests.shifted import Shifted

S = TypeVar("S", bound=Server)
T = TypeVar("T", Authority, NamedValues)


def own_server(kind: type[S]) -> Any:
    """The fixture of a module that breaks its server: `server = own_server(RedisServer)`."""

    def server() -> Iterator[S]:
        with kind() as started:
            yield started

    return pytest.fixture(scope="module")(server)


IN_ONE_COLOUR = {"a_dead_waiter_keeps_its_place_for_ten_seconds"}
"""They take ten seconds and look at the server alone, whatever client there is."""

every_outage = pytest.mark.parametrize(
    ("check", "colour"),
    [
        pytest.param(check, colour, id=f"{check.name}-{colour}")
        for check in OUTAGE_CHECKS
        for colour in (COLOURS[:1] if check.name in IN_ONE_COLOUR else COLOURS)
    ],
)


class Opening:
    """Closes at the end what a check has opened."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._opened: list[Authority | NamedValues] = []

    async def _open(self, made: T) -> T:
        self._opened.append(made)
        await made.open()
        return made

    async def close(self) -> None:
        for opened in self._opened:
            await opened.close()


class ServerAndProxy(Opening):
    """One server, and a proxy in front of it."""

    def __init__(self, runtime: Runtime, server: Server, proxy: Proxy | None = None) -> None:
        super().__init__(runtime)
        self.server = server
        self.proxy = proxy or Proxy(server.host, server.port)
        self._place = secrets.token_hex(8)

    async def close(self) -> None:
        await super().close()
        self.proxy.stop()


class ProxiedHarness(ServerAndProxy):
    """`words` are what tells an ask, a renewal and a release on the wire."""

    def __init__(
        self,
        runtime: Runtime,
        server: Server,
        address: Callable[[str, int], str],
        words: Mapping[str, bytes],
        proxy: Proxy | None = None,
    ) -> None:
        super().__init__(runtime, server, proxy)
        self.words = dict(words)
        self._address = address

    async def authority(self) -> Authority:
        return await self._open(self._at(self.proxy))

    async def direct(self) -> Authority:
        return await self._open(self._at(self.server))

    def _at(self, where: Endpoint) -> Authority:
        return authority(self._address(where.host, where.port), self.runtime, self._place)


async def a_stream_that_died_silently_is_opened_again(harness: ProxiedHarness, runtime: Shifted) -> None:
    """A middlebox forgets the stream of wake-ups, and nobody says so. The client notices, and misses no wake-up."""
    one, other = await harness.authority(), await harness.direct()
    held, wanted = asking(runtime, "orders", ttl=600), asking(runtime, "orders", ttl=600, wait=True)
    await granted(other, held)
    assert isinstance(await one.ask(wanted), Waiting)

    async def listen() -> list[str]:
        return await one.next_wakeups(runtime.now() + 0.2)

    assert await listen() == []
    while (connections := harness.proxy.connections) < 2:  # one for requests, one to listen
        await listen()
    harness.proxy.black_hole(drop=True)
    runtime.ahead += heartbeat.IDLE_SECONDS
    while harness.proxy.dropped[0] == 0:
        assert await listen() == [], "the ping is lost, and with it the connection"
    await other.release(held.secret)
    while harness.proxy.dropped[1] == 0:  # the wake-up is lost, too; before that the link must not heal
        await runtime.wait(runtime.wakeup(), runtime.now() + 0.01)
    harness.proxy.heal()
    runtime.ahead += heartbeat.ANSWER_SECONDS
    heard: list[str] = []
    end = runtime.now() + 30
    while not heard and runtime.now() < end:
        heard = await listen()
    assert heard == [grant_id(wanted.secret)] and harness.proxy.connections > connections
    connections = harness.proxy.connections
    for seconds in (heartbeat.IDLE_SECONDS, heartbeat.ANSWER_SECONDS, heartbeat.IDLE_SECONDS):
        runtime.ahead += seconds
        for _ in range(5):
            await listen()
    assert harness.proxy.connections == connections, "a stream that answers is left as it is"
    await harness.close()
