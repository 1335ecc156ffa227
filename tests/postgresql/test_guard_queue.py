"""Whoever takes a name over waits for the transactions that were there before, and for no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

import fenced
from fenced.testing.kit import stamp
from fenced.values.model import Stamp
from tests.conftest import NewDatabase
from tests.postgresql.orders import ONE, ORDERS, TWO, prepare
from tests.postgresql.planted_guard_sql import changed, functions

Db = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def postgresql_url(new_database: NewDatabase) -> str:
    return new_database(prepare)


@pytest.fixture
def db(postgresql_url: str) -> Iterator[Db]:
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def write(db: Db, fence: Stamp, *names: str) -> None:
    with ORDERS.transaction(db, fence, *names) as tx:
        tx.execute("UPDATE orders SET qty = qty + 1 WHERE id = 1")


def waits(db: Db, other: Db, work: Future[Any]) -> bool:
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
    wanted = functions()["has_successor"]
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
    write(db, old)  # the second one makes the lease row
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
    # The row of a name stays with its mark: a lease of one name uses it, whatever its grant.
    kept = db.execute("SELECT grant_id FROM fenced_guard.turn ORDER BY 1").fetchall()
    assert kept == [(f"/{ONE}",), (stamp(7).grant,)]
    for _ in range(2):
        write(db, stamp(8, 1, ONE))
    write(db, stamp(9, 1, ONE))
    db.execute("SELECT fenced_guard.reset(%s, 'gone')", [ONE])
    db.execute("SELECT fenced_guard.reset(%s, 'gone')", [TWO])
    db.execute("SELECT fenced_guard.tidy_up(10)")
    for table in ("turn", "lease", "mark"):
        assert db.execute(f"SELECT FROM fenced_guard.{table}".encode()).fetchall() == [], table


def test_a_lease_that_the_functions_before_knew_gets_the_row_of_its_name(db: Db) -> None:
    """They made the row under the grant. Without another one no successor of this lease could be seen."""
    for _ in range(2):
        write(db, stamp(5, 1, ONE))
    db.execute("UPDATE fenced_guard.turn SET grant_id = %s", [stamp(5).grant])
    write(db, stamp(5, 1, ONE))
    assert (f"/{ONE}",) in db.execute("SELECT grant_id FROM fenced_guard.turn").fetchall()
    write(db, stamp(6, 1, ONE))
    assert db.execute("SELECT grant_id FROM fenced_guard.turn").fetchall() == [(f"/{ONE}",)]


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


def test_a_token_that_nobody_minted_waits_for_nobody(
    db: Db, connect: Callable[[], Db], threads: ThreadPoolExecutor
) -> None:
    """Or the holder's own transactions would queue behind it, until it is refused."""
    first, stranger, second = connect(), connect(), connect()
    write(db, stamp(5, 1, ONE, TWO))
    db.execute("UPDATE fenced_guard.trust SET max_jump = 10")
    with ORDERS.transaction(first, stamp(5, 2, ONE, TWO), ONE):
        forging = threads.submit(write, stranger, stamp(1000, 1, ONE), ONE)
        assert not waits(db, stranger, forging)
        with pytest.raises(fenced.ForgedStamp):
            forging.result()
        write(second, stamp(5, 3, ONE, TWO), ONE)


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
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="not a refusal"):
            stranger.execute("SELECT fenced_guard.report(%s)", [told])
    assert db.execute("SELECT verdict, who FROM fenced_guard.record").fetchall() == [("stale", db.info.user)]


# How long a successor waits, and for which transactions.


def impatient(db: Db) -> None:
    db.execute("UPDATE fenced_guard.trust SET patience = 0.2")


def announce(db: Db, fence: Stamp, *names: str) -> None:
    db.execute("BEGIN")
    ORDERS.announce_within(db, fence, *names)


def sleeps(db: Db) -> None:
    announce(db, stamp(5, 2, ONE, TWO))
    db.execute("SELECT pg_sleep(600)")


