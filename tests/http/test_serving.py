"""The gate that answers 503 while a lease is not held."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import fenced
from fenced.http import Serving, WsgiServing


@pytest.fixture
def client() -> Iterator[fenced.Client]:
    with fenced.Client("memory:serving") as client:
        yield client


def hello(environ: object, start_response: object) -> list[bytes]:
    assert callable(start_response)
    start_response("200 OK", [])
    return [b"hello"]


def test_asgi(client: fenced.Client) -> None:
    holder: list[fenced.Lease] = []
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("hello"))])
    gate = Serving(app, lambda: holder[0] if holder else None, retry_after=3)

    async def get(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(gate)
        async with httpx.AsyncClient(transport=transport, base_url="http://leader.invalid") as caller:
            return await caller.get(path)

    refused = asyncio.run(get("/"))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "3")
    with client.hold("leader") as lease:
        holder.append(lease)
        assert asyncio.run(get("/")).text == "hello"
        assert asyncio.run(get("/ready")).status_code == 204
    assert not lease.serving()
    assert asyncio.run(get("/")).status_code == asyncio.run(get("/ready")).status_code == 503
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    asyncio.run(gate({"type": "websocket", "path": "/"}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1013}]


def test_wsgi(client: fenced.Client) -> None:
    lease = client.acquire("leader")
    gate = httpx.Client(
        transport=httpx.WSGITransport(WsgiServing(hello, lease)), base_url="http://leader.invalid"
    )
    assert gate.get("/").text == "hello"
    assert gate.get("/ready").status_code == 204
    lease.release()
    assert gate.get("/").status_code == gate.get("/ready").status_code == 503


def test_a_lease_that_is_over_does_not_serve(client: fenced.Client) -> None:
    """Also before anybody has noticed that its deadline has passed."""
    lease = client.acquire("leader")
    assert lease.serving()
    lease._grant.deadline = 0.0
    assert not lease.serving()
