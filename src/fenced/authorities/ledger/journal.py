"""The files of a ledger: a journal of batches, and a snapshot of what came before them.

The journal is a table of an SQLite file, in write-ahead mode with synchronous=FULL: a batch is there as a whole or not
at all. The connection is in SQLite's exclusive mode, so its lock on the file is held until the process closes it or
dies. The snapshot is a text file beside it, which is written under another name, synced and renamed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fenced import sqlfile
from fenced.authorities.ledger.changes import Change, only_ends
from fenced.authorities.shared import filesystem
from fenced.authorities.shared.filesystem import FileInUse
from fenced.authorities.shared.sqlite import never_close, translate
from fenced.errors import Misconfigured
from fenced.runtime import forking
from fenced.runtime.machine import boot_id
from fenced.schema import Schema, check_readable

APPLICATION_ID = 0x46454E4C  # "FENL"
SCHEMA_VERSION = 1
PART = 5
"""How many changes a snapshot has in one line. The interpreter runs nothing else while a line is encoded."""
READ_BYTES = 2**20
"""How much of a snapshot is read at once. A line is longer than the usual buffer."""
TRIM_ROWS = 200
"""How many batches are deleted in one transaction: the batches of callers come between two of them."""

try:  # five times as fast, and there wherever a service runs
    import msgspec

    _text: Callable[[Any], bytes] = msgspec.json.Encoder().encode
    _value: Callable[[bytes | str], Any] = msgspec.json.Decoder().decode
except ImportError:
    _encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    _value = json.loads

    def _text(value: Any) -> bytes:
        return _encode(value).encode()


class Batch(NamedTuple):
    number: int
    now: int
    changes: list[Change]


class Journal(Protocol):
    """Where the changes of a ledger are kept. One thread at a time calls `append`, and one `save` and `trim`."""

    def open(self, create: bool) -> None: ...

    def read(self) -> Iterator[Batch]:
        """The snapshot in several parts, all with its number, then the batches that follow it, each number once."""

    def clock_ahead(self, clock: int, last: int) -> int:
        """What to add to a clock that shows `clock` now, so that it does not fall behind `last`, the last batch's."""

    def append(self, batch: Batch) -> None:
        """Write a batch, and sync it unless it only ends leases. After an error nobody knows what the disk has."""

    def save(self, number: int, now: int, changes: Iterable[Change]) -> None:
        """Replace the snapshot by one that has everything up to batch `number`."""

    def trim(self, number: int) -> bool:
        """Delete some batches up to `number`; returns whether there are more of them."""

    def close(self) -> None: ...
    def abandon(self) -> None:
        """In a forked child: never use the parent's connection, and never close it."""