@pytest.mark.parametrize("names", PARTS.values(), ids=PARTS)
def test_a_transaction_of_an_older_token_is_ended_by_its_successor(
    db: Db, connect: Callable[[], Db], names: tuple[str, ...]
) -> None:
    impatient(db)
    old = connect()
    write(db, stamp(5, 1, ONE, TWO))
    announce(old, stamp(5, 2, ONE, TWO), *names)
    write(db, stamp(6, 1, ONE, TWO), *names)
    with pytest.raises(psycopg.OperationalError):
        old.execute("SELECT 1")
    ((detail,),) = db.execute("SELECT detail FROM fenced_guard.history WHERE what = 'ended'").fetchall()
    assert (detail["token"], detail["for"]) == (5, 6)


def test_a_statement_that_runs_for_long_is_ended_with_its_transaction(
    db: Db, connect: Callable[[], Db], threads: ThreadPoolExecutor
) -> None:
    impatient(db)
    old = connect()
    write(db, stamp(5, 1, ONE, TWO))
    stuck = threads.submit(sleeps, old)
    count = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND query ~ '^SELECT pg_sleep'"
    while db.execute(count, [old.info.backend_pid]).fetchone() != (1,):
        assert not stuck.done()
    write(db, stamp(6, 1, ONE, TWO))
    with pytest.raises(psycopg.OperationalError):
        stuck.result()


def test_a_copy_that_waits_for_its_program_is_ended_with_its_transaction(
    db: Db, connect: Callable[[], Db]
) -> None:
    """No limit of the server's own sees that."""
    impatient(db)
    old = connect()
    write(db, stamp(5, 1, ONE, TWO))
    announce(old, stamp(5, 2, ONE, TWO))
    with pytest.raises(psycopg.OperationalError), old.cursor().copy("COPY orders FROM STDIN") as copy:
        copy.write(b"11\t5\n")
        write(db, stamp(6, 1, ONE, TWO))
    assert db.execute("SELECT count(*) FROM orders WHERE id = 11").fetchone() == (0,)


def test_a_first_announcement_is_ended_as_well(db: Db, connect: Callable[[], Db]) -> None:
    """Its mark is not committed: nobody can read whose it is."""
    impatient(db)
    ORDERS.adopt(db, stamp(5).realm)
    old, newer = connect(), connect()
    announce(old, stamp(5, 1, "orders/7"))
    with ORDERS.transaction(db, stamp(6, 1, "orders/7")):
        newer.execute("SET lock_timeout = '1s'")
        with pytest.raises(fenced.Contended):
            write(newer, stamp(5, 2, "orders/7"))  # the older one ends nobody
    with pytest.raises(psycopg.OperationalError):
        old.execute("SELECT 1")


def test_where_the_right_is_missing_the_successor_is_told_whom_it_waits_for(
    db: Db, connect: Callable[[], Db]
) -> None:
    impatient(db)
    old = connect()
    old.execute("SET application_name = 'nightly'")
    write(db, stamp(5, 1, ONE))
    announce(old, stamp(5, 2, ONE))
    db.execute("CREATE ROLE queue_owner")
    try:
        for grant in ("ALL ON ALL TABLES", "ALL ON ALL SEQUENCES", "EXECUTE ON ALL FUNCTIONS"):
            db.execute(f"GRANT {grant} IN SCHEMA fenced_guard TO queue_owner".encode())
        db.execute("ALTER FUNCTION fenced_guard.in_the_way(text, text, bigint) OWNER TO queue_owner")
        told = rf"orders/1: process {old.info.backend_pid} \(\w+, nightly\) under token 5"
        with pytest.raises(fenced.Contended, match=told):
            write(db, stamp(6, 1, ONE))
        old.execute("COMMIT")
        write(db, stamp(6, 1, ONE))
    finally:
        db.execute("DROP OWNED BY queue_owner CASCADE")
        db.execute("DROP ROLE queue_owner")


def test_nobody_is_ended_for_less_than_the_guards_patience(db: Db, connect: Callable[[], Db]) -> None:
    old = connect()
    write(db, stamp(5, 1, ONE))
    announce(old, stamp(5, 2, ONE))
    db.execute("SET lock_timeout = '100ms'")
    with pytest.raises(fenced.Contended, match="under token 5"):
        write(db, stamp(6, 1, ONE))
    db.execute("SELECT fenced_guard.make_way(%s, NULL, 100)", [str(stamp(6, 1, ONE))])
    old.execute("COMMIT")


# What the server ends by itself.


def limit(db: Db) -> str:
    (found,) = db.execute("SHOW idle_in_transaction_session_timeout").fetchone() or (None,)
    return str(found)


