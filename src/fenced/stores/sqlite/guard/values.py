"""Named values in a guarded SQLite table, for drills and for programs without tables.

Programs with tables use `fenced.sql.Guard`, which works on their own connections.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from fenced.errors import Conflict, Contended, Misconfigured
from fenced.guards.answers import check_value, expect_rule, one_stamp
from fenced.guards.spec import Spec
from fenced.runtime import forking
from fenced.runtime.blocking import step
from fenced.stores.sqlite.guard import install
from fenced.stores.sqlite.guard.fencing import SqliteFence
from fenced.stores.sqlite.guard.operator import SqliteOperator, connect
from fenced.stores.sqlite.guard.refusals import translate
from fenced.stores.sqlite.guard.sessions import BUSY_SECONDS, PlainSession, path_of
from fenced.stores.sqlite.guard.transactions import GuardedConnection
from fenced.values.contracts import MANY_NAMES, Operator, Runtime, Trait, Versioned
from fenced.values.decision import Mark, Mode, Rule
from fenced.values.model import Credential, Stamp, check_name

_TABLE = install.OWN_TABLE
_CREATE = f"""
CREATE TABLE IF NOT EXISTS {_TABLE} (
  name TEXT PRIMARY KEY, value BLOB, version INTEGER NOT NULL
) STRICT, WITHOUT ROWID"""
_TEXTS = f"SELECT 1 FROM pragma_table_info('{_TABLE}') WHERE name = 'value' AND type = 'TEXT'"
_READ = f"SELECT value, version FROM {_TABLE} WHERE name = ?"
_WRITE = f"""
INSERT INTO {_TABLE} (name, value, version) VALUES (?, ?, 1)
ON CONFLICT (name) DO UPDATE SET value = excluded.value, version = version + 1
RETURNING version"""
_ADOPT = "UPDATE fenced_guard SET realm = ?"
_HIGHEST = "SELECT coalesce(max(token), 0) FROM fenced_mark"
_MODES = "SELECT pattern, mode FROM fenced_mode WHERE guard = ?"

T = TypeVar("T")


class SqliteValues:
    """Values under names in one SQLite file. With `mandatory`, triggers decide every write; otherwise the guard decides
    only its own."""

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

    def __init__(
        self,
        path: Path,
        runtime: Runtime,
        *,
        rule: Rule | None = None,
        mode: str = "enforce",
        mandatory: bool = True,
    ) -> None:
        self.url = f"sqlite:///{path}"
        if not mandatory:
            self.traits = tuple(trait for trait in self.traits if trait.key != "mandatory")
        self._path = path
        self._runtime = runtime
        self._spec = Spec(_TABLE, "{name}", rule)
        self._mode = Mode.parse(mode)
        self._fence = SqliteFence(_TABLE, mandatory, rule)
        self._idle: list[sqlite3.Connection] = []
        forking.register(self)

    def _before_fork(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _forked(self) -> None:
        return

    @classmethod
    def at(cls, url: str, runtime: Runtime) -> SqliteValues:
        return cls(path_of(url), runtime)

    async def open(self) -> None:
        """Create what is missing. An installed guard keeps its mode and its rule."""
        await self._on_session(self._open)

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
            await self._install(session, self._spec, self._mode)
        elif self._fence.mandatory and there[0][1] == 0:  # an earlier client opened it as cooperative
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
        if self._fence.mandatory:
            ((rule,),) = await session.run("SELECT rule FROM fenced_guard WHERE guard = ?", (_TABLE,))
            await self._install(session, Spec(_TABLE, self._spec.name, rule), None)

    async def _install(self, session: PlainSession, spec: Spec, mode: Mode | None) -> None:
        statements = await install.script(
            spec, mode, session.run, mandatory=self._fence.mandatory, replace=True
        )
        for statement in statements:
            await session.run(statement)

    async def _on_session(self, work: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """One operation on a separate connection, as one blocking call.

        If each statement were a separate call, all threads of a pool could be busy with operations that wait for this
        transaction's lock, and none would be left to finish it.
        """
        return await self._runtime.call(self._blocking, work, args)

    def _blocking(self, work: Callable[..., Coroutine[Any, Any, T]], args: tuple[Any, ...]) -> T:
        forking.enter()
        try:
            return self._on_connection(work, args)
        except sqlite3.Error as error:
            raise translate(error) from error
        finally:
            forking.leave()

    def _on_connection(self, work: Callable[..., Coroutine[Any, Any, T]], args: tuple[Any, ...]) -> T:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            return step(work(PlainSession(connection), *args))
        finally:
            if connection.in_transaction:
                connection.rollback()
            self._idle.append(connection)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    async def announce(self, credential: Credential) -> None:
        stamp = one_stamp(credential, "an SQLite guard")
        await self._on_session(self._announce, stamp, credential.names or stamp.names)

    async def _announce(self, session: PlainSession, stamp: Stamp, names: Sequence[str]) -> None:
        guarded = GuardedConnection(self._fence, session, stamp, names, stamping=False)
        await guarded.enter()
        await guarded.leave(None)

    async def read(self, credential: Credential, name: str) -> Versioned:
        stamp = one_stamp(credential, "an SQLite guard")
        return await self._on_session(self._read, stamp, check_name(name))

    async def _read(self, session: PlainSession, stamp: Stamp, name: str) -> Versioned:
        await self._announce(session, stamp, (name,))
        return await self._value(session, name)

    async def peek(self, name: str, at_least: int = 0) -> Versioned:
        return await self._on_session(self._peek, check_name(name), at_least)

    async def _peek(self, session: PlainSession, name: str, at_least: int) -> Versioned:
        if at_least:
            mark = await self._fence.mark(session, name)
            if mark is None or mark.token < at_least:
                raise Contended(f"{name}: token {at_least} has not been seen here yet; look again")
        return await self._value(session, name)

    async def write(
        self, credential: Credential | None, name: str, value: bytes, *, expect: int | None = None
    ) -> int:
        (version,) = await self._stamped(credential, {check_name(name): value}, expect)
        return version

    async def write_many(self, credential: Credential | None, values: dict[str, bytes]) -> None:
        await self._stamped(credential, values, None)

    async def _stamped(
        self, credential: Credential | None, values: dict[str, bytes], expect: int | None
    ) -> list[int]:
        stamp = None if credential is None else one_stamp(credential, "an SQLite guard")
        checked = {check_name(name): check_value(value) for name, value in values.items()}
        return await self._on_session(self._write, stamp, checked, expect)

    async def _write(
        self, session: PlainSession, stamp: Stamp | None, values: dict[str, bytes], expect: int | None
    ) -> list[int]:
        """One guarded transaction."""
        guarded = GuardedConnection(self._fence, session, stamp, tuple(values))
        await guarded.enter()
        try:
            versions = [await self._put(session, name, value, expect) for name, value in values.items()]
        except BaseException as error:
            await guarded.leave(error)
            raise
        await guarded.leave(None)
        return versions

    async def _put(self, session: PlainSession, name: str, value: bytes, expect: int | None) -> int:
        if expect is not None:
            before = await self._value(session, name)
            if before.version != expect:
                raise Conflict(f"{name}: version {before.version}, not {expect}")
        return int((await session.run(_WRITE, (name, value)))[0][0])

    async def _value(self, session: PlainSession, name: str) -> Versioned:
        rows = await session.run(_READ, (check_name(name),))
        return Versioned(*rows[0]) if rows else Versioned(None, 0)

    async def set_mode(self, mode: str, pattern: str = "*") -> None:
        await self._on_session(_set_mode, Mode.parse(mode), pattern)

    async def adopt(self, realm: str) -> None:
        await self._on_session(_run, _ADOPT, (realm,))

    async def mark(self, name: str) -> Mark | None:
        return await self._on_session(self._fence.mark, name)

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

    async def modes(self) -> dict[str, str]:
        return dict(await self._on_session(_run, _MODES, (_TABLE,)))

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

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


async def _run(session: PlainSession, sql: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
    return await session.run(sql, parameters)


async def _on_operator(connection: sqlite3.Connection, work: Callable[[Operator], Awaitable[T]]) -> T:
    return await work(SqliteOperator(PlainSession(connection)))


async def _set_mode(session: PlainSession, mode: Mode, pattern: str) -> None:
    await install.set_mode(session.run, _TABLE, mode, pattern)
