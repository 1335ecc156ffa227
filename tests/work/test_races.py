"""The races of workers that stall: by hand they happen, with claims they do not.

They were seen in aegra 502, xagent 1230, River 1302, django-ox 16 and procrastinate 1518.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import fenced
from fenced.errors import Misuse, OutOfOrder, StaleToken, Uncovered
from tests.work.places import EMPTY, Place, claimed, end_lease, place_at, refused, row

HAND_CLAIM = (
    "UPDATE runs SET status = 'running', problem = '{who}' WHERE id = "
    "(SELECT id FROM (SELECT id FROM runs WHERE status = 'pending' LIMIT 1) AS next)"
)
HAND_REAP = "UPDATE runs SET status = 'pending', problem = NULL WHERE status = 'running'"


@pytest.fixture
def db(place: Place) -> Any:
    return place.prepare()


def by_hand(place: Place) -> Any:
    """A row that A has claimed by hand, a reaper has given back, and B has claimed."""
    db = place.prepare("observe")
    assert db.execute(HAND_CLAIM.format(who="A")).rowcount == 1
    db.execute(HAND_REAP)
    assert db.execute(HAND_CLAIM.format(who="B")).rowcount == 1
    return db


def test_by_hand_the_superseded_attempt_hits_its_successor(place: Place) -> None:
    db = by_hand(place)
    db.execute("UPDATE runs SET status = 'done', output = 'of A' WHERE id = 1")  # A wakes up: finish, by id
    db.execute("UPDATE runs SET problem = NULL WHERE id = 1")  # and its release strips B
    assert row(db, "output, problem") == ("of A", None)


def test_by_hand_the_status_in_the_condition_is_not_enough(place: Place) -> None:
    db = by_hand(place)
    late = "UPDATE runs SET status = 'done', output = 'of {}' WHERE id = 1 AND status = 'running'"
    assert db.execute(late.format("A")).rowcount == 1  # it matched B's attempt
    assert db.execute(late.format("B")).rowcount == 0


def test_by_hand_a_rescue_overwrites_a_finished_row(place: Place) -> None:
    db = place.prepare("observe")
    db.execute(HAND_CLAIM.format(who="A"))
    stuck = db.execute("SELECT id FROM runs WHERE status = 'running'").fetchall()
    db.execute("UPDATE runs SET status = 'done', output = 'of A' WHERE id = 1")  # A finishes in between
    db.execute(f"UPDATE runs SET status = 'pending' WHERE id = {stuck[0][0]}")
    assert row(db) == ("pending", "of A")  # it will run again


def test_a_superseded_worker_is_refused_whatever_it_writes(place: Place, db: Any) -> None:
    first, second = place.worker(), place.worker()
    late = claimed(first, db)
    end_lease(first)
    assert second.give_back(db) == 1
    now = claimed(second, db)
    assert (now.id, now.attempt, now.token > late.token) == (late.id, 2, True)
    with pytest.raises(StaleToken, match=f"token {late.token} is stale: {now.token} has been seen"):
        late.finish(db, status="done", output="of A")
    assert late.outcome == "lost"
    for late_again in (late, late):
        late_again.outcome = None
        with pytest.raises(StaleToken):
            late_again.retry(db)
    late.outcome = None
    with pytest.raises(StaleToken):
        late.update(db, output="progress of A")
    late.outcome = None
    with pytest.raises(StaleToken), late.transaction(db) as tx:
        tx.execute("CREATE TABLE side_effect (n int)")
    assert refused(db, "SELECT * FROM side_effect") is not None  # never made
    now.finish(db, status="done", output="of B")
    assert row(db, "status, output, claim_token") == ("done", "of B", now.token)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE runs SET status = 'done', output = 'by hand'",
        "UPDATE runs SET claim_holder = NULL",
        "UPDATE runs SET claim_token = 99999",
        "UPDATE runs SET claim_write = NULL",
        "DELETE FROM runs",
    ],
)
def test_writes_by_hand_of_a_claimed_row_are_refused(place: Place, db: Any, sql: str) -> None:
    run = claimed(place.worker(), db)
    assert refused(db, sql) == "MissingStamp"
    run.finish(db, status="done", output="x")
    if not sql.startswith("DELETE"):  # finished rows may be deleted
        assert refused(db, sql) == "MissingStamp"
    assert row(db) == ("done", "x")


def test_a_dead_workers_row_is_given_back_by_workers_alone(place: Place, db: Any) -> None:
    first, second = place.worker(), place.worker()
    claimed(first, db)
    end_lease(first)
    by_hand = "UPDATE runs SET status = 'done', output = 'by hand', claim_holder = NULL"
    assert refused(db, by_hand) == "MissingStamp"
    assert second.give_back(db) == 1
    assert refused(db, by_hand) == "MissingStamp"
    claimed(second, db).finish(db, status="done")


def test_a_rescue_never_touches_a_finished_row(place: Place, db: Any) -> None:
    first, second = place.worker(), place.worker()
    run = claimed(first, db)
    end_lease(first)
    run.finish(db, status="done", output="of A")  # late, but nobody was given the row: it counts
    assert second.give_back(db) == 0
    assert second.claim_many(db) == []
    assert row(db) == ("done", "of A")


def test_late_but_given_to_nobody_yet(place: Place, db: Any) -> None:
    first, second = place.worker(), place.worker()
    run = claimed(first, db)
    end_lease(first)
    assert second.give_back(db) == 1
    run.finish(db, status="done", output="of A")  # its token is still the last one: nothing is thrown away
    assert second.claim_many(db) == []
    assert row(db) == ("done", "of A")


def test_the_same_worker_twice(place: Place, db: Any) -> None:
    worker = place.worker()
    one = claimed(worker, db)
    assert one.retry(db) == "retried"
    two = claimed(worker, db)
    assert two.token > one.token
    one.outcome = None
    with pytest.raises(StaleToken):
        one.finish(db, status="done")
    two.finish(db, status="done")


def test_a_restarted_worker_is_another_one(place: Place, db: Any) -> None:
    with fenced.Client(place.authority, label="worker-1") as client, place.claims.worker(client) as first:
        late = claimed(first, db)
    second = place.worker(place.client(label="worker-1"))
    again = claimed(second, db)  # claiming has given it back first
    late.outcome = None
    with pytest.raises(StaleToken):
        late.finish(db, status="done")
    again.finish(db, status="done")


def test_nobody_is_born_claimed_and_nobody_moves_a_claimed_name(place: Place, db: Any) -> None:
    assert refused(db, "INSERT INTO runs (id, claim_token) VALUES (7, 7)") == "MissingStamp"
    db.execute("UPDATE runs SET priority = 3")  # nobody has claimed it yet: the program's own business
    run = claimed(place.worker(), db)
    write = (run.token << 20) + 1
    assert refused(db, f"UPDATE runs SET id = 9, claim_write = {write}") == "Uncovered"
    assert refused(db, f"UPDATE runs SET claim_write = {write + (1 << 20)}") == "ForgedStamp"
    run.finish(db, status="done")


def test_a_row_made_again_under_its_old_key_is_another_one(place: Place, db: Any) -> None:
    worker = place.worker()
    run = claimed(worker, db)
    with run.transaction(db) as tx:
        tx.execute("DELETE FROM runs WHERE id = 1")
    with pytest.raises(StaleToken, match="gone"):
        run.update(db, output="x")
    db.execute("INSERT INTO runs (id) VALUES (1)")
    run.outcome = None
    with pytest.raises(StaleToken):
        run.finish(db, status="done")
    assert row(db) == ("pending", None)


def test_a_transaction_writes_the_row_and_others_or_nothing(place: Place, db: Any) -> None:
    db.execute("CREATE TABLE answers (id int)")
    worker = place.worker()
    run = claimed(worker, db)
    with pytest.raises(ZeroDivisionError), run.transaction(db) as tx:
        tx.execute("INSERT INTO answers VALUES (1)")
        run.finish(tx, status="done")
        raise ZeroDivisionError
    assert (run.outcome, row(db)) == (None, ("running", None))
    with run.transaction(db) as tx:
        tx.execute("INSERT INTO answers VALUES (1)")
        tx.execute("UPDATE runs SET output = 'unstamped, but announced' WHERE id = 1")
        run.finish(tx, status="done")
    assert row(db) == ("done", "unstamped, but announced")
    assert db.execute("SELECT count(*) FROM answers").fetchone() == (1,)
    with pytest.raises(Misuse, match="has ended: done"):
        run.finish(db, status="done")


def test_attempts_are_counted_at_the_claim_and_end_as_a_dead_letter(place: Place, db: Any) -> None:
    second = place.worker()
    for attempt in (1, 2, 3):
        crashing = place.worker()
        assert claimed(crashing, db).attempt == attempt
        end_lease(crashing)
        assert second.give_back(db) == 1
    assert row(db, "status, claim_attempts") == ("failed", 3)
    assert second.claim_many(db) == []
    status = place.claims.status(db)
    assert (status.ready, status.dead) == (0, 1)
    assert place.claims.revive(db, id=1) == 1
    assert claimed(second, db).retry(db) == "retried"


def test_an_operator_revokes_the_claim_of_a_live_worker(place: Place, db: Any) -> None:
    worker = place.worker()
    run = claimed(worker, db)
    assert place.claims.revoke(db, key=1)
    assert not place.claims.revoke(db, key=1)
    with pytest.raises(OutOfOrder, match="revoked"):
        run.finish(db, status="done")
    run.outcome = None
    with pytest.raises(OutOfOrder), run.transaction(db):
        pass
    claimed(worker, db).finish(db, status="done")


@pytest.mark.parametrize("ended", ["not", "finished", "given back", "revoked"])
def test_a_transaction_of_one_claim_admits_no_write_of_another(place: Place, db: Any, ended: str) -> None:
    """Where the worker declares its tokens, the rows of a batch have the same."""
    db.execute("INSERT INTO runs (id) VALUES (2)")
    one, two = place.worker().claim_many(db, 2)
    if ended == "finished":
        two.finish(db, status="done")
    elif ended == "given back":
        two.retry(db)
    elif ended == "revoked":
        assert place.claims.revoke(db, key=two.id)
    before = row(db, "status, output", two.id)
    with pytest.raises(Uncovered, match=f"^{two.name}:"), one.transaction(db) as tx:
        tx.execute(f"UPDATE runs SET output = 'late' WHERE id = {two.id}")
    if ended == "not":
        with pytest.raises(Uncovered, match=f"^{two.name}:"), one.transaction(db) as tx:
            tx.execute(f"DELETE FROM runs WHERE id = {two.id}")
    assert row(db, "status, output", two.id) == before
    with one.transaction(db) as tx:
        tx.execute(f"UPDATE runs SET output = 'its own' WHERE id = {one.id}")
    assert row(db, "output", one.id) == ("its own",)


def test_the_planted_transaction_that_compares_tokens_alone_is_seen(
    claimed_databases: dict[str, str], tmp_path: Path
) -> None:
    url = claimed_databases["elsewhere"]
    with place_at("postgresql", url, f"sqlite:///{tmp_path}/leases.db") as place:
        db = place.connect()
        db.execute(EMPTY)
        ((right,),) = db.execute(
            "SELECT pg_get_functiondef('fenced_guard.carries_claim'::regproc)"
        ).fetchall()
        wrong = right.replace("p_line, E'\\n'", "split_part(p_line, ' ', 1), ' '")
        assert wrong != right
        db.execute(wrong.encode())
        try:
            db.execute("INSERT INTO runs (id) VALUES (1), (2)")
            one, two = place.worker().claim_many(db, 2)
            with one.transaction(db) as tx:
                tx.execute(f"UPDATE runs SET output = 'late' WHERE id = {two.id}")
            assert row(db, "output", two.id) == ("late",)
        finally:
            db.execute(right.encode())


def test_a_repeated_write_is_applied_once(place: Place, db: Any) -> None:
    """The answer of the first was lost. The repeat has the same number, and finds that it was applied."""
    run = claimed(place.worker(), db)
    run.update(db, output="x")
    db_two = place.connect()
    run._unsure = True
    run.update(db_two, output="applied twice")
    assert row(db) == ("running", "x")
    run.finish(db, status="done")


def test_a_block_gives_back_what_it_did_not_finish(place: Place, db: Any) -> None:
    worker = place.worker()
    with worker.claim(db) as run:
        assert run is not None
    assert (run.outcome, row(db, "status, problem")) == ("retried", ("pending", None))
    with pytest.raises(ZeroDivisionError), worker.claim(db) as run:
        raise ZeroDivisionError("no answer")
    assert row(db, "status, problem") == ("pending", "ZeroDivisionError: no answer")
    with worker.claim(db) as run:
        assert run is not None
        run.finish(db, status="done")
    with worker.claim(db) as none:
        assert none is None
    with worker.claim(db, where={"id": 1}) as certain:  # finished: an operator's way to change it
        assert certain is not None
        certain.finish(db, status="pending")


def test_a_retry_comes_not_before_its_time_and_claims_keep_the_order(place: Place, db: Any) -> None:
    db.execute("INSERT INTO runs (id, priority) VALUES (2, 5), (3, 9)")
    worker = place.worker()
    found = worker.claim_many(db, 3)
    assert [run.id for run in found] == [3, 2, 1]
    found[0].retry(db, after=3600)
    found[1].retry(db, after=0)
    assert [run.id for run in worker.claim_many(db, 3)] == [2]
    assert (place.claims.status(db).later, place.claims.status(db).claimed) == (1, 2)


def test_its_stamp_is_valid_at_another_guard(place: Place, db: Any) -> None:
    db.execute("CREATE TABLE results (run_id bigint PRIMARY KEY, text text)")
    results = fenced.sql.Guard(table="results", name="runs/{run_id}")
    results.install(db, mode="require")
    first, second = place.worker(), place.worker()
    late = claimed(first, db)
    with results.transaction(db, late) as tx:
        tx.execute("INSERT INTO results VALUES (1, 'draft of A')")
    end_lease(first)
    second.give_back(db)
    now = claimed(second, db)
    with now.transaction(db, guards=[results]) as tx:
        tx.execute("UPDATE results SET text = 'of B'")
        now.finish(tx, status="done")
    with pytest.raises(StaleToken), results.transaction(db, late) as tx:
        tx.execute("UPDATE results SET text = 'of A'")
    assert db.execute("SELECT text FROM results").fetchone() == ("of B",)


def test_a_late_write_that_waits_for_the_row_sees_the_new_claim(place: Place, db: Any) -> None:
    """The late UPDATE is already waiting for the row's lock when the claim of the successor commits."""
    first, second = place.worker(), place.worker()
    late = claimed(first, db)
    end_lease(first)
    second.give_back(db)
    other = place.connect()
    other.execute("BEGIN IMMEDIATE" if place.engine == "sqlite" else "BEGIN")
    claimed(second, other)
    said: list[BaseException] = []

    def finish() -> None:
        try:
            late.finish(place.connect(), status="done", output="of A")
        except StaleToken as error:
            said.append(error)

    thread = threading.Thread(target=finish)
    thread.start()
    if place.engine != "sqlite":
        waiting = {
            "postgresql": "SELECT count(*) FROM pg_locks WHERE NOT granted",
            "mariadb": "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'",
        }
        while int(db.execute(waiting[place.engine]).fetchone()[-1]) == 0:
            pass
    other.execute("COMMIT")
    thread.join()
    assert [type(error) for error in said] == [StaleToken]
