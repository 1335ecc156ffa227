"""The short way of a request: the same answers as on the long way, in the order of the requests."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import socket
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from fenced.errors import Indeterminate, Unavailable
from fenced.http1.server import ListenOptions
from fenced.leases.rules import no_namespace
from fenced.runtime.aio import AioRuntime
from fenced.service.access import TokenFile
from fenced.service.api import Api
from fenced.service.bodies import BatchBody, BatchItem, ReleaseBody, RenewBody
from fenced.service.limits import Limits, Rates
from fenced.service.server import LeaseServer
from fenced.service.work import ENDS, GroupedWork, Work, work_of
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced.values.model import (
    Ask,
    BatchAnswer,
    BatchOperation,
    Granted,
    Holder,
    Release,
    Released,
    Standing,
    Withdrawal,
)

PATIENCE = 100.0
A, B, C = (letter * 32 for letter in "abc")
LONG_WAY = ("Expect", "nothing")
"""A request with this header takes the long way."""


class CountedApi(Api):
    """Counts the requests that take the short way, and can delay them."""

    hot = 0
    gate: asyncio.Event | None = None

    def serve(self, *arguments: Any) -> None:
        self.hot += 1
        super().serve(*arguments)


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

    def __init__(self, tokens: TokenFile | None = None, limits: Limits | None = None) -> None:
        store = MemoryStore(lambda: 1000.0)
        store.realm = "00000000000000aa"
        self.leases: list[Gated] = []

        def make(runtime: Any, namespace: str) -> Gated:
            self.leases.append(Gated(store, runtime, namespace))
            return self.leases[-1]

        self.api = CountedApi(make, tokens, limits=limits)
        self.api.quotas.rates = Rates(lambda: 1000.0)
        self.server = LeaseServer(self.api, ListenOptions())
        self.server.config.load()

    async def __aenter__(self) -> Instance:
        await self.api.namespaces.opened("default", create=True)
        await self.connect()
        return self

    async def connect(self, *, tcp: bool = False) -> None:
        ours, theirs = tcp_pair() if tcp else socket.socketpair()
        loop = asyncio.get_running_loop()
        make: Any = self.server.config.http
        state = self.server.server_state
        _, self.connection = await loop.connect_accepted_socket(
            lambda: make(self.server.config, state, {}), ours
        )
        self.reader, self.writer = await asyncio.open_connection(sock=theirs)

    async def disconnect(self) -> None:
        self.connection.transport.abort()
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
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"{method} {path} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in headers)]
    head += [f"Content-Length: {len(data)}"] if data else []
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


def ask(attempt: str, *names: str, **more: Any) -> dict[str, Any]:
    return {"attempt": attempt, "names": names, "ttl": 30, "holder": {"id": "h"}, **more}


POSTS: list[tuple[str, object]] = [
    ("/v1/leases", ask(A, "orders/1")),
    ("/v1/leases", ask(A, "orders/1")),
    ("/v1/leases", ask(A, "orders/2")),
    ("/v1/leases", ask(B, "orders/1")),
    ("/v1/leases?namespace=default&realm=00000000000000aa", ask(B, "orders/1", wait=True)),
    ("/v1/leases?realm=00000000000000bb", ask(C, "orders/3")),
    ("/v1/leases?namespace=elsewhere", ask(C, "orders/3")),
    ("/v1/leases", ask(C, "not//a name")),
    ("/v1/leases", {"attempt": C}),
    ("/v1/leases", b"{"),
    ("/v1/leases", b'{"' + b"x" * 70_000 + b'"}'),
    ("/v1/leases/renew", {"attempts": [A, B, C]}),
    ("/v1/leases/release", {"attempt": C}),
    ("/v1/batch", {"do": [{"release": {"attempt": A}}, {"renew": B}, {"ask": ask(C, "orders/9")}, {}]}),
    ("/v1/batch", {"do": [{}]}),
    ("/v1/leases/release", {"attempt": A}),
    ("/v1/leases", ask(A, "orders/1")),
]


async def answers_to(instance: Instance, way: Sequence[tuple[str, str]]) -> list[Any]:
    """The answers, without the header that has the time of day."""
    found = []
    for path, body in POSTS:
        if instance.connection.transport.is_closing():
            await instance.disconnect()  # after an answer to a body that was not read to its end
            await instance.connect()
        instance.connection.data_received(request("POST", path, body, *way))
        status, headers, fields = await instance.answer()
        found.append((status, {k: v for k, v in headers.items() if k != "date"}, fields))
    metrics = re.sub(
        r"(?m)^lock_acquire_latency_ms.*$",
        "",
        instance.api.numbers.text(instance.api.namespaces.held, instance.api.events.expired.total()),
    )
    return [*found, metrics, [(event.kind, event.why) for event in instance.api.events.since(0)]]


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story())


@pytest.mark.parametrize("limits", [None, Limits(rate=1e-6), Limits(running=0)])
@pytest.mark.parametrize("token", ["", "known", "unknown", "reader", "elsewhere"])
def test_both_ways_give_the_same_answers(tmp_path: Path, token: str, limits: Limits | None) -> None:
    """For every kind of answer, with and without credentials; counters and events are the same too."""
    scopes = {
        "known": 'rights = ["lease"]',
        "reader": 'rights = ["observe"]',
        "elsewhere": 'rights = ["lease"]\nnames = ["other"]',
    }
    file = tmp_path / "tokens"
    file.write_text(
        "".join(
            f'[[token]]\nid = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n{scope}\n'
            for name, scope in scopes.items()
        )
    )

    async def story() -> None:
        tokens = TokenFile(str(file)) if token else None
        way = [("Authorization", f"Bearer {token}")] if token else []
        async with Instance(tokens, limits) as short, Instance(tokens, limits) as long:
            answered = await answers_to(short, way)
            assert answered == await answers_to(long, [*way, LONG_WAY])
            assert (short.api.hot, long.api.hot) == (len(POSTS) - 2, 0)  # a long body, an unknown namespace
            if not token and limits is None:
                statuses = [status for status, _, _ in answered[:-2]]
                assert " ".join(map(str, statuses)) == (
                    "200 200 400 409 202 421 404 400 400 400 413 200 404 200 200 200 410"
                )

    run(story)


def test_pipelined_requests_are_answered_in_order() -> None:
    """Requests of both ways in one stream, cut anywhere."""
    mixed = [
        (request("POST", "/v1/leases", ask(A, "orders/1")), "granted"),
        (request("GET", "/healthz"), b"alive\n"),
        (request("POST", "/v1/leases/renew", {"attempts": [A]}), "kept"),
        (request("POST", "/v1/leases", ask(B, "orders/1"), LONG_WAY), "busy"),
        (request("POST", "/v1/leases", ask(B, "orders/2")), "granted"),
        (request("POST", "/v1/batch", {"do": [{"release": {"attempt": B}}]}), "released"),
        (request("GET", "/nothing"), "about:blank"),
        (request("POST", "/v1/leases/release", {"attempt": A}), "released"),
    ]
    stream = b"".join(each for each, _ in mixed)

    async def story() -> None:
        draw = random.Random(7)
        ways = set()
        for pieces in (1, 2, 3, 5, 9, 17, 60, 200, len(stream)):
            cuts = sorted(draw.sample(range(1, len(stream)), pieces - 1))
            async with Instance() as instance:
                for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
                    instance.connection.data_received(stream[begin:end])
                    if draw.random() < 0.3:
                        await asyncio.sleep(0)
                for _, word in mixed:
                    _, _, fields = await instance.answer()
                    assert fields == word or str(word) in json.dumps(fields), (pieces, word, fields)
                ways.add(instance.api.hot)
        assert len(ways) > 1, ways  # some took the short way where in other cuts they did not

    run(story)


class Forgetful(dict[bytes, Any]):
    def __setitem__(self, *_: object) -> None:
        return


def test_a_head_that_is_remembered_means_what_the_parser_reads_in_it() -> None:
    """Pieces of requests in any order: with and without remembered heads the client gets the same bytes."""
    post = request("POST", "/v1/leases/release", {"attempt": A})
    other = request("POST", "/v1/leases/release?namespace=default", {"attempt": B}, ("X-A", "\xe9"))
    head, _, body = post.partition(b"\r\n\r\n")
    odd = head.replace(b"Length: %d" % len(body), b"Length: %d" % (len(head) - 2))
    # `odd + b"\r"` without its last byte is a head, and without its first three a body of the length that it names.
    whole = [post, post, other, odd + b"\r\n\r\n" + b" " * (len(head) - 2)]
    parts = [
        *(head, b"\r\n\r\n", body, post[:9], post[9:], odd + b"\r", b"\r\n", b"\n", b" ", b""),
        *(request("GET", "/healthz"), request("POST", "/v1/leases/release", {"attempt": A}, LONG_WAY)),
        request("POST", "/v1/leases/release", {"attempt": A}, ("Connection", "close")),
        request("POST", "/v1/leases/release", {"attempt": A}, ("Upgrade", "h2c"), ("Connection", "upgrade")),
    ]

    async def answered(instance: Instance, pieces: list[bytes]) -> bytes:
        await instance.disconnect()
        await instance.connect()
        for piece in pieces:
            if not instance.connection.transport.is_closing():
                instance.connection.data_received(piece)
            for _ in range(9):  # all that happens by then happens in this loop, without a socket or a thread
                await asyncio.sleep(0)
        instance.connection.transport.close()
        async with asyncio.timeout(PATIENCE):
            return await instance.reader.read()

    async def story() -> None:
        draw = random.Random(7)
        async with Instance() as one, Instance() as another:
            remembered: dict[bytes, Any] = one.server.config.http.heads[True]  # type: ignore[union-attr]
            another.server.config.http.heads = {True: Forgetful()}  # type: ignore[union-attr]
            for _ in range(150):
                pieces = draw.choices(whole, k=2) + draw.choices(whole + parts, k=6)
                if draw.random() < 0.5:
                    pieces[1:3] = [pieces[1] + pieces[2]]
                assert await answered(one, pieces) == await answered(another, pieces), pieces
            assert set(remembered) == {each.partition(b"\r\n\r\n")[0] for each in whole}

    run(story)


def test_a_head_that_is_remembered_is_admitted_by_the_tokens_of_now(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    entry = '[[token]]\nid = "{0}"\nsha256 = "{1}"\nrights = ["lease"]\n'
    file.write_text(entry.format("cron", hashlib.sha256(b"cron").hexdigest()))
    post = request("POST", "/v1/leases/release", {"attempt": A}, ("Authorization", "Bearer cron"))

    async def story() -> None:
        async with Instance(TokenFile(str(file))) as instance:

            async def status() -> int:
                instance.connection.data_received(post)
                return (await instance.answer())[0]

            assert [await status() for _ in range(2)] == [404, 404]
            file.write_text(entry.format("another", "0" * 64))
            instance.server.reload()
            assert [await status() for _ in range(2)] == [401, 401]
            assert instance.api.hot == 4

    run(story)


def test_a_head_that_a_unix_socket_may_send_is_not_admitted_from_another_one() -> None:
    """A page of another site can reach a TCP port of this machine, and no Unix socket."""

    async def story() -> None:
        async with Instance() as instance:
            instance.api.own_host_only = True
            for tcp in (False, True, False):
                await instance.disconnect()
                await instance.connect(tcp=tcp)
                for _ in range(2):
                    instance.connection.data_received(request("POST", "/v1/leases/release", {"attempt": A}))
                    assert (await instance.answer())[0] == (403 if tcp else 404)
            assert instance.api.hot == 6

    run(story)


def test_a_server_that_stops_answers_what_is_under_way() -> None:
    async def story() -> None:
        async with Instance() as instance:
            instance.leases[0].gate.clear()
            instance.connection.data_received(request("POST", "/v1/leases", ask(A, "orders/1")))
            instance.connection.shutdown()
            instance.leases[0].gate.set()
            status, headers, _ = await instance.answer()
            assert (status, headers["connection"], instance.api.hot) == (200, "close", 1)
            assert await instance.reader.read() == b""

    run(story)


def test_a_client_that_leaves_is_answered_nothing() -> None:
    async def story() -> None:
        async with Instance() as instance:
            instance.leases[0].gate.clear()
            instance.connection.data_received(request("POST", "/v1/leases", ask(A, "orders/1")))
            instance.writer.close()
            while not instance.connection.cycle.disconnected:
                await asyncio.sleep(0.01)
            instance.leases[0].gate.set()
            while not instance.api.events.number:
                await asyncio.sleep(0.01)
            assert instance.api._running == 0

    run(story)


@pytest.mark.parametrize("accept", ["application/x-ndjson", "*/*"])
def test_a_held_answer_is_the_same_on_both_ways(accept: str) -> None:
    """It comes with the release, or when the instance stops; the request behind it is answered then."""

    async def held(instance: Instance, attempt: str, *way: tuple[str, str]) -> None:
        for _ in range(2):  # the client of the first one leaves
            await instance.disconnect()
            await until(lambda: instance.api.namespaces.held == 0)
            await instance.connect()
            waits = ask(attempt, "orders/1", wait=True, keeps=True)
            wanted = [("Prefer", "wait=30"), ("Accept", accept), *way]
            instance.connection.data_received(request("POST", "/v1/leases", waits, *wanted))
            if "ndjson" in accept:
                await instance.reader.readuntil(b'"answer":"waiting"')
            await until(lambda: (instance.api.namespaces.held, instance.api._running) == (1, 0))
        instance.connection.data_received(request("GET", "/healthz"))

    async def rest(instance: Instance) -> object:
        found: object
        if "ndjson" in accept:
            text = await instance.reader.readuntil(b"0\r\n\r\n")
            found = re.sub(rb"(?im)^date: .*$", b"", text).lower()
        else:
            status, headers, fields = await instance.answer()
            found = status, [*headers], fields["answer"], fields["check_in"] > 0
        assert (await instance.answer())[2] == b"alive\n"
        assert instance.api.namespaces.held == 0
        return found

    async def answers(*way: tuple[str, str]) -> list[object]:
        async with Instance() as instance:
            instance.connection.data_received(request("POST", "/v1/leases", ask(A, "orders/1")))
            await instance.answer()
            await held(instance, B, *way)
            await instance.leases[0].release(A)
            found = [await rest(instance)]
            await instance.leases[0].ask(Ask(A[:-1] + "0", ("orders/1",), 30.0, Holder("h", "", "", 0), True))
            await held(instance, C, *way)
            instance.api.send_on()
            instance.connection.shutdown()
            found.append(await rest(instance))
            assert instance.api.hot == 1 + 4 * (not way)
            return found

    async def story() -> None:
        async with asyncio.timeout(PATIENCE):
            short = await answers()
            assert short == await answers(LONG_WAY)

    run(story)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not is_so():
            await asyncio.sleep(0.01)


class Slow:
    """A store whose writes end when the test says so."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.writes = asyncio.Event()
        self.error: Exception | None = None

    async def many(self, operations: Sequence[BatchOperation]) -> list[BatchAnswer]:
        self.batches.append(len(operations))
        await self.writes.wait()
        if self.error is not None:
            raise self.error
        return [Granted(number, 30.0, 30.0) for number, _ in enumerate(operations, 1)]


