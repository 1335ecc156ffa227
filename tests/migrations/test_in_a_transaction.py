"""A guard is installed, replaced and removed in the program's own transaction, on every kind of connection."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import fenced
from fenced.cli import main
from fenced.client import registry
from fenced.guards.spec import Spec
from fenced.runtime.blocking import step
from fenced.sql import AsyncGuard, Guard
from fenced.sql.engines import on
from fenced.stores.postgresql.guard import install

ASKED: dict[str, Any] = {"table": "orders", "name": "orders/{id}"}
TABLES = ("CREATE TABLE orders (id integer PRIMARY KEY, qty integer)", "CREATE TABLE note (text varchar(9))")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    (tmp_path / "shop.db").touch()
    return f"sqlite:///{tmp_path}/shop.db"


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    """A database with a table to guard; the same story on every engine."""
    return with_tables(request.getfixturevalue(f"{request.param}_url"))


def with_tables(url: str) -> str:
    connection = registry.engine(url).connect(url)
    for statement in TABLES:
        connection.execute(statement)
    connection.close()
    return url


def seen(onlooker: Any) -> tuple[list[tuple[str, str]], list[str]]:
    """What another session sees: the guards, and the program's own rows."""
    guards = step(on(onlooker, "blocking").table(Spec("any", "any"), True).registered())
    notes = onlooker.execute("SELECT text FROM note ORDER BY text").fetchall()
    return [(guard.spec.name, guard.spec.installs) for guard in guards], [text for (text,) in notes]


def status_of(*words: str) -> object:
    """The exit status of a command line."""
    with pytest.raises(SystemExit) as left:
        main(words)
    return left.value.code


