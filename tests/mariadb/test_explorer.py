"""The explorer of interleavings on MariaDB: what it makes of sessions that wait, and of a deadlock's victim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pymysql
import pytest

from fenced_testkit.interleaving import (
    COMMIT,
    Explorer,
    InterleavingScript,
    IsolationLevel,
    interleavings,
    sql,
)
from fenced_testkit.interleaving.mariadb import MariadbEngine
from fenced_testkit.servers import MariadbServer

Connect = Callable[[], "pymysql.Connection[Any]"]
Counters = Callable[..., list[int]]
RAISE = sql("UPDATE counter SET n = n + 1 WHERE id = 1", label="raise")
OTHER = sql("UPDATE counter SET n = n + 1 WHERE id = 2", label="other")
LEVELS = (IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ)


@pytest.fixture(scope="module")
def connect(mariadb_server: MariadbServer) -> Connect:
    database = mariadb_server.create_database()
    mariadb_server.execute("CREATE TABLE counter (id int PRIMARY KEY, n int NOT NULL)", database)
    mariadb_server.execute("INSERT INTO counter VALUES (1, 0), (2, 0)", database)
    host, port = mariadb_server.host, mariadb_server.port
    return lambda: pymysql.connect(host=host, port=port, user="root", database=database, autocommit=True)


@pytest.fixture(scope="module")
def explorer(connect: Connect) -> Iterator[Explorer]:
    with Explorer(MariadbEngine(connect)) as explorer:
        yield explorer


@pytest.fixture
def counters(connect: Connect) -> Iterator[Counters]:
    """The two counters; or set them to 0."""
    with connect() as connection, connection.cursor() as cursor:

        def counted(reset: bool = False) -> list[int]:
            cursor.execute("UPDATE counter SET n = 0" if reset else "SELECT n FROM counter ORDER BY id")
            return [n for (n,) in cursor.fetchall()]

        yield counted


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_a_waiting_session_is_held_back(
    level: IsolationLevel, explorer: Explorer, counters: Counters
) -> None:
    """Neither sees an error: REPEATABLE READ of InnoDB does not refuse an UPDATE of what was changed meanwhile."""
    scripts = [InterleavingScript(name, (RAISE, COMMIT), level) for name in "AB"]
    for order in interleavings(scripts).chosen:
        counters(reset=True)
        trace = explorer.run(scripts, order)
        assert [event.outcome.code for event in trace.events] == [""] * 4
        waited = {event.session for event in trace.events if event.waited_for}
        assert waited == ({order[1]} if order[0] != order[1] else set()), str(trace)
        assert counters() == [2, 0]


def test_a_deadlock_has_one_victim(explorer: Explorer, counters: Counters) -> None:
    """Its whole transaction is gone: what it says after that is a transaction of its own."""
    scripts = [
        InterleavingScript("A", (RAISE, OTHER, COMMIT)),
        InterleavingScript("B", (OTHER, RAISE, COMMIT)),
    ]
    victims = {}
    for order in interleavings(scripts).chosen:
        counters(reset=True)
        trace = explorer.run(scripts, order)
        victims[order] = [event.outcome.code for event in trace.events if event.outcome.code]
        assert counters() == ([1, 1] if victims[order] else [2, 2]), str(trace)
    assert len(victims) == 20
    assert {order for order, codes in victims.items() if codes == ["1213"]} == {
        order for order in victims if sorted(order[:2]) == ["A", "B"]
    }


def test_open_transactions_are_rolled_back(explorer: Explorer, counters: Counters) -> None:
    scripts = [InterleavingScript("A", (RAISE,)), InterleavingScript("B", (RAISE, COMMIT))]
    for order in ("ABB", "BAB", "BBA"):
        counters(reset=True)
        explorer.run(scripts, order)
        assert counters() == [1, 0]


def test_waits_of_other_transactions_are_not_taken_for_ours(
    explorer: Explorer, connect: Connect, counters: Counters
) -> None:
    """Somebody else holds the row that B does not want; A and B do not wait."""
    counters(reset=True)
    with connect() as other, other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(OTHER.statement)
        trace = explorer.run([InterleavingScript(name, (RAISE, COMMIT)) for name in "AB"], "ABAB")
        assert [event.waited_for for event in trace.events] == ["", "A", "", ""]
        cursor.execute("ROLLBACK")


def test_a_trace_is_a_table(explorer: Explorer, counters: Counters) -> None:
    counters(reset=True)
    trace = explorer.run([InterleavingScript(name, (RAISE, COMMIT)) for name in "AB"], "ABBA")
    assert str(trace).splitlines() == [
        "order 'ABBA'",
        "  A                  B",
        "  raise -> UPDATE 1",
        "                     raise ... waits for A",
        "  COMMIT",
        "                     ... raise -> UPDATE 1",
        "                     COMMIT",
    ]
