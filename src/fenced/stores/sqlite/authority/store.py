"""Leases in an SQLite file: every operation is one short write transaction.

`BEGIN IMMEDIATE` takes the file's one write lock, and the clock is read after that: a request that
waited for the lock cannot revive an attempt that has expired. A grant is synced to the disk before its
token is handed out; a release or a renewal need not be, since the next grant's sync includes it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fenced.errors import Misconfigured
from fenced.leases.rowauthority import Kind, Work
from fenced.leases.rows import NS, LeaseAlgorithm
from fenced.leases.rules import no_namespace
from fenced.net import filesystem
from fenced.runtime import forking
from fenced.runtime.machine import boot_id
from fenced.stores.sqlite.authority.connecting import Deadline, LeaseFile, retry_while_locked, switch_to_wal
from fenced.stores.sqlite.authority.floor import Floor
from fenced.stores.sqlite.authority.rows import HERE, SQL, SqliteRows
from fenced.stores.sqlite.failures import translate
from fenced.values import sqlfile, timing
from fenced.values.model import Granted, Standing
from fenced.values.schema import Schema, check_readable

T = TypeVar("T")
APPLICATION_ID = 0x46454E43  # "FENC"
SCHEMA_VERSION = 1
SQLITE_MIN = (3, 37, 0)

Wake = tuple[str, str]
"""A waiter's socket and public id."""


class Store:
    """One namespace of a database file. Safe to use from many threads: each call has its own transaction."""

    algorithm: type[LeaseAlgorithm] = LeaseAlgorithm

    def __init__(self, path: Path, namespace: str, clock: Callable[[], int]) -> None:
        self.path = path
        self.file = LeaseFile(path)
        self._namespace_name = namespace
        self._clock = clock
        self._namespace = 0
        self._floor = Floor(path)

    # Opening.

    def open(self, create: bool = True, deadline: Deadline | None = None) -> Standing:
        if sqlite3.sqlite_version_info < SQLITE_MIN:
            raise Misconfigured(f"SQLite {sqlite3.sqlite_version} is too old; 3.37 or later is needed")
        try:
            return self._open(create, deadline or Deadline.of())
        except OSError as error:
            raise Misconfigured(f"{self.path} cannot be used: {error}") from error

    def _open(self, create: bool, deadline: Deadline) -> Standing:
        filesystem.check_file(self.path, create=create)
        forking.enter()
        try:
            retry_while_locked(self._install, deadline)
        except sqlite3.Error as error:
            raise translate(error, self.path) from error
        finally:
            forking.leave()
        filesystem.check_place(self.path)
        self.file.opened()
        with self.file.transaction(deadline, durable=True) as db:
            self._notice_reboot(db)
            row = db.execute(SQL["namespace"], (self._namespace_name,)).fetchone()
            if row is None and not create:
                raise no_namespace(self.path, self._namespace_name)
            if row is None:
                db.execute(SQL["new_namespace"], (self._namespace_name,))
                row = db.execute(SQL["namespace"], (self._namespace_name,)).fetchone()
        self._namespace = row[0]
        self._floor.open(*row)
        doubts = filesystem.doubts_about(self.path)
        schema = Schema(SCHEMA_VERSION, SCHEMA_VERSION)
        return Standing(row[1], row[2], doubts, schema=schema, stopped=self._floor.stops(row[2]))

    def _install(self) -> None:
        """Create the schema if it is missing; refuse another program's database."""
        db = sqlite3.connect(self.path, timeout=0, isolation_level=None)
        try:
            self._refuse_foreign(db)
            switch_to_wal(db)
            db.execute("BEGIN IMMEDIATE")
            self._refuse_foreign(db)
            (version,) = db.execute("PRAGMA user_version").fetchone()
            # The oldest version that a client must know: 0.1 compares this number.
            check_readable(str(self.path), Schema(version, version), SCHEMA_VERSION)
            if version == 0:
                for statement in sqlfile.statements((HERE / "schema.sql").read_text()):
                    db.execute(statement)
                db.execute("INSERT INTO machine (id, boot) VALUES (1, ?)", (boot_id(),))
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            db.execute("COMMIT")
        finally:
            db.close()

    def _refuse_foreign(self, db: sqlite3.Connection) -> None:
        # Count the tables before reading the id: another process may create ours between the two reads.
        (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if tables and db.execute("PRAGMA application_id").fetchone() != (APPLICATION_ID,):
            raise Misconfigured(f"{self.path} is a database of another program; leases need their own file")

    def _notice_reboot(self, db: sqlite3.Connection) -> None:
        boot = boot_id()
        if db.execute(SQL["boot"]).fetchone() == (boot,):
            return
        now = self._clock()
        db.execute(SQL["new_boot"], (now + int(timing.REMEMBER_SECONDS_MIN * NS),))
        db.execute("DELETE FROM claim")
        db.execute("DELETE FROM queue")
        db.execute("UPDATE machine SET boot = ?", (boot,))

    def transact(self, work: Work[T], kind: Kind, deadline: Deadline | None = None) -> tuple[T, list[Wake]]:
        """One transaction; the waiters to wake are for the caller. A reading one is deferred, and blocks nobody."""
        begin = "BEGIN" if kind is Kind.READS else "BEGIN IMMEDIATE"
        with self.file.transaction(deadline, durable=kind is Kind.MINTS, begin=begin) as db:
            # The transaction has just taken the lock: the clock is read only now.
            algorithm = self.algorithm(SqliteRows(db, self._namespace, self._floor), self._clock())
            answer, heads = work(algorithm)
        if kind is Kind.MINTS and (token := _token_in(answer)):
            self._floor.rise(token)  # after its commit, before the caller gets it
        return answer, [(head.wake, head.id) for head in heads]

    def close(self) -> None:
        self.file.close()
        self._floor.close()


def _token_in(answer: object) -> int:
    """The highest token that an answer hands out; 0: none."""
    if isinstance(answer, list):
        return max(map(_token_in, answer), default=0)
    if isinstance(answer, Granted):
        return answer.token
    return answer if isinstance(answer, int) else 0
