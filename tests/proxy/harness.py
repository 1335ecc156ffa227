"""An upstream that knows nothing of fencing, a proxy in front of it, and clients that speak HTTP by hand."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fenced.proxy.server import FencingProxy, ProxyOptions
from tests.proxy.worlds import NAME, stamp_of

PATIENCE = 60.0
_NUMBERS = itertools.count()
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@dataclass
class Arrived:
    """A request that has reached the upstream."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter

    @property
    def token(self) -> int:
        return int(self.headers["fenced-stamp"].split(":")[2])


@dataclass
class Upstream:
    """Notes what arrives, then does what `behave` does; its result is sent, and b"" closes the connection."""

    behave: Callable[[Arrived], Awaitable[bytes]] | None = None
    arrived: list[Arrived] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if (task := asyncio.current_task()) is not None:
            self.tasks.add(task)  # the loop itself holds no task that waits for ever
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                request = await read_request(reader, writer)
                self.arrived.append(request)
                answer = OK if self.behave is None else await self.behave(request)
                if not answer:
                    break
                writer.write(answer)
                await writer.drain()
        writer.close()


async def read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Arrived:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await read_body(reader, headers)
    return Arrived(method, target, headers, body, writer)


async def read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", 0)))
    body = []
    while size := int(await reader.readline(), 16):
        body.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while await reader.readline() != b"\r\n":
        pass  # trailers
    return b"".join(body)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def problem(self) -> str:
        return str(json.loads(self.body)["type"]).rpartition(":")[2]


@dataclass
class Caller:
    """One connection of a client."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self, method: str = "POST") -> Answer:
        async with asyncio.timeout(PATIENCE):
            first, *lines = (
                (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip("\r\n").split("\r\n")
            )
            status = int(first.split(" ")[1])
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
            }
            if method == "HEAD" or status in (204, 304) or status < 200:
                return Answer(status, headers, b"")
            return Answer(status, headers, await read_body(self.reader, headers))

    async def ask(
        self, method: str, target: str, token: int | None = None, body: bytes = b"", **more: Any
    ) -> Answer:
        self.writer.write(request(method, target, token, body, **more))
        return await self.answer(method)

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def raw(self, data: bytes) -> bytes:
        """Send, and read until the proxy closes the connection."""
        self.writer.write(data)
        async with asyncio.timeout(PATIENCE):
            return await self.reader.read()


def request(
    method: str,
    target: str,
    token: int | None = None,
    body: bytes = b"",
    headers: str = "",
    name: str = NAME,
    host: str = "shop",
) -> bytes:
    stamp = f'Fenced-Stamp: "{stamp_of(token, name, 1)}"\r\n' if token else ""
    length = f"Content-Length: {len(body)}\r\n" if body or method not in ("GET", "HEAD") else ""
    return f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n{stamp}{headers}{length}\r\n".encode() + body


@dataclass
class Stage:
    """A proxy in front of an upstream."""

    proxy: FencingProxy
    upstream: Upstream
    port: int
    reports: list[str]
    callers: list[Caller] = field(default_factory=list)
    host: str = "shop"
    """What requests say in Host."""

    async def caller(self, **more: Any) -> Caller:
        found = Caller(*await asyncio.open_connection("127.0.0.1", self.port, **more))
        self.callers.append(found)
        return found

    async def ask(
        self, method: str, target: str, token: int | None = None, body: bytes = b"", **more: Any
    ) -> Answer:
        caller = await self.caller()
        return await caller.ask(method, target, token, body, host=self.host, **more)


async def until(condition: Callable[[], object]) -> None:
    """Wait for an event of which nobody is notified."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def upstream_server(
    behave: Callable[[Arrived], Awaitable[bytes]] | None = None,
) -> AsyncIterator[Upstream]:
    upstream = Upstream(behave)
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0, limit=2**24)
    upstream.port = server.sockets[0].getsockname()[1]
    try:
        yield upstream
    finally:
        server.close()
        for task in upstream.tasks:
            task.cancel()
        await asyncio.gather(*upstream.tasks, return_exceptions=True)
        await asyncio.sleep(0)  # their connections are closed in the next turn of the loop


@asynccontextmanager
async def proxied(
    behave: Callable[[Arrived], Awaitable[bytes]] | None = None,
    *,
    store: str | None = None,
    upstream: Upstream | None = None,
    upstream_url: str | None = None,
    **options: Any,
) -> AsyncIterator[Stage]:
    """A proxy, with times so long that they do not matter unless a test says so."""
    async with contextlib.AsyncExitStack() as stack:
        if upstream is None:
            upstream = await stack.enter_async_context(upstream_server(behave))
        reports: list[str] = []
        chosen: dict[str, Any] = {
            "upstream": upstream_url or f"http://127.0.0.1:{upstream.port}",
            "names": ("orders/{path.id}",),
            "listen": ("127.0.0.1", 0),
            "timeout": PATIENCE,
            "settle": PATIENCE,
            "wait": PATIENCE,
            "grace": PATIENCE,
            **options,
        }
        if store is None:
            store = f"memory:{next(_NUMBERS)}"  # of its own
        proxy = FencingProxy(ProxyOptions(store=store, **chosen), reports.append)
        _, port = await proxy.start()
        stage = Stage(proxy, upstream, port, reports)
        try:
            yield stage
        finally:
            for caller in stage.callers:
                await caller.close()
            await proxy.stop()
