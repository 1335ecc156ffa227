"""Claims on MariaDB and MySQL: every blocking driver, and what is different there."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fenced
from fenced.errors import Conflict, Indeterminate, Misuse, OutOfOrder, StaleToken, Unsupported
from fenced.runtime.blocking import step
from fenced.sql.engines import on
from fenced.stores.mariadb.address import MariadbAddress
from fenced.stores.mariadb.guard.claiming import order_of
from fenced.stores.mariadb.guard.schema import routines, server_of
from fenced.work import Claims
from fenced_testkit.servers import MariadbServer
from tests.work.places import OPTIONS, Place, claimed, end_lease, mariadb_connection, place_at, refused, row


@pytest.fixture
def place(mariadb_url: str) -> Iterator[Place]:
    with place_at("mariadb", mariadb_url, mariadb_url) as found:
        yield found


@pytest.fixture
def db(place: Place) -> Any:
    return place.prepare()


def driver_url(url: str, driver: str) -> str:
    return url.replace("mariadb://", f"mysql+{driver}://")


@contextmanager
def implicit(url: str) -> Iterator[Any]:
    """PyMySQL as it is by default: its first statement begins a transaction."""
    with mariadb_connection(url, autocommit=False) as connection:
        yield connection


@contextmanager
def mysqlclient(url: str, autocommit: bool = True) -> Iterator[Any]:
    import MySQLdb

    address = MariadbAddress(url)
    ((host, port),) = address.members
    connection: Any = MySQLdb.connect(host=host, port=port, user=address.user, database=address.database)
    connection.autocommit(autocommit)
    yield connection
    connection.close()


@contextmanager
def implicit_mysqlclient(url: str) -> Iterator[Any]:
    with mysqlclient(url, autocommit=False) as connection:
        yield connection


@contextmanager
def session(url: str, driver: str = "pymysql") -> Iterator[Any]:
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    engine = create_engine(driver_url(url, driver))
    with Session(engine) as made:
        yield made
    engine.dispose()


@contextmanager
def session_of_mysqlclient(url: str) -> Iterator[Any]:
    with session(url, "mysqldb") as made:
        yield made


@contextmanager
def alchemy_connection(url: str) -> Iterator[Any]:
    from sqlalchemy import create_engine

    engine = create_engine(driver_url(url, "pymysql"))
    with engine.connect() as made:
        yield made
    engine.dispose()


DRIVERS: tuple[Callable[[str], Any], ...] = (
    mariadb_connection,
    implicit,
    mysqlclient,
    implicit_mysqlclient,
    session,
    session_of_mysqlclient,
    alchemy_connection,
)


@pytest.mark.parametrize("connect", DRIVERS)
def test_a_late_worker_over_each_driver(connect: Any, place: Place, db: Any) -> None:
    first, second = place.worker(), place.worker()
    with connect(place.data) as own:
        late = claimed(first, own)
        end_lease(first)
        assert second.give_back(own) == 1
        with second.claim(own) as run:
            assert run is not None
            with pytest.raises(StaleToken, match=f"token {late.token} is stale: {run.token} has been seen"):
                late.finish(own, status="done", output="late")
            with run.transaction(own):
                run.finish(own, status="done", output="50 %")
        assert row(db) == ("done", "50 %")
        assert place.claims.status(own).claimed == 0
    operator = on(db, "blocking").engine.operator(db)
    records = step(operator.records("runs"))
    assert [(one.verdict, one.ruling, one.name) for one in records] == [("stale", "refuse", "runs/1")]


def test_a_claim_in_the_programs_transaction_is_undone_with_it(place: Place, db: Any) -> None:
    worker = place.worker()
    with implicit(place.data) as own:
        own.execute("SELECT 1 FROM runs FOR UPDATE")
        run = claimed(worker, own)
        run.finish(own, status="done")
        own.rollback()
    assert row(db, "status, claim_token") == ("pending", None)


def test_a_claim_reads_as_many_rows_as_it_takes(place: Place, db: Any) -> None:
    """The index has only rows that may be claimed, in order. Without it every claim would lock them all."""
    db.execute("INSERT INTO runs (id) SELECT a.id FROM runs, (SELECT 2 AS id) a")
    for _ in range(12):
        db.execute("INSERT INTO runs (id) SELECT id + (SELECT MAX(id) FROM runs) FROM runs")
    db.execute("ANALYZE TABLE runs")
    plan = (
        "EXPLAIN SELECT id FROM runs WHERE claim_busy = 0 AND claim_attempts < 3 AND (claim_at IS NULL OR "
        f"claim_at <= UTC_TIMESTAMP(6)) ORDER BY {order_of(place.claims._spec.claims)} LIMIT 10 FOR UPDATE SKIP LOCKED"  # type: ignore[arg-type]
    )
    said = repr(db.execute(plan).fetchall())
    assert "fenced_ready" in said and "filesort" not in said, said
    first, second, other = place.worker(), place.worker(), place.connect()
    for worker in (first, second):
        claimed(worker, db).retry(db)  # it has begun its work
    other.execute("BEGIN")
    assert [run.id for run in first.claim_many(other, 10)] == list(range(1, 11))
    assert [run.id for run in second.claim_many(db, 10)] == list(range(11, 21))  # skips what is locked
    other.execute("COMMIT")


def test_a_transaction_that_saw_the_row_before_a_newer_claim_writes_nothing(place: Place, db: Any) -> None:
    """At REPEATABLE READ: refused, or in conflict where the server compares snapshots (MariaDB from 11.6 on)."""
    first, second = place.worker(), place.worker()
    late = claimed(first, db)
    with mariadb_connection(place.data, autocommit=False) as old:
        old.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert row(old, "claim_token") == (late.token,)
        end_lease(first)
        second.give_back(db)
        now = claimed(second, db)
        with pytest.raises((StaleToken, Conflict)):
            late.finish(old, status="done", output="late")
        old.rollback()
    now.finish(db, status="done", output="now")
    assert row(db) == ("done", "now")


def test_an_announcement_ends_with_its_transaction(place: Place, db: Any) -> None:
    run = claimed(place.worker(), db)
    by_hand = "UPDATE runs SET output = 'by hand'"
    with run.transaction(db) as tx:
        tx.execute("UPDATE runs SET output = 'announced'")
    assert refused(db, by_hand) == "MissingStamp"
    with pytest.raises(ZeroDivisionError), run.transaction(db):
        raise ZeroDivisionError
    assert refused(db, by_hand) == "MissingStamp"
    for ending in ("COMMIT", "ROLLBACK"):
        with pytest.raises(Misuse, match="ended inside"), run.transaction(db) as tx:
            tx.execute(ending)
        assert refused(db, by_hand) == "MissingStamp"
    assert row(db, "output") == ("announced",)


def test_an_announcement_that_is_left_over_admits_nothing_late(place: Place, db: Any) -> None:
    """It is compared with the row for each write: it is no more than a hint."""
    first, second = place.worker(), place.worker()
    late = claimed(first, db)
    leaks = place.connect()

    def announce(token: int) -> None:
        leaks.execute(f"CALL fenced_guard.enter_claim(DATABASE(), 'runs', 'runs/1', {token})")
        leaks.execute("COMMIT")

    announce(late.token)
    end_lease(first)
    second.give_back(db)
    now = claimed(second, db)
    assert refused(leaks, "UPDATE runs SET output = 'late'") == "Uncovered"
    announce(now.token)
    assert place.claims.revoke(db, key=1)
    assert refused(leaks, "UPDATE runs SET output = 'late'") == "Uncovered"
    with pytest.raises(OutOfOrder, match="revoked"):
        now.finish(db, status="done")
    assert row(db, "output") == (None,)


def test_the_planted_transaction_that_compares_tokens_alone_is_seen(place: Place, db: Any) -> None:
    name = "fenced_guard.carries_claim"
    (right,) = (
        text
        for text in routines(step(server_of(on(db, "blocking").table(place.claims._spec, True))).product)
        if f"FUNCTION {name}(" in text
    )
    wrong = right.replace("CONCAT(x'0A09', p_scope, '/', p_table, '/', p_name, ", "CONCAT(")
    assert wrong != right
    db.execute(f"DROP FUNCTION {name}")
    db.execute(wrong)
    try:
        db.execute("INSERT INTO runs (id) VALUES (2)")
        one, two = place.worker().claim_many(db, 2)
        with one.transaction(db) as tx:
            tx.execute(f"UPDATE runs SET output = 'late' WHERE id = {two.id}")
        assert row(db, "output", two.id) == ("late",)
    finally:
        db.execute(f"DROP FUNCTION {name}")
        db.execute(right)


def test_a_deadlocks_victim_claims_again(place: Place, db: Any) -> None:
    """The claim has locked the row and waits for the trusted realm; somebody heavier has that, and wants the row."""
    worker, own, other = place.worker(), place.connect(), place.connect()
    claimed(worker, db).retry(db)  # it has begun its work
    db.execute("CREATE TABLE ballast (n int PRIMARY KEY)")
    other.execute("BEGIN")
    other.execute("INSERT INTO ballast VALUES " + ", ".join(f"({n})" for n in range(500)))
    other.execute("SELECT realm FROM fenced_guard.trust WHERE scope = CAST(DATABASE() AS BINARY) FOR UPDATE")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(worker.claim_many(own)))
    thread.start()
    wait_for_a_waiter(db)
    other.execute("SELECT 1 FROM runs WHERE id = 1 FOR UPDATE")  # returns: the claim was the victim
    thread.join()
    assert found == [[]]  # somebody has the row locked
    other.execute("ROLLBACK")
    claimed(worker, own).finish(own, status="done")


def test_a_write_whose_connection_is_lost_may_be_called_again(place: Place, db: Any) -> None:
    run = claimed(place.worker(), db)
    lost, other = place.connect(), place.connect()
    other.execute("BEGIN")
    other.execute("SELECT 1 FROM runs WHERE id = 1 FOR UPDATE")
    said: list[BaseException] = []

    def finish() -> None:
        try:
            run.finish(lost, status="done", output="x")
        except Indeterminate as error:
            said.append(error)

    thread = threading.Thread(target=finish)
    thread.start()
    wait_for_a_waiter(db)
    db.execute(f"KILL {lost.thread_id()}")
    thread.join()
    assert [type(error) for error in said] == [Indeterminate]
    other.execute("ROLLBACK")
    run.finish(db, status="done", output="x")
    assert row(db) == ("done", "x")


def wait_for_a_waiter(db: Any) -> None:
    while db.execute("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'").fetchone()[-1] == "0":
        pass


def test_an_ability_that_these_servers_lack_is_refused_at_the_installation(place: Place) -> None:
    db = place.connect()
    db.execute("CREATE TABLE jobs (id bigint PRIMARY KEY)")
    db.execute(
        "CREATE TABLE runs (id bigint PRIMARY KEY, status varchar(20), title text, job bigint, "
        "FOREIGN KEY (job) REFERENCES jobs (id) ON DELETE CASCADE)"
    )
    options = {**OPTIONS, "order": "id", "error": None}
    with pytest.raises(Unsupported, match="without firing its triggers"):
        Claims(**options).install(db)
    db.execute("ALTER TABLE runs DROP FOREIGN KEY runs_ibfk_1")
    with pytest.raises(Unsupported, match="mint"):
        Claims(**options, mint=True).install(db)
    for order in ("title", "length(status)", "nothing"):
        with pytest.raises(Unsupported, match="not a column that an index"):
            Claims(**{**options, "order": order}).install(db)
    with pytest.raises(fenced.Misconfigured, match="stats"):
        Claims(**{**options, "ready": "stats = 'pending'"}).install(db)


def test_proofs_and_claims_exclude_each_other(place: Place, db: Any) -> None:
    db.execute("UPDATE fenced_guard.trust SET proof = TRUE WHERE scope = CAST(DATABASE() AS BINARY)")
    with pytest.raises(Unsupported, match="proofs"):
        place.claims.install(db)


def test_another_condition_replaces_column_and_index(place: Place, db: Any) -> None:
    db.execute("UPDATE runs SET status = 'waiting 50 %'")
    changed = Claims(**{**OPTIONS, "ready": "status = 'waiting 50 %'", "back": {"status": "waiting 50 %"}})
    changed.install(db, replace=True)
    indexes = {line[2] for line in db.execute("SHOW INDEX FROM runs").fetchall()}
    assert len(indexes) == 3, indexes  # the primary key, one of what is ready, one of what is held
    with changed.worker(place.client()) as worker:
        run = claimed(worker, db)
        assert row(db) == ("running", None)
        run.retry(db)
        assert row(db) == ("waiting 50 %", None)
        assert (changed.status(db).ready, changed.status(db).claimed) == (1, 0)
    changed.uninstall(db)
    db.execute("UPDATE runs SET output = 'free'")
    assert row(db, "output, claim_token") == ("free", run.token)


def test_claims_on_a_model_of_django(mariadb_server: MariadbServer) -> None:
    where = [mariadb_server.host, str(mariadb_server.port), mariadb_server.create_database()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.work.django_program", *where],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["as expected"], done.stderr
