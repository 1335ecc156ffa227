"""Atomic: requests in the program's own transaction, within this process."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import aiosqlite
import psycopg
import pytest
from fastapi import Depends, FastAPI, Request
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from starlette.responses import PlainTextResponse, StreamingResponse

import fenced
from fenced import sql
from fenced.http import Receiver, WsgiReceiver, atomic, replies_table
from fenced.proofs import HmacKey
from fenced.values.decision import Rule
from tests.http.calling import call_asgi, call_wsgi, environ_of, pairs_of
from tests.http.serving import Reply, stamp

WRITE = "UPDATE orders SET qty = qty - 1 WHERE id = 42"
NAME = "orders/42"


class Shop:
    """A guarded table in SQLite behind both kinds of receivers. A reply is as long as the path says."""

    def __init__(self, folder: Path, rule: Rule, mode: str, mandatory: bool = True) -> None:
        self.path = str(folder / "shop.db")
        self.options: dict[str, Any] = {
            "table": "orders",
            "name": "orders/{id}",
            "rule": rule,
            "mandatory": mandatory,
        }
        self.replies = None if rule == "retry" else "fenced_replies"
        with sqlite3.connect(self.path, isolation_level=None) as db:
            db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, qty INTEGER)")
            db.execute("INSERT INTO orders VALUES (42, 10)")
            db.execute(replies_table())
            sql.Guard(**self.options).install(db, mode=mode)
        db.close()

    def wsgi_app(self, environ: Any, start_response: Any) -> Any:
        db = sqlite3.connect(self.path, isolation_level=None)
        response = self.response(environ["PATH_INFO"])
        environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"] or 0))
        try:
            with atomic(sql.Guard(**self.options), db, environ, replies=self.replies) as operation:
                db.execute(WRITE)
                if self.replies:
                    operation.keep(response)
        finally:
            db.close()
        start_response("201 Created", [])
        return [b"done"]

    async def asgi_app(self, scope: Any, receive: Any, send: Any) -> None:
        response = self.response(scope["path"])
        await receive()
        async with aiosqlite.connect(self.path, isolation_level=None) as db:
            guard = sql.AsyncGuard(**self.options)
            async with atomic(guard, db, scope, replies=self.replies) as operation:
                await db.execute(WRITE)
                if self.replies:
                    await operation.keep(response)
        await response(scope, receive, send)

    @staticmethod
    def response(path: str) -> Any:
        if path == "/streamed":
            return StreamingResponse(iter([b"x"]), 201)
        size = int(path[1:])
        return PlainTextResponse("x" * size, 201 if size else 404)

    def qty(self) -> int:
        with sqlite3.connect(self.path) as db:
            ((qty,),) = db.execute("SELECT qty FROM orders")
        db.close()
        return int(qty)


class Asgi:
    def __init__(self, shop: Shop, **options: Any) -> None:
        self.app = Receiver(shop.asgi_app, **options)

    def __call__(self, path: str, fence: Any, *headers: tuple[bytes, bytes], body: bytes = b"") -> Reply:
        return asyncio.run(call_asgi(self.app, "POST", path, [*pairs_of(fence), *headers], body=body))


class Wsgi:
    def __init__(self, shop: Shop, **options: Any) -> None:
        self.app = WsgiReceiver(shop.wsgi_app, **options)

    def __call__(self, path: str, fence: Any, *headers: tuple[bytes, bytes], body: bytes = b"") -> Reply:
        return call_wsgi(self.app, "POST", path, [*pairs_of(fence), *headers], body)


both = pytest.mark.parametrize("receiver", [Asgi, Wsgi])


@both
def test_the_mode_of_the_table_decides_about_requests_without_a_stamp(receiver: Any, tmp_path: Path) -> None:
    shop = Shop(tmp_path, "retry", "observe")
    call = receiver(shop)
    assert (call("/1", None).status, shop.qty()) == (201, 9)
    with sqlite3.connect(shop.path, isolation_level=None) as db:
        sql.Guard(**shop.options).set_mode(db, "require")
    db.close()
    assert (call("/1", None).kind, shop.qty()) == ("missing", 9)
    assert (call("/1", stamp(1, 1, NAME)).status, shop.qty()) == (201, 8)


def test_without_triggers_a_request_needs_a_stamp(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "retry", "observe", mandatory=False)
    assert (Wsgi(shop)("/1", None).kind, shop.qty()) == ("missing", 10)


@both
def test_a_repeat_gets_the_kept_reply_or_applied(receiver: Any, tmp_path: Path) -> None:
    shop = Shop(tmp_path, "sequenced", "require")
    call = receiver(shop)
    for seq, (path, again) in enumerate(
        (("/65536", "replayed"), ("/65537", "applied"), ("/streamed", "applied")), 1
    ):
        first, second = call(path, stamp(1, seq, NAME)), call(path, stamp(1, seq, NAME))
        assert first.status == 201 and not first.replayed
        assert ("replayed" if second.replayed else second.kind) == again
        assert shop.qty() == 10 - seq
    assert call("/2", stamp(1, 4, NAME)).status == 201
    assert call("/3", stamp(1, 4, NAME)).kind == "invalid", "the same stamp with another request"


@both
def test_a_kept_reply_goes_to_its_caller_alone(receiver: Any, tmp_path: Path) -> None:
    shop, owner = Shop(tmp_path, "sequenced", "require"), (b"authorization", b"owner")
    call, mine = receiver(shop), stamp(1, 1, NAME)
    assert call("/7", mine, owner, body=b"one").status == 201
    assert call("/7", mine, owner, body=b"one").replayed
    for stranger in ((b"authorization", b"other"), (b"x-nothing", b"owner")):
        reply = call("/7", mine, stranger, body=b"one")
        assert (reply.kind, reply.replayed) == ("applied", False)
    assert call("/7", mine, owner, body=b"two").kind == "invalid"
    assert call("/7?x=1", mine, owner, body=b"one").kind == "invalid"
    call("/0", stamp(1, 2, NAME), owner)
    assert call("/0", stamp(1, 2, NAME), owner).kind == "applied", "only 2xx is kept"
    assert shop.qty() == 8


@both
def test_proofs_are_checked_by_the_receiver_or_by_the_guard(receiver: Any, tmp_path: Path) -> None:
    key = HmacKey("ours", b"k" * 32)
    shop = Shop(tmp_path, "retry", "require")
    call, mine = receiver(shop, keys=[key]), stamp(1, 1, NAME)
    assert call("/1", key.sign(mine)).status == 201
    assert call("/1", mine).kind == "forged"
    assert receiver(shop)("/1", key.sign(mine)).kind == "unsupported", "SQLite's guard cannot check one"


def test_misuse_is_an_error_of_the_program(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "retry", "require")
    with pytest.raises(fenced.Misuse, match=r"fenced\.http\.Receiver"):
        shop.wsgi_app(environ_of("POST", "/1"), None)
    shop.replies = "fenced_replies"
    with pytest.raises(fenced.Misuse, match="retry"):
        Wsgi(shop)("/1", stamp(1, 1, NAME))


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


async def test_in_fastapi_a_dependency_commits_before_the_answer_only_with_function_scope(
    postgresql_url: str,
) -> None:
    """SQLAlchemy sends the INSERT at COMMIT, and the database refuses it. With FastAPI's default that is too late."""
    guard = sql.AsyncGuard(table="orders", name="orders/{id}")
    with psycopg.connect(postgresql_url, autocommit=True) as db:
        db.execute("CREATE TABLE orders (id int PRIMARY KEY)")
        sql.Guard(table="orders", name="orders/{id}").install(db, mode="require")
    app = FastAPI()
    app.add_middleware(Receiver)
    engine = create_async_engine(postgresql_url.replace("postgresql:", "postgresql+psycopg:"))

    async def session_of(request: Request) -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as session, atomic(guard, session, request):
            yield session

    @app.post("/early")
    async def early(session: Annotated[AsyncSession, Depends(session_of, scope="function")]) -> str:
        session.add(Order(id=43))  # the lease is of order 42
        return "done"

    @app.post("/late")
    async def late(session: Annotated[AsyncSession, Depends(session_of)]) -> str:
        session.add(Order(id=43))
        return "done"

    mine = pairs_of(stamp(1, 1, NAME))
    assert (await call_asgi(app, "POST", "/early", mine)).kind == "uncovered"
    statuses: list[int] = []
    with pytest.raises(fenced.Uncovered):
        await call_asgi(app, "POST", "/late", mine, statuses)
    assert statuses == [200], "the client believes that it was done"
    await engine.dispose()
