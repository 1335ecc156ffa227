"""What an operator of SQLite guards sees and does. The counts of SQLite guards have no times and no writers."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fenced.errors import Misconfigured, Misuse
from fenced.guards.answers import check_pattern
from fenced.guards.spec import Spec
from fenced.net.filesystem import doubts_about
from fenced.stores.sqlite.guard import install
from fenced.stores.sqlite.guard.refusals import translate
from fenced.stores.sqlite.guard.sessions import BUSY_SECONDS, SqliteSession
from fenced.stores.sqlite.guard.tables import SqliteTable
from fenced.values.contracts import Operator
from fenced.values.decision import Mode, Verdict, rule_on
from fenced.values.rollout import (
    QUIET_SECONDS,
    DatabaseStatus,
    Decision,
    DecisionCount,
    GuardStatus,
    Stage,
    advised,
)

_GUARDS = """
SELECT guard, template, rule, triggers, realm, (
  SELECT count(*) FROM main.sqlite_schema WHERE type = 'trigger' AND name GLOB 'fenced_*'
  AND tbl_name IN (guard, 'fenced_' || guard || '_gate')
) FROM fenced_guard ORDER BY guard"""
_OUTBOXES = """
SELECT guard FROM fenced_guard WHERE triggers = 0 AND (
  SELECT count(*) FROM pragma_table_info(guard) WHERE name IN ('id', 'headers', 'topic', 'body')
) = 4"""
_MODES = "SELECT pattern, mode FROM fenced_mode WHERE guard = ? ORDER BY length(pattern), pattern"
_TALLY = "SELECT verdict, mode, count FROM fenced_tally WHERE guard = ? ORDER BY verdict, mode"
_MARKS = """
SELECT count(*), coalesce(max(token), 0) FROM fenced_mark
WHERE name GLOB ?1 AND (?1 = '*' OR length(name) - length(replace(name, '/', '')) = ?2)"""
_RECORDS = """
SELECT time, guard, name, stamp, token, grant_id, seq, verdict, ruling, mode FROM fenced_record
WHERE guard = coalesce(?1, guard) ORDER BY id DESC LIMIT ?2"""
_UNSET = "DELETE FROM fenced_mode WHERE guard = ? AND pattern = ? RETURNING 1"


def connect(path: Path) -> sqlite3.Connection:
    """A connection for an operator. Creates no file: a mistyped path is not an empty database."""
    if not path.is_file():
        raise Misconfigured(f"there is no file {path}")
    connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_SECONDS)
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


class SqliteOperator(Operator):
    """The guards of one file."""

    kind = "an SQLite guard"

    def __init__(self, session: SqliteSession) -> None:
        self._session = session

    async def status(self, table: str | None = None, quiet_for: float = QUIET_SECONDS) -> DatabaseStatus:
        """Every guard, or that of one table, as it is now."""
        return await self._status(table, quiet_for, marks=True)

    async def figures(self) -> DatabaseStatus:
        return await self._status(None, QUIET_SECONDS, marks=False)

    async def extent(self) -> tuple[int, int]:
        ((rows, highest),) = await self._run("SELECT count(*), coalesce(max(token), 0) FROM fenced_mark")
        return rows, highest

    async def _status(self, table: str | None, quiet_for: float, *, marks: bool) -> DatabaseStatus:
        now = datetime.now(UTC)
        rows = [row for row in await self._run(_GUARDS) if table in (None, row[0])]
        if not rows:
            raise Misconfigured(f"no guard is installed for {table or 'any table'}")
        guards = [await self._guard(*row, counts_marks=marks) for row in rows]
        if marks:
            guards = [advised(guard, now, quiet_for) for guard in guards]
        files = await self._run("SELECT file FROM pragma_database_list WHERE name = 'main'")
        doubts = doubts_about(Path(files[0][0]), "marks") if files and files[0][0] else ()
        stored = await install.stored_schema(self._run)
        return DatabaseStatus(now, rows[0][4], tuple(guards), schema=stored, doubts=doubts)

    async def upgrade(self) -> list[str]:
        """Bring the tables and every guard's triggers to this version. Returns the guarded tables."""
        if await install.stored_schema(self._run) is None:
            raise Misconfigured("no guard is installed in this file: fenced guard install")
        await self._run("BEGIN IMMEDIATE")
        try:
            guards = await install.registered(self._run)
            for spec, mandatory in guards:
                for statement in await install.script(spec, None, self._run, mandatory=mandatory):
                    await self._run(statement)
            await self._run("COMMIT")
        except BaseException:
            await self._session.rollback()
            raise
        return [spec.table for spec, _ in guards]

    async def _guard(
        self,
        guard: str,
        template: str,
        rule: str,
        triggers: int,
        realm: str | None,
        there: int,
        *,
        counts_marks: bool,
    ) -> GuardStatus:
        modes = await self._run(_MODES, (guard,))
        current = {mode for _, mode in modes}
        spec = Spec(guard, template)
        pattern = "".join("*" if column else piece for piece, column in spec.pieces)
        marks = highest = 0
        if counts_marks:
            ((marks, highest),) = await self._run(_MARKS, (install.glob_of(pattern), pattern.count("/")))
        counts = [
            DecisionCount(verdict, _ruling(verdict, mode), mode, count, count if mode in current else 0)
            for verdict, mode, count in await self._run(_TALLY, (guard,))
        ]
        wrong = ("triggers are missing: install the guard again",) if there != triggers else ()
        stages = tuple(Stage(*row) for row in modes)
        return GuardStatus(
            guard,
            template,
            rule,
            triggers > 0,
            None,
            stages,
            marks=marks,
            highest=highest,
            counts=tuple(counts),
            wrong=wrong,
            bypass=("every process that may write the file",),
        )

    async def records(self, table: str | None = None, limit: int = 100) -> list[Decision]:
        """The newest lines of the audit, the newest last."""
        rows = await self._run(_RECORDS, (table, limit))
        if table is not None and not rows:  # records of a guard stay after it was uninstalled
            await self.status(table)  # Misconfigured if no guard is installed for it
        return [Decision.of((datetime.fromtimestamp(at, UTC), *rest)) for at, *rest in reversed(rows)]

    async def pending(self, table: str | None, wait: float = 0.0) -> tuple[str, ...]:
        """Always empty: a change takes the one write lock, so no writing transaction is older than the change."""
        return ()

    async def modes(self, table: str | None = None) -> dict[str, str]:
        """The mode of each pattern of a table that has one."""
        return dict(await self._run(_MODES, (_named(table),)))

    async def set_mode(
        self, table: str | None, mode: str, pattern: str = "*", wait: float = 0.0
    ) -> tuple[str, ...]:
        """Set the mode of the names that match. Returns nothing, for the reason that `pending` gives."""
        return await SqliteTable(Spec(_named(table), "x"), self._session, True).set_mode(mode, pattern)

    async def adopt(self, realm: str) -> None:
        """Trust this authority from now on, and no other."""
        await SqliteTable(Spec("x", "x"), self._session, True).adopt(realm)

    async def waiting_messages(self) -> dict[str, int]:
        """How many messages wait in each outbox. An empty one is not listed."""
        found = {}
        for (table,) in await self._run(_OUTBOXES):
            ((count,),) = await self._run(f'SELECT count(*) FROM "{table}"')
            found[table] = count
        return {table: count for table, count in found.items() if count}

    async def unset_mode(self, table: str | None, pattern: str) -> bool:
        """Delete the mode of a pattern; False if it had none."""
        if check_pattern(pattern) == "*":
            raise Misuse("the mode of * is the table's own: set another one")
        return bool(await self._run(_UNSET, (_named(table), pattern)))

    async def _run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        try:
            return await self._session.run(sql, parameters)
        except sqlite3.Error as error:
            raise translate(error) from error


def _ruling(verdict: str, mode: str) -> str:
    """The ruling behind a count. A count has no name, so for a canary this is the ruling outside its share."""
    return rule_on(Verdict(verdict), Mode(Mode.parse(mode).name), "").value


def _named(table: str | None) -> str:
    if table is None:
        raise Misuse("which table? Pass --table TABLE")
    return table
