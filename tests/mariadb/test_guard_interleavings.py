"""Every order of the statements of two or three guarded transactions, on a real server.

In each of them: no stale write is admitted, no acknowledged write is lost, the newest holder is never refused and never
the victim of a deadlock. Each planted bug is found.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import pymysql
import pytest

from fenced.sql import Guard
from fenced.testing.kit import stamp
from fenced_testkit.interleaving import (
    Explorer,
    InterleavingProgram,
    IsolationLevel,
    ScriptOutcome,
    ScriptStep,
    StoryBroken,
    Trace,
    sql,
)
from fenced_testkit.interleaving.mariadb import MariadbEngine
from fenced_testkit.servers import MariadbServer, MysqlServer
from tests.mariadb.planted_guard_sql import BUGS, Bug

LEVELS = (IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ)
OLD, NEW = 9, 10
"""The two holders' tokens; as texts they would be the other way round."""
RETRY = Guard(table="retry_rows", name="retry/{id}")
ONCE = Guard(table="once_rows", name="once/{id}", rule="once")
LEAVE, UNDO, COMMIT, BEGIN = (
    sql("CALL fenced_guard.leave()", label="leave"),
    sql("CALL fenced_guard.undo()", label="undo"),
    sql("COMMIT", label="commit by hand"),
    sql("START TRANSACTION", label="begin by hand"),
)
Steps = Generator[ScriptStep, ScriptOutcome, None]


def enter(token: int, *rows: int, seq: int = 1, again: bool = False, rule: str = "retry") -> ScriptStep:
    names = [f"{rule}/{row}" for row in rows]
    told = str(stamp(token, seq, *names))
    lines = "".join(f"1 {name}\n" for name in sorted(names)).rstrip().encode().hex()
    operation = f"{token}{seq}{id(object())}"
    arguments = (
        f"'{rule}_rows', NULL, '{told}', x'{lines}', 'announce', '{operation}', NULL, {int(again)}, NULL"
    )
    return sql(
        f"CALL fenced_guard.enter(DATABASE(), {arguments})",
        label=f"enter {token} {names}",
        about=("enter", token),
    )


def write(token: int, n: int | str, row: int = 1, rule: str = "retry") -> ScriptStep:
    return sql(f"UPDATE {rule}_rows SET n = {n} WHERE id = {row}", label=f"write {n}", about=("write", token))


def holder(token: int, *rows: int, again: bool = False, times: int = 1) -> Callable[[], Steps]:
    """As `transaction` does it: read each row, write it by what was read, and commit."""

    def program() -> Steps:
        for time in range(times):
            entered = yield enter(token, *(rows or (1,)), again=again or time > 0)
            if entered.code:
                yield UNDO
                return
            for row in rows or (1,):
                ((n,),) = (yield sql(f"SELECT n FROM retry_rows WHERE id = {row}", label=f"read {row}")).rows
                written = yield write(token, int(n) + 1, row)
                if written.code:
                    yield UNDO
                    return
            yield LEAVE

    return program


def unstamped() -> Steps:
    yield BEGIN
    yield write(0, "n")  # it changes nothing that could be lost
    yield COMMIT


def leaking() -> Steps:
    """It commits by itself, and nobody clears its stamp."""
    entered = yield enter(OLD, 1)
    if entered.code:
        yield UNDO
        return
    yield COMMIT
    yield write(OLD, "n + 0")
    yield UNDO


def ending() -> Steps:
    entered = yield enter(OLD, 1)
    if entered.code:
        yield UNDO
        return
    yield COMMIT
    left = yield LEAVE
    if left.code:
        yield UNDO


def once(seq: int, statements: int = 1) -> Callable[[], Steps]:
    def program() -> Steps:
        entered = yield enter(OLD, 1, seq=seq, rule="once")
        if entered.code:
            yield UNDO
            return
        for _ in range(statements):
            written = yield write(OLD, "n + 1", rule="once")
            if written.code:
                yield UNDO
                return
        yield LEAVE

    return program


@dataclass(frozen=True)
class Story:
    """Who does what at once, the holder of the newest token last; the mark before; how many places each has."""

    name: str
    programs: tuple[Callable[[], Steps], ...]
    lengths: tuple[int, ...]
    mark: int = 0
    limit: int | None = None
    newest: str | None = "B"
    """The session that must never be refused."""


NEWER = holder(NEW)
STORIES = [
    *(
        Story(f"old and new, {told}", (holder(OLD), NEWER), (4, 4), mark)
        for told, mark in (("no mark", 0), ("the mark is below both", 8), ("the mark is the old one's", OLD))
    ),
    Story("old again and new", (holder(OLD, again=True, times=2), NEWER), (8, 4), OLD),
    Story("siblings and new", (holder(OLD, 1), holder(OLD, 2), holder(NEW, 1, 2)), (4, 4, 6), OLD, 250, "C"),
    Story("two names", (holder(OLD, 1, 2), holder(NEW, 1, 2)), (6, 6), OLD, 250),
    Story("three holders", (holder(8), holder(OLD), NEWER), (4, 4, 4), 0, 250, "C"),
    Story("a writer without a stamp", (unstamped, NEWER), (3, 4), OLD),
    Story("a stamp that is left over", (leaking, NEWER), (4, 4), OLD),
    Story("a transaction that the program ends", (ending, NEWER), (4, 4), OLD),
    Story("rule once, two connections", (once(1), once(2)), (3, 3), newest=None),
    Story("rule once, two statements", (once(1, 2), unstamped), (4, 3), newest="A"),
]
BY_NAME = {story.name: story for story in STORIES}


