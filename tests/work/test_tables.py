"""Claims as a guard on tables of all shapes: modes, records, partitions, upserts, cascades, and the plan of a claim."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

import fenced
from fenced.cli import app
from fenced.errors import LeaseLost, Misconfigured, Misuse, StaleToken, Unsupported
from fenced.guards.claims import Claiming
from fenced.runtime.blocking import step
from fenced.sql.engines import on
from fenced.work import Claims
from tests.work.places import EMPTY, OPTIONS, Place, claimed, end_lease, place_at, refused, row


@pytest.fixture
def db(place: Place) -> Any:
    return place.prepare()


@pytest.fixture
def beside(claimed_databases: dict[str, str]) -> str:
    return claimed_databases["postgresql"]


def late_and_now(place: Place, db: Any) -> tuple[Any, Any]:
    first, second = place.worker(), place.worker()
    late = claimed(first, db)
    end_lease(first)
    second.give_back(db)
    return late, claimed(second, db)


@pytest.mark.parametrize("mode", ["observe", "shadow", "enforce"])
def test_below_require_a_write_without_a_stamp_is_let_through(place: Place, mode: str) -> None:
    db = place.prepare(mode)
    run = claimed(place.worker(), db)
    db.execute("UPDATE runs SET output = 'by hand'")
    assert row(db, "output, claim_token") == ("by hand", run.token)
    run.finish(db, status="done")


@pytest.mark.parametrize("mode", ["observe", "shadow"])
def test_a_stale_write_that_is_let_through_leaves_the_claim_alone(place: Place, mode: str) -> None:
    db = place.prepare(mode)
    late, now = late_and_now(place, db)
    if place.engine == "sqlite":
        # Its triggers cannot change what is written: a stale claim is refused in every mode.
        with pytest.raises(StaleToken):
            late.finish(db, output="late")
    else:
        late.finish(db, output="late")
        assert row(db, "output") == ("late",)
    holder = row(db, "claim_token, claim_holder")
    assert holder[0] == now.token
    assert holder[1] is not None
    now.finish(db, status="done", output="now")
    assert row(db, "output") == ("now",)


def test_enforce_refuses_a_stale_write_and_an_override_lets_it_through(place: Place) -> None:
    db = place.prepare("enforce")
    late, _ = late_and_now(place, db)
    with pytest.raises(StaleToken):
        late.update(db, output="late")
    operator = on(db, "blocking").engine.operator(db)
    (record,) = [one for one in step(operator.records("runs")) if one.verdict == "stale"]
    assert (record.name, record.ruling) == ("runs/1", "refuse")
    assert record.stamp is not None
    assert f":{late.token}:" in record.stamp
    if place.engine != "sqlite":
        step(operator.override("runs", "*", 60, "an emergency"))
        late.outcome = None
        late.update(db, output="late")
        assert row(db, "output") == ("late",)


def test_a_canary_refuses_for_its_share_of_the_names(place: Place) -> None:
    db = place.prepare()
    if place.engine == "sqlite":  # its triggers know no shares: a stale claim is refused in every mode
        return
    operator = on(db, "blocking").engine.operator(db)
    for share, refuses in (("0%", False), ("100%", True)):
        step(operator.set_mode("runs", f"canary({share})"))
        delete = (
            "DELETE FROM runs"  # MariaDB lets it through: it carries no stamp, and the mode is not require
        )
        if place.engine == "postgresql":
            delete = f"SET session_replication_role = replica; {delete}; RESET session_replication_role"
        db.execute(delete)
        db.execute("INSERT INTO runs (id) VALUES (1)")
        late, _ = late_and_now(place, db)
        if refuses:
            with pytest.raises(StaleToken):
                late.update(db, output="late")
        else:
            late.update(db, output="late")


def test_its_status_is_that_of_a_guard(place: Place, db: Any) -> None:
    operator = on(db, "blocking").engine.operator(db)
    (guard,) = step(operator.status("public.runs" if place.engine == "postgresql" else "runs")).guards
    assert (guard.template, guard.wrong) == ("runs/{id}", ())
    assert [stage.mode for stage in guard.stages] == ["require"]
    assert step(operator.upgrade()) == [guard.guard]
    run = claimed(place.worker(), db)  # its triggers still work
    assert refused(db, "UPDATE runs SET output = 'by hand'") == "MissingStamp"
    run.finish(db, status="done")


def test_installing_it_again_is_harmless_and_another_one_is_refused(place: Place, db: Any) -> None:
    place.claims.install(db)
    other = Claims(**{**OPTIONS, "ready": "status = 'waiting'"})
    with pytest.raises(Misconfigured, match="replace=True"):
        other.install(db)
    with pytest.raises(Misconfigured, match="replace=True"):
        fenced.sql.Guard(table="runs", name="runs/{id}").install(db)
    assert "claim_holder" in place.claims.script(db)
    place.claims.uninstall(db)
    db.execute("UPDATE runs SET output = 'free'")
    place.claims.install(db, mode="require")


@pytest.mark.parametrize(
    "wrong",
    [
        {"ready": "status = 'x'; DROP TABLE runs"},
        {"name": "runs/{id}/{status}"},
        {"name": "runs"},
        {"max_attempts": 0},
        {"backoff": (5, 1)},
        {"back": {"claim_token": 1}},
        {"back": {"status": 1.5}},
        {"table": None},
        {"key": "status", "name": "runs/{id}"},
    ],
)
def test_wrong_arguments_are_misuse(wrong: dict[str, Any]) -> None:
    with pytest.raises(Misuse):
        Claims(**{**OPTIONS, **wrong})


def test_an_installed_guard_stores_what_was_given() -> None:
    claiming = Claims(**OPTIONS)._spec.claims
    assert claiming is not None
    assert Claiming.parse(str(claiming)) == claiming


def test_a_table_that_cannot_be_claimed_is_refused(place: Place, db: Any) -> None:
    db.execute("CREATE TABLE answers (id int, status text)")
    options = {**OPTIONS, "table": "answers", "name": "answers/{id}", "order": "id"}
    with pytest.raises(Misconfigured, match="not unique"):
        Claims(**options).install(db)
    with pytest.raises(Misconfigured, match="no column"):
        Claims(**{**OPTIONS, "back": {"missing": 1}}).install(db, replace=True)
    with pytest.raises((Misconfigured, LeaseLost), match="not installed"), place.stack:
        Claims(**options).worker(place.client()).__enter__().claim_many(db)


def test_upserts_replaces_and_cascades_meet_the_claim(place: Place, db: Any) -> None:
    run = claimed(place.worker(), db)
    conflict = "ON DUPLICATE KEY UPDATE" if place.engine == "mariadb" else "ON CONFLICT (id) DO UPDATE SET"
    assert refused(db, f"INSERT INTO runs (id) VALUES (1) {conflict} output = 'upserted'") == "MissingStamp"
    if place.engine != "postgresql":
        assert refused(db, "REPLACE INTO runs (id) VALUES (1)") == "MissingStamp"
    else:
        merge = "MERGE INTO runs r USING (SELECT 1 AS id) s ON r.id = s.id WHEN MATCHED THEN UPDATE SET output = 'm'"
        assert refused(db, merge) == "MissingStamp"
        assert refused(db, "TRUNCATE runs") == "MissingStamp"
    assert row(db, "output, claim_token") == (None, run.token)
    run.finish(db, status="done")
    db.execute("DELETE FROM runs")


def test_rows_of_partitions_are_claimed_too(beside: str) -> None:
    runs = Claims(**{**OPTIONS, "table": "parts", "name": "parts/{id}", "order": "id", "error": None})
    with (
        psycopg.connect(beside, autocommit=True) as db,
        fenced.Client(beside) as client,
        runs.worker(client) as worker,
    ):
        db.execute("DROP TABLE IF EXISTS parts")
        db.execute(
            "CREATE TABLE parts (id bigint, day int, status text DEFAULT 'pending', output text, PRIMARY KEY (id, day))"
            " PARTITION BY LIST (day); CREATE TABLE parts_1 PARTITION OF parts FOR VALUES IN (1)"
        )
        runs.install(db, mode="require", replace=True)
        # Later: it inherits the triggers.
        db.execute("CREATE TABLE parts_2 PARTITION OF parts FOR VALUES IN (2)")
        db.execute("INSERT INTO parts (id, day) VALUES (1, 1), (2, 2)")
        found = worker.claim_many(db, 2)
        assert [run.id for run in found] == [1, 2]
        for table in ("parts_1", "parts_2"):
            with pytest.raises(psycopg.Error) as by_hand:
                db.execute(f"UPDATE {table} SET output = 'by hand'")
            assert by_hand.value.sqlstate == "ZF007"
        for run in found:
            run.finish(db, status="done")
        runs.uninstall(db)
        db.execute("DROP TABLE parts")


def test_a_connection_in_pipeline_mode_is_misuse(beside: str) -> None:
    """There the rows that a statement claims come later, and nobody would have them."""
    with place_at("postgresql", beside, beside) as place:
        db = place.connect()
        with pytest.raises(Misuse, match="pipeline"), db.pipeline():
            place.worker().claim_many(db)
        assert place.claims.status(db).claimed == 0


def test_a_lease_of_another_namespace_or_nobody_claims_nothing(beside: str, place: Place, db: Any) -> None:
    """Where the database mints, the holder must be a live lease of the trusted realm."""
    if place.authority != beside:
        assert refused(db, "UPDATE runs SET claim_holder = '" + "1" * 32 + "'") == "MissingStamp"
        return
    claimed(place.worker(), db).retry(db)
    nobody = "UPDATE runs SET claim_holder = gen_random_uuid(), claim_token = 9000"
    with pytest.raises(psycopg.Error) as lost:
        db.execute(nobody)
    assert lost.value.sqlstate == "ZF013"
    other = place.worker(place.client(namespace="other"))
    with pytest.raises(fenced.Refused, match="realm"):
        other.claim_many(db)
    assert row(db, "claim_holder") == (None,)


def test_a_renewal_under_way_keeps_its_worker_alive(beside: str) -> None:
    """The lease is past its time, but its renewal has locked the row and has not committed."""
    runs = Claims(**OPTIONS)
    with (
        psycopg.connect(beside, autocommit=True) as db,
        psycopg.connect(beside) as renewal,
        fenced.Client(beside) as client,
        runs.worker(client) as second,
    ):
        db.execute(EMPTY)
        db.execute("INSERT INTO runs (id) VALUES (1)")
        first = runs.worker(client).__enter__()
        claimed(first, db)
        past = "UPDATE fenced.attempt SET expires = clock_timestamp() - interval '1 s' WHERE id = %s"
        db.execute(past, (first._work.lease.grant,))
        renewal.execute("SELECT FROM fenced.attempt WHERE id = %s FOR UPDATE", (first._work.lease.grant,))
        assert second.give_back(db) == 0
        renewal.rollback()
        assert second.give_back(db) == 1


def test_a_claim_of_a_large_table_reads_its_index(beside: str) -> None:
    runs = Claims(**OPTIONS)
    with (
        psycopg.connect(beside, autocommit=True) as db,
        fenced.Client(beside) as client,
        runs.worker(client) as worker,
    ):
        db.execute(EMPTY)
        db.execute("INSERT INTO runs (id) SELECT n FROM generate_series(1, 20000) AS n")
        db.execute("VACUUM ANALYZE runs")
        worker._work._minted = True
        table: Any = worker._work.tables(db)
        for limit in (1, 10):
            statement = table._claim(worker._work._terms(), limit, None, None)
            plan = "\n".join(line for (line,) in db.execute("EXPLAIN " + statement))
            assert "Seq Scan" not in plan, plan
            assert "fenced_ready" in plan, plan
        back = "EXPLAIN SELECT FROM runs WHERE claim_holder = ANY ((SELECT ARRAY[gen_random_uuid()])::uuid[])"
        assert "fenced_held" in "\n".join(line for (line,) in db.execute(back))


def test_one_renewal_and_one_statement_a_poll(beside: str) -> None:
    """A worker with many claims renews one lease; an idle one sends one statement each time."""
    runs = Claims(**OPTIONS)
    sent: list[str] = []
    with (
        psycopg.connect(beside, autocommit=True) as db,
        fenced.Client(beside) as client,
        runs.worker(client) as worker,
    ):
        db.execute(EMPTY)
        db.execute("INSERT INTO runs (id) SELECT n FROM generate_series(1, 100) AS n")
        leases = "SELECT count(*) FROM fenced.attempt"
        before = db.execute(leases).fetchone()
        assert len(worker.claim_many(db, 100)) == 100
        assert db.execute(leases).fetchone() == before
        table: Any = worker._work.tables(db)
        kept = type(table._session).records

        async def counted(session: Any, sql: str, parameters: Any = ()) -> Any:
            sent.append(sql)
            return await kept(session, sql, parameters)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(table._session), "records", counted)
            patch.setattr(type(table._session), "run", counted)
            for _ in range(3):
                assert worker.claim_many(db, 1) == []
        assert len(sent) == 3


def test_proofs_and_claims_exclude_each_other(beside: str) -> None:
    with psycopg.connect(beside, autocommit=True) as db, db.transaction(force_rollback=True):
        db.execute("UPDATE fenced_guard.trust SET proof = true")
        with pytest.raises(Unsupported, match="proofs"):
            Claims(**OPTIONS).install(db)


def test_a_transaction_that_saw_the_row_before_a_newer_claim_is_in_conflict(
    beside: str, place: Place, db: Any
) -> None:
    """At REPEATABLE READ: it cannot see the newer claim, so it is neither admitted nor refused, but run again."""
    if place.authority != beside:
        return
    first, second = place.worker(), place.worker()
    late = claimed(first, db)
    with psycopg.connect(beside) as old:
        old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        old.execute("SELECT FROM runs")
        end_lease(first)
        second.give_back(db)
        now = claimed(second, db)
        with pytest.raises(fenced.Conflict):
            late.finish(old, status="done", output="late")
        old.rollback()
    now.finish(db, status="done", output="now")
    assert row(db) == ("done", "now")


def test_an_authority_that_has_lost_its_history_claims_nothing(beside: str, place: Place, db: Any) -> None:
    """As after a restored dump, or in a copy of the table in another database: until its floor is raised."""
    if place.authority != beside:
        return
    above = 10**9
    db.execute(
        "SET session_replication_role = replica; "
        f"UPDATE runs SET claim_token = {above}, claim_write = {above << 20}; RESET session_replication_role"
    )
    worker = place.worker()
    with pytest.raises(fenced.Misconfigured, match="lost its history"):
        worker.claim_many(db)
    done = CliRunner().invoke(app, ["authority", "raise", beside, "--above", str(above)])
    assert done.exit_code == 0, done.output
    assert claimed(place.worker(), db).token > above
