"""`fenced audit` shows what guards recorded; `fenced explain` tells what happened, and claims no more than that."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

import fenced
from evidence.explained import differences, drilled, explained
from fenced.cli import app
from fenced.client import registry
from fenced.diagnosis import explain, lanes
from fenced.diagnosis.records import Audit, Wanted, followed, merged
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.sql import Guard
from fenced.testing.kit import asking
from fenced.values.contracts import Authority
from fenced.values.decision import Ruling, Verdict
from fenced.values.model import Granted, Holder, Stamp, grant_id
from fenced.values.past import PastLease, Remembers
from fenced.values.rollout import Change, Decision
from tests.conftest import NewDatabase

ORDERS = Guard(table="orders", name="orders/{id}")
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
NAME = "orders/42"
A, B = Holder("a" * 32, "A", "host", 1), Holder("b" * 32, "B", "host", 2)


# What authorities remember.


@pytest.fixture(params=["memory", "sqlite", "ledger", "postgresql"])
def remembering(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgresql_url"))
    return f"memory:{tmp_path}" if request.param == "memory" else f"{request.param}:///{tmp_path}/leases"


def test_an_authority_remembers_how_leases_ended(remembering: str) -> None:
    """Who had it, with which token, until when, and how it ended; and who gave up waiting."""
    runtime = BlockingRuntime()
    authority = registry.authority(remembering, runtime)
    step(authority.open())
    began = datetime.now(UTC).timestamp()
    expired, released, revoked, held = (asking(runtime, NAME, ttl=ttl) for ttl in (0.2, 10.0, 10.0, 10.0))
    tokens = [_granted(authority, expired)]
    waiter = asking(runtime, NAME, wait=True)
    step(authority.ask(waiter))
    step(authority.withdraw(waiter.secret))
    _until_free(runtime, 0.3)
    tokens.append(_granted(authority, released))
    step(authority.release(released.secret))
    tokens.append(_granted(authority, revoked))
    step(authority.force_release(NAME, tokens[-1]))
    tokens.append(_granted(authority, held))
    assert isinstance(authority, RowsThatRemember)
    past = step(authority.past(NAME))
    ended = datetime.now(UTC).timestamp()
    assert step(authority.past("orders/41")) == []
    step(authority.close())
    waited, *leases = past
    assert (waited.token, waited.state, waited.holder) == (0, "withdrawn", waiter.holder)
    assert [each.token for each in leases] == tokens
    assert [each.state for each in leases] == ["expired", "released", "revoked", "granted"]
    assert [each.grant for each in leases] == [
        grant_id(each.secret) for each in (expired, released, revoked, held)
    ]
    for each in leases[:3]:
        assert each.confirmed is not None and each.ended is not None
        assert began - 0.1 <= each.confirmed <= each.ended <= ended + 0.1
    assert leases[0].confirmed is not None
    assert leases[0].ended == pytest.approx(leases[0].confirmed + 0.2)


class RowsThatRemember(Remembers, Authority):
    """What the four are."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return hasattr(kind, "past")


def _granted(authority: Authority, ask: Any) -> int:
    answer = step(authority.ask(ask))
    assert isinstance(answer, Granted)
    return answer.token


def _until_free(runtime: BlockingRuntime, seconds: float) -> None:
    step(runtime.wait(runtime.wakeup(), runtime.now() + seconds))


# Accounts of drills.


@pytest.mark.xdist_group("drills")
def test_a_drill_is_explained(tmp_path: Path) -> None:
    """`python -m evidence.explained` does it for twelve."""
    authority, guard = f"sqlite:///{tmp_path}/leases.db", f"sqlite:///{tmp_path}/values.db"
    drill = drilled("sigstop", authority, guard)
    account = explained(drill["names"][0], authority, guard)
    assert differences(drill, account) == []
    # And the comparison can fail: each of these would be a wrong story.
    for planted in (_other_holder, _no_refusal, _nobody_late, _let_through):
        assert differences(drill, planted(json.loads(json.dumps(account)))) != []


def _other_holder(account: dict[str, Any]) -> dict[str, Any]:
    account["leases"][0]["holder"]["label"] = "drill Z"
    return account


def _no_refusal(account: dict[str, Any]) -> dict[str, Any]:
    account["events"] = [each for each in account["events"] if each["kind"] != "refused"]
    return account


def _nobody_late(account: dict[str, Any]) -> dict[str, Any]:
    return {**account, "concluded": []}


def _let_through(account: dict[str, Any]) -> dict[str, Any]:
    return {**account, "concluded": [*account["concluded"], "The guard LET IT THROUGH"]}


# What is said, and what is not.

LATE = PastLease((NAME,), A, "a" * 32, 33, "expired", 2.0, NOON.timestamp(), NOON.timestamp() + 2)
NEXT = PastLease((NAME,), B, "b" * 32, 34, "released", 2.0, NOON.timestamp() + 2, NOON.timestamp() + 5)
STALE = Decision(
    NOON + timedelta(seconds=3),
    "public.orders",
    NAME,
    str(Stamp("0" * 16, (NAME,), 33, 1, "a" * 32)),
    34,
    "b" * 32,
    1,
    Verdict.STALE,
    Ruling.REFUSE,
    "require",
    "app",
)


def audit(*decisions: Decision, changes: tuple[Change, ...] = (), **more: Any) -> Audit:
    return Audit("guard:", decisions, None, changes, None, False, **more)


def told(leases: list[PastLease] | None, *audits: Audit) -> explain.Account:
    return explain.explained(NAME, *explain.around(NOON), leases, audits)


