"""The pairs of `test_interleavings` on MariaDB, where an operation is several statements.

The code that ships sends them, under every interleaving of two sessions. A deadlock's victim is repeated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import Any

import pymysql
import pytest

from fenced.errors import FencedError, MissingStamp, OutOfOrder, StaleToken
from fenced.guards.claims import ClaimTerms, Ends
from fenced.sql import refusal
from fenced.stores.mariadb.guard.claims import MariadbClaims
from fenced.stores.mariadb.guard.schema import routines
from fenced.stores.mariadb.guard.tables import MariadbTable
from fenced.work import Claims
from fenced_testkit.interleaving import Explorer, InterleavingProgram, IsolationLevel, StoryBroken, Trace, sql
from fenced_testkit.interleaving.mariadb import MariadbEngine
from fenced_testkit.interleaving.scripts import Program, ScriptOutcome, ScriptStep
from fenced_testkit.servers import MariadbServer
from tests.work.places import OPTIONS, mariadb_connection, place_at
from tests.work.test_interleavings import MISSING, OUT_OF_ORDER, PAIRS, STALE, RowModel, applied

pytestmark = pytest.mark.xdist_group("claim interleavings on MariaDB")

CODES = {StaleToken: STALE, OutOfOrder: OUT_OF_ORDER, MissingStamp: MISSING}
HERE = tuple(pair for pair in PAIRS if "renew" not in pair)  # a renewal is a matter of the authority alone
LENGTHS = {"claim": 5, "give_back": 4, "finish": 3, "retry": 3, "write": 4, "revoke": 1, "by_hand": 1}


class Sent:
    """A statement that the explorer sends when it is its turn."""

    def __init__(self, step: ScriptStep) -> None:
        self._step = step

    def __await__(self) -> Generator[ScriptStep, ScriptOutcome, ScriptOutcome]:
        outcome = yield self._step
        if outcome.code:
            raise pymysql.err.OperationalError(int(outcome.code), outcome.message)
        return outcome


class Explored:
    """A session whose statements the explorer sends."""

    def __init__(self, columns: list[str]) -> None:
        self._columns = columns

    def state(self) -> str:
        return "idle"

    async def begin(self, statement: str) -> None:
        await self.run(statement)

    leave = undo = begin

    async def run(self, statement: str, parameters: Any = ()) -> list[tuple[Any, ...]]:
        return [*(await Sent(sql(statement, *parameters))).rows]

    async def records(self, statement: str, parameters: Any = ()) -> list[dict[str, Any]]:
        return [dict(zip(self._columns, row, strict=True)) for row in await self.run(statement, parameters)]

    async def change(self, statement: str, parameters: Any = ()) -> int:
        return int((await Sent(sql(statement, *parameters))).tag.split()[1])

    async def together(self, work: Callable[[Explored], Awaitable[Any]]) -> Any:
        return await work(self)

    async def told(self) -> object:
        return (await self.run("SELECT @fenced_refused"))[0][0]


class ExploredTransaction(Explored):
    """One in which `enter` has begun a transaction."""

    def state(self) -> str:
        return "unknown"


class ExploredRow:
    """A database in which A has claimed row 1, and B is a live worker."""

    def __init__(self, url: str) -> None:
        self.claims = Claims(**OPTIONS)
        with place_at("mariadb", url, url) as place:
            place.prepare()
            first, second = place.worker(), place.worker()
            (run,) = first.claim_many(place.connect())
            self.key = run._key
            self.holders = {first._work._id: "A", second._work._id: "B"}
            self.first = f"{self.key.realm}:{first._work._id}"
            self.terms = ClaimTerms(second._work._id, second._work._token, self.key.realm)
        self.db = mariadb_connection(url)
        self.columns = [line[0] for line in self.db.execute("SHOW COLUMNS FROM runs").fetchall()]
        self.explorer = Explorer(MariadbEngine(lambda: mariadb_connection(url)))
        self.ends: dict[str, str | int] = {}
        """How each session ended: the code of its refusal, or how many rows it has changed."""

    def work(self, operation: str) -> Callable[[], Awaitable[Any]]:
        key, spec = self.key, self.claims._spec
        plain: Any = Explored(self.columns)
        begun: Any = ExploredTransaction(self.columns)
        table = MariadbClaims(spec, MariadbTable(spec, plain), plain)

        async def write() -> None:
            announced = MariadbClaims(spec, MariadbTable(spec, begun), begun)
            await announced.enter(key)
            try:
                await begun.run("UPDATE runs SET output = 'W' WHERE id = 1")
            except Exception as error:
                await announced.leave(error)
                raise
            await announced.leave(None)

        done = {"status": "done", "output": "A"}
        return {
            "claim": lambda: table.claim(self.terms, 1, None),
            "give_back": lambda: table.give_back([self.first[-32:]]),
            "finish": lambda: table.write(key, 1, done, Ends(), repeat=False),
            "retry": lambda: table.write(key, 2, {}, Ends(0.0), repeat=False),
            "write": write,
            "revoke": lambda: table.revoke(1),
            "by_hand": lambda: plain.run(
                "UPDATE runs SET output = 'by hand', claim_holder = NULL WHERE id = 1"
            ),
        }[operation]

    def program(self, name: str, operation: str) -> Program:
        work: Any = self.work(operation)()
        found: Any = None
        try:
            step = work.send(None)
            while True:
                step = work.send((yield step))
        except StopIteration as done:
            found = len(done.value) if isinstance(done.value, list) else int(done.value or 0)
        except (FencedError, pymysql.Error) as error:
            meant = error if isinstance(error, FencedError) else refusal(error)
            found = CODES.get(type(meant), repr(error))  # type: ignore[arg-type]
        self.ends[name] = found

    def reset(self) -> None:
        self.ends = {}
        for statement in (
            "UPDATE runs SET claim_holder = CONCAT('~', claim_holder) WHERE claim_holder IS NOT NULL",
            "DELETE FROM runs",
            "INSERT INTO runs (id) VALUES (1)",
            f"UPDATE runs SET claim_holder = '{self.first}', claim_token = {self.key.token}, status = 'running'",
        ):
            self.db.execute(statement)

    def judge(self, trace: Trace, pair: dict[str, str]) -> None:
        model = RowModel()
        for session in sorted(pair, key=lambda name: _decided(trace, name)):
            operation, ended = pair[session], self.ends[session]
            after, expected, most = applied(model, operation, expired=True)
            refused = ended if isinstance(ended, str) else ""
            assert refused == expected, f"{operation}: {refused!r} and not {expected!r}"
            if operation in ("claim", "give_back"):
                assert isinstance(ended, int) and ended <= most, (
                    f"{operation} changed {ended} rows, not {most}"
                )
                model = after if ended else model
            else:
                model = after
        ((status, output, holder, token),) = self.db.execute(
            "SELECT status, output, claim_holder, claim_token FROM runs"
        ).fetchall()
        there = (status, output, self.holders.get(holder), token > self.key.token)
        assert there == (model.status, model.output, model.holder, model.later), f"{there} and not {model}"

    def explore(self, pair: tuple[str, str], isolation: IsolationLevel) -> int:
        operations = dict(zip("XY", pair, strict=True))
        programs = [
            InterleavingProgram(
                name,
                lambda name=name, operation=operation: self.program(name, operation),  # type: ignore[misc]
                LENGTHS[operation],
                isolation,
            )
            for name, operation in operations.items()
        ]
        report = self.explorer.explore(
            programs, reset=self.reset, judge=lambda trace: self.judge(trace, operations)
        )
        return report.different

    def close(self) -> None:
        self.explorer.close()
        self.db.close()


def _decided(trace: Trace, session: str) -> int:
    """When it was refused, or committed."""
    events = [event for event in trace.steps if event.session == session]
    refused = [event.ended for event in events if event.outcome.code.startswith("9")]
    return min(refused) if refused else max(event.ended for event in events)


@pytest.fixture(scope="module")
def world(mariadb_server: MariadbServer) -> Iterator[ExploredRow]:
    found = ExploredRow(mariadb_server.url(mariadb_server.create_database()))
    yield found
    found.close()


@pytest.mark.parametrize(
    "isolation", [IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ], ids=lambda one: one.name
)
def test_every_pair_is_as_if_one_came_after_the_other(world: ExploredRow, isolation: IsolationLevel) -> None:
    for pair in HERE:
        world.explore(pair, isolation)


@pytest.mark.parametrize(
    ("name", "wrong", "pair"),
    [
        ("PROCEDURE fenced_guard.rule_on_write", "BEGIN END", ("finish", "by_hand")),
        ("FUNCTION fenced_guard.carries_claim", "BEGIN RETURN TRUE; END", ("claim", "by_hand")),
    ],
    ids=["a stale or unstamped write is let through", "every transaction counts as announced"],
)
def test_a_planted_bug_is_seen(world: ExploredRow, name: str, wrong: str, pair: tuple[str, str]) -> None:
    (right,) = (text for text in routines(_product(world.db)) if f"{name}(" in text and "BEGIN" in text)
    world.db.execute(f"DROP {name}")
    world.db.execute(right.partition("\nBEGIN\n")[0] + "\n" + wrong)
    try:
        with pytest.raises(StoryBroken):
            world.explore(pair, IsolationLevel.READ_COMMITTED)
    finally:
        world.db.execute(f"DROP {name}")
        world.db.execute(right)


def _product(db: Any) -> str:
    return "mariadb" if "MariaDB" in db.execute("SELECT VERSION()").fetchone()[0] else "mysql"
