"""Calls of ASGI and WSGI apps within this process."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterable
from typing import Any

from fenced.http.asgi import App
from fenced.http.protocol import fence_headers
from fenced.http.wsgi import WsgiApp
from fenced.proofs import Proof
from fenced.values.model import Stamp
from tests.http.serving import Reply

Pairs = Iterable[tuple[bytes, bytes]]


def pairs_of(fence: Stamp | Proof | None) -> list[tuple[bytes, bytes]]:
    if fence is None:
        return []
    return [(name.lower().encode(), value.encode()) for name, value in fence_headers(fence).items()]


async def call_asgi(
    app: App,
    method: str,
    path: str,
    headers: Pairs = (),
    statuses: list[int] | None = None,
    body: bytes = b"",
) -> Reply:
    """`statuses`: gets the status of the answer even if the app fails after it."""
    sent: list[Any] = []
    path, _, query = path.partition("?")
    length = [(b"content-length", b"%d" % len(body))] if body else []
    bodies = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return bodies.pop() if bodies else await asyncio.Event().wait()  # the client stays connected

    async def send(message: Any) -> None:
        sent.append(message)
        if statuses is not None and "status" in message:
            statuses.append(message["status"])

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [*headers, *length],
        "query_string": query.encode(),
    }
    await app(scope, receive, send)
    start, *rest = sent
    found = {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
    return Reply(start["status"], found, b"".join(message.get("body", b"") for message in rest))


def call_wsgi(app: WsgiApp, method: str, path: str, headers: Pairs = (), body: bytes = b"") -> Reply:
    started: list[Any] = []

    def start_response(status: str, headers: Any, exc_info: Any = None) -> Callable[[bytes], object]:
        started[:] = status, headers
        return lambda _: None

    parts = app(environ_of(method, path, headers, body), start_response)
    try:
        content = b"".join(parts)
    finally:
        if hasattr(parts, "close"):
            parts.close()
    status, found = started
    return Reply(int(status.split()[0]), {name.lower(): value for name, value in found}, content)


def environ_of(method: str, path: str, headers: Pairs = (), body: bytes = b"") -> dict[str, Any]:
    path, _, query = path.partition("?")
    environ: dict[str, Any] = {
        "SERVER_NAME": "here",
        "SERVER_PORT": "80",
        "wsgi.url_scheme": "http",
        "REQUEST_METHOD": method,
        "PATH_INFO": path.encode("utf-8", "surrogateescape").decode("latin-1"),
        "QUERY_STRING": query,
        "CONTENT_LENGTH": str(len(body)) if body else "",
        "wsgi.input": io.BytesIO(body),
    }
    for name, value in headers:  # as servers do it: repeated headers are joined
        key = "HTTP_" + name.decode("latin-1").upper().replace("-", "_")
        text = value.decode("latin-1")
        environ[key] = f"{environ[key]},{text}" if key in environ else text
    return environ
