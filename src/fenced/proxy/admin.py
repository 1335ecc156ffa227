"""The operators' port: is it alive, is it ready, what has happened."""

from __future__ import annotations

import asyncio
import contextlib

from fenced.errors import Misconfigured
from fenced.proxy.server import FencingProxy

_SECONDS = 5.0


async def listen(proxy: FencingProxy, host: str, port: int) -> asyncio.Server:
    """Answer GET /healthz, /readyz and /metrics, one request a connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError, OSError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(_SECONDS):
                request = (await reader.readuntil(b"\r\n\r\n")).split(b" ")
                status, text = await _answer(proxy, request[0], request[1].partition(b"?")[0])
                body = text.encode()
                head = f"HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\n"
                head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
                writer.write(head.encode() + (b"" if request[0] == b"HEAD" else body))
                await writer.drain()
        writer.close()

    try:
        return await asyncio.start_server(answer, host, port)
    except OSError as error:
        raise Misconfigured(f"cannot listen on {host}:{port}: {error}") from error


async def _answer(proxy: FencingProxy, method: bytes, path: bytes) -> tuple[str, str]:
    if method not in (b"GET", b"HEAD"):
        return "405 Method Not Allowed", "GET or HEAD\n"
    if path == b"/healthz":
        return "200 OK", "alive\n"
    if path == b"/metrics":
        return "200 OK", proxy.metrics()
    if path == b"/readyz":
        why = await proxy.ready()
        return ("200 OK", "ready\n") if why is None else ("503 Service Unavailable", f"not ready: {why}\n")
    return "404 Not Found", "GET /healthz, /readyz or /metrics\n"
