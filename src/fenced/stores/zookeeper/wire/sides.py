"""The callers of one client: those of its own runtime, and under asyncio also the threads of its keeper.

A session is bound to one connection, so the keeper's thread and the event loop share it. Each caller waits as its own
runtime does. What must go on while the event loop is blocked, the threads do: they connect, and read for themselves.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fenced.values.contracts import (
    ByteStream,
    Colour,
    Endpoint,
    Pulse,
    Readable,
    Runtime,
    Selector,
    SocketLike,
    Task,
    Wakeup,
)

T = TypeVar("T")


class Sides:
    """A runtime that is the caller's: the client's own, or that of the threads beside it."""

    def __init__(self, own: Runtime, threads: Runtime | None = None) -> None:
        self.own = own
        self.all = (own,) if threads is None else (own, threads)
        self._threads = threads
        self.colour: Colour = own.colour
        self.now, self.random, self.secret = own.now, own.random, own.secret
        # A lock of the threads' excludes the event loop, too.
        self.lock: Callable[[], contextlib.AbstractContextManager[object]] = self.all[-1].lock

    def side(self) -> Runtime:
        """The runtime of the caller."""
        threads = self._threads
        return self.own if threads is None or self.own.runs_here() else threads

    async def beside(self, work: Callable[[], Awaitable[T]], until: float) -> T | None:
        """Run it where no blocked event loop can hold it up, and wait until `until`. None: it is not done yet."""
        threads = self._threads
        if threads is None or self.side() is threads:
            return await work()
        done, results, errors = self.own.wakeup(), list[T](), list[BaseException]()

        async def run() -> None:
            try:
                results.append(await work())
            except BaseException as error:  # noqa: BLE001 - handed to the caller, which raises it
                errors.append(error)
            done.set()  # last: the caller reads both when it finds this

        try:
            threads.spawn(run, "fenced-connect")
        except RuntimeError:  # no thread can be started
            return await work()
        await self.own.wait(done, until)
        if errors:
            raise errors[0]
        return results[0] if results else None

    def runs_here(self) -> bool:
        return any(side.runs_here() for side in self.all)

    def whoami(self) -> object:
        return self.side().whoami()

    def wakeup(self) -> Wakeup:
        """For a caller that waits for it here."""
        return self.side().wakeup()

    async def wait(self, wakeup: Wakeup, until: float | None) -> bool:
        return await self.side().wait(wakeup, until)

    async def readable(self, source: Readable, until: float) -> bool:
        return await self.side().readable(source, until)

    async def writable(self, source: Readable, until: float) -> bool:
        return await self.side().writable(source, until)

    async def connect(
        self, endpoint: Endpoint, until: float, context: ssl.SSLContext | None = None
    ) -> SocketLike:
        return await self.side().connect(endpoint, until, context)

    def stream(self, link: SocketLike) -> ByteStream:
        return self.side().stream(link)

    def selector(self) -> Selector:
        return self.side().selector()

    async def call(self, function: Callable[..., T], *args: Any, urgent: bool = False) -> T:
        return await self.side().call(function, *args, urgent=urgent)

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> Task:
        return self.side().spawn(work, name)

    def deliver(self, call: Callable[..., object], *args: object) -> None:
        self.own.deliver(call, *args)

    def pulse(self) -> Pulse | None:
        return self.own.pulse()
