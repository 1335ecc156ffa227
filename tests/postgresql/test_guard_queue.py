"""Whoever takes a name over waits for the transactions that were there before, and for no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

import fenced
from fenced.model import Stamp
from fenced.sql import Guard
from fenced.testing.kit import stamp
from tests.postgresql.planted_guard_sql import changed, functions

ORDERS = Guard(table="orders", name="orders/{id}")
ONE, TWO = "orders/1", "orders/2"
Db = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def db(postgresql_url: str) -> Iterator[Db]:
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id integer PRIMARY KEY, qty integer NOT NULL DEFAULT 0)")
        connection.execute("INSERT INTO orders SELECT id FROM generate_series(1, 9) AS id")
        ORDERS.install(connection, mode="require")
        yield connection


@pytest.fixture
def connect(postgresql_url: str) -> Iterator[Callable[[], Db]]:
    opened: list[Db] = []

    def one() -> Db:
        opened.append(psycopg.connect(postgresql_url, autocommit=True))
        return opened[-1]

    yield one
    for connection in opened:
        connection.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def write(db: Db, fence: Stamp, *names: str) -> None:
    with ORDERS.transaction(db, fence, *names) as tx:
        tx.execute("UPDATE orders SET qty = qty + 1 WHERE id = 1")


def waits(db: Db, other: Db, work: Future[None]) -> bool:
    """Whether it waits for somebody; False when it has ended. The server is asked, not the time."""
    while not work.done():
        if db.execute(
            "SELECT cardinality(pg_blocking_pids(%s)) > 0", [other.info.backend_pid]
        ).fetchone() == (True,):
            return True
    return False


PARTS = {"the whole lease": (), "a part of it": (ONE,), "all of it by name": (ONE, TWO)}


def test_a_planted_bug_lets_an_old_holder_overtake(
    db: Db, connect: Callable[[], Db], threads: ThreadPoolExecutor
) -> None:
    """Nobody looks whether the grant is wanted: the test below fails."""
    wanted = functions()["wanted"]
    bug = changed(wanted, (("RETURN EXISTS", "RETURN false AND EXISTS"),), "nobody looks")
    db.execute(bug.encode())
    with pytest.raises(AssertionError, match="it queues"):
        test_an_old_holders_further_transactions_queue_behind_its_successor(db, connect, threads, (ONE,))


@pytest.mark.parametrize("names", PARTS.values(), ids=PARTS)
def test_an_old_holders_further_transactions_queue_behind_its_successor(
    db: Db, connect: Callable[[], Db], threads: ThreadPoolExecutor, names: tuple[str, ...]
) -> None:
    first, second, taker = connect(), connect(), connect()
    old, new = stamp(5, 1, ONE, TWO), stamp(6, 1, ONE, TWO)
    write(db, old, *names)
    with ORDERS.transaction(first, old, *names):
        taking = threads.submit(write, taker, new, *names)
        assert waits(db, taker, taking), "a transaction that was there before is waited for"
        again = threads.submit(write, second, old, *names)
        assert waits(db, second, again), "one that comes later is not: it queues"
        assert not taking.done()
    taking.result()
    with pytest.raises(fenced.StaleToken):
        again.result()


def test_a_taker_that_gives_up_leaves_the_holder_as_it_was(db: Db, connect: Callable[[], Db]) -> None:
    first, second, taker = connect(), connect(), connect()
    old = stamp(5, 1, ONE, TWO)
    write(db, old)
    taker.execute("SET lock_timeout = '50ms'")
    with ORDERS.transaction(first, old):
        with pytest.raises(fenced.Contended):
            write(taker, stamp(6, 1, ONE))
        second.execute("SET lock_timeout = '2s'")
        with ORDERS.transaction(second, old):
            assert locks(db, second, "mark") == 0, "it shares the lease again, by one statement"


def locks(db: Db, other: Db, table: str) -> int:
    (count,) = db.execute(
        "SELECT count(*) FROM pg_locks WHERE pid = %s AND relation = %s::regclass AND mode = 'RowShareLock'",
        [other.info.backend_pid, f"fenced_guard.{table}"],
    ).fetchone() or (None,)
    assert isinstance(count, int)
    return count


def test_grants_that_are_gone_leave_nothing(db: Db) -> None:
    write(db, stamp(5, 1, ONE, TWO))
    write(db, stamp(6, 1, ONE), ONE)
    assert len(db.execute("SELECT FROM fenced_guard.turn").fetchall()) == 2, "the first one still has a mark"
    write(db, stamp(7, 1, ONE, TWO))
    assert db.execute("SELECT grant_id FROM fenced_guard.turn").fetchall() == [(stamp(7).grant,)]


def test_a_lock_that_anybody_can_take_keeps_nobody_out(db: Db, connect: Callable[[], Db]) -> None:
    """A role that may connect and no more takes every lock in memory that it can think of."""
    stranger, holder = connect(), connect()
    write(db, stamp(5, 1, ONE))
    keys = " ".join(stamp(token).grant for token in (5, 6))
    stranger.execute("CREATE ROLE queue_stranger")
    try:
        stranger.execute("SET ROLE queue_stranger")
        for function in ("pg_advisory_lock", "pg_advisory_lock_shared"):
            stranger.execute(
                f"SELECT {function}(hashtextextended(g, 0)) FROM string_to_table(%s, ' ') AS g".encode(),
                [keys],
            )
        for table in ("mark", "lease", "turn", "trust"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                stranger.execute(f"SELECT FROM fenced_guard.{table} FOR UPDATE".encode())
        holder.execute("SET lock_timeout = '2s'")
        write(holder, stamp(5, 2, ONE))
        write(holder, stamp(6, 1, ONE))
        write(holder, stamp(6, 2, ONE))
    finally:
        stranger.execute("RESET ROLE")
        stranger.execute("DROP ROLE queue_stranger")


def test_the_audit_holds_what_was_refused_and_nothing_else(db: Db, connect: Callable[[], Db]) -> None:
    """Anybody may report a refusal: once, and only if it was one."""
    write(db, stamp(6, 1, ONE))
    with pytest.raises(fenced.StaleToken) as refused:
        write(db, stamp(5, 1, ONE))
    detail = refused.value.__cause__.diag.message_detail  # type: ignore[union-attr]
    stranger = connect()
    for _ in range(3):
        stranger.execute("SELECT fenced_guard.report(%s)", [detail])
    for told in (
        detail.replace("stale", "reused"),
        '{"guard": "public.orders", "verdict": "stale", "mode": "x"}',
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="no refusal"):
            stranger.execute("SELECT fenced_guard.report(%s)", [told])
    assert db.execute("SELECT verdict, who FROM fenced_guard.record").fetchall() == [("stale", db.info.user)]