class World:
    """A database with guarded tables, and its explorer."""

    def __init__(self, server: MariadbServer) -> None:
        self.product = "mysql" if isinstance(server, MysqlServer) else "mariadb"
        database = server.create_database()
        where: dict[str, Any] = {"host": server.host, "port": server.port, "user": "root"}
        self._connect: Callable[[], Any] = lambda: pymysql.connect(
            **where, database=database, autocommit=True
        )
        self._db = self._connect()
        for table in ("retry_rows", "once_rows"):
            self.run(f"CREATE TABLE {table} (id int PRIMARY KEY, n int NOT NULL) ENGINE = InnoDB")
            self.run(f"INSERT INTO {table} VALUES (1, 0), (2, 0)")
        for guard in (RETRY, ONCE):
            guard.install(self._db, mode="enforce")
        self.explorer = Explorer(MariadbEngine(self._connect))

    def run(self, *statements: str) -> Any:
        with self._db.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return cursor.fetchall()

    def close(self) -> None:
        self.explorer.close()
        self._db.close()

    def reset(self, mark: int) -> None:
        self.run("DELETE FROM fenced_guard.mark WHERE scope = CAST(DATABASE() AS BINARY)")
        self.run("UPDATE retry_rows SET n = 0", "UPDATE once_rows SET n = 0", "SET @fenced_lines = NULL")
        self.run(
            "UPDATE fenced_guard.trust SET realm = '00000000000000aa' WHERE scope = CAST(DATABASE() AS BINARY)"
        )
        if mark:
            rows = ", ".join(
                f"(CAST(DATABASE() AS BINARY), '{name}', {mark}, '{mark:032x}', 0)"
                for name in ("retry/1", "retry/2")
            )
            self.run(f"INSERT INTO fenced_guard.mark (scope, name, token, grant_id, seq) VALUES {rows}")

    def explore(self, story: Story, level: IsolationLevel) -> int:
        scripts = [
            InterleavingProgram(letter, program, length, level, autocommit=True)
            for letter, program, length in zip("ABC", story.programs, story.lengths, strict=False)
        ]
        report = self.explorer.explore(
            scripts,
            reset=lambda: self.reset(story.mark),
            judge=lambda trace: self.judge(trace, story),
            limit=story.limit,
        )
        return report.different

    def judge(self, trace: Trace, story: Story) -> None:
        by_rule = dict(
            self.run(
                "SELECT 'retry', n FROM retry_rows WHERE id = 1 UNION SELECT 'once', n FROM once_rows WHERE id = 1"
            )
        )
        announced: dict[int, int] = {}
        committed = 0
        ended: set[str] = set()
        wrote: dict[str, bool] = {}
        for event in sorted(trace.steps, key=lambda event: event.ended):
            code, about = event.outcome.code, event.step.about
            # A write outside of its transaction may deadlock with the newer holder, who is never the victim.
            leaks = event.session != story.newest and story.name == "a stamp that is left over"
            assert code not in ("1213", "1205", "1020") or leaks, f"{code}: {event.session}"
            if event.session == story.newest:
                assert not code, f"an honest writer was refused: {event.outcome}"
            if code:
                assert code in ("901", "902", "914") or leaks, event.outcome
            if event.step is COMMIT:
                ended.add(event.session)
            if about and about[0] == "enter" and not code:
                announced[about[1]] = event.ended
                wrote[event.session] = False
            if about and about[0] == "write" and about[1] and not code:
                newer = [token for token, at in announced.items() if token > about[1] and at < event.began]
                assert not newer, f"a stale write was admitted: {about[1]} after {newer}"
                wrote[event.session] = "_rows" in event.step.statement
            if event.step is LEAVE and not code:
                assert event.session not in ended, "an ended transaction was not noticed"
                committed += 1
        if story.name.startswith("rule once, two connections"):
            assert committed == 1 and by_rule["once"] == 1, f"rule once let two in: {committed}, {by_rule}"
        elif story.name.startswith(("old", "two names", "three")):
            assert by_rule["retry"] == committed, f"an update was lost: {by_rule['retry']} of {committed}"


@pytest.fixture(scope="module")
def world(mariadb_server: MariadbServer) -> Iterator[World]:
    made = World(mariadb_server)
    yield made
    made.close()


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_in_every_order(story: Story, level: IsolationLevel, world: World) -> None:
    assert world.explore(story, level) > 3


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, world: World) -> None:
    world.run(*bug.statements(world.product))
    try:
        for name in bug.found_by:
            with pytest.raises(StoryBroken, match=bug.sign):
                for level in LEVELS:
                    world.explore(BY_NAME[name], level)
    finally:
        world.run(*bug.repair(world.product))