def test_what_arrives_during_a_write_shares_the_next_one() -> None:
    """A request that comes alone is written at once. An error of a write is the answer of all in it."""

    async def story() -> None:
        store: Any = Slow()
        worker = GroupedWork(store, lambda: False, lambda *_: None)
        found: list[Any] = []

        def start(count: int) -> None:
            worker.start(Work([Release(A)] * count, lambda *_: None), found.append)  # type: ignore[arg-type]

        start(1)
        while not store.batches:
            await asyncio.sleep(0)
        for count in (1, 2, 3):
            start(count)
        assert (store.batches, found) == ([1], [])
        store.writes.set()
        while len(found) < 4:
            await asyncio.sleep(0)
        assert store.batches == [1, 6]
        assert [[each.token for each in results] for results in found] == [[1], [1], [2, 3], [4, 5, 6]]
        store.error = Indeterminate("the disk")
        start(1)
        while len(found) < 5:
            await asyncio.sleep(0)
        store.error = None
        start(1)
        while len(found) < 6:
            await asyncio.sleep(0)
        assert isinstance(found[4], Indeterminate) and found[5][0].token == 1

    run(story)


class TwoConnections(Gated):
    """Notes how many asks are under way."""

    connections = 2

    def __init__(self) -> None:
        super().__init__(MemoryStore(lambda: 1000.0), AioRuntime(), "default")
        self.running: list[str] = []
        self.most = 0

    async def ask(self, ask: Ask, until: float | None = None) -> Any:
        self.running.append(ask.secret)
        self.most = max(self.most, len(self.running))
        try:
            return await super().ask(ask, until)
        finally:
            self.running.remove(ask.secret)


