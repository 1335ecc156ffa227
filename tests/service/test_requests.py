"""Requests over the shipped connections: in the order in which they came, however their bytes arrive."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from fenced.http1.heads import Heads, request_head
from fenced.http1.server import ListenOptions
from fenced.leases.rules import no_namespace
from fenced.service.access import TokenFile
from fenced.service.api import Api
from fenced.service.server import RunningInstance
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced.values.model import Ask, Holder, Standing

PATIENCE = 100.0
A, B, C = (letter * 32 for letter in "abc")


class Gated(MemoryAuthority):
    """Answers asks when the gate opens. It has one namespace."""

    def __init__(self, store: MemoryStore, runtime: Any, namespace: str) -> None:
        super().__init__(store, runtime)
        self._namespace = namespace
        self.gate = asyncio.Event()
        self.gate.set()

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        if self._namespace != "default":
            raise no_namespace("memory", self._namespace)
        return await super().open(create=create, until=until)

    async def ask(self, ask: Ask, until: float | None = None) -> Any:
        await self.gate.wait()
        return await super().ask(ask, until)


class Instance:
    """An API and one connection to it: a real socket, but the test decides in which pieces its bytes arrive."""

    def __init__(self, tokens: TokenFile | None = None) -> None:
        store = MemoryStore(lambda: 1000.0)
        self.leases: list[Gated] = []

        def make(runtime: Any, namespace: str) -> Gated:
            self.leases.append(Gated(store, runtime, namespace))
            return self.leases[-1]

        self.api = Api(make, tokens)
        self.server = RunningInstance(self.api, ListenOptions())

    async def __aenter__(self) -> Instance:
        await self.api.namespaces.opened("default", create=True)
        await self.connect()
        return self

    async def connect(self, *, tcp: bool = False) -> None:
        ours, theirs = tcp_pair() if tcp else socket.socketpair()
        loop = asyncio.get_running_loop()
        transport, self.connection = await loop.connect_accepted_socket(self.server.http.connection, ours)
        self.transport: Any = transport
        self.reader, self.writer = await asyncio.open_connection(sock=theirs)

    async def disconnect(self) -> None:
        self.transport.abort()
        self.writer.close()
        await self.writer.wait_closed()

    async def __aexit__(self, *_: object) -> None:
        await self.disconnect()
        await self.api.close()

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        async with asyncio.timeout(PATIENCE):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            body = await self.reader.readexactly(int(headers["content-length"]))
        known = json.loads(body) if "json" in headers["content-type"] else body
        return int(first.split()[1]), headers, known


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        return listening.accept()[0], theirs


def request(method: str, path: str, body: object = None, *headers: tuple[str, str]) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = [f"{method} {path} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in headers)]
    head += [f"Content-Length: {len(data)}"] if data else []
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


def chunked(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    head = request("POST", path, None, ("Transfer-Encoding", "chunked"))
    return head + b"1\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (data[:1], len(data) - 1, data[1:])


def ask(attempt: str, *names: str, **more: Any) -> dict[str, Any]:
    return {"attempt": attempt, "names": names, "ttl": 30, "holder": {"id": "h"}, **more}


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story())


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not is_so():
            await asyncio.sleep(0.01)


MIXED = [
    (request("POST", "/v1/leases", ask(A, "orders/1")), "granted"),
    (request("GET", "/healthz"), b"alive\n"),
    (request("POST", "/v1/leases/renew", {"attempts": [A]}), "kept"),
    (chunked("/v1/leases", ask(B, "orders/1")), "busy"),
    (request("POST", "/nothing", {"a": 1}), "about:blank"),
    (request("POST", "/v1/leases", ask(B, "orders/2")), "granted"),
    (request("POST", "/v1/batch", {"do": [{"release": {"attempt": B}}]}), "released"),
    (request("POST", "/v1/leases/release", {"attempt": A}), "released"),
]


async def test_pipelined_requests_are_answered_in_order() -> None:
    """Answered at once, by a task or before their body has come; in one stream, cut anywhere."""
    stream = b"".join(each for each, _ in MIXED)
    draw = random.Random(7)
    for pieces in (1, 2, 3, 5, 9, 17, 60, 200, len(stream)):
        cuts = sorted(draw.sample(range(1, len(stream)), pieces - 1))
        async with Instance() as instance:
            for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
                instance.connection.data_received(stream[begin:end])
                if draw.random() < 0.3:
                    await asyncio.sleep(0)
            for _, word in MIXED:
                _, _, fields = await instance.answer()
                assert fields == word or str(word) in json.dumps(fields), (pieces, word, fields)


async def test_a_head_that_is_remembered_is_admitted_by_the_tokens_of_now(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    entry = '[[token]]\nid = "{0}"\nsha256 = "{1}"\nrights = ["lease"]\n'
    file.write_text(entry.format("cron", hashlib.sha256(b"cron").hexdigest()))
    post = request("POST", "/v1/leases/release", {"attempt": A}, ("Authorization", "Bearer cron"))
    async with Instance(TokenFile(str(file))) as instance:

        async def status() -> int:
            instance.connection.data_received(post)
            return (await instance.answer())[0]

        assert [await status() for _ in range(2)] == [404, 404]
        file.write_text(entry.format("another", "0" * 64))
        instance.server.reload()
        assert [await status() for _ in range(2)] == [401, 401]


async def test_a_head_that_a_unix_socket_may_send_is_not_admitted_from_another_one() -> None:
    """A page of another site can reach a TCP port of this machine, and no Unix socket."""
    async with Instance() as instance:
        instance.api.own_host_only = True
        for tcp in (False, True, False):
            await instance.disconnect()
            await instance.connect(tcp=tcp)
            for _ in range(2):
                instance.connection.data_received(request("POST", "/v1/leases/release", {"attempt": A}))
                assert (await instance.answer())[0] == (403 if tcp else 404)


async def test_a_server_that_stops_answers_what_is_under_way() -> None:
    async with Instance() as instance:
        instance.leases[0].gate.clear()
        instance.connection.data_received(request("POST", "/v1/leases", ask(A, "orders/1")))
        instance.server.http.close_listeners()
        instance.leases[0].gate.set()
        status, headers, _ = await instance.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await instance.reader.read() == b""


async def test_a_client_that_leaves_is_answered_nothing() -> None:
    """Before its body has come, or before the store has answered. Nothing stays counted as under way."""
    async with Instance() as instance:
        instance.connection.data_received(request("POST", "/v1/leases", ask(B, "orders/1"))[:-5])
        assert instance.api._running == 1
        instance.writer.close()
        await until(lambda: not instance.server.http.connections)
        assert instance.api._running == 0
        await instance.connect()
        instance.leases[0].gate.clear()
        instance.connection.data_received(request("POST", "/v1/leases", ask(A, "orders/1")))
        instance.writer.close()
        await until(lambda: not instance.server.http.connections)
        instance.leases[0].gate.set()
        await until(lambda: instance.api.events.number > 0)
        assert instance.api._running == 0


@pytest.mark.parametrize("accept", ["application/x-ndjson", "*/*"])
async def test_a_held_answer(accept: str) -> None:
    """It comes with the release, or when the instance stops; the request behind it is answered then."""

    async def held(instance: Instance, attempt: str) -> None:
        for _ in range(2):  # the client of the first one leaves
            await instance.disconnect()
            await until(lambda: instance.api.namespaces.held == 0)
            await instance.connect()
            waits = ask(attempt, "orders/1", wait=True, keeps=True)
            wanted = [("Prefer", "wait=30"), ("Accept", accept)]
            instance.connection.data_received(request("POST", "/v1/leases", waits, *wanted))
            if "ndjson" in accept:
                await instance.reader.readuntil(b'"answer":"waiting"')
            await until(lambda: (instance.api.namespaces.held, instance.api._running) == (1, 0))
        instance.connection.data_received(request("GET", "/healthz"))

    async def ends(instance: Instance, turn: bool) -> None:
        if "ndjson" in accept:
            text = await instance.reader.readuntil(b"0\r\n\r\n")
            assert (b'{"turn":true}' in text, b'{"turn":false}' in text) == (turn, not turn)
        else:
            status, _, fields = await instance.answer()
            assert (status, fields["answer"], fields["check_in"] > 0) == (202, "waiting", not turn)
        assert (await instance.answer())[2] == b"alive\n"
        assert instance.api.namespaces.held == 0

    async with asyncio.timeout(PATIENCE), Instance() as instance:
        instance.connection.data_received(request("POST", "/v1/leases", ask(A, "orders/1")))
        await instance.answer()
        await held(instance, B)
        await instance.leases[0].release(A)
        await ends(instance, turn=True)
        await instance.leases[0].ask(Ask(A[:-1] + "0", ("orders/1",), 30.0, Holder("h", "", "", 0), True))
        await held(instance, C)
        instance.api.send_on()
        await ends(instance, turn=False)


async def test_equal_heads_get_the_same_notes() -> None:
    """With heads that are remembered and without, the client gets the same bytes, in whatever pieces they come."""
    whole = [each for each, _ in MIXED] + [request("GET", "/healthz", None, ("Connection", "close"))]

    class Forgetful(Heads):
        def read(self, text: bytes) -> Any:
            return request_head(text)

    async def answered(instance: Instance, pieces: list[bytes]) -> bytes:
        await instance.disconnect()
        await instance.connect()
        for piece in pieces:
            if not instance.transport.is_closing():
                instance.connection.data_received(piece)
            for _ in range(9):  # all that happens by then happens in this loop, without a socket or a thread
                await asyncio.sleep(0)
        instance.transport.close()
        async with asyncio.timeout(PATIENCE):
            return await instance.reader.read()

    def strip(data: bytes) -> list[bytes]:
        return [line for line in data.split(b"\r\n") if not line.startswith((b"date: ", b"{"))]

    draw = random.Random(7)
    async with Instance() as one, Instance() as another:
        another.server.http.heads = {True: Forgetful(), False: Forgetful()}
        another.api.events = one.api.events
        for _ in range(100):
            stream = b"".join(draw.choices(whole, k=4)) + draw.choice((b"", b"\r\n", b"\0", b"GET /h"))
            cuts = sorted(draw.choices(range(len(stream)), k=draw.choice((0, 1, 5))))
            pieces = [stream[i:j] for i, j in zip([0, *cuts], [*cuts, None], strict=True) if stream[i:j]]
            first, second = await answered(one, pieces), await answered(another, pieces)
            assert strip(first) == strip(second), pieces
