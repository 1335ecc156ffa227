"""Ways in that a review found: each was open once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

import fenced
from fenced.errors import Misuse
from fenced.sql import Guard
from fenced.testing.kit import stamp
from fenced.values.model import Stamp
from tests.conftest import NewDatabase
from tests.postgresql.orders import ONE, ORDERS, TWO, prepare


@pytest.fixture
def postgresql_url(new_database: NewDatabase) -> str:
    return new_database(prepare)


@pytest.fixture
def db(postgresql_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        yield connection


def write(db: psycopg.Connection, fence: Stamp | list[Stamp], row: int, *names: str) -> None:
    with ORDERS.transaction(db, fence, *names) as tx:
        tx.execute("UPDATE orders SET qty = qty + 1 WHERE id = %s", [row])


def test_a_name_said_twice_is_one_name(db: psycopg.Connection) -> None:
    """Or a lease would count as whole that has lost one of its names."""
    old = stamp(5, 1, ONE, TWO)
    write(db, stamp(9, 1, TWO), 2)
    write(db, old, 1, ONE, ONE)
    with pytest.raises(fenced.StaleToken):
        write(db, old, 2)


@pytest.mark.parametrize("level", list(psycopg.IsolationLevel), ids=lambda level: level.name.lower())
def test_a_name_of_the_lease_that_was_not_announced_is_not_written(
    db: psycopg.Connection, postgresql_url: str, level: psycopg.IsolationLevel
) -> None:
    """It may have been read before a late holder's write, which would be lost: I5."""
    late, both = stamp(5, 1, TWO), stamp(6, 1, ONE, TWO)
    write(db, late, 2)
    with psycopg.connect(postgresql_url, autocommit=True) as holder:
        holder.isolation_level = level
        with (
            pytest.raises(fenced.Uncovered, match="announce it too"),
            ORDERS.transaction(holder, both, ONE) as tx,
        ):
            (before,) = tx.execute("SELECT qty FROM orders WHERE id = 2").fetchone() or ()
            if level < psycopg.IsolationLevel.REPEATABLE_READ:
                # There the wrapper announced the whole lease apart.
                write(db, stamp(5, 2, TWO), 2)
            tx.execute("UPDATE orders SET qty = %s WHERE id = 2", [before + 1])
    expected = 2 if level < psycopg.IsolationLevel.REPEATABLE_READ else 1
    assert db.execute("SELECT qty FROM orders WHERE id = 2").fetchone() == (expected,)
    write(db, both, 2, ONE, TWO)


def test_a_stamp_observed_by_one_guard_raises_no_mark_of_another(
    db: psycopg.Connection, postgresql_url: str
) -> None:
    """The observing guard did not wait for the fence, so what was read since is not fenced."""
    db.execute("CREATE TABLE lines (id integer PRIMARY KEY, of integer NOT NULL)")
    lines = Guard(table="lines", name="orders/{of}")
    lines.install(db, mode="observe")
    write(db, stamp(5, 1, ONE), 1)
    with (
        psycopg.connect(postgresql_url, autocommit=True) as late,
        psycopg.connect(postgresql_url, autocommit=True) as holder,
        pytest.raises(fenced.Contended, match="announce it with the guard of this table"),
        ORDERS.transaction(late, stamp(5, 2, ONE)) as busy,
        lines.transaction(holder, stamp(6, 1, ONE)) as tx,
    ):
        tx.execute("INSERT INTO lines VALUES (1, 1)")
        busy.execute("COMMIT")
        tx.execute("UPDATE orders SET qty = 9 WHERE id = 1")


def test_of_two_leases_of_one_name_the_newer_one_is_whole(db: psycopg.Connection) -> None:
    write(db, [stamp(5, 1, ONE), stamp(6, 1, ONE)], 1)
    with pytest.raises(fenced.StaleToken):
        write(db, stamp(5, 2, ONE), 1)
    write(db, stamp(6, 2, ONE), 1)


def test_a_mark_changes_hands_at_read_committed_alone(db: psycopg.Connection, postgresql_url: str) -> None:
    """An old snapshot does not see the lease that has to be unmade, and its holder would still be let through."""
    write(db, stamp(5, 1, ONE, TWO), 1, ONE)
    with psycopg.connect(postgresql_url) as late:
        late.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        late.execute("SELECT 1")
        write(db, stamp(5, 2, ONE, TWO), 1)
        with pytest.raises(psycopg.DatabaseError) as caught:
            late.execute("SELECT fenced_guard.announce_alone(%s)", [str(stamp(6, 0, ONE))])
        assert caught.value.sqlstate == "ZF012"
        late.rollback()
    write(db, stamp(5, 3, ONE, TWO), 1)


