"""What a receiver adds to a request: its own work within the process, and a request in a guarded transaction."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg

from bench.figures import Figure, ratio
from bench.guards_postgresql import SETTINGS, plain
from bench.interleaved import Effort, async_medians, medians
from fenced import sql
from fenced.http import STAMP_HEADER, Before, BeforeHandler, Receiver, WsgiBefore, atomic
from fenced.http.receiving import SCOPE_KEY, read_request
from fenced.values.model import Stamp
from fenced_testkit.servers import PostgresqlServer

ROUNDS = 3000
BATCH = 20
"""Requests in one measurement: one alone is not longer than a few ticks of the clock."""
UPDATE = "UPDATE {} SET qty = qty + 1 WHERE id = %s"
PATHS = {"/orders/{id:int}": "orders/{id}"}
HEADERS = [
    (b"host", b"localhost"),
    (b"accept", b"*/*"),
    (b"accept-encoding", b"gzip, deflate"),
    (b"user-agent", b"bench"),
    (b"content-type", b"application/json"),
    (b"content-length", b"20"),
]


def run(_: Path, effort: Effort) -> Iterator[Figure]:
    yield from asyncio.run(_asgi(effort))
    yield _wsgi(effort)
    yield _atomic(effort)


def _added(key: str, what: str, ours: float, theirs: float, target: float | None) -> Figure:
    ours, theirs = ours / BATCH * 1e6, theirs / BATCH * 1e6
    detail = f"{ours:.1f} µs against {theirs:.1f} µs, an app that answers at once: {ours / theirs:.1f} x"
    return Figure(key, what, ours - theirs, "µs", target, detail)


def _stamp(seq: int) -> Stamp:
    return Stamp("00000000000000aa", ("orders/42",), 7, seq, f"{7:032x}")


def _pairs_of(first: int = 1) -> Iterator[list[tuple[bytes, bytes]]]:
    """The headers of one operation after another of the same lease."""
    for seq in itertools.count(first):
        yield [(STAMP_HEADER.lower().encode(), f'"{_stamp(seq)}"'.encode())]


async def _bare(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _numbered(request: Any, number: int) -> None: ...


async def _asgi(effort: Effort) -> list[Figure]:
    sent = [0]

    async def send(message: Any) -> None:
        sent[0] += 1

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    def batch(app: Any) -> Callable[[], Any]:
        async def call() -> None:
            for _ in range(BATCH):
                await app(next(scopes), receive, send)

        return call

    def scopes_of() -> Iterator[dict[str, Any]]:
        for pairs in _pairs_of():
            yield {"type": "http", "method": "POST", "path": "/orders/42", "headers": [*HEADERS, *pairs]}

    # Each measurement also makes its requests, whatever the app, so this is not part of the difference.
    scopes = scopes_of()
    handler = BeforeHandler("memory:handler-bench")("orders/{number}")(_numbered)

    async def decorated(scope: Any, receive: Any, send: Any) -> None:
        await handler(scope, 42)
        await _bare(scope, receive, send)

    apps = [_bare, Receiver(_bare), Before(_bare, store="memory:bench", names=PATHS), Receiver(decorated)]
    bare, receiver, before, single = await async_medians(
        *(batch(app) for app in apps), rounds=effort.of(ROUNDS), warm_up=effort.size(100)
    )
    return [
        _added("http_receiver", "a request through Receiver: the stamp is read", receiver, bare, None),
        _added("http_before", "a request through Before, with a store in memory", before, bare, 20.0),
        _added("http_before_handler", "the same for Receiver and BeforeHandler", single, bare, 20.0),
    ]


def _wsgi(effort: Effort) -> Figure:
    requests = _pairs_of()

    def app(environ: Any, start_response: Any) -> Any:
        start_response("204 No Content", [])
        return []

    def batch(app: Any) -> Callable[[], None]:
        def call() -> None:
            for _ in range(BATCH):
                environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/orders/42"}
                environ["HTTP_FENCED_STAMP"] = next(requests)[0][1].decode()
                body = app(environ, lambda status, headers: None)
                for _ in body:
                    pass
                if hasattr(body, "close"):
                    body.close()

        return call

    before = WsgiBefore(app, store="memory:wsgi-bench", names=PATHS)
    bare, ours = medians(batch(app), batch(before), rounds=effort.of(ROUNDS), warm_up=effort.size(100))
    return _added("http_wsgi_before", "the same for WSGI: WsgiBefore", ours, bare, 20.0)


def _atomic(effort: Effort) -> Figure:
    with PostgresqlServer(SETTINGS) as server:
        url = server.url(server.create_database("received"))
        with psycopg.connect(url, autocommit=True) as connection:
            for table in ("plain", "guarded"):
                connection.execute(f"CREATE TABLE {table} (id integer PRIMARY KEY, qty integer)".encode())
                connection.execute(f"INSERT INTO {table} VALUES (42, 0)".encode())
            guard = sql.Guard(table="guarded", name="orders/{id}")
            guard.install(connection, mode="enforce")
            stamps = (_stamp(seq) for seq in itertools.count(1))
            requests = _pairs_of(1_000_000)

            def received() -> None:
                scope = {SCOPE_KEY: read_request("POST", "/orders/42", next(requests))}
                with atomic(guard, connection, scope):
                    connection.execute(UPDATE.format("guarded").encode(), [42])

            def guarded() -> None:
                with guard.transaction(connection, next(stamps)):
                    connection.execute(UPDATE.format("guarded").encode(), [42])

            unguarded = plain(connection, UPDATE.format("plain").encode(), [42])
            theirs, ours, own = medians(
                unguarded, received, guarded, rounds=effort.of(1500), warm_up=effort.size(300)
            )
            what = "a request in atomic(): read the stamp, announce, UPDATE, COMMIT (PostgreSQL)"
            against = f"BEGIN, UPDATE, COMMIT; the guard alone {own / theirs:.2f} x"
            return ratio("http_atomic", what, ours, theirs, target=1.5, against=against)