class Stepped:
    """A store that carries out one write whenever the test says so."""

    endings_are_quick = True

    def __init__(self) -> None:
        self.batches: list[list[BatchOperation]] = []
        self.steps = asyncio.Semaphore(0)

    async def many(self, operations: Sequence[BatchOperation]) -> list[BatchAnswer]:
        self.batches.append(list(operations))
        await self.steps.acquire()
        return [Released()] * len(operations)


def test_ends_of_leases_are_answered_before_what_must_be_synced() -> None:
    """The others let them pass once, and share their write with what came meanwhile."""

    async def story() -> None:
        store: Any = Stepped()
        worker = GroupedWork(store, lambda: False, lambda *_: None)
        found: list[Any] = []

        def start(*operations: Any) -> None:
            ends = all(isinstance(each, ENDS) for each in operations)
            worker.start(Work(list(operations), lambda *_: None, only_ends=ends), found.append)  # type: ignore[arg-type]

        asks = [Ask(letter * 32, ("a",), 30.0, Holder("h", "", "", 0)) for letter in "abc"]
        ends, mixed = Release("e" * 32), (Release("f" * 32), asks[1])
        released, renewed = BatchItem(release=ReleaseBody(A)), BatchItem(renew=B)
        assert [work_of(BatchBody(items), str).only_ends for items in ([released], [released, renewed])] == [
            True,
            False,
        ]
        start(asks[0])
        await until(lambda: len(store.batches) == 1)
        own = Release(asks[1].secret)  # it must not pass its own ask
        for operations in ((asks[1],), (ends,), mixed, (own,), (Withdrawal("d" * 32),)):
            start(*operations)
        store.steps.release()
        await until(lambda: len(store.batches) == 2)
        start(ends)
        start(asks[2])
        store.steps.release()
        await until(lambda: len(store.batches) == 3)
        start(ends)
        for _ in range(2):
            store.steps.release()
        await until(lambda: len(found) == 9)
        ended, others = [ends, Withdrawal("d" * 32)], [asks[1], *mixed, own, ends, asks[2]]
        assert store.batches == [[asks[0]], ended, others, [ends]]

    run(story)