def test_an_unstamped_write_opens_no_name_for_a_later_stamp(db: psycopg.Connection) -> None:
    ORDERS.set_mode(db, "enforce")
    with pytest.raises(psycopg.DatabaseError) as caught, db.transaction():
        db.execute("UPDATE orders SET qty = 0 WHERE id = 3")
        ORDERS.announce_within(db, stamp(5, 1, ONE))
        db.execute("UPDATE orders SET qty = 0 WHERE id = 2")
    assert caught.value.sqlstate == "ZF005"


def test_a_copied_epoch_opens_nothing(db: psycopg.Connection) -> None:
    """A row carries a token only if it was written under it, and under its own name."""
    guard = Guard(table="orders", name="orders/{id}", epoch="epoch")
    guard.install(db, mode="enforce", replace=True)
    with guard.transaction(db, stamp(5, 1, ONE)) as tx:
        tx.execute("UPDATE orders SET qty = 1 WHERE id = 1")
    db.execute("INSERT INTO orders (id, qty, epoch) SELECT 44, qty, epoch FROM orders WHERE id = 1")
    db.execute("UPDATE orders SET id = 45 WHERE id = 1")
    assert db.execute("SELECT id, epoch FROM orders WHERE id > 9 ORDER BY id").fetchall() == [
        (44, 0),
        (45, 0),
    ]
    guard.set_mode(db, "require")
    for row in (44, 45):
        with pytest.raises(fenced.Uncovered), guard.transaction(db, stamp(5, 2, ONE)) as tx:
            tx.execute("UPDATE orders SET qty = 2 WHERE id = %s", [row])


def test_a_trigger_function_is_nobody_elses(db: psycopg.Connection) -> None:
    """It runs as the guard's owner: whoever could hang it on a table of his own could make it call his functions."""
    found = db.execute(
        "SELECT p.proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace "
        "WHERE n.nspname = 'fenced_guard' AND p.prorettype = 'trigger'::regtype "
        "AND has_function_privilege('public', p.oid, 'EXECUTE')"
    ).fetchall()
    assert found == []
    with pytest.raises(Misuse, match="dollar"):
        Guard(table="orders", name="a$$b/{id}")


@pytest.mark.parametrize("collation", ['"POSIX"', '"und-x-icu"', "loose"])
def test_any_collation_of_a_name_column_will_do(db: psycopg.Connection, collation: str) -> None:
    db.execute("CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    db.execute(f"CREATE TABLE jobs (name text COLLATE {collation} PRIMARY KEY, n integer)".encode())
    jobs = Guard(table="jobs", name="jobs/{name}")
    jobs.install(db, mode="observe")
    db.execute("INSERT INTO jobs VALUES ('a', 1)")
    jobs.set_mode(db, "require")
    with jobs.transaction(db, stamp(5, 1, "jobs/a")) as tx:
        tx.execute("UPDATE jobs SET n = 2")
    with pytest.raises(fenced.Uncovered), jobs.transaction(db, stamp(5, 2, "jobs/a")) as tx:
        tx.execute("UPDATE jobs SET name = 'A'")


def test_a_token_used_twice_is_told_apart_by_its_grant(db: psycopg.Connection) -> None:
    """Row 1 carries the mark of another grant with the same token; a lease of row 2 must not write it."""
    write(db, stamp(8, 1, ONE), 1)
    twin = stamp(8, 1, TWO, grant="f" * 32)
    for seq in (1, 2):  # the long way, and the short one
        with pytest.raises(fenced.Uncovered):
            write(db, twin._replace(seq=seq), 1)
        write(db, twin._replace(seq=seq), 2)


def test_an_inner_announcement_takes_only_itself_out(db: psycopg.Connection) -> None:
    with ORDERS.transaction(db, stamp(5, 1, ONE)) as tx:
        with ORDERS.announce_within(db, stamp(5, 2, ONE)):
            tx.execute("UPDATE orders SET qty = 1 WHERE id = 1")
        tx.execute("UPDATE orders SET qty = 2 WHERE id = 1")


def test_new_transactions_of_the_old_holder_do_not_keep_the_new_one_out(
    db: psycopg.Connection, postgresql_url: str
) -> None:
    """They share one row. Once somebody waits for it, who comes later queues behind him, and is refused."""
    write(db, stamp(5, 1, ONE), 1)
    watch = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with (
        psycopg.connect(postgresql_url, autocommit=True) as first,
        psycopg.connect(postgresql_url, autocommit=True) as second,
        psycopg.connect(postgresql_url, autocommit=True) as successor,
        ThreadPoolExecutor() as threads,
    ):
        with ORDERS.transaction(first, stamp(5, 2, ONE)) as tx:
            tx.execute("UPDATE orders SET qty = 1 WHERE id = 1")
            new = threads.submit(write, successor, stamp(6, 1, ONE), 1)
            while db.execute(watch).fetchone() != (1,):
                assert not new.done()
            late = threads.submit(write, second, stamp(5, 3, ONE), 1)
            while db.execute(watch).fetchone() != (2,):
                assert not late.done(), "it shared the row once more"
        new.result(30)
        with pytest.raises(fenced.StaleToken):
            late.result(30)
