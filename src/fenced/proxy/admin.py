"""The operators' port: is it alive, is it ready, what has happened, and what an operator knows to be settled."""

from __future__ import annotations

import asyncio
import contextlib
import json
from datetime import UTC, datetime
from ipaddress import ip_address
from urllib.parse import parse_qs, urlsplit

from fenced.errors import FencedError, Misconfigured, Misuse, shown
from fenced.proxy.messages import BadMessage, PassedRequest, request_head
from fenced.proxy.server import FencingProxy
from fenced.values.model import check_name

SETTLE = b"/settle"
_SECONDS = 10.0


async def listen(proxy: FencingProxy, host: str, port: int) -> asyncio.Server:
    """Answer GET /healthz, /readyz, /metrics and /records and POST /settle, one request a connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError, OSError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(_SECONDS):
                data = await reader.readuntil(b"\r\n\r\n")
                status, text = await _answer(proxy, data, host)
                body = text.encode()
                head = f"HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\n"
                head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
                writer.write(head.encode() + (b"" if data.startswith(b"HEAD ") else body))
                await writer.drain()
        writer.close()

    try:
        return await asyncio.start_server(answer, host, port)
    except OSError as error:
        raise Misconfigured(f"cannot listen on {host}:{port}: {error}") from error


async def _answer(proxy: FencingProxy, data: bytes, host: str) -> tuple[str, str]:
    try:
        request = request_head(data)
    except BadMessage as error:
        return "400 Bad Request", f"{error}\n"
    if request is None:
        return "400 Bad Request", "not a request of HTTP/1.1\n"
    if (why := _another_site(request, host)) is not None:
        return "403 Forbidden", f"{why}\n"
    path, _, query = request.target.partition(b"?")
    if path == SETTLE and request.method == b"POST":
        return await _settle(proxy, request, query)
    if path == SETTLE or request.method not in (b"GET", b"HEAD"):
        return "405 Method Not Allowed", "GET or HEAD; POST /settle\n"
    if path == b"/healthz":
        return "200 OK", "alive\n"
    if path == b"/metrics":
        return "200 OK", proxy.metrics()
    if path == b"/records":
        return "200 OK", "".join(proxy.callers.lines())
    if path == b"/readyz":
        why = await proxy.ready()
        return ("200 OK", "ready\n") if why is None else ("503 Service Unavailable", f"not ready: {why}\n")
    return "404 Not Found", "GET /healthz, /readyz, /metrics or /records; POST /settle\n"


def _another_site(request: PassedRequest, host: str) -> str | None:
    """Why a request may come from a page of another site in an operator's browser; None if it does not.

    Such a page can make its own name lead to this port, so a name in Host must be one that the operator chose.
    """
    headers = request.headers()
    if any(name == b"origin" for name, _ in headers):
        return "this port answers no pages: the request has an Origin"
    named = next((value.decode("latin-1") for name, value in headers if name == b"host"), None)
    if named is None:
        return None  # HTTP/1.0, which no browser speaks
    try:
        wanted = urlsplit(f"//{named}").hostname or ""
    except ValueError:
        wanted = ""
    if wanted in ("localhost", host.lower()):
        return None
    try:
        ip_address(wanted)
    except ValueError:
        return f"Host is the address of this port, localhost or the host of --admin, not {shown(named)}"
    return None


async def _settle(proxy: FencingProxy, request: PassedRequest, query: bytes) -> tuple[str, str]:
    """What an operator knows: nothing of this name runs any more whose outcome was unknown."""
    # The header says who it was, and no page in an operator's browser can send it here.
    operators = [value for name, value in request.headers() if name == b"fenced-operator"]
    names = parse_qs(query.decode()).get("name", [])
    if len(operators) != 1 or not operators[0] or len(names) != 1:
        return (
            "400 Bad Request",
            "POST /settle?name=NAME, with a header Fenced-Operator that says who you are\n",
        )
    try:
        settled, left = await proxy.gate.settle(check_name(names[0]))
    except Misuse as error:
        return "400 Bad Request", f"{error}\n"
    except FencedError as error:
        return "503 Service Unavailable", f"nothing was settled: {error}\n"
    at, by = datetime.now(UTC).isoformat(timespec="milliseconds"), operators[0].decode("latin-1")
    tokens = [permit.token for permit in settled]
    proxy.report(
        "audit " + json.dumps({"at": at, "by": by, "did": "settle", "name": names[0], "tokens": tokens})
    )
    text = f"{names[0]}: {len(settled)} settled\n"
    if left:
        text += f"{len(left)} left, of proxies that may be alive; if one is dead, repeat this in 4 seconds\n"
    return "200 OK", text
