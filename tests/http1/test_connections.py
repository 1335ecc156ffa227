"""Connections of the server, over a transport that notes what is done to it: times in sweeps, and back-pressure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fenced.http1.connections import ServerConnection
from fenced.http1.exchanges import ServerExchange
from fenced.http1.heads import BadMessage
from fenced.http1.limits import HttpLimits
from fenced.http1.server import HttpServer, ListenOptions
from fenced.http1.writing import ServerReply

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10000\r\n\r\n"


class Noted(asyncio.Transport):
    """Takes everything at once. Without a socket, so the connection writes by the transport."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.paused, self.closed, self.aborted = b"", False, False, False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = self.closed = True


class Scene:
    """A server, one connection of it, and a handler that answers when the test does."""

    def __init__(self, **limits: float) -> None:
        self.exchanges: list[ServerExchange] = []
        self.bodies: list[bytes | BadMessage] = []
        times = {"request_time": 1.0, "body_time": 1.0, "idle_time": 3.0, **limits}
        self.server = HttpServer(self, ListenOptions(), HttpLimits(**times))  # type: ignore[arg-type]
        self.transport, self.connection = Noted(), self.server.connection()
        self.connection.connection_made(self.transport)

    def begin(self, exchange: ServerExchange) -> None:
        self.exchanges.append(exchange)
        exchange.read(10_000, self.bodies.append)

    def refusal(self, error: BadMessage) -> ServerReply:
        return ServerReply(error.status, (), b"")

    def receive(self, data: bytes) -> ServerConnection:
        self.connection.data_received(data)
        return self.connection

    def sweeps_until(self, over: Any, trickle: bytes = b"") -> int:
        for number in range(1, 1000):
            if trickle:
                self.receive(trickle)
            self.server.sweep()
            if over():
                return number
        raise AssertionError("it is never late")


async def test_a_body_is_late_however_it_trickles() -> None:
    """Each byte does not begin its time anew: else one client with a byte a second keeps a connection for ever."""
    for trickle in (b"", b"x"):
        scene = Scene()
        scene.receive(POST)
        sweeps = scene.sweeps_until(lambda scene=scene: scene.bodies, trickle)
        (late,) = scene.bodies
        assert isinstance(late, BadMessage) and late.status == 408
        assert sweeps <= scene.server.ticks.body + 1


async def test_a_head_is_late_however_it_trickles() -> None:
    for trickle in (b"", b"x"):
        scene = Scene()
        scene.receive(GET[:-2] + b"X: ")
        sweeps = scene.sweeps_until(lambda scene=scene: scene.transport.written, trickle)
        assert scene.transport.written.startswith(b"HTTP/1.1 408 ") and scene.transport.closed
        assert sweeps <= scene.server.ticks.request + 1


@pytest.mark.parametrize("requests", [0, 1])
async def test_an_idle_connection_is_closed_without_an_answer(requests: int) -> None:
    scene = Scene()
    for _ in range(requests):
        scene.receive(GET)
        scene.exchanges[-1].reply(200)
    written = scene.transport.written
    sweeps = scene.sweeps_until(lambda: scene.transport.closed)
    assert scene.transport.written == written and sweeps > scene.server.ticks.request + 1


async def test_a_request_that_is_not_answered_is_not_late() -> None:
    scene = Scene()
    scene.receive(GET)
    for _ in range(100):
        scene.server.sweep()
    assert not scene.transport.closed
    scene.exchanges[0].reply(200)
    assert scene.transport.written.startswith(b"HTTP/1.1 200 ")


async def test_a_client_that_does_not_take_its_answer_is_ended() -> None:
    scene = Scene()
    scene.receive(GET)
    scene.exchanges[0].begin(200, ())
    scene.connection.pause_writing()
    assert scene.sweeps_until(lambda: scene.transport.aborted) <= scene.server.ticks.request + 1


async def test_a_client_that_takes_its_answer_after_all_is_no_longer_late() -> None:
    scene = Scene()
    scene.receive(GET)
    scene.exchanges[0].begin(200, ())
    scene.connection.pause_writing()
    scene.connection.resume_writing()
    scene.exchanges[0].end()
    scene.sweeps_until(lambda: scene.transport.closed)
    assert not scene.transport.aborted, "it was idle"


async def test_a_client_that_we_do_not_read_is_not_late() -> None:
    scene = Scene()
    scene.receive(POST)
    (exchange,) = scene.exchanges
    exchange.stream(lambda pieces, whole: None)
    exchange.pause("gate")
    for _ in range(100):
        scene.server.sweep()
    assert not scene.transport.closed
    exchange.resume("gate")
    scene.sweeps_until(lambda: scene.bodies)


async def test_an_empty_line_before_a_request_is_skipped() -> None:
    scene = Scene()
    scene.receive(b"\r\n" + GET)
    assert len(scene.exchanges) == 1


@pytest.mark.parametrize("apart", [False, True])
async def test_the_next_request_waits_unread_until_this_one_is_answered(apart: bool) -> None:
    """Else a client that sends and does not read its answers could fill our memory."""
    scene = Scene()
    for data in (GET, GET) if apart else (GET + GET,):
        scene.receive(data)
    assert scene.transport.paused and len(scene.exchanges) == 1
    scene.exchanges[0].reply(200)
    await asyncio.sleep(0)
    assert not scene.transport.paused and len(scene.exchanges) == 2
    scene.exchanges[1].reply(204)
    assert [line[9:12] for line in scene.transport.written.split(b"\r\n") if line[:4] == b"HTTP"] == [
        b"200",
        b"204",
    ]
    scene.exchanges[0].reply(500)
    assert b" 500 " not in scene.transport.written, "it is answered"


@pytest.mark.parametrize("framing", ["Content-Length: 10001", "Transfer-Encoding: chunked"])
async def test_a_body_that_is_too_long_is_413(framing: str) -> None:
    """By its length before it comes; in chunks as soon as it is too long."""
    scene = Scene()
    scene.receive(f"POST / HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n".encode())
    for _ in range(11 if "chunked" in framing else 0):
        assert not scene.bodies
        scene.receive(b"3e8\r\n%b\r\n" % (b"x" * 1000))
    (error,) = scene.bodies
    assert isinstance(error, BadMessage) and error.status == 413 and not scene.exchanges[0].keep


@pytest.mark.parametrize(
    ("head", "sent"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\r\n\r\n1\r\na\r\n2\r\nbc\r\n1\r\nd\r\n0\r\n\r\n"),
        (b"GET / HTTP/1.0\r\n\r\n", b"\r\n\r\nabcd"),
        (b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n", b"\r\n\r\n"),
    ],
)
async def test_an_answer_in_pieces(head: bytes, sent: bytes) -> None:
    """In chunks, or to the end of the connection for those who know none."""
    scene = Scene()
    scene.receive(head)
    (exchange,) = scene.exchanges
    exchange.begin(200, (), b"a")
    exchange.write(b"bc")
    exchange.end(b"d")
    exchange.write(b"late")
    assert scene.transport.written.endswith(sent)
    assert scene.transport.closed == (b"1.0" in head)
