"""Where claims are tested: a table, the authority of its workers, and what a stalled worker looks like."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pymysql

import fenced
from fenced.runtime.blocking import step
from fenced.stores.mariadb.address import MariadbAddress
from fenced.work import ClaimedRow, Claims, ClaimWorker

OPTIONS: dict[str, Any] = {
    "table": "runs",
    "name": "runs/{id}",
    "ready": "status = 'pending'",
    "order": "priority DESC, id",
    "taken": {"status": "running"},
    "back": {"status": "pending"},
    "dead": {"status": "failed"},
    "max_attempts": 3,
    "backoff": (0.0, 0.0),
    "error": "problem",
}
TABLE = (
    "CREATE TABLE runs (id {key}, status text NOT NULL DEFAULT ('pending'), priority int NOT NULL DEFAULT 0, "
    "input text, output text, problem text)"
)
KEYS = {
    "postgresql": "bigint PRIMARY KEY",
    "sqlite": "INTEGER PRIMARY KEY",
    "mariadb": "bigint PRIMARY KEY",
}


class ShortConnection(pymysql.Connection):
    """With a method that the connections of the other drivers have, too."""

    def execute(self, sql: str) -> Any:
        cursor = self.cursor()
        cursor.execute(sql)
        return cursor


def mariadb_connection(url: str, **options: Any) -> ShortConnection:
    address = MariadbAddress(url)
    ((host, port),) = address.members
    return ShortConnection(
        host=host, port=port, user=address.user, database=address.database, **{"autocommit": True, **options}
    )


@dataclass
class Place:
    """A table with claims in mode `require`, and one row that is ready."""

    engine: str
    data: str
    authority: str
    stack: ExitStack
    claims: Claims = field(default_factory=lambda: Claims(**OPTIONS))

    @property
    def dsn(self) -> str:
        return f"sqlite:///{self.data}" if self.engine == "sqlite" else self.data

    def connect(self, **options: Any) -> Any:
        if self.engine == "postgresql":
            connection: Any = psycopg.connect(self.data, **{"autocommit": True, **options})
        elif self.engine == "mariadb":
            connection = mariadb_connection(self.data, **options)
        else:
            connection = sqlite3.connect(self.data, isolation_level=None, timeout=10, check_same_thread=False)
        self.stack.callback(connection.close)
        return connection

    def client(self, **options: Any) -> fenced.Client:
        return self.stack.enter_context(fenced.Client(self.authority, **options))

    def worker(self, client: fenced.Client | None = None, **options: Any) -> ClaimWorker:
        worker = self.claims.worker(client or self.client(), **options)
        self.stack.callback(_end, worker)
        return worker.__enter__()

    def prepare(self, mode: str = "require") -> Any:
        """Install claims on the table; of a copied database that is done."""
        db = self.connect()
        if self.engine != "postgresql":
            db.execute(TABLE.format(key=KEYS[self.engine]))
            self.claims.install(db, mode="require")
        if mode != "require":
            self.claims.set_mode(db, mode)
        db.execute("INSERT INTO runs (id) VALUES (1)")
        return db


def _end(worker: ClaimWorker) -> None:
    with suppress(fenced.LeaseLost):
        worker.__exit__(None, None, None)


def prepare(db: psycopg.Connection[Any], url: str, *, beside: bool) -> None:
    """Make a database with claims on an empty table."""
    if beside:
        with fenced.Client(url) as client:
            client.acquire("warm").release()
    db.execute(TABLE.format(key=KEYS["postgresql"]))
    Claims(**OPTIONS).install(db, mode="require")


EMPTY = """SET session_replication_role = replica;
DELETE FROM runs; DROP TABLE IF EXISTS answers, results, children;
DELETE FROM fenced_guard.guard WHERE claims IS NULL; DELETE FROM fenced_guard.mark; DELETE FROM fenced_guard.lease;
DELETE FROM fenced_guard.record; DELETE FROM fenced_guard.tally; DELETE FROM fenced_guard.override;
UPDATE fenced_guard.mode SET mode = 'require' WHERE pattern = '*'; DELETE FROM fenced_guard.mode WHERE pattern <> '*';
UPDATE fenced_guard.trust SET realm = NULL WHERE NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'fenced');
RESET session_replication_role"""
"""For the next test: the same claims, no rows. The authority elsewhere is another one."""


def end_lease(worker: ClaimWorker) -> None:
    """The worker is stopped, and its lease is over; it does not know that yet."""
    lease = worker._work.lease
    assert step(worker._work.engine.authority.force_release(lease.names[0], lease.token)) is not None


def claimed(worker: ClaimWorker, db: Any, limit: int = 1) -> ClaimedRow:
    found = worker.claim_many(db, limit)
    assert len(found) == limit, found
    return found[0]


def row(db: Any, columns: str = "status, output", key: int = 1) -> tuple[Any, ...]:
    found = db.execute(f"SELECT {columns} FROM runs WHERE id = {key}").fetchone()
    assert found is not None
    return tuple(found)


Refusal = Callable[[Any, str], str | None]


def refused(db: Any, sql: str) -> str | None:
    """How the database refuses a statement by hand; None if it does not."""
    try:
        db.execute(sql)
    except (psycopg.Error, pymysql.Error, sqlite3.Error) as error:
        found = fenced.sql.refusal(error)
        return type(found).__name__ if found else type(error).__name__
    return None


@contextmanager
def place_at(engine: str, data: str, authority: str) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(engine, data, authority, stack)