def test_every_sentence_has_a_record_behind_it() -> None:
    account = told([LATE, NEXT], audit(STALE))
    assert [each.kind for each in account.events] == ["held", "expired", "held", "refused", "released"]
    assert {each.source for each in account.events} == {"authority", "guard"}
    (late,) = account.concluded
    over = "its write came 1.00 s after its lease had ended, unrenewed"
    assert late == f"A (host:1) (token 33) was late: {over}. The guard refused it."
    assert "token 34 of B (host:2) has been seen" in next(
        e.says for e in account.events if e.kind == "refused"
    )


def test_another_record_is_another_story() -> None:
    let = told([LATE, NEXT], audit(replace(STALE, ruling=Ruling.RECORD, mode="shadow")))
    assert "LET IT THROUGH" in let.concluded[0] and let.events[3].kind == "let_through"
    unknown = told([NEXT], audit(STALE))
    assert "Nobody remembers who had it" in unknown.concluded[0]
    assert "a write of somebody" in next(each.says for each in unknown.events if each.kind == "refused")
    forged = replace(STALE, stamp=str(Stamp("0" * 16, (NAME,), 33, 1, "c" * 32)))
    assert "A (host:1) (token 33) was late" not in str(told([LATE, NEXT], audit(forged)).concluded)
    elsewhere = told([LATE, NEXT], audit(replace(STALE, name="orders/41")))
    assert "recorded a refusal" in elsewhere.concluded[0] and len(elsewhere.events) == 4
    change = Change(NOON, "ops", "psql", "public.orders", "override", {"pattern": "orders/4*", "why": "test"})
    other = replace(change, detail={"pattern": "orders/9*"})
    changed = told(None, audit(changes=(change, other)))
    assert [each.kind for each in changed.events] == ["changed"] and "why test" in changed.events[0].says


def test_nothing_is_claimed_without_records() -> None:
    account = told(None)
    assert account.events == () and "no authority was asked" in account.unknown[0]
    assert any("no record of this name" in line for line in account.lines())
    assert "means nothing" in str(told([], audit()).unknown)
    assert "up to a second late" in str(told([], replace(audit(), lags=True)).unknown)


def test_the_picture_has_a_lane_for_each_lease() -> None:
    leases = [LATE, NEXT, *(replace(NEXT, token=n, grant=f"{n:032x}") for n in range(35, 60))]
    drawn = lanes.picture(told(leases, audit(STALE)))
    assert "older leases are not drawn" in drawn and ">token 59<" in drawn and ">token 33<" not in drawn
    two = lanes.picture(told([LATE, NEXT], audit(STALE)))
    assert ">token 33<" in two and "REFUSES" in two and "<svg" in two
    assert "<svg" in lanes.picture(told(None))


# The audit.


def test_decisions_are_chosen_by_name_token_time_and_verdict() -> None:
    found = merged([audit(STALE, replace(STALE, name="x", at=NOON))], Wanted())
    assert [each.name for _, each in found] == ["x", NAME]
    assert STALE in Wanted(name="orders/*", token=33, since=NOON, verdict="stale")
    for unwanted in (
        Wanted(name="x*"),
        Wanted(token=34),
        Wanted(since=NOON + timedelta(hours=1)),
        Wanted(verdict="reused"),
    ):
        assert STALE not in unwanted


def test_following_shows_each_decision_once() -> None:
    later = replace(STALE, at=NOON + timedelta(seconds=9))
    turns = [[audit(STALE)], [audit(STALE)], [audit(STALE, later)], [audit(later)]]
    found = followed(lambda: turns.pop(0), Wanted(), lambda: None)
    assert [[each for _, each in next(found)] for _ in range(4)] == [[STALE], [], [later], []]


def test_audit_and_explain_of_a_late_holder(new_database: NewDatabase, tmp_path: Path) -> None:
    """On a real table: the audit by name and as CSV, the account with its picture, and wrong times."""
    guard, leases = new_database(_prepare), f"sqlite:///{tmp_path}/leases.db"
    with fenced.Client(leases, label="billing") as client, psycopg.connect(guard, autocommit=True) as db:
        with client.hold(NAME) as lease:
            late = lease.next_stamp()
        with client.hold(NAME) as lease:
            ORDERS.announce(db, lease)
        with pytest.raises(fenced.StaleToken), ORDERS.transaction(db, late):
            pass
    run = _runner()
    rows = list(
        csv.DictReader(io.StringIO(run("audit", guard, "--name", "orders/*", "--since", "1h", "--csv")))
    )
    assert [(row["name"], row["verdict"], row["token"], row["mark"]) for row in rows] == [
        (NAME, "stale", "1", "2")
    ]
    assert json.loads(run("audit", guard, "--verdict", "reused", "--json")) == []
    assert "refused" in run("audit", guard)
    words = ["explain", NAME, "--authority", leases, "--guard", guard]
    text = run(*words, "--svg", str(tmp_path / "story.svg"))
    assert "REFUSES a write of billing" in text and "had released the lease. The guard refused it." in text
    assert "token 2" in (tmp_path / "story.svg").read_text()
    assert "no record of this name" in run(*words, "--at", "2026-01-31T03:12")
    assert CliRunner().invoke(app, [*words, "--at", "yesterday"]).exit_code == 2
    assert CliRunner().invoke(app, [*words, "--at", "03:12", "--since", "1h"]).exit_code == 2


def _runner() -> Callable[..., str]:
    def run(*words: str) -> str:
        ended = CliRunner().invoke(app, list(words))
        assert ended.exit_code == 0, ended.output
        return ended.output

    return run


def _prepare(db: psycopg.Connection[Any]) -> None:
    db.execute("CREATE TABLE orders (id integer PRIMARY KEY, qty integer NOT NULL)")
    ORDERS.install(db, mode="require")