def test_a_store_gets_as_many_operations_at_once_as_it_has_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Renewals do not wait for the others. What waited too long is not carried out, and says so."""

    async def story() -> None:
        store = TwoConnections()
        worker = GroupedWork(store, lambda: False, lambda *_: None)
        found: dict[str, Any] = {}

        def start(what: str, work: Work) -> None:
            worker.start(work, lambda results: found.__setitem__(what, results[0]))  # type: ignore[index]

        def asking(attempt: str) -> Work:
            ask = Ask(attempt, (f"orders/{attempt}",), 30.0, Holder("h", "", "", 0))
            return Work([ask], lambda *_: None)  # type: ignore[arg-type]

        await store.open()
        store.gate.clear()
        for attempt in (A, B, C):
            start(attempt, asking(attempt))
        with monkeypatch.context() as patched:
            patched.setattr("fenced.values.timing.CALL_SECONDS", -1.0)
            start("late", asking("d" * 32))
        start("renewal", work_of(RenewBody([A]), lambda: ""))
        start("in a batch", work_of(BatchBody([BatchItem(renew=A)]), lambda: ""))
        await until(lambda: len(found) == 2)
        assert (store.running, set(found)) == ([A, B], {"renewal", "in a batch"})
        store.gate.set()
        await until(lambda: len(found) == 6)
        assert {found[each].token for each in (A, B, C)} == {1, 2, 3} and store.most == 2
        assert isinstance(found["late"], Unavailable)
        await until(lambda: not worker._tasks)

    run(story)
