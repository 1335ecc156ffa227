"""Every call ends at its caller's deadline, whatever the server does; what came in time is taken; nothing is kept."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import threading
import time
from typing import Any

import pytest

from fenced.errors import Indeterminate, Unavailable
from fenced.runtime.aio import AioRuntime, LoopSocketStream
from fenced.runtime.sockets import SocketStream
from fenced.stores.etcd.authority.authority import EtcdAuthority
from fenced.stores.etcd.wire import http2
from fenced.testing.kit import asking, granted
from fenced.values.contracts import Colour, Runtime
from fenced.values.model import Granted, Waiting
from fenced_testkit.servers import EtcdServer
from tests.pretending import DEADLINE, LONG, drip, every_call_ends, pretender, silence, takes

HELLO = http2.frame(http2.SETTINGS, 0, 0, b"")


def trickle(link: socket.socket, over: threading.Event) -> None:
    """Answers the first request with a long reply, a byte at a time, so that no single read takes long."""
    link.recv(100_000)
    link.sendall(HELLO + struct.pack(">HBBBI", 10_000 >> 8, 10_000 & 0xFF, http2.DATA, 0, 1))
    drip(link, over)


def flood(link: socket.socket, over: threading.Event) -> None:
    """Sends what says nothing, as fast as it can."""
    link.recv(100_000)
    link.settimeout(0.1)
    began = time.monotonic()
    while not over.is_set() and time.monotonic() - began < LONG:
        link.sendall(http2.frame(http2.WINDOW_UPDATE, 0, 7, struct.pack(">I", 1)) * 5000)


@pytest.mark.parametrize("behave", [trickle, flood, silence])
@pytest.mark.parametrize("members", [1, 2])
async def test_no_server_holds_a_call_beyond_its_deadline(
    behave: Any, members: int, runtime: Runtime
) -> None:
    with pretender(behave) as port:
        hosts = ("127.0.0.1", "localhost")[:members]
        authority = EtcdAuthority.at("etcd://" + ",".join(f"{host}:{port}" for host in hosts), runtime, "any")
        await every_call_ends(authority, runtime)
        await authority.close()


async def test_no_server_holds_who_connects_beyond_its_deadline(runtime: Runtime) -> None:
    with pretender(silence) as port:
        authority = EtcdAuthority.at(f"etcds://127.0.0.1:{port}", runtime, "any")
        ask = asking(runtime, "orders")
        assert await takes(runtime, lambda until: authority.ask(ask, until), Unavailable) < LONG / 2
        await authority.close()


async def test_a_step_for_which_no_time_is_left_is_not_begun(
    etcd_server: EtcdServer, runtime: Runtime
) -> None:
    """Nothing was sent, and so nothing is unknown."""
    authority = EtcdAuthority.at(etcd_server.url(), runtime, secrets.token_hex(8))
    await authority.open()
    with pytest.raises(Unavailable, match="deadline passed"):
        await authority.ask(asking(runtime, "orders"), runtime.now() - 1)
    assert await authority.survey() == []
    await authority.close()


async def test_an_answer_that_came_in_time_is_taken_however_late(
    etcd_server: EtcdServer, runtime: Runtime, colour: Colour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process stands still between sending and reading, beyond the deadline: the grant is not thrown away."""
    authority = EtcdAuthority.at(etcd_server.url(), runtime, secrets.token_hex(8))
    await authority.open()
    warm = asking(runtime, "warm")
    await granted(authority, warm)
    await authority.release(warm.secret)  # the next attempt uses its etcd lease again: one request
    kind = SocketStream if colour == "blocking" else LoopSocketStream
    sent = kind.send

    async def stall(line: Any, data: bytes, until: float) -> None:
        await sent(line, data, until)
        time.sleep(max(0.0, until - runtime.now()) + 0.01)

    monkeypatch.setattr(kind, "send", stall)
    ask = asking(runtime, "orders")
    assert isinstance(await authority.ask(ask, runtime.now() + DEADLINE), Granted)
    monkeypatch.undo()
    await authority.close()


async def test_a_cancelled_call_ends_at_once_and_its_connection_with_it() -> None:
    with pretender(silence) as port:
        runtime = AioRuntime()
        authority = EtcdAuthority.at(f"etcd://127.0.0.1:{port}", runtime, "any")
        began = runtime.now()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(DEADLINE):
                await authority.ask(asking(runtime, "orders"), began + LONG)
        assert runtime.now() - began < LONG / 2
        assert not authority._wire._used and not authority._wire._pool._idle
        await authority.close()
        runtime.close()


# Clients that nobody closes.


@pytest.mark.parametrize("thread", [False, True], ids=["here", "another thread"])
async def test_abandoning_closes_connections_and_nothing_else(
    etcd_server: EtcdServer, runtime: Runtime, thread: bool
) -> None:
    """Also of those on which somebody waits: a wake-up, and a reply."""
    name = secrets.token_hex(8)
    other = EtcdAuthority.at(etcd_server.url(), runtime, name)
    await other.open()
    before = set(os.listdir("/proc/self/fd"))
    authority = EtcdAuthority.at(etcd_server.url(), runtime, name)
    await authority.open()
    ask = asking(runtime, "orders")
    await granted(authority, ask)
    assert isinstance(await authority.ask(asking(runtime, "orders", wait=True)), Waiting)
    heard: list[list[str]] = []

    async def next_wakeups() -> None:
        heard.append(await authority.next_wakeups(runtime.now() + LONG))

    listening = runtime.spawn(next_wakeups, "listening")
    while not authority._wakeups.listening:
        await runtime.wait(runtime.wakeup(), runtime.now() + 0.01)
    for _ in range(2):
        if thread:
            elsewhere = threading.Thread(target=authority.abandon)
            elsewhere.start()
            elsewhere.join()
        else:
            authority.abandon()
    await listening.join()
    assert heard == [[]]
    await runtime.wait(runtime.wakeup(), runtime.now() + 0.01)  # the loop closes the descriptors
    assert set(os.listdir("/proc/self/fd")) <= before
    view = await other.observe("orders")
    assert view.held_by is not None and len(view.waiters) == 1
    await other.close()


async def test_abandoning_ends_a_call_that_is_under_way(runtime: Runtime) -> None:
    with pretender(silence) as port:
        authority = EtcdAuthority.at(f"etcd://127.0.0.1:{port}", runtime, "any")
        ended: list[type[BaseException]] = []

        async def ask() -> None:
            try:
                await authority.ask(asking(runtime, "orders"), runtime.now() + LONG)
            except (Indeterminate, Unavailable) as error:
                ended.append(type(error))

        asking_now = runtime.spawn(ask, "asking")
        while not authority._wire._used:
            await runtime.wait(runtime.wakeup(), runtime.now() + 0.01)
        began = runtime.now()
        authority.abandon()
        await asking_now.join()
        assert ended and runtime.now() - began < LONG / 2
