"""Named values in a guarded SQLite table."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from fenced.errors import FencedError, Misconfigured
from fenced.guards.answers import expect_rule
from fenced.guards.spec import Spec
from fenced.guards.tablevalues import TableValues
from fenced.runtime import forking
from fenced.runtime.blocking import step
from fenced.stores.sqlite.guard import install
from fenced.stores.sqlite.guard.marks import SqliteMarks
from fenced.stores.sqlite.guard.operator import SqliteOperator, connect
from fenced.stores.sqlite.guard.refusals import translate
from fenced.stores.sqlite.guard.sessions import BUSY_SECONDS, PlainSession, path_of
from fenced.stores.sqlite.guard.tables import SqliteTable
from fenced.values.contracts import MANY_NAMES, Operator, Runtime, Trait
from fenced.values.decision import Mode, Rule

_TABLE = install.OWN_TABLE
_CREATE = f"""
CREATE TABLE IF NOT EXISTS {_TABLE} (
  name TEXT PRIMARY KEY, value BLOB, version INTEGER NOT NULL
) STRICT, WITHOUT ROWID"""
_TEXTS = f"SELECT 1 FROM pragma_table_info('{_TABLE}') WHERE name = 'value' AND type = 'TEXT'"
_HIGHEST = "SELECT coalesce(max(token), 0) FROM fenced_mark"

T = TypeVar("T")


class SqliteValues(TableValues[PlainSession]):
    """Values under names in one SQLite file."""

    traits: tuple[Trait, ...] = (
        Trait("durable-marks", "Marks and values are synced to the disk together (synchronous=FULL)."),
        Trait(
            "mandatory",
            "Triggers decide every SQL write to the table, also one typed into the sqlite3 shell.",
        ),
        MANY_NAMES,
        Trait("single-writer", "A holder stopped inside its transaction blocks its successor."),
        Trait(
            "shell-unrecorded",
            "Only our wrapper records a refusal; a refusal elsewhere, as in the sqlite3 shell, is not recorded.",
        ),
        Trait("canary-uncovered", "In canary, a trigger records an uncovered row and lets it through."),
    )
    TABLE = _TABLE
    READ = f"SELECT value, version FROM {_TABLE} WHERE name = ?"
    WRITE = f"""
    INSERT INTO {_TABLE} (name, value, version) VALUES (?, ?, 1)
    ON CONFLICT (name) DO UPDATE SET value = excluded.value, version = version + 1
    RETURNING version"""
    MODES = "SELECT pattern, mode FROM fenced_mode WHERE guard = ?"
    ERRORS = sqlite3.Error

    def __init__(
        self,
        path: Path,
        runtime: Runtime,
        *,
        rule: Rule | None = None,
        mode: str = "enforce",
        mandatory: bool = True,
    ) -> None:
        super().__init__(f"sqlite:///{path}", runtime, rule=rule, mode=mode, mandatory=mandatory)
        self._path = path
        self._marks = SqliteMarks(_TABLE, mandatory, rule)

    @classmethod
    def at(cls, url: str, runtime: Runtime) -> SqliteValues:
        return cls(path_of(url), runtime)

    async def _open(self, session: PlainSession) -> None:
        await session.run("BEGIN IMMEDIATE")
        await session.run(_CREATE)
        known = await session.run(
            "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'fenced_guard'"
        )
        await install.stored_schema(session.run)  # Misconfigured if this client is too old
        texts = await session.run(_TEXTS)
        there = known and await session.run(
            "SELECT rule, triggers FROM fenced_guard WHERE guard = ?", (_TABLE,)
        )
        if there:
            expect_rule(self.url, there[0][0], self._spec.rule)
        if not there:
            await self._install(session, self._spec, Mode.parse(self._mode))
        elif self._mandatory and there[0][1] == 0:  # an earlier client opened it as cooperative
            await self._install(session, Spec(_TABLE, self._spec.name, there[0][0]), None)
        if texts:
            await self._turn_into_bytes(session)
        await session.run("COMMIT")

    async def _turn_into_bytes(self, session: PlainSession) -> None:
        """Values were texts in 0.1: create the table and its triggers again, with the same values as bytes."""
        await session.run(f"ALTER TABLE {_TABLE} RENAME TO fenced_value_texts")
        await session.run(_CREATE)
        columns = "name, CAST(value AS BLOB), version"
        await session.run(f"INSERT INTO {_TABLE} SELECT {columns} FROM fenced_value_texts")
        await session.run("DROP TABLE fenced_value_texts")
        if self._mandatory:
            ((rule,),) = await session.run("SELECT rule FROM fenced_guard WHERE guard = ?", (_TABLE,))
            await self._install(session, Spec(_TABLE, self._spec.name, rule), None)

    async def _install(self, session: PlainSession, spec: Spec, mode: Mode | None) -> None:
        statements = await install.script(spec, mode, session.run, mandatory=self._mandatory, replace=True)
        for statement in statements:
            await session.run(statement)

    async def _on_session(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """One operation as one blocking call.

        If each statement were a separate call, all threads of a pool could be busy with operations that wait for this
        transaction's lock, and none would be left to finish it.
        """
        return await self._runtime.call(self._blocking, work, args)

    def _blocking(self, work: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> T:
        # A fork waits until no operation runs: a child must not inherit a connection that is in use.
        forking.enter()
        try:
            return step(super()._on_session(work, *args))
        finally:
            forking.leave()

    def _typed(self, error: sqlite3.Error) -> FencedError:
        return translate(error)

    async def _connect(self) -> PlainSession:
        connection = sqlite3.connect(
            self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        return PlainSession(connection)

    def _close(self, session: PlainSession) -> None:
        session.connection.close()

    def _is_idle(self, session: PlainSession) -> bool:
        return not session.in_transaction

    def _table(self, session: PlainSession) -> SqliteTable:
        return SqliteTable(self._spec, session, self._mandatory)

    async def _miss(self, session: PlainSession, names: Sequence[str]) -> None:
        await self._marks.record_missing_stamp(session, names)

    async def highest(self) -> int:
        return await self._runtime.call(self._highest)

    def _highest(self) -> int:
        """On a read-only connection, which creates no file."""
        try:
            with closing(self._read_only()) as db:
                (highest,) = db.execute(_HIGHEST).fetchone()
        except sqlite3.Error as error:
            raise Misconfigured(f"the marks in {self._path} cannot be read: {error}") from error
        return int(highest)

    def _read_only(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{quote(str(self._path))}?mode=ro", uri=True, timeout=BUSY_SECONDS)

    async def operate(self, work: Callable[[Operator], Awaitable[T]]) -> T:
        return await self._runtime.call(self._operate, work)

    def _operate(self, work: Callable[[Operator], Awaitable[T]]) -> T:
        """On a connection that leaves the file as it is: it may be the program's, with a journal mode of its own."""
        forking.enter()
        try:
            with closing(connect(self._path)) as connection:
                return step(_on_operator(connection, work))
        except sqlite3.Error as error:
            raise translate(error) from error
        finally:
            forking.leave()


async def _on_operator(connection: sqlite3.Connection, work: Callable[[Operator], Awaitable[T]]) -> T:
    return await work(SqliteOperator(PlainSession(connection)))
