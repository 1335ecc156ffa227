"""Named values in a guarded SQLite table: what drills use, and programs without tables of their own.

Programs with tables use `fenced.sql.Guard`, which works on their own connections.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

from fenced.contracts import Record, Runtime, Trait, Versioned
from fenced.decision import Mark, Mode, Rule, Ruling, Verdict
from fenced.errors import Conflict, Contended, Misuse, shown
from fenced.guards.answers import check_pattern
from fenced.guards.sqlite import install
from fenced.guards.sqlite.fencing import Fence, Guarded, translate
from fenced.guards.sqlite.sessions import RuntimeSession
from fenced.model import Stamp, check_name

_URL = re.compile(r"sqlite:///(?P<path>[^?#]+)")
_TABLE = "fenced_value"
_CREATE = f"""
CREATE TABLE IF NOT EXISTS {_TABLE} (
  name TEXT PRIMARY KEY, value TEXT, version INTEGER NOT NULL
) STRICT, WITHOUT ROWID"""
_READ = f"SELECT value, version FROM {_TABLE} WHERE name = ?"
_WRITE = f"""
INSERT INTO {_TABLE} (name, value, version) VALUES (?, ?, 1)
ON CONFLICT (name) DO UPDATE SET value = excluded.value, version = version + 1
RETURNING version"""
BUSY_SECONDS = 10.0


class SqliteGuard:
    """Values under names in one SQLite file. `mandatory` has triggers, else only our own writes decide."""

    traits: ClassVar[tuple[Trait, ...]] = (
        Trait("durable-marks", "Marks and values are synced to the disk together (synchronous=FULL)."),
        Trait("mandatory", "Triggers decide every write, also one typed into the sqlite3 shell."),
        Trait("single-writer", "A holder stopped inside its transaction blocks its successor; SQLite has one writer."),
        Trait("shell-unrecorded", "A refusal outside our wrapper leaves no audit record: it rolled back with its cause."),
        Trait("canary-uncovered", "In canary, a write under an uncovered name is recorded, not refused: SQL cannot hash."),
    )

    def __init__(
        self, path: Path, runtime: Runtime, *, rule: Rule = "retry", mode: str = "enforce", mandatory: bool = True
    ) -> None:
        self.url = f"sqlite:///{path}"
        self._path = path
        self._runtime = runtime
        self._spec = install.Spec(_TABLE, "{name}", rule)
        self._mode = Mode.parse(mode)
        self._fence = Fence(_TABLE, mandatory)
        self._idle: list[sqlite3.Connection] = []

    @classmethod
    def at(cls, url: str, runtime: Runtime) -> SqliteGuard:
        found = _URL.fullmatch(url)
        if found is None:
            raise Misuse(f"an SQLite address is sqlite:///path/to/file.db, not {shown(url)}")
        return cls(Path(found["path"]).absolute(), runtime)

    async def open(self) -> None:
        """Create what is missing; a guard that is there keeps its mode and its rule."""
        async with self._session() as session:
            await session.run("BEGIN IMMEDIATE")
            await session.run(_CREATE)
            statements = await install.script(self._spec, self._mode, session.run)
            known = await session.run(
                "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'fenced_guard'"
            )
            if not known or not await session.run(
                "SELECT 1 FROM fenced_guard WHERE guard = ?", (_TABLE,)
            ):
                for statement in statements:
                    await session.run(statement)
                if not self._fence.mandatory:
                    for statement in install.drop_triggers(self._spec):
                        await session.run(statement)
            await session.run("COMMIT")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[RuntimeSession]:
        """A connection of our own for one operation."""
        try:
            connection = self._idle.pop() if self._idle else await self._runtime.call(self._connect)
        except sqlite3.Error as error:
            raise translate(error) from error
        try:
            yield RuntimeSession(connection, self._runtime)
        except sqlite3.Error as error:
            connection.close()
            raise translate(error) from error
        except BaseException:
            if connection.in_transaction:
                connection.rollback()
            self._idle.append(connection)
            raise
        self._idle.append(connection)

    async def announce(self, stamp: Stamp, *names: str) -> None:
        async with self._session() as session:
            await self._run(session, stamp, names or stamp.names, stamping=False)

    async def read(self, stamp: Stamp, name: str) -> Versioned:
        async with self._session() as session:
            await self._run(session, stamp, (name,), stamping=False)
            return await self._value(session, name)

    async def peek(self, name: str, at_least: int = 0) -> Versioned:
        async with self._session() as session:
            if at_least:
                rows = await session.run("SELECT token FROM fenced_mark WHERE name = ?", (name,))
                if not rows or rows[0][0] < at_least:
                    raise Contended(f"{name}: token {at_least} has not been seen here yet; look again")
            return await self._value(session, name)

    async def write(
        self, stamp: Stamp | None, name: str, value: str, *, expect: int | None = None
    ) -> int:
        async with self._session() as session:
            return (await self._run(session, stamp, (name,), {name: value}, expect=expect))[0]

    async def write_many(self, stamp: Stamp | None, values: dict[str, str]) -> None:
        async with self._session() as session:
            await self._run(session, stamp, tuple(values), values)

    async def _run(
        self,
        session: RuntimeSession,
        stamp: Stamp | None,
        names: Sequence[str],
        values: dict[str, str] | None = None,
        *,
        expect: int | None = None,
        stamping: bool = True,
    ) -> list[int]:
        guarded = Guarded(self._fence, session, stamp, names, stamping=stamping)
        await guarded.enter()
        try:
            versions = [
                await self._put(session, check_name(name), value, expect)
                for name, value in (values or {}).items()
            ]
        except BaseException as error:
            await guarded.leave(error)
            raise
        await guarded.leave(None)
        return versions

    async def _put(
        self, session: RuntimeSession, name: str, value: str, expect: int | None
    ) -> int:
        if expect is not None:
            before = await self._value(session, name)
            if before.version != expect:
                raise Conflict(f"{name}: version {before.version}, not {expect}")
        return int((await session.run(_WRITE, (name, value)))[0][0])

    async def _value(self, session: RuntimeSession, name: str) -> Versioned:
        rows = await session.run(_READ, (check_name(name),))
        return Versioned(*rows[0]) if rows else Versioned(None, 0)

    async def set_mode(self, mode: str, pattern: str = "*") -> None:
        parsed = Mode.parse(mode)
        async with self._session() as session:
            await set_mode(session.run, _TABLE, parsed, pattern)

    async def adopt(self, realm: str) -> None:
        async with self._session() as session:
            await session.run(
                "INSERT INTO fenced_realm (id, realm) VALUES (1, ?) "
                "ON CONFLICT (id) DO UPDATE SET realm = excluded.realm",
                (realm,),
            )

    async def mark(self, name: str) -> Mark | None:
        async with self._session() as session:
            return await self._fence.mark(session, name)

    async def records(self) -> list[Record]:
        async with self._session() as session:
            rows = await session.run(
                "SELECT time, name, stamp, token, grant_id, seq, verdict, ruling, mode "
                "FROM fenced_record WHERE guard = ? ORDER BY id",
                (_TABLE,),
            )
        return [_record(row) for row in rows]

    async def tally(self) -> dict[tuple[str, str], int]:
        async with self._session() as session:
            rows = await session.run(
                "SELECT verdict, mode, count FROM fenced_tally WHERE guard = ?", (_TABLE,)
            )
        return {(verdict, mode): count for verdict, mode, count in rows}

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _record(row: tuple[Any, ...]) -> Record:
    at, name, stamp, token, grant, seq, verdict, ruling, mode = row
    return Record(
        at,
        name,
        Stamp.parse(stamp) if stamp else None,
        Mark(token, grant, seq) if token is not None else None,
        Verdict(verdict),
        Ruling(ruling),
        mode,
    )


async def set_mode(run: install.Run, guard: str, mode: Mode, pattern: str) -> None:
    """Switch the stage of a guard for the names that match; holds from the next transaction on."""
    await run(
        "INSERT INTO fenced_mode (guard, pattern, glob, mode) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (guard, pattern) DO UPDATE SET mode = excluded.mode",
        (guard, check_pattern(pattern), install.glob_of(pattern), str(mode)),
    )