class FileJournal:
    """A journal in the files of one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._snapshot = path.with_name(path.name + ".snapshot")
        self._watched = (str(path), f"{path}-wal")
        self._files: tuple[filesystem.FileId, ...] = ()
        self._db: sqlite3.Connection | None = None
        self._synced = True
        self._using = threading.Lock()
        """Held for one transaction: the thread that appends and the one that trims share the connection."""

    # Opening.

    def open(self, create: bool) -> None:
        if not self.path.parent.is_dir():
            raise Misconfigured(f"the folder {self.path.parent} does not exist; create it first")
        if self.path.is_dir():
            raise Misconfigured(f"{self.path} is a folder; name a file in it")
        if not create and not self.path.exists():
            raise Misconfigured(f"there is no file {self.path}; the first lease would create it")
        filesystem.check_place(self.path)
        try:
            # timeout=0: whoever has the file keeps it, so waiting for its lock is useless.
            self._db = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
            self._install(self._db)
        except sqlite3.Error as error:
            self.close()
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
                raise FileInUse(
                    f"{self.path} is used by another process: a ledger belongs to one process at a time. Stop that "
                    "process, or ask it for leases; processes of one machine that share a file need sqlite:///"
                ) from error
            raise translate(error, self.path) from error
        except BaseException:
            self.close()
            raise
        self._files = self._file_ids()

    def _install(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._refuse_foreign(db)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("BEGIN IMMEDIATE")  # from here on no other process can open the file
        (version,) = db.execute("PRAGMA user_version").fetchone()
        check_readable(str(self.path), Schema(version, version), SCHEMA_VERSION)
        if version == 0:
            for statement in sqlfile.statements((Path(__file__).parent / "schema.sql").read_text()):
                db.execute(statement)
            db.execute("INSERT INTO ledger VALUES (1, ?, 0, 0)", (boot_id(),))
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")

    def _refuse_foreign(self, db: sqlite3.Connection) -> None:
        (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if tables and db.execute("PRAGMA application_id").fetchone() != (APPLICATION_ID,):
            raise Misconfigured(f"{self.path} is a database of another program; a ledger needs its own file")

    def clock_ahead(self, clock: int, last: int) -> int:
        """The same boot: as before. Another boot: the clock goes on from the last batch, as if no time had passed.

        So a lease lasts at least as long as its holder believes: the machine was down for a time that nobody knows.
        """
        boot, ahead = self._opened().execute("SELECT boot, ahead FROM ledger").fetchone()
        if boot == boot_id():
            return int(ahead)
        ahead = last - clock
        self._opened().execute("UPDATE ledger SET boot = ?, ahead = ?", (boot_id(), ahead))
        return ahead

    # Reading.

    def read(self) -> Iterator[Batch]:
        try:
            yield from self._read()
        except sqlite3.Error as error:
            raise translate(error, self.path) from error
        except (ValueError, OSError) as error:
            raise self._damaged(f"it is damaged ({error})") from error

    def _read(self) -> Iterator[Batch]:
        last = 0
        for part in self._read_snapshot():
            last = part.number
            yield part
        (trimmed,) = self._opened().execute("SELECT trimmed FROM ledger").fetchone()
        if trimmed > last:
            raise self._damaged(f"{self._snapshot.name} is missing, or older than batch {trimmed}")
        rows = self._opened().execute(
            "SELECT number, now, changes FROM journal WHERE number > ? ORDER BY number", (last,)
        )
        for number, now, changes in rows:
            if number != last + 1:
                raise self._damaged(f"batch {last + 1} is missing")
            last = number
            yield Batch(number, now, _value(changes))

    def _read_snapshot(self) -> Iterator[Batch]:
        try:
            file = self._snapshot.open("rb", READ_BYTES)
        except FileNotFoundError:
            return
        with file:
            head = file.readline()
            check, (number, now) = zlib.crc32(head), _value(head)
            for line in file:
                if line.startswith(b"{"):
                    if _value(line) != {"crc32": check}:
                        raise self._damaged(
                            f"{self._snapshot.name} is damaged: it does not match its checksum"
                        )
                    return
                check = zlib.crc32(line, check)
                yield Batch(number, now, _value(line))
        raise self._damaged(f"{self._snapshot.name} is damaged: it has no end")

    def _damaged(self, why: str) -> Misconfigured:
        return Misconfigured(
            f"{self.path}: {why}. Restore the file and {self._snapshot.name} from one backup, then run "
            "`fenced authority raise`"
        )

    # Writing.

    def append(self, batch: Batch) -> None:
        text = _text(batch.changes).decode()
        with self._using:  # the other thread holds it for the deletion of a few rows
            self._check_files()
            with self._transaction() as db:  # a single statement is a transaction of its own
                self._sync(db, not only_ends(batch.changes))
                db.execute("INSERT INTO journal VALUES (?, ?, ?)", (batch.number, batch.now, text))

    def _sync(self, db: sqlite3.Connection, synced: bool) -> None:
        """Whether commits are synced from now on. A sync includes all commits before it."""
        if synced is not self._synced:
            db.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
            self._synced = synced

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """`forking` delays a fork until its end."""
        db = self._opened()
        forking.enter()
        try:
            yield db
        except sqlite3.Error as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise translate(error, self.path) from error
        finally:
            forking.leave()

    def _check_files(self) -> None:
        """The paths must lead to the files that were opened: what is written to a removed file is lost."""
        if self._file_ids() != self._files:
            raise Misconfigured(
                f"{self.path} or {self.path.name}-wal was removed or replaced while this process had it open"
            )

    def _file_ids(self) -> tuple[filesystem.FileId, ...]:
        return tuple(map(filesystem.file_id, self._watched))

    def save(self, number: int, now: int, changes: Iterable[Change]) -> None:
        new = self._snapshot.with_name(self._snapshot.name + ".new")
        rest = iter(changes)
        with new.open("wb") as file:
            check = _write_line(file, [number, now], 0)
            while part := list(itertools.islice(rest, PART)):
                check = _write_line(file, part, check)
            file.write(_text({"crc32": check}) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._snapshot)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def trim(self, number: int) -> bool:
        with self._using:
            (trimmed,) = self._opened().execute("SELECT trimmed FROM ledger").fetchone()
            last = min(number, trimmed + TRIM_ROWS)
            if last > trimmed:
                with self._transaction() as db:
                    self._sync(db, True)
                    db.execute("BEGIN IMMEDIATE")
                    db.execute("UPDATE ledger SET trimmed = ?", (last,))
                    db.execute("DELETE FROM journal WHERE number <= ?", (last,))
                    db.execute("COMMIT")
        return bool(last < number)

    # Closing.

    def _opened(self) -> sqlite3.Connection:
        if self._db is None:
            raise Misconfigured(f"{self.path} is not open")
        return self._db

    def close(self) -> None:
        db, self._db = self._db, None
        if db is None:
            return
        if self._files and self._file_ids() != self._files:
            never_close(db)  # closing would write a removed log into a file that is not its own
        else:
            db.close()

    def abandon(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            never_close(db)


def _write_line(file: object, value: object, check: int) -> int:
    line = _text(value) + b"\n"
    file.write(line)  # type: ignore[attr-defined]
    return zlib.crc32(line, check)
