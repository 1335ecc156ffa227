"""Servers that are none: what the tests of deadlines connect to, and how long a call takes there."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from fenced.errors import Indeterminate, Unavailable
from fenced.testing.kit import asking
from fenced.values.contracts import Authority, Runtime

DEADLINE = 0.2
LONG = 10.0
"""For how long a bad server goes on; whoever keeps its deadline is back long before."""

PAUSE = DEADLINE / 4
TRIES = 20


@contextlib.contextmanager
def pretender(behave: Callable[[socket.socket, threading.Event], None]) -> Iterator[int]:
    """A server that is none; the port on which it behaves as told, on each connection."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def one(link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            behave(link, over)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = listener.accept()
                threads.append(threading.Thread(target=one, args=(link,)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=serve)
        accepting.start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for thread in threads:
                thread.join()


def drip(link: socket.socket, over: threading.Event) -> None:
    """Sends a byte at a time."""
    for _ in range(round(LONG / PAUSE)):
        if over.wait(PAUSE):
            break
        link.sendall(b"x")


def silence(link: socket.socket, over: threading.Event) -> None:
    over.wait(LONG)


async def takes(runtime: Runtime, call: Callable[[float], Coroutine[Any, Any, object]], kind: Any) -> float:
    """How long a call takes that must end in an error of this kind."""
    began = runtime.now()
    with pytest.raises(kind):
        await call(began + DEADLINE)
    return runtime.now() - began


async def every_call_ends(authority: Authority, runtime: Runtime) -> None:
    """Each call of the contract that takes a deadline keeps it, and ends in doubt.

    On a busy machine the deadline may pass before anything was sent. Such a call says so, and is made again.
    """
    calls: tuple[Callable[[float], Coroutine[Any, Any, object]], ...] = (
        lambda until: authority.open(until=until),
        lambda until: authority.ask(asking(runtime, "orders"), until),
        lambda until: authority.renew(["0" * 32], until),
        lambda until: authority.release("0" * 32, until),
        lambda until: authority.withdraw("0" * 32, until),
    )
    for call in calls:
        ended: list[Exception] = []
        while not ended or (isinstance(ended[-1], Unavailable) and len(ended) < TRIES):
            began = runtime.now()
            with pytest.raises((Indeterminate, Unavailable)) as caught:
                await call(began + DEADLINE)
            assert runtime.now() - began < LONG / 2
            ended.append(caught.value)
        assert isinstance(ended[-1], Indeterminate), ended[-1]