@pytest.mark.parametrize("first", [True, False], ids=["first", "again"])
def test_a_transaction_may_be_idle_until_max_hold(db: Db, tmp_path: Path, first: bool) -> None:
    """And without one for as long as its lease is renewed; where nothing is refused, for as long as it likes."""
    with fenced.Client(f"sqlite:///{tmp_path}/leases.db") as client:
        renewed, bounded = client.acquire(ONE, ttl=1), client.acquire(TWO, max_hold=600)
        for lease in () if first else (renewed, bounded):
            with ORDERS.transaction(db, lease):
                pass
        with ORDERS.transaction(db, renewed):
            assert limit(db) == "0"
        with ORDERS.transaction(db, bounded):
            assert 0 < int(limit(db).removesuffix("ms")) <= 600_000
        for mode in ("observe", "shadow", "canary(0%)"):
            ORDERS.set_mode(db, mode)
            with ORDERS.transaction(db, bounded):
                assert limit(db) == "0", mode
        ORDERS.set_mode(db, "enforce", TWO)
        db.execute("SET idle_in_transaction_session_timeout = '300ms'")
        with ORDERS.transaction(db, bounded):
            assert limit(db) == "300ms", "the program's own limit is shorter"


def test_a_holder_that_was_idle_for_longer_than_max_hold(db: Db, connect: Callable[[], Db]) -> None:
    """It has lost its lease. A limit of the program's own says nothing about the lease."""

    def idle(lease: fenced.Lease, own_limit: str, then: str) -> None:
        holder = connect()
        holder.execute(f"SET idle_in_transaction_session_timeout = '{own_limit}'".encode())
        with ORDERS.transaction(holder, lease) as tx:
            while db.execute(
                "SELECT 1 FROM pg_stat_activity WHERE pid = %s", [holder.info.backend_pid]
            ).fetchone():
                db.execute("SELECT pg_sleep(0.02)")
            tx.execute(then.encode()) if then else None

    with fenced.Client("memory:idle") as client:
        held = client.acquire(TWO, max_hold=600)
        with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
            idle(held, "100ms", "SELECT 1")
        with pytest.raises(fenced.Unavailable, match="the program's own limit; nothing was committed"):
            idle(held, "100ms", "")
        for then in ("SELECT 1", ""):
            with pytest.raises(fenced.LeaseLost, match="max_hold"):
                idle(client.acquire(f"orders/{3 + len(then)}", max_hold=0.2), "0", then)


def test_an_announcement_without_a_guard_goes_by_the_names_guard(db: Db, connect: Callable[[], Db]) -> None:
    """What another program sends that knows a stamp and nothing else."""
    late = connect()
    write(db, stamp(6, 1, ONE))
    call = "SELECT fenced_guard.announce(%s, 600000)"
    with pytest.raises(psycopg.DatabaseError) as refused, late.transaction():
        late.execute(call, [str(stamp(5, 1, ONE))])
    assert refused.value.sqlstate == "ZF001"
    ORDERS.set_mode(db, "observe")
    with ORDERS.transaction(db, stamp(6, 2, ONE)), late.transaction():
        late.execute("SET LOCAL statement_timeout = '5s'")
        late.execute(call, [str(stamp(7, 1, ONE))])
        late.execute("INSERT INTO orders VALUES (12)")
        assert limit(late) == "0"
    assert db.execute("SELECT count(*) FROM orders WHERE id = 12").fetchone() == (1,)


def test_a_planted_bug_ends_whoever_is_there(db: Db, connect: Callable[[], Db]) -> None:
    """Tokens are not compared: an old holder that is late has its successor ended."""
    wrong = (("WHERE (a.low << 31) + b.low < s.token", ""),)
    db.execute(changed(functions()["older_transactions"], wrong, "any token").encode())
    with pytest.raises((pytest.fail.Exception, fenced.FencedError, psycopg.Error)):
        test_a_first_announcement_is_ended_as_well(db, connect)


def test_a_planted_bug_limits_idling_where_nothing_is_refused(db: Db, tmp_path: Path) -> None:
    db.execute(changed(functions()["limit_idling"], ((" WHERE m.refuses", ""),), "any stage").encode())
    with pytest.raises(AssertionError, match="observe"):
        test_a_transaction_may_be_idle_until_max_hold(db, tmp_path, True)
