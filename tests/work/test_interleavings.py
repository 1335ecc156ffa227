"""Every pair of what happens to a claimed row, under every interleaving of two sessions on a real server.

What was committed is played again, in the order of the commits, through a model of one row: the model must have
admitted all of it, the row must be the one that it leaves, and every refusal must be one that it makes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import pytest

import fenced
from fenced.errors import StaleToken
from fenced.guards.claims import CLOSED, ClaimTerms, Ends
from fenced.runtime.blocking import step
from fenced.sql.engines import on
from fenced.stores.postgresql.guard.claims import PostgresqlClaims
from fenced.work import Claims
from fenced_testkit.interleaving import (
    COMMIT,
    Explorer,
    InterleavingScript,
    ScriptStep,
    StoryBroken,
    Trace,
    sql,
)
from fenced_testkit.interleaving.postgresql import PostgresqlEngine
from tests.work.places import EMPTY, OPTIONS

pytestmark = pytest.mark.xdist_group("claim interleavings")

STALE, OUT_OF_ORDER, MISSING = "ZF001", "ZF003", "ZF007"
OPERATIONS = ("claim", "give_back", "renew", "finish", "retry", "write", "revoke", "by_hand")
PAIRS = tuple(itertools.combinations_with_replacement(OPERATIONS, 2))


@dataclass(frozen=True)
class RowModel:
    """One row: A has claimed it. `later`: somebody has claimed it since."""

    status: str = "running"
    output: str | None = None
    holder: str | None = "A"
    later: bool = False
    count: int = 0
    renewed: bool = False
    over: bool = False

    def writes(self, count: int) -> str:
        """How a stamped write is refused. One with the row's own number cannot be told from one without a stamp."""
        if self.later:
            return STALE
        return MISSING if count == self.count else OUT_OF_ORDER if count < self.count else ""


def applied(model: RowModel, operation: str, *, expired: bool) -> tuple[RowModel, str, int]:
    """The row after an operation, the SQLSTATE of its refusal, and how many rows it changes at most. A claim and a
    give-back skip a row that another session has locked, so they may change fewer."""
    match operation:
        case "claim" if model.status == "pending" and model.holder is None:
            return replace(model, status="running", holder="B", later=True, count=0), "", 1
        case "give_back" if model.holder == "A" and expired and not model.renewed:
            return replace(model, status="pending", holder=None, over=True), "", 1
        case "renew" if not model.over:
            return replace(model, renewed=True), "", 0
        case "finish" | "retry":
            number = 1 if operation == "finish" else 2
            if refusal := model.writes(number):
                return model, refusal, 0
            status, output = ("done", "A") if operation == "finish" else ("pending", model.output)
            return replace(model, status=status, output=output, holder=None, count=number), "", 1
        case "write":
            refusal = STALE if model.later else OUT_OF_ORDER if model.count >= CLOSED else ""
            return (model, refusal, 0) if refusal else (replace(model, output="W"), "", 1)
        case "revoke" if model.holder is not None:
            return replace(model, status="pending", holder=None, count=CLOSED + 1), "", 1
        case "by_hand":
            return model, MISSING, 0
    return model, "", 0


class Recorder:
    """A session that runs nothing, and keeps what it should run."""

    def __init__(self) -> None:
        self.sent: list[ScriptStep] = []

    def state(self) -> str:
        return "open"

    def place(self, number: int) -> str:
        return f"${number}"

    async def run(self, statement: str, parameters: Any = ()) -> list[tuple[Any, ...]]:
        self.sent.append(sql(statement, *parameters))
        return []

    async def records(self, statement: str, parameters: Any = ()) -> list[dict[str, Any]]:
        await self.run(statement, parameters)
        return []


