"""What a client can use up: connections, time, requests a second, held requests. Each has its answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from fenced.authorities.memory import MemoryAuthority, MemoryStore
from fenced.runtime import clocks
from fenced.service.access import TokenFile
from fenced.service.api import Api
from fenced.service.connections import BoundedConnection
from fenced.service.limits import Limits, Rates
from fenced.service.server import GONE_SECONDS, LeaseServer, ListenOptions, listening
from tests.service.test_values import Program

PATIENCE = 100.0
GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


class Peer:
    """A client that sends what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> Peer:
        self.writer.write(data)
        await self.writer.drain()
        return self

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next answer; status 0 if the connection ends without one."""
        async with asyncio.timeout(PATIENCE):
            head = await self._reader.readuntil(b"\r\n\r\n") if not await self._ended() else b""
            if not head:
                return 0, {}, b""
            first, *lines = head.decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines if line)
            body = await self._reader.readexactly(int(headers["content-length"]))
            return int(first.split()[1]), headers, body

    async def _ended(self) -> bool:
        while not self._reader._buffer and not self._reader.at_eof():  # type: ignore[attr-defined]
            await self._reader._wait_for_data("answer")  # type: ignore[attr-defined]
        return self._reader.at_eof()

    async def is_closed(self) -> bool:
        async with asyncio.timeout(PATIENCE):
            return await self._reader.read() == b""


class Bounded:
    """An instance with limits, and clients of it, in one loop."""

    def __init__(self, limits: Limits) -> None:
        store = MemoryStore(clocks.now)
        self.api = Api(lambda runtime, _: MemoryAuthority(store, runtime), limits=limits)
        self.server = LeaseServer(self.api, ListenOptions())
        self.sockets = listening(ListenOptions(("127.0.0.1", 0)))
        self._peers: list[Peer] = []

    async def peer(self) -> Peer:
        host, port = self.sockets[0].getsockname()
        self._peers.append(Peer(*await asyncio.open_connection(host, port)))
        return self._peers[-1]

    async def run(self, story: Callable[[Bounded], Coroutine[Any, Any, None]]) -> None:
        serving = asyncio.create_task(self.server.serve(self.sockets))
        while not self.server.started:
            await asyncio.sleep(0.01)
        try:
            await story(self)
        finally:
            for peer in self._peers:
                peer.writer.transport.abort()
            self.server.stop()
            await serving


def is_problem(answer: tuple[int, dict[str, str], bytes], status: int) -> bool:
    found, headers, body = answer
    document = json.loads(body)
    return (found, headers["content-type"], document["status"]) == (
        status,
        "application/problem+json",
        status,
    )


def test_slow_clients_are_ended(caplog: pytest.LogCaptureFixture) -> None:
    """Whose head or body does not arrive, who sends nothing, who does not read. Others are served meanwhile."""

    async def story(bounded: Bounded) -> None:
        async def another_is_served() -> bool:
            return (await (await (await bounded.peer()).send(GET)).answer())[0] == 200

        silent = await bounded.peer()
        head = await (await bounded.peer()).send(GET[:-2])
        second = await (await bounded.peer()).send(GET)
        assert (await second.answer())[0] == 200
        for connection in bounded.server.server_state.connections:
            assert isinstance(connection, BoundedConnection)
            accepted = connection.transport.get_extra_info("socket")
            # The kernel notices a peer that has vanished.
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == GONE_SECONDS * 1000
        await second.send(GET[:9])  # its second request does not arrive
        body = await bounded.peer()
        await body.send(b"POST /v1/leases HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        gone = await bounded.peer()
        await gone.send(b"PUT /v1/values/a HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        gone.writer.close()
        deaf = socket.create_connection(bounded.sockets[0].getsockname())
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 500)
        for each in (head, second, body):
            answer = await each.answer()
            assert is_problem(answer, 408) and answer[1]["connection"] == "close"
            assert await each.is_closed()
            assert await another_is_served()
        assert await silent.is_closed()
        async with asyncio.timeout(PATIENCE):
            while bounded.server.server_state.connections:
                await asyncio.sleep(0.05)
        assert await another_is_served()
        assert not [record for record in caplog.records if record.name == "fenced.service"]
        deaf.close()

    limits = Limits(request_time=1.0, idle_time=3.0, body_time=0.5)
    asyncio.run(Bounded(limits).run(story))


def test_connections_beyond_the_limit_are_answered() -> None:
    """By a problem document that says that nothing happened. What is no HTTP is answered by one, too."""

    async def story(bounded: Bounded) -> None:
        first, second = await bounded.peer(), await bounded.peer()
        for each in (first, second):
            assert (await (await each.send(GET)).answer())[0] == 200
        third = await (await bounded.peer()).send(GET)
        answer = await third.answer()
        assert is_problem(answer, 503) and answer[1]["retry-after"] == "1"
        assert json.loads(answer[2])["type"] == "urn:fenced:problem:unavailable"
        assert await third.is_closed()
        await first.send(b"NONSENSE\r\n\r\n")
        assert is_problem(await first.answer(), 400)
        await second.send(b"GET /healthz HTTP/1.1\r\nX: ")
        with pytest.raises((ConnectionError, AssertionError)):  # the answer, or a reset before it arrives
            for _ in range(20):
                await second.send(b"x" * 2**16)
            raise AssertionError
        async with asyncio.timeout(PATIENCE):
            while bounded.server.server_state.connections:
                await asyncio.sleep(0.05)
        assert (await (await (await bounded.peer()).send(GET)).answer())[0] == 200

    asyncio.run(Bounded(Limits(connections=2)).run(story))


def test_rates() -> None:
    """A bucket that fills with time. A batch may take more than there is, and is paid for afterwards."""
    now = 0.0
    rates = Rates(lambda: now)
    assert [rates.wait("a", 20.0) for _ in range(20)] == [0.0] * 20
    assert rates.wait("a", 20.0) == pytest.approx(0.05) and rates.wait("b", 20.0) == 0.0
    now = 0.05
    assert rates.wait("a", 20.0, 100) == 0.0
    assert rates.wait("a", 20.0) == pytest.approx(100 / 20)
    now = 1000.0
    assert [rates.wait("a", 20.0) for _ in range(21)][19:] == [0.0, pytest.approx(0.05)]


def test_a_client_that_asks_too_often(tmp_path: Path) -> None:
    """429 with Retry-After; its renewals, and other clients, are not concerned. Held requests are bounded, too."""
    file = tmp_path / "tokens.toml"
    hashed = {who: hashlib.sha256(who.encode()).hexdigest() for who in ("busy", "calm")}
    file.write_text(
        "".join(
            f'[[token]]\nid = "{who}"\nsha256 = "{hashed[who]}"\nrights = ["lease", "observe"]\n{rate}\n'
            for who, rate in (("busy", "rate = 0.001"), ("calm", ""))
        )
    )

    async def story() -> None:
        store = MemoryStore(clocks.now)
        limits = Limits(held_each=1)
        api = Api(lambda runtime, _: MemoryAuthority(store, runtime), TokenFile(str(file)), limits=limits)
        await api.namespaces.opened("default", create=True)
        busy, calm = Program(api, "busy"), Program(api, "calm")
        answers = [await busy.http.get("/v1/names/a") for _ in range(12)]
        assert [each.status_code for each in answers] == [200] * 10 + [429] * 2
        assert int(answers[-1].headers["retry-after"]) >= 100 and answers[-1].json()["retry"] == "later"
        assert (await busy.http.post("/v1/leases/renew", json={"attempts": []})).status_code == 200
        assert (await calm.http.get("/v1/names/a")).status_code == 200

        def ask() -> Coroutine[Any, Any, Any]:
            body = {"attempt": secrets.token_hex(16), "names": ["a"], "ttl": 600, "wait": True, "keeps": True}
            return calm.http.post("/v1/leases", json=body, headers={"prefer": "wait=30"})

        assert (await ask()).status_code == 200
        held = asyncio.create_task(ask())
        while not api.namespaces.held:
            await asyncio.sleep(0.01)
        assert (await ask()).status_code == 202, "answered at once"
        assert not held.done()
        api.send_on()
        assert (await held).status_code == 202
        api.limits = Limits(running=0)
        full = await calm.http.get("/v1/names/a")
        assert (full.status_code, full.headers["retry-after"]) == (503, "1")
        await api.close()

    asyncio.run(story())
