"""How many round trips a guard makes, counted between the driver and the server.

The count is part of the promise: behind a network each one costs more than all that the server does.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import psycopg
import pytest

import fenced
from fenced.client.guarding import credential
from fenced.guards.spec import Spec
from fenced.runtime.blocking import step
from fenced.sql import Guard
from fenced.stores.postgresql.guard.sessions import PsycopgSession
from fenced.stores.postgresql.guard.tables import PostgresqlTable
from fenced.testing.kit import stamp
from fenced.values.decision import Rule
from fenced_testkit.servers import PostgresqlServer
from tests.conftest import NewDatabase
from tests.postgresql.test_guard_connections import PLAIN, UPDATE, Writer, prepare, writing

_FLIGHT_ENDS = (b"Q", b"S")
"""A simple query, and the Sync of the extended protocol: after each the driver waits for ReadyForQuery."""


class Counter:
    """Stands between a driver and the server, and counts the messages after which the driver waits."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.trips = 0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
            threading.Thread(target=_copy, args=(server, client), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        stream = client.makefile("rb")
        try:
            head = b""  # the startup message has no type
            while size := stream.read(4):
                body = stream.read(int.from_bytes(size) - 4)
                # Counted before it is sent: when the driver has its answer, the count is right.
                self.trips += head in _FLIGHT_ENDS
                server.sendall(head + size + body)
                head = stream.read(1)
        except OSError:
            return

    def close(self) -> None:
        for one in self._sockets:
            one.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        return


@pytest.fixture
def postgresql_url(new_database: NewDatabase) -> str:
    return new_database(prepare)


@pytest.fixture
def counter(postgresql_server: PostgresqlServer) -> Iterator[Counter]:
    made = Counter((postgresql_server.host, postgresql_server.port))
    yield made
    made.close()


def url_of(counter: Counter, url: str) -> str:
    info = psycopg.conninfo.conninfo_to_dict(url)
    user, password, dbname = (info.get(key) or "" for key in ("user", "password", "dbname"))
    return f"postgresql://{user}:{password}@127.0.0.1:{counter.port}/{dbname}?sslmode=disable"


async def committed(writer: Writer) -> None:
    async with writer.transaction(stamp(6)):
        await writer.run(UPDATE)


async def refused_when_announced(writer: Writer) -> None:
    with pytest.raises(fenced.StaleToken):
        async with writer.transaction(stamp(5)):
            raise AssertionError


async def refused_at_the_write(writer: Writer) -> None:
    with pytest.raises(fenced.Uncovered):
        async with writer.transaction(stamp(6)):
            await writer.run("UPDATE orders SET qty = 9 WHERE id = 43")


class ReportedTooEarly(PsycopgSession):
    """Reports inside the transaction that it then rolls back: a refusal leaves no record."""

    async def rollback_and(self, statement: str) -> None:
        await self.rollback()
        await self._execute(f"BEGIN; {statement}; ROLLBACK".encode())


class OneByOne(PsycopgSession):
    """Rolls back first, and reports in a second message."""

    async def rollback_and(self, statement: str) -> None:
        await self.rollback()
        await super().rollback_and(statement)


@pytest.mark.parametrize(
    ("kind", "trips", "records"), [(PsycopgSession, 2, 1), (ReportedTooEarly, 3, 0), (OneByOne, 3, 1)]
)
def test_planted_bugs_are_counted(
    counter: Counter, postgresql_url: str, kind: type[PsycopgSession], trips: int, records: int
) -> None:
    """The shipped session, and two with a mistake that the counts show."""
    with psycopg.connect(url_of(counter, postgresql_url), autocommit=True) as connection:
        with PLAIN.transaction(connection, stamp(6)) as tx:
            tx.execute(UPDATE)
        table = PostgresqlTable(Spec("orders", "orders/{id}"), kind(connection))
        before = counter.trips
        with pytest.raises(fenced.StaleToken):
            step(table.enter(credential(stamp(5))))
        assert counter.trips - before == trips
        found = connection.execute("SELECT count(*) FROM fenced_guard.record").fetchone()
        assert found == (records,)


@pytest.mark.parametrize(
    ("story", "own", "begins"),
    [
        (committed, 2, 3),  # BEGIN and announce, the program's own statement, COMMIT
        (refused_when_announced, 2, 3),  # BEGIN and announce, ROLLBACK and report
        (refused_at_the_write, 2, 3),
    ],
)
@pytest.mark.parametrize("driver", ["psycopg", "async psycopg", "asyncpg", "psycopg, begins"])
async def test_round_trips(
    counter: Counter, postgresql_url: str, driver: str, story: Callable[[Writer], Any], own: int, begins: int
) -> None:
    """Two of our own; psycopg without autocommit sends its BEGIN separately."""
    async with writing(driver, url_of(counter, postgresql_url)) as writer:
        await committed(writer)
        await story(writer)  # asyncpg prepares the program's statement
        before = counter.trips
        await story(writer)
        theirs = 0 if story is refused_when_announced else 1
        assert counter.trips - before - theirs == (begins if "begins" in driver else own)


def test_a_rule_that_the_program_names_costs_no_round_trip(counter: Counter, postgresql_url: str) -> None:
    """The database compares it in the statement that announces. Another rule than the installed one: Misconfigured."""
    with psycopg.connect(url_of(counter, postgresql_url), autocommit=True) as connection:
        trips, told = [], pytest.raises(fenced.Misconfigured, match=r"rule retry.* says sequenced")
        for guard in (PLAIN, named("retry"), named("sequenced")):
            before = counter.trips
            expected = told if guard.rule == "sequenced" else nullcontext()
            with expected, guard.transaction(connection, stamp(6)) as tx:
                tx.execute(UPDATE)
            trips.append(counter.trips - before)
        assert trips == [3, 3, 2], "the last one announces, and rolls back"


def named(rule: Rule) -> Guard:
    return Guard(table="orders", name="orders/{id}", rule=rule)
