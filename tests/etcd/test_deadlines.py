"""What the outage kit does not show of deadlines: a flood, two members, and an answer that came in time."""

from __future__ import annotations

import asyncio
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
from fenced.values.model import Granted
from fenced_testkit.servers import EtcdServer
from tests.pretending import DEADLINE, LONG, every_call_ends, pretender, silence, takes

HELLO = http2.frame(http2.SETTINGS, 0, 0, b"")


def flood(link: socket.socket, over: threading.Event) -> None:
    """Sends what says nothing, as fast as it can."""
    link.recv(100_000)
    link.settimeout(0.1)
    began = time.monotonic()
    while not over.is_set() and time.monotonic() - began < LONG:
        link.sendall(http2.frame(http2.WINDOW_UPDATE, 0, 7, struct.pack(">I", 1)) * 5000)


@pytest.mark.parametrize("behave, members", [(flood, 1), (silence, 2)])
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