class World:
    """A database in which A has claimed row 1, and B is a live worker.

    It mints the tokens, or the workers have theirs from an authority elsewhere.
    """

    def __init__(self, url: str, elsewhere: str = "") -> None:
        self.db = psycopg.connect(url, autocommit=True)
        self.minted = not elsewhere
        self.db.execute(EMPTY)
        self.db.execute("INSERT INTO runs (id) VALUES (1)")
        claims = Claims(**OPTIONS)
        # The client is closed: nobody renews these leases, and `reset` says whether they live.
        with fenced.Client(elsewhere or url) as client:
            first, second = claims.worker(client).__enter__(), claims.worker(client).__enter__()
            (run,) = first.claim_many(self.db)
            self.key = run._key
            self.holders = {
                name: worker._work.lease.grant if self.minted else worker._work._id
                for name, worker in (("A", first), ("B", second))
            }
            self.token = None if self.minted else second._work._token
        self._claims = claims
        self.expired = False
        self.explorer = Explorer(PostgresqlEngine(url))

    def _sent(self, call: Callable[[PostgresqlClaims], Any]) -> ScriptStep:
        recorder: Any = Recorder()
        table: Any = on(self.db, "blocking").table(self._claims._spec, True)
        with contextlib.suppress(StaleToken):  # the recorder has changed no row
            step(call(PostgresqlClaims(self._claims._spec, table, recorder)))
        return recorder.sent[0]  # type: ignore[no-any-return]

    def steps(self, operation: str) -> tuple[ScriptStep, ...]:
        key = self.key
        terms = ClaimTerms(self.holders["B"], self.token, key.realm)
        over = None if self.minted else [self.holders["A"]]  # elsewhere B has asked the authority before
        attempt = f"fenced.attempt WHERE id = '{self.holders['A']}'"
        made: dict[str, Callable[[], tuple[ScriptStep, ...]]] = {
            "claim": lambda: (self._sent(lambda table: table.claim(terms, 1, None)),),
            "give_back": lambda: (self._sent(lambda table: table.give_back(over)),),
            "renew": lambda: (
                sql(f"SELECT 1 FROM {attempt} FOR UPDATE"),
                sql(
                    "UPDATE fenced.attempt SET expires = clock_timestamp() + interval '1 h' "
                    f"WHERE id = '{self.holders['A']}' AND state = 'granted'"
                ),
            ),
            "finish": lambda: (
                self._sent(
                    lambda table: table.write(key, 1, {"status": "done", "output": "A"}, Ends(), repeat=False)
                ),
            ),
            "retry": lambda: (self._sent(lambda table: table.write(key, 2, {}, Ends(0.0), repeat=False)),),
            "write": lambda: (
                sql(
                    f"SELECT fenced_guard.announce_claim('public.runs', 'runs/1', '{key.realm}', {key.token}, "
                    "(SELECT claim_write FROM runs WHERE id = 1 FOR NO KEY UPDATE))"
                ),
                sql("UPDATE runs SET output = 'W' WHERE id = 1 RETURNING 1"),
            ),
            "revoke": lambda: (self._sent(lambda table: table.revoke(1)),),
            "by_hand": lambda: (sql("UPDATE runs SET output = 'by hand', claim_holder = NULL WHERE id = 1"),),
        }
        return tuple(replace(one, label=operation, about=operation) for one in made[operation]())

    def reset(self) -> None:
        key, expires = self.key, "- interval '1 s'" if self.expired else "+ interval '1 h'"
        self.db.execute(
            "SET session_replication_role = replica; DELETE FROM runs; INSERT INTO runs (id, status, claim_token, "
            f"claim_write, claim_holder, claim_attempts) VALUES (1, 'running', {key.token}, {key.token << 20}, "
            f"'{self.holders['A']}', 1); RESET session_replication_role"
        )
        if not self.minted:
            return
        self.db.execute(
            f"UPDATE fenced.attempt SET state = 'granted', expires = clock_timestamp() {expires} WHERE id = "
            f"'{self.holders['A']}'; UPDATE fenced.attempt SET state = 'granted', "
            f"expires = clock_timestamp() + interval '1 h' WHERE id = '{self.holders['B']}'"
        )

    def judge(self, trace: Trace) -> None:
        model = RowModel()
        for session in sorted("XY", key=lambda name: _committed(trace, name)):
            events = [event for event in trace.events if event.session == session and event.step.about]
            operation = events[0].step.about
            after, refusal, most = applied(model, operation, expired=self.expired)
            states = [event.outcome.code for event in events if event.outcome.code]
            assert (states[0] if states else "") == refusal, f"{operation}: {states} and not {refusal!r}"
            if operation in ("claim", "give_back"):
                changed = len(events[0].outcome.rows)
                assert changed <= most, f"{operation} changed {changed} rows, and not {most}"
                model = after if changed else model
            else:
                model = after
        holders: dict[str | None, str] = {grant: name for name, grant in self.holders.items()}
        found = self.db.execute("SELECT status, output, claim_holder, claim_token FROM runs").fetchone()
        assert found is not None
        status, output, holder, token = found
        there = (status, output, holders.get(holder.hex if holder else None), token > self.key.token)
        assert there == (model.status, model.output, model.holder, model.later), f"{there} and not {model}"

    def explore(self, pair: tuple[str, str], *, expired: bool) -> None:
        self.expired = expired
        scripts = [
            InterleavingScript(name, (*self.steps(operation), COMMIT))
            for name, operation in zip("XY", pair, strict=True)
        ]
        self.explorer.explore(scripts, reset=self.reset, judge=self.judge)

    def close(self) -> None:
        self.explorer.close()
        self.db.close()


def _committed(trace: Trace, session: str) -> int:
    return max(event.ended for event in trace.events if event.session == session)


@pytest.fixture(scope="module")
def world_elsewhere(
    claimed_databases: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    leases = tmp_path_factory.mktemp("interleavings") / "leases.db"
    found = World(claimed_databases["elsewhere"], f"sqlite:///{leases}")
    yield found
    found.close()


@pytest.fixture(scope="module")
def world(claimed_databases: dict[str, str]) -> Iterator[World]:
    found = World(claimed_databases["postgresql"])
    yield found
    found.close()


@pytest.mark.parametrize("expired", [False, True], ids=["alive", "expired"])
def test_every_pair_is_as_if_one_came_after_the_other(world: World, expired: bool) -> None:
    for pair in PAIRS:
        world.explore(pair, expired=expired)


def test_every_pair_under_declared_tokens(world_elsewhere: World) -> None:
    """A worker is given back only once its authority says that its lease is over, for ever."""
    for pair in PAIRS:
        if "renew" not in pair:
            world_elsewhere.explore(pair, expired=True)


PLANTED = {
    "a stale or unstamped write is let through": (
        (
            "CREATE OR REPLACE FUNCTION fenced_guard.rule_on_claim(p_guard text, p_name text, p_write bigint, "
            "p_verdict text, p_seen bigint, p_says text) RETURNS void LANGUAGE sql AS 'SELECT'"
        ),
        ("finish", "by_hand"),
        False,
    ),
    "a lease that is alive counts as over": (
        "CREATE OR REPLACE FUNCTION fenced_guard.is_over(p_holder uuid) RETURNS boolean LANGUAGE sql AS 'SELECT true'",
        ("give_back", "claim"),
        False,
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_seen(world: World, bug: str) -> None:
    function, pair, expired = PLANTED[bug]
    name = function.partition("(")[0].rpartition(" ")[2]
    found = world.db.execute(
        "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname = %s", (name.split(".")[1],)
    )
    ((right,),) = found.fetchall()
    world.db.execute(function.encode())
    try:
        with pytest.raises(StoryBroken):
            world.explore(pair, expired=expired)
    finally:
        world.db.execute(right.encode())
