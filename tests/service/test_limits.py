"""What a client can use up: connections, time, requests a second, held requests. Each has its answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fenced.http1.exchanges import ServerExchange
from fenced.http1.heads import request_head
from fenced.http1.limits import HttpLimits
from fenced.http1.server import GONE_SECONDS, HttpServer, ListenOptions, listening
from fenced.runtime import clocks
from fenced.service.access import TokenFile
from fenced.service.api import Api
from fenced.service.limits import Limits, Rates, TokenLeases
from fenced.service.replies import NotAdmitted
from fenced.service.server import RunningInstance
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced.values.model import Kept, Release, Released, Renewal
from tests.service.inside import MemoryTransport
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
        self.server = RunningInstance(self.api, ListenOptions())
        self.sockets = listening(ListenOptions(("127.0.0.1", 0)))
        self._peers: list[Peer] = []

    async def peer(self) -> Peer:
        host, port = self.sockets[0].getsockname()
        self._peers.append(Peer(*await asyncio.open_connection(host, port)))
        return self._peers[-1]

    async def __aenter__(self) -> Bounded:
        self._serving = asyncio.create_task(self.server.serve(self.sockets))
        await self.server.started.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        for peer in self._peers:
            peer.writer.transport.abort()
        self.server.stop()
        await self._serving


def is_problem(answer: tuple[int, dict[str, str], bytes], status: int) -> bool:
    found, headers, body = answer
    document = json.loads(body)
    return (found, headers["content-type"], document["status"]) == (
        status,
        "application/problem+json",
        status,
    )


async def test_slow_clients_are_ended(caplog: pytest.LogCaptureFixture) -> None:
    """Whose head or body does not arrive, who sends nothing, who does not read. Others are served meanwhile."""
    async with Bounded(Limits(request_time=1.0, idle_time=3.0, body_time=0.5)) as bounded:

        async def another_is_served() -> bool:
            return (await (await (await bounded.peer()).send(GET)).answer())[0] == 200

        silent = await bounded.peer()
        head = await (await bounded.peer()).send(GET[:-2])
        second = await (await bounded.peer()).send(GET)
        assert (await second.answer())[0] == 200
        for connection in bounded.server.http.connections:
            accepted = connection._transport.get_extra_info("socket")
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
            while bounded.server.http.connections:
                await asyncio.sleep(0.05)
        assert await another_is_served()
        assert not [record for record in caplog.records if record.name == "fenced.service"]
        deaf.close()


async def test_connections_beyond_the_limit_are_answered() -> None:
    """By a problem document that says that nothing happened. What is no HTTP is answered by one, too."""
    async with Bounded(Limits(connections=2)) as bounded:
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
            while bounded.server.http.connections:
                await asyncio.sleep(0.05)
        assert (await (await (await bounded.peer()).send(GET)).answer())[0] == 200


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


def tokens_file(folder: Path, **fields: str) -> TokenFile:
    """A file with one token for each keyword, which is its id and the token itself."""
    file = folder / "tokens.toml"
    file.write_text(
        "".join(
            f'[[token]]\nid = "{who}"\nsha256 = "{hashlib.sha256(who.encode()).hexdigest()}"\n'
            f'rights = ["lease", "guard", "observe", "operate"]\n{more}\n'
            for who, more in fields.items()
        )
    )
    return TokenFile(str(file))


@asynccontextmanager
async def limited(tokens: TokenFile, limits: Limits) -> AsyncIterator[tuple[Api, Program, Program]]:
    """An instance in memory, and the clients with the tokens `busy` and `calm`."""
    store = MemoryStore(clocks.now)
    api = Api(lambda runtime, _: MemoryAuthority(store, runtime), tokens, limits=limits)
    await api.namespaces.opened("default", create=True)
    busy, calm = Program(api, "busy"), Program(api, "calm")
    try:
        yield api, busy, calm
    finally:
        for each in (busy, calm):
            await each.http.aclose()
        await api.close()


def ask_of(name: str, ttl: float = 600) -> dict[str, Any]:
    return {"attempt": secrets.token_hex(16), "names": [name], "ttl": ttl}


async def test_one_token_does_not_use_up_what_all_need(tmp_path: Path) -> None:
    """Namespaces, leases and places in queues, live pages: each token has its own share."""
    tokens = tokens_file(tmp_path, busy="leases = 3", calm="")
    async with limited(tokens, Limits(namespaces_each=2, pages_each=2, leases_each=100)) as (api, busy, calm):

        async def opens(client: Program, name: str) -> int:
            return (await client.http.post("/v1/namespaces", json={"namespace": name})).status_code

        assert [await opens(busy, name) for name in "abc"] == [200, 200, 403]
        assert (await busy.http.get("/v1?namespace=d")).status_code == 403
        assert await opens(busy, "a") == 200 and await opens(calm, "c") == 200
        assert await opens(busy, "c") == 200, "it is there by now"

        held = [ask_of("x"), ask_of("y"), {**ask_of("x"), "wait": True}]
        found = [await busy.http.post("/v1/leases", json=each) for each in held]
        assert [each.status_code for each in found] == [200, 200, 202]
        full = await busy.http.post("/v1/leases", json=ask_of("z"))
        assert (full.status_code, full.json()["retry"], full.headers["retry-after"]) == (429, "later", "1")
        batch = {"do": [{"ask": ask_of("z")}]}
        assert (await busy.http.post("/v1/batch", json=batch)).status_code == 429
        assert (await busy.http.post("/v1/leases", json=held[0])).status_code == 200, "the same one again"
        assert (await calm.http.post("/v1/leases", json=ask_of("z"))).status_code == 200
        for each in held[1:]:
            await busy.http.post("/v1/leases/withdraw", json={"attempt": each["attempt"]})
        batch = {"do": [{"ask": ask_of("u")}, {"ask": ask_of("z")}]}
        answers = (await busy.http.post("/v1/batch", json=batch)).json()["answers"]
        assert [each["answer"] for each in answers] == ["granted", "busy"]
        assert (await busy.http.post("/v1/leases", json=ask_of("v"))).status_code == 200, (
            "the busy one has none"
        )
        assert (await busy.http.post("/v1/leases", json=ask_of("w"))).status_code == 429

        namespace = await api.namespaces.get("default")
        assert api.tokens is not None
        one, other = (api.tokens.shown(who) for who in ("busy", "calm"))
        assert one is not None and other is not None
        for _ in range(2):
            await api.live.open(namespace, one)
        with pytest.raises(NotAdmitted, match="429"):
            await api.live.open(namespace, one)
        await api.live.open(namespace, other)


def test_leases_of_a_token_count_until_they_are_over() -> None:
    now = 0.0
    leases = TokenLeases(lambda: now)
    assert leases.admit("a", {"1": 10.0, "2": 20.0}, 2) and not leases.admit("a", {"3": 10.0}, 2)
    leases.answered("a", [Renewal("1")], [Kept(30.0)])
    now = 21.0
    assert leases.admit("a", {"3": 10.0}, 2) and not leases.admit("a", {"4": 10.0}, 2)
    leases.answered("a", [Release("1", 0.0)], [Released()])
    assert leases.admit("a", {"4": 10.0}, 2)


async def test_a_rate_counts_attempts_pages_and_strangers(tmp_path: Path) -> None:
    """A request counts as all of its attempts; the page, a wrong log-in and a request without a token count, too."""
    async with limited(tokens_file(tmp_path, busy="", calm=""), Limits(rate=1.0)) as (api, busy, calm):
        api.quotas.rates = Rates(lambda: 1000.0)
        many = {"attempts": [secrets.token_hex(16) for _ in range(150)]}
        renewed = [await busy.http.post("/v1/leases/renew", json=many) for _ in range(2)]
        assert [each.status_code for each in renewed] == [200, 429]
        batch = {"do": [{"ask": ask_of(str(number))} for number in range(20)]}
        asked = [await busy.http.post("/v1/batch", json=batch) for _ in range(2)]
        assert [each.status_code for each in asked] == [200, 429]
        del busy.http.headers["authorization"], calm.http.headers["authorization"]
        unknown = [await busy.http.get("/v1", headers={"authorization": "Bearer x"}) for _ in range(12)]
        assert [each.status_code for each in unknown] == [401] * 10 + [429] * 2
        assert (await busy.http.post("/login", content="token=x")).status_code == 429
        assert (await busy.http.get("/")).status_code == 429
        calm.http.cookies.set("fenced_token", "calm")
        pages = [await calm.http.get("/") for _ in range(12)]
        assert [each.status_code for each in pages] == [200] * 10 + [429] * 2


async def test_names_of_others_are_not_reached_through_own_ones(tmp_path: Path) -> None:
    """A lease has names of two programs: who may use one of them neither sees nor ends the other."""
    async with limited(tokens_file(tmp_path, busy='names = ["busy"]', calm=""), Limits()) as (
        api,
        busy,
        calm,
    ):
        both = {**ask_of("busy/1"), "names": ["busy/1", "calm/1"]}
        granted = (await calm.http.post("/v1/leases", json=both)).json()
        waits = {**ask_of("busy/1"), "names": ["busy/1", "calm/2"], "wait": True}
        assert (await calm.http.post("/v1/leases", json=waits)).status_code == 202
        for path in ("/v1/names/busy/1", "/v1/names"):
            found = await busy.http.get(path)
            assert "busy/1" in found.text and "calm" not in found.text
        assert api.tokens is not None
        by = api.tokens.shown("busy")
        assert by is not None
        stream = await api.live.open(await api.namespaces.get("default"), by)
        assert [each.names for each in next(stream._names)] == [["busy/1"]]
        taken = await busy.http.post("/v1/names/busy/1/force-release", json={"token": granted["token"]})
        assert taken.status_code == 403
        assert (await calm.http.get("/v1/names/calm/1")).json()["held_by"]["token"] == granted["token"]
        own = (await busy.http.post("/v1/leases", json=ask_of("busy/2"))).json()
        taken = await busy.http.post("/v1/names/busy/2/force-release", json={"token": own["token"]})
        assert taken.status_code == 200 and taken.json()["token"] > own["token"]


async def test_the_stream_of_a_revoked_token_ends(tmp_path: Path) -> None:
    """When the file is read again. Those of other tokens go on."""
    async with limited(tokens_file(tmp_path, busy="", calm=""), Limits()) as (api, _, _):
        assert api.tokens is not None
        namespace = await api.namespaces.get("default")
        streams = {}
        for who in ("busy", "calm"):
            by = api.tokens.shown(who)
            assert by is not None
            streams[who] = await api.live.open(namespace, by)

        server = HttpServer(api, ListenOptions(), HttpLimits())

        def exchange() -> ServerExchange:
            connection = server.connection()
            connection.connection_made(MemoryTransport())
            return ServerExchange(connection, request_head(GET))

        reading = {who: asyncio.create_task(stream.send(exchange())) for who, stream in streams.items()}
        api.reload_tokens()
        tokens_file(tmp_path, calm="")
        api.reload_tokens()
        await asyncio.wait_for(reading["busy"], PATIENCE)
        assert not reading["calm"].done()
        tokens_file(tmp_path, calm='names = ["less"]')
        api.reload_tokens()
        await asyncio.wait_for(reading["calm"], PATIENCE)


async def test_a_client_that_asks_too_often(tmp_path: Path) -> None:
    """429 with Retry-After; its renewals, and other clients, are not concerned. Held requests are bounded, too."""
    file = tmp_path / "tokens.toml"
    hashed = {who: hashlib.sha256(who.encode()).hexdigest() for who in ("busy", "calm")}
    file.write_text(
        "".join(
            f'[[token]]\nid = "{who}"\nsha256 = "{hashed[who]}"\nrights = ["lease", "observe"]\n{rate}\n'
            for who, rate in (("busy", "rate = 0.001"), ("calm", ""))
        )
    )
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
