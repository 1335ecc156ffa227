"""What a change binds: a stage that is switched on, an override that ends, an authority that is adopted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

import fenced
from fenced.proofs import HmacKey
from fenced.runtime.blocking import step
from fenced.stores.postgresql.guard.operator import PostgresqlOperator
from fenced.stores.postgresql.guard.sessions import PsycopgSession
from fenced.testing.kit import stamp
from tests.postgresql.orders import ONE, ORDERS, TWO
from tests.postgresql.planted_guard_sql import changed, functions
from tests.postgresql.test_guard_queue import Db, waits, write

OTHER_REALM = "00000000000000bb"


@pytest.fixture
def db(postgresql_url: str) -> Iterator[Db]:
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id integer PRIMARY KEY, qty integer NOT NULL DEFAULT 0)")
        connection.execute("INSERT INTO orders SELECT id FROM generate_series(1, 9) AS id")
        ORDERS.install(connection, mode="observe")
        write(connection, stamp(6, 1, ONE))
        yield connection


def status(db: Db) -> tuple[str, ...]:
    (guard,) = step(PostgresqlOperator(PsycopgSession(db)).status()).guards
    return guard.pending


UPDATE = "UPDATE orders SET qty = qty + 1 WHERE id = 1"


def wrote(db: Db) -> None:
    db.execute("BEGIN")
    db.execute(UPDATE)


def was_let_through(db: Db) -> None:
    db.execute("BEGIN")
    ORDERS.announce_within(db, stamp(5, 1, ONE))


def has_a_snapshot(db: Db) -> None:
    db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    db.execute("SELECT 1")


def is_serializable(db: Db) -> None:
    db.execute("BEGIN ISOLATION LEVEL SERIALIZABLE")
    db.execute("SELECT 1")


OLDER = [wrote, was_let_through, has_a_snapshot, is_serializable]


@pytest.mark.parametrize("older", OLDER, ids=lambda older: older.__name__)
def test_a_stage_says_whom_it_does_not_bind(
    db: Db, connect: Callable[[], Db], older: Callable[[Db], None]
) -> None:
    """Until they are over: whoever comes later is bound."""
    early, later = connect(), connect()
    early.execute("SET application_name = 'early'")
    older(early)
    later.execute("BEGIN")
    (told,) = ORDERS.set_mode(db, "require", wait=0)
    assert told.startswith(f"process {early.info.backend_pid} (") and "early" in told
    assert status(db) == (told,)
    early.execute(UPDATE)
    early.execute("COMMIT")
    with pytest.raises(psycopg.DatabaseError):
        later.execute(UPDATE)
    later.execute("ROLLBACK")
    assert status(db) == ()
    assert ORDERS.set_mode(db, "require", wait=0) == ()
    with pytest.raises(psycopg.DatabaseError):
        early.execute(UPDATE)


def test_a_stage_is_switched_on_when_older_transactions_are_over(
    db: Db, connect: Callable[[], Db], postgresql_url: str
) -> None:
    early, operator = connect(), connect()
    wrote(early)
    with ThreadPoolExecutor() as threads:
        switching = threads.submit(ORDERS.set_mode, operator, "require", wait=60)
        while db.execute("SELECT mode FROM fenced_guard.mode").fetchone() != ("require",):
            assert not switching.done()
        assert not switching.done(), "it waits"
        early.execute("COMMIT")
        assert switching.result() == ()


def test_a_planted_bug_forgets_snapshots(db: Db, connect: Callable[[], Db]) -> None:
    bug = changed(functions()["pending"], (("age(r.backend_xmin) >= age(g.changed)", "false"),), "snapshots")
    db.execute(bug.encode())
    with pytest.raises(ValueError, match="not enough values"):
        test_a_stage_says_whom_it_does_not_bind(db, connect, has_a_snapshot)


def test_the_end_of_an_override_says_whom_it_does_not_bind(db: Db, connect: Callable[[], Db]) -> None:
    operator, early = PostgresqlOperator(PsycopgSession(db)), connect()
    assert ORDERS.set_mode(db, "require") == ()
    step(operator.override("orders", "*", 600, "drill"))
    wrote(early)
    assert step(operator.end_overrides("orders", None)) == 1
    assert len(step(operator.pending("orders", 0))) == len(status(db)) == 1
    early.execute("ROLLBACK")
    assert step(operator.pending("orders", 0)) == status(db) == ()


def test_set_mode_waits_for_transactions_that_the_role_cannot_see(db: Db, connect: Callable[[], Db]) -> None:
    """An operator without pg_read_all_stats sees no snapshots of others: who was there at the change is waited for."""
    early, later, operator = connect(), connect(), connect()
    has_a_snapshot(early)
    db.execute("CREATE ROLE stage_operator")
    try:
        for grant in ("ALL ON ALL TABLES", "ALL ON ALL SEQUENCES", "EXECUTE ON ALL FUNCTIONS"):
            db.execute(f"GRANT {grant} IN SCHEMA fenced_guard TO stage_operator".encode())
        operator.execute("SET ROLE stage_operator")
        assert len(ORDERS.set_mode(operator, "require", wait=0)) == 1
        early.execute("ROLLBACK")
        assert ORDERS.set_mode(operator, "require", wait=0) == ()
        later.execute("SELECT 1")
    finally:
        operator.close()
        db.execute("DROP OWNED BY stage_operator")
        db.execute("DROP ROLE stage_operator")


# Keys, limits, authorities.


def test_first_announcements_keep_no_operator_waiting(db: Db, connect: Callable[[], Db]) -> None:
    """One that is open is as good as ever new ones that overlap."""
    ORDERS.set_mode(db, "require")
    early = connect()
    early.execute("BEGIN")
    ORDERS.announce_within(early, stamp(7, 1, TWO))
    db.execute("SET lock_timeout = '2s'")
    keys = PostgresqlOperator(PsycopgSession(db))
    for name in ("one", "two"):
        step(keys.add_key(HmacKey(name, b"x" * 32)))
    step(keys.revoke_key("one"))
    step(keys.trust({"max_jump": 1000}))
    step(keys.tidy())
    early.execute("COMMIT")


def test_a_transaction_that_begins_after_adopt_waits_for_it(db: Db, connect: Callable[[], Db]) -> None:
    ORDERS.set_mode(db, "require")
    early, operator, later = connect(), connect(), connect()
    early.execute("BEGIN")
    ORDERS.announce_within(early, stamp(7, 1, TWO))
    with ThreadPoolExecutor() as threads:
        adopting = threads.submit(operator.execute, b"SELECT fenced_guard.adopt(%s)", [OTHER_REALM])
        assert waits(db, operator, adopting)
        coming = threads.submit(write, later, stamp(8, 1, ONE))
        assert waits(db, later, coming), "or those that come could keep it waiting"
        early.execute("COMMIT")
        adopting.result()
        with pytest.raises(fenced.ForeignRealm):
            coming.result()


def test_an_announcement_that_waits_is_of_the_authority_that_is_trusted_when_it_goes_on(
    db: Db, connect: Callable[[], Db]
) -> None:
    both = stamp(7, 1, ONE, TWO)
    ORDERS.set_mode(db, "require")
    write(db, both, ONE)
    early, late = connect(), connect()
    early.execute("BEGIN")
    ORDERS.announce_within(early, both, ONE)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(write, late, stamp(8, 1, ONE), ONE)
        assert waits(db, late, waiting)
        ORDERS.adopt(db, OTHER_REALM)
        early.execute("COMMIT")
        with pytest.raises(fenced.ForeignRealm):
            waiting.result()
    write(db, stamp(9, 1, ONE, realm=OTHER_REALM))


def test_a_planted_bug_believes_the_realm_of_before(db: Db, connect: Callable[[], Db]) -> None:
    right = " AND trust.realm = s.realm;\n"
    db.execute(changed(functions()["admit"], ((right, ";\n"),), "the realm of before").encode())
    with pytest.raises(pytest.fail.Exception):
        test_an_announcement_that_waits_is_of_the_authority_that_is_trusted_when_it_goes_on(db, connect)
