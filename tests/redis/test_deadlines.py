"""What the outage kit does not show of deadlines: while a connection is made, and an answer that came in time."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fenced.errors import Indeterminate, Misconfigured, Unavailable
from fenced.runtime.aio import LoopSocketStream
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.runtime.sockets import SocketStream
from fenced.stores.redis.authority.authority import RedisAuthority
from fenced.testing.kit import asking, granted
from fenced.values.contracts import Colour, Runtime
from fenced.values.model import Granted, Kept, Released
from fenced_testkit.servers import RedisServer
from tests.pretending import DEADLINE, LONG, drip, pretender, silence, takes


def trickle(link: socket.socket, over: threading.Event) -> None:
    """Answers the first request with a long reply, a byte at a time, so that no single read takes long."""
    link.recv(100_000)
    link.sendall(b"$100000\r\n")
    drip(link, over)


@pytest.mark.parametrize(
    "behave, url",
    [
        (trickle, "redis://:secret@127.0.0.1:{}/3"),  # AUTH and SELECT
        (silence, "redis://:secret@127.0.0.1:{}/3"),
        (silence, "rediss://127.0.0.1:{}"),  # TLS
    ],
)
async def test_no_server_holds_who_connects_beyond_its_deadline(
    behave: Any, url: str, runtime: Runtime
) -> None:
    with pretender(behave) as port:
        authority = RedisAuthority.at(url.format(port), runtime, "any")
        took = await takes(
            runtime, lambda until: authority.ask(asking(runtime, "orders"), until), Unavailable
        )
        assert took < LONG / 2
        await authority.close()


async def test_no_name_server_holds_who_connects_beyond_its_deadline(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def silent(*_: object, **__: object) -> None:
        over.wait(LONG)
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    authority = RedisAuthority.at("redis://cache.internal", runtime, "any")
    for _ in range(2):
        took = await takes(runtime, lambda until: authority.release("0" * 32, until), Unavailable)
        assert took < LONG / 2
    await authority.close()
    over.set()


async def test_no_full_queue_holds_who_connects_beyond_its_deadline(runtime: Runtime, tmp_path: Path) -> None:
    """A socket file whose server takes no connections: nothing tells when there is room."""
    path = str(tmp_path / "redis.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(0)
    waiting: list[socket.socket] = []
    with contextlib.suppress(BlockingIOError):
        while True:
            waiting.append(socket.socket(socket.AF_UNIX))
            waiting[-1].setblocking(False)
            waiting[-1].connect(path)
    authority = RedisAuthority.at(f"unix://{path}", runtime, "any")
    took = await takes(runtime, lambda until: authority.release("0" * 32, until), Unavailable)
    assert took < LONG / 2
    await authority.close()
    for link in (listener, *waiting):
        link.close()


async def test_an_answer_that_came_in_time_is_taken_however_late(
    redis_server: RedisServer, runtime: Runtime, colour: Colour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process stands still between sending and reading, beyond the deadline: the grant is not thrown away."""
    authority = RedisAuthority.at(redis_server.url(), runtime, secrets.token_hex(8))
    await authority.open()
    await granted(authority, asking(runtime, "warm"))
    sent = SocketStream.send

    async def stall(line: SocketStream, data: bytes, until: float) -> None:
        await sent(line, data, until)
        time.sleep(max(0.0, until - runtime.now()) + 0.01)

    monkeypatch.setattr(SocketStream, "send", stall)
    if colour == "asyncio":
        monkeypatch.setattr(LoopSocketStream, "send", stall)
    assert isinstance(await authority.ask(asking(runtime, "orders"), runtime.now() + DEADLINE), Granted)
    monkeypatch.undo()
    await authority.close()


# Settings.


# proves authority redis: settings-watched
@pytest.mark.xdist_group("redis")
@pytest.mark.parametrize("planted", [False, True], ids=["", "planted: looked at when opened only"])
def test_settings_are_looked_at_again_on_each_new_connection(planted: bool) -> None:
    """A restart with appendfsync everysec: no token is minted any more; holders go on, and so does who knew it."""
    runtime = BlockingRuntime()
    with RedisServer() as server:
        authority = RedisAuthority.at(server.url(), runtime, "any")
        assert step(authority.open()).doubts == ()
        if planted:
            authority._promise.given = False
        held, other = asking(runtime, "held"), asking(runtime, "orders")
        token = step(granted(authority, held)).token
        server.settings["appendfsync"] = "everysec"
        server.restart()
        if planted:
            step(granted(authority, other))
            step(authority.close())
            return
        with pytest.raises(Indeterminate, match="now they could"):  # its connection broke
            step(authority.ask(other))
        with pytest.raises(Misconfigured, match="now they could: with appendfsync everysec"):
            step(authority.ask(other))
        with pytest.raises(Misconfigured, match="now they could"):
            step(authority.force_release("held", token))
        assert step(authority.renew([held.secret])) == [Kept(10.0)]
        knowing = RedisAuthority.at(server.url(), runtime, "any")
        assert step(knowing.open()).doubts
        server.restart()
        best_effort = step(granted(knowing, asking(runtime, "other"))).token
        server.execute("CONFIG", "SET", "appendfsync", "always")
        assert token < best_effort < step(granted(authority, other)).token, "mended, without a new client"
        assert step(authority.release(held.secret)) == Released()
        with server.replica():
            server.execute("CLIENT", "KILL", "TYPE", "normal")
            with pytest.raises(Indeterminate, match="replicas"):
                step(authority.ask(asking(runtime, "more")))
        for each in (authority, knowing):
            step(each.close())


# After an outage.
