"""Connecting: what fails at once, what never answers, and a name with several addresses."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from fenced.runtime.aio import AioRuntime
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.runtime.sockets import KEEP_ALIVE
from fenced.values.contracts import Runtime

NOWHERE = "255.255.255.255"
"""To connect there fails at once: the network is unreachable."""


def run(colour: str, work: Callable[[Runtime], Coroutine[Any, Any, Any]]) -> Any:
    if colour == "blocking":
        return step(work(BlockingRuntime()))

    async def main() -> Any:
        runtime = AioRuntime()
        try:
            return await work(runtime)
        finally:
            runtime.close()

    return asyncio.run(main())


@pytest.fixture
def port() -> Iterator[int]:
    """Somebody listens there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def place(host: str, port: int) -> Any:
    return (socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))


@pytest.mark.parametrize("colour", ["blocking", "asyncio"])
def test_the_first_address_that_answers_is_taken(
    colour: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fails at once, one refuses, one is of a kind that the machine does not have."""
    listed = [
        place(NOWHERE, port),
        place("127.0.0.1", 1),
        (99, socket.SOCK_STREAM, 0, "", ("x", 1)),
        place("127.0.0.1", port),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: list(listed))
    link = run(colour, lambda runtime: runtime.connect(("db", port), runtime.now() + 5))
    assert link.getpeername() == ("127.0.0.1", port)
    link.close()
    listed.pop()
    with pytest.raises(OSError, match="family not supported"):
        run(colour, lambda runtime: runtime.connect(("db", port), runtime.now() + 5))


@pytest.mark.parametrize("colour", ["blocking", "asyncio"])
@pytest.mark.parametrize(
    "host, why",
    [
        (NOWHERE, "unreachable"),
        ("a" * 64, "label"),
        ("a..b", "label"),
        ("no-such-host.invalid", "no-such-host"),
    ],
)
def test_an_unreachable_address_is_an_oserror(colour: str, host: str, why: str) -> None:
    with pytest.raises(OSError, match=why):
        run(colour, lambda runtime: runtime.connect((host, 1), runtime.now() + 5))


@pytest.mark.parametrize("colour", ["blocking", "asyncio"])
def test_a_resolver_that_hangs_keeps_nobody(colour: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for that name gives up in time, and other names are looked up meanwhile."""
    hangs = threading.Event()

    def resolve(host: str, *_: object) -> list[Any]:
        if host == "hangs":
            hangs.wait(60)
            return []
        return [place("127.0.0.1", port)]

    async def talk(runtime: Runtime) -> None:
        with pytest.raises(OSError, match="no address in time"):
            await runtime.connect(("hangs", 1), runtime.now() + 0.1)
        (await runtime.connect(("answers", port), runtime.now() + 30)).close()

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        run(colour, talk)
    finally:
        hangs.set()


@pytest.mark.parametrize("colour", ["blocking", "asyncio"])
def test_a_silent_peer_is_left_at_the_deadline(colour: str, port: int) -> None:
    async def talk(runtime: Runtime) -> None:
        line = runtime.stream(await runtime.connect(("127.0.0.1", port), runtime.now() + 5))
        try:
            assert line.read_available() == b""
            with pytest.raises(OSError, match="no answer in time"):
                await line.receive(runtime.now() + 0.05)
            with pytest.raises(OSError, match="no answer in time"):
                await line.send(bytes(50_000_000), runtime.now() + 0.05)
        finally:
            line.close()

    run(colour, talk)


@pytest.mark.parametrize("colour", ["blocking", "asyncio"])
def test_the_kernel_probes_idle_connections(colour: str, port: int) -> None:
    link = run(colour, lambda runtime: runtime.connect(("127.0.0.1", port), runtime.now() + 5))
    assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    for name, value in KEEP_ALIVE.items():
        assert link.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value
    link.close()


@pytest.mark.parametrize("colour", ["blocking", "asyncio"])
def test_an_end_is_noticed_while_nobody_waits(colour: str) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    async def talk(runtime: Runtime) -> None:
        line = runtime.stream(ours)
        theirs.send(b"last")
        assert await line.receive(runtime.now() + 5) == b"last"
        theirs.send(b"words")
        await runtime.wait(runtime.wakeup(), runtime.now() + 0.01)
        assert line.read_available() == b"words"
        theirs.close()
        await runtime.wait(runtime.wakeup(), runtime.now() + 0.01)
        with pytest.raises(OSError, match="closed"):
            line.read_available()
        line.close()

    run(colour, talk)
