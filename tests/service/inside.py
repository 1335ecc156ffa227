"""An instance without sockets: ASGI clients of the tests reach the shipped connections over a transport in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from fenced.http1.heads import ResponseHead, request_head
from fenced.http1.limits import HttpLimits
from fenced.http1.responses import EndOfResponse, ResponseReader
from fenced.http1.server import HttpServer, ListenOptions
from fenced.service.api import Api

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class MemoryTransport(asyncio.Transport):
    """Keeps what is written. `client`: the address of the peer; None: a Unix socket."""

    def __init__(self, client: str | None = "127.0.0.1") -> None:
        super().__init__({"peername": None if client is None else (client, 1)})
        self.written: asyncio.Queue[bytes] = asyncio.Queue()
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.put_nowait(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.written.put_nowait(b"")

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        return

    def resume_reading(self) -> None:
        return


class Written:
    """An exchange whose pieces a test takes."""

    done = False
    on_gone = on_pressure = None
    head = request_head(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.write = write

    def begin(self, *_: object) -> None:
        return

    end = begin


def app_of(api: Api) -> Any:
    """An ASGI application: each request is one connection to the instance."""
    server = HttpServer(api, ListenOptions(), HttpLimits())

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        transport = MemoryTransport((scope.get("client") or ["127.0.0.1"])[0])
        connection = server.connection()
        connection.connection_made(transport)
        connection.data_received(await _request(scope, receive))
        gone = asyncio.create_task(_gone(receive, transport))
        try:
            await _pass_back(scope["method"], transport, send)
        finally:
            gone.cancel()
            transport.close()
            connection.connection_lost(None)

    return app


async def _request(scope: Any, receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    target = scope.get("raw_path", quote(scope["path"]).encode()) + (
        b"?" + scope["query_string"] if scope["query_string"] else b""
    )
    kept = [(k, v) for k, v in scope["headers"] if k not in (b"content-length", b"transfer-encoding")]
    lines = [b"%b %b HTTP/1.1" % (scope["method"].encode(), target), *(b"%b: %b" % each for each in kept)]
    return b"\r\n".join((*lines, b"content-length: %d" % len(body), b"", body))


async def _gone(receive: Receive, transport: MemoryTransport) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    transport.close()


async def _pass_back(method: str, transport: MemoryTransport, send: Send) -> None:
    reader = ResponseReader(2**26)
    reader.expect(method)
    while True:
        while (event := reader.next()) is None:
            data = await transport.written.get()
            if not data:
                return
            reader.feed(data)
        if isinstance(event, ResponseHead):
            kept = [header for header in event.headers() if header[0] != b"transfer-encoding"]
            await send({"type": "http.response.start", "status": event.status, "headers": kept})
        elif isinstance(event, EndOfResponse):
            await send({"type": "http.response.body", "body": b""})
            return
        else:
            await send({"type": "http.response.body", "body": event, "more_body": True})