async def now(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


class Program:
    """A program's connection, the guard of its colour, and its own way to run a statement and to end a transaction."""

    def __init__(self, connection: Any, execute: Callable[[str], Any], *, begin: str | None = None) -> None:
        package = type(connection).__module__
        suspends = "Async" in type(connection).__name__ or package.startswith(("asyncpg", "aiosqlite"))
        self.guard: Any = (AsyncGuard if suspends else Guard)(**ASKED)
        self.other: Any = (AsyncGuard if suspends else Guard)(table="orders", name="order/{id}", rule="once")
        self.connection = connection
        self.execute = execute
        self._begin = begin

    async def begin(self) -> None:
        if self._begin:
            await now(self.execute(self._begin))

    async def end(self, how: str) -> None:
        if self._begin:
            await now(self.execute(how))
        else:
            await now(getattr(self.connection, how.lower())())


@asynccontextmanager
async def program(kind: str, url: str) -> AsyncIterator[Program]:
    path = url.removeprefix("sqlite:///")
    async with AsyncExitStack() as stack:
        if kind.startswith("psycopg"):
            db = stack.enter_context(psycopg.connect(url, autocommit=kind == "psycopg"))
            yield Program(db, db.execute, begin="BEGIN" if kind == "psycopg" else None)
        elif kind == "asyncpg":
            pg = await asyncpg.connect(url)
            stack.push_async_callback(pg.close)
            yield Program(pg, pg.execute, begin="BEGIN")
        elif kind == "sqlite3":
            lite = sqlite3.connect(path, isolation_level=None)
            stack.callback(lite.close)
            yield Program(lite, lite.execute, begin="BEGIN")
        elif kind == "aiosqlite":
            aio = await stack.enter_async_context(aiosqlite.connect(path, isolation_level=None))
            yield Program(aio, aio.execute, begin="BEGIN")
        elif kind == "async-sqlalchemy":
            suspended = create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"))
            stack.push_async_callback(suspended.dispose)
            joined = await stack.enter_async_context(suspended.connect())
            yield Program(joined, lambda sql: joined.execute(sa.text(sql)))
        else:
            engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
            stack.callback(engine.dispose)
            made: Any = Session(engine) if kind.endswith("session") else engine.connect()
            target = stack.enter_context(made)
            yield Program(target, lambda sql: target.execute(sa.text(sql)))


KINDS = {
    "postgresql": (
        *("psycopg", "psycopg-implicit", "asyncpg"),
        *("sqlalchemy-connection", "sqlalchemy-session", "async-sqlalchemy"),
    ),
    "sqlite": ("sqlite3", "aiosqlite", "sqlalchemy-connection"),
}


def test_the_program_commits_or_rolls_back(url: str) -> None:
    """Nothing is committed or rolled back in its place, and a failure undoes no work of the program's own."""

    onlooker = registry.engine(url).connect(url)

    async def story(kind: str) -> None:
        async with program(kind, url) as own:
            db = own.connection
            await own.begin()
            await now(own.execute("DELETE FROM note"))
            await now(own.guard.install(db))
            await own.end("ROLLBACK")
            assert seen(onlooker)[0] == []
            await own.begin()
            await now(own.execute("INSERT INTO note VALUES ('one')"))
            await now(own.guard.install(db, mode="require"))
            assert seen(onlooker)[0] == [], "committed too early"
            with pytest.raises(
                fenced.Misconfigured, match=r"orders/\{id\}, rule retry.* order/\{id\}, rule once"
            ):
                await now(own.other.install(db))
            await now(own.execute("INSERT INTO note VALUES ('two')"))
            await own.end("COMMIT")
            assert seen(onlooker) == ([("orders/{id}", "retry")], ["one", "two"])
            await own.begin()
            await now(own.execute("DELETE FROM note"))
            script = await now(own.guard.script(db, transaction=False))
            assert "TRIGGER" in script and "COMMIT;" not in script and not script.startswith("BEGIN")
            await now(own.guard.uninstall(db))
            await own.end("ROLLBACK")
            assert seen(onlooker) == ([("orders/{id}", "retry")], ["one", "two"])
            await own.begin()
            await now(own.execute("DELETE FROM note"))
            await now(own.guard.uninstall(db))
            await own.end("COMMIT")
            assert seen(onlooker) == ([], [])

    for kind in KINDS[registry.engine(url).name]:
        try:
            asyncio.run(story(kind))
        except BaseException as error:
            error.add_note(f"on {kind}")
            raise
    onlooker.close()


def test_an_installed_guard_is_replaced_only_if_that_is_said(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped template in a migration that runs again must not become the live one."""
    db = registry.engine(url).connect(url)
    Guard(**ASKED).install(db, mode="enforce")
    Guard(**ASKED).install(db)
    for changed in ({"name": "order/{id}"}, {"rule": "once"}, {"mandatory": False}):
        with pytest.raises(
            fenced.Misconfigured, match=r"orders is guarded under orders/\{id\}, rule retry; .* asks"
        ):
            Guard(**{**ASKED, **changed}).install(db)
        assert seen(db)[0] == [("orders/{id}", "retry")]
    typed = ["guard", "install", url, "--table", "orders", "--name", "order/{id}"]
    assert status_of(*typed) == 78
    said = capsys.readouterr().err
    assert "orders/{id}, rule retry" in said and "--replace" in said
    assert status_of(*typed, "--replace") == 0
    assert seen(db)[0] == [("order/{id}", "retry")]
    Guard(**ASKED).install(db, replace=True)
    assert seen(db)[0] == [("orders/{id}", "retry")]
    db.close()


def test_a_script_refuses_a_guard_that_was_installed_after_it_was_written(postgresql_url: str) -> None:
    with psycopg.connect(with_tables(postgresql_url), autocommit=True) as db:
        script = Guard(table="orders", name="order/{id}").script(db)
        Guard(**ASKED).install(db)
        stale = Guard(table="orders", name="order/{id}").script(db)
        assert stale.count("is guarded under") == 1 and script.count("is guarded under") == 1
        with pytest.raises(psycopg.Error, match=r"orders is guarded under orders/\{id\}, rule retry; "):
            db.execute(stale.encode())
        db.execute("ROLLBACK")
        db.execute(Guard(table="orders", name="order/{id}").script(db, replace=True).encode())
        assert seen(db)[0] == [("order/{id}", "retry")]


def test_of_two_installations_at_once_the_second_sees_the_first(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "LOCK_TIMEOUT", "60s")
    waiting = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
    with (
        psycopg.connect(with_tables(postgresql_url)) as first,
        psycopg.connect(postgresql_url, autocommit=True) as second,
        psycopg.connect(postgresql_url, autocommit=True) as onlooker,
        ThreadPoolExecutor(1) as pool,
    ):
        Guard(table="note", name="note").install(first)  # so that the schema is there
        for asked, outcome in (({"name": "order/{id}"}, "orders/{id}, rule retry; "), ({}, None)):
            first.execute("SELECT 1")
            Guard(**ASKED).install(first)
            other = pool.submit(Guard(**{**ASKED, **asked}).install, second)
            while not onlooker.execute(waiting, (second.info.backend_pid,)).fetchall() and not other.done():
                pass
            first.commit()
            error = other.exception()
            assert outcome in str(error) if outcome else error is None, error
            Guard(**ASKED).uninstall(second)


def test_a_table_in_use_is_left_alone_and_its_users_are_named(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "LOCK_TIMEOUT", "50ms")
    url, orders = with_tables(postgresql_url), Guard(**ASKED)
    with (
        psycopg.connect(url) as db,
        psycopg.connect(url, application_name="monthly report") as reader,
        psycopg.connect(url) as writer,
    ):
        orders.install(db)
        reader.execute("SELECT * FROM orders")
        orders.install(db)  # a reader is not in its way
        who = rf"in use by process {reader.info.backend_pid} \(postgres, monthly report; idle in transaction for"
        db.execute("INSERT INTO note VALUES ('own')")
        with pytest.raises(fenced.Contended, match=who):
            orders.uninstall(db)
        writer.execute("INSERT INTO orders VALUES (1, 1)")
        with pytest.raises(
            fenced.Contended, match=rf"in use by process {writer.info.backend_pid} \(postgres; idle"
        ):
            orders.install(db)
        db.commit()
        assert seen(writer) == ([("orders/{id}", "retry")], ["own"])
        assert status_of("guard", "uninstall", url, "--table", "orders") == 75
        assert "monthly report" in capsys.readouterr().err
        reader.rollback()
        writer.rollback()
        orders.uninstall(db)


def test_where_it_cannot_be_done_it_says_so(postgresql_url: str) -> None:
    """Each is a Misuse, and no coroutine is left behind that nobody awaits (which pytest would report)."""
    url, orders = with_tables(postgresql_url), Guard(**ASKED)
    with psycopg.connect(url) as failed:
        with pytest.raises(psycopg.Error):
            failed.execute("SELECT nonsense")
        for work in (orders.install, orders.script, orders.uninstall):
            with pytest.raises(fenced.Misuse, match="roll back first"):
                work(failed)
        failed.rollback()
        failed.execute("SELECT 1")
        for refused in (lambda: orders.set_mode(failed, "enforce"), lambda: orders.adopt(failed, "ab" * 8)):
            with pytest.raises(fenced.Misuse, match="commit or roll back first"):
                refused()
    for work in (orders.install, orders.script, orders.uninstall):
        with pytest.raises(fenced.Misuse, match="closed"):
            work(failed)
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    with engine.connect() as committing, pytest.raises(fenced.Misuse, match="AUTOCOMMIT"):
        committing.execute(sa.text("SELECT 1"))
        orders.install(committing)
    engine.dispose()
    lite = sa.create_engine("sqlite://")
    with lite.connect() as reading, pytest.raises(fenced.Unsupported, match="for migrations"):
        orders.announce_within(reading, fenced.Stamp("ab" * 8, ("orders/42",), 5, 1, f"{5:032x}"))
    lite.dispose()
