"""Leases in an SQLite file: every operation is one short write transaction.

`BEGIN IMMEDIATE` takes the file's one write lock, and only then is the clock read: a request that
waited for the lock cannot revive what expired meanwhile. A grant is synced to the disk before its
token is handed out; a release or a renewal need not be, since the next grant's sync carries it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fenced import sqlfile, timing
from fenced.authorities.shared.rules import (
    QUEUE_MAX,
    holder_from,
    holder_text,
    no_namespace,
    reused_attempt,
    tokens_used_up,
)
from fenced.authorities.sqlite import filesystem
from fenced.authorities.sqlite.connecting import (
    Deadline,
    Log,
    StoreConnection,
    StoreTransaction,
    never_close,
    retry_while_locked,
    switch_to_wal,
    translate,
)
from fenced.authorities.sqlite.floor import Floor
from fenced.errors import InvariantBroken, Misconfigured
from fenced.model import (
    Ask,
    AskAnswer,
    Busy,
    Ended,
    Gone,
    Granted,
    HeldBy,
    Kept,
    NameView,
    ReleaseAnswer,
    Released,
    RenewAnswer,
    Standing,
    Waiter,
    Waiting,
    check_floor,
    grant_id,
)
from fenced.runtime import forking
from fenced.schema import Schema, check_readable

HERE = Path(__file__).parent
SQL = sqlfile.load(HERE / "queries.sql")
APPLICATION_ID = 0x46454E43  # "FENC"
SCHEMA_VERSION = 1
SQLITE_MIN = (3, 37, 0)
TIDY_EVERY_TOKENS = 64
"""Every so many grants also look for ended attempts to forget, so that no process has to sweep."""

_NS = 10**9
_LAST = 2**62

Wake = tuple[str, str]


class Store:
    """One database file. Safe to use from many threads: each call takes a connection of its own."""

    def __init__(self, path: Path, namespace: str, clock: Callable[[], int]) -> None:
        self.path = path
        self._namespace_name = namespace
        self._clock = clock
        self._namespace = 0
        self._files = (str(path), f"{path}-wal", f"{path}-shm")
        self._file = filesystem.NO_FILE
        self._floor = Floor(path)
        self._lost = ""
        self._abandoned = False
        self.idle: list[StoreConnection] = []

    # Opening.

    def open(self, create: bool = True, deadline: Deadline | None = None) -> Standing:
        if sqlite3.sqlite_version_info < SQLITE_MIN:
            raise Misconfigured(f"SQLite {sqlite3.sqlite_version} is too old; 3.37 or later is needed")
        try:
            return self._open(create, deadline or Deadline.of())
        except OSError as error:
            raise Misconfigured(f"{self.path} cannot be used: {error}") from error

    def _open(self, create: bool, deadline: Deadline) -> Standing:
        if not self.path.parent.is_dir():
            raise Misconfigured(f"the folder {self.path.parent} does not exist; create it first")
        if self.path.is_dir():
            raise Misconfigured(f"{self.path} is a folder; name a file in it")
        if not create and not self.path.exists():
            raise Misconfigured(f"there is no file {self.path}; the first lease would create it")
        filesystem.check_place(self.path)
        forking.enter()
        try:
            retry_while_locked(self._install, deadline)
        except sqlite3.Error as error:
            raise translate(error, self.path) from error
        finally:
            forking.leave()
        filesystem.check_place(self.path)
        if self._file == filesystem.NO_FILE:  # opened again: `check_files` finds out if it was replaced
            self._file = filesystem.file_id(self._files[0])
        with self._write(deadline, durable=True) as db:
            self._notice_reboot(db)
            row = db.execute(SQL["namespace"], (self._namespace_name,)).fetchone()
            if row is None and not create:
                raise no_namespace(self.path, self._namespace_name)
            if row is None:
                db.execute(SQL["new_namespace"], (self._namespace_name,))
                row = db.execute(SQL["namespace"], (self._namespace_name,)).fetchone()
        self._namespace = row[0]
        self._abandoned = False
        self._floor.open(*row)
        return Standing(row[1], row[2])

    def _install(self) -> None:
        """Create the schema, unless it is there; refuse a database that is somebody else's."""
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
                db.execute("INSERT INTO machine (id, boot) VALUES (1, ?)", (filesystem.boot_id(),))
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            db.execute("COMMIT")
        finally:
            db.close()

    def _refuse_foreign(self, db: sqlite3.Connection) -> None:
        # The tables are counted first: another process may create ours between the two looks.
        (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if tables and db.execute("PRAGMA application_id").fetchone() != (APPLICATION_ID,):
            raise Misconfigured(
                f"{self.path} is a database of another program; leases need a file of their own"
            )

    def _notice_reboot(self, db: sqlite3.Connection) -> None:
        boot = filesystem.boot_id()
        if db.execute(SQL["boot"]).fetchone() == (boot,):
            return
        now = self._clock()
        db.execute(SQL["new_boot"], (now + int(timing.REMEMBER_SECONDS_MIN * _NS),))
        db.execute("DELETE FROM claim")
        db.execute("DELETE FROM queue")
        db.execute("UPDATE machine SET boot = ?", (boot,))

    # Connections and transactions.

    def connect(self) -> StoreConnection:
        # `mode=rw`: SQLite must not create an empty file in place of one that was moved away.
        address = self.path.as_uri() + "?mode=rw"
        # timeout=0: SQLite itself does not wait for a lock; `retry_while_locked` does, until the call's deadline.
        db = sqlite3.connect(address, timeout=0, isolation_level=None, check_same_thread=False, uri=True)
        try:
            mode = db.execute("PRAGMA journal_mode").fetchone()[0]  # this also opens the log
            if mode != "wal":
                raise Misconfigured(f"{self.path} has journal_mode {mode}; tokens need wal")
        except BaseException:
            db.close()
            raise
        return StoreConnection(db, self._log())

    def put_back(self, connection: StoreConnection) -> None:
        if self._lost or self._abandoned:
            self.discard(connection)
        else:
            self.idle.append(connection)

    def discard(self, connection: StoreConnection) -> None:
        if self._has_another_log(connection):
            never_close(connection)
        else:
            connection.db.close()

    def _write(
        self, deadline: Deadline | None = None, *, durable: bool, begin: str = "BEGIN IMMEDIATE"
    ) -> StoreTransaction:
        """A write transaction: the lock is taken first, the clock is read afterwards."""
        return StoreTransaction(self, durable, deadline, begin)

    def _read(self, deadline: Deadline | None) -> StoreTransaction:
        """A transaction that only looks, and blocks nobody."""
        return self._write(deadline, durable=False, begin="BEGIN")

    # Whether the files are still the same.

    def check_files(self, connection: StoreConnection) -> None:
        """The path must still lead to the file that was opened, and to the log that this connection writes.

        Checked inside the transaction, before its first read. Other processes do not see the contents of a log that
        was removed, and writes to it are lost.
        """
        if not self._namespace:
            return  # not yet opened
        if filesystem.file_id(self._files[0]) != self._file:
            raise Misconfigured(
                f"{self.path} was removed or replaced while this process had it open; restart the "
                "process, and after a restore from backup run `fenced authority raise` first"
            )
        if self._log() != connection.log:
            self._log_was_lost()
            self.refuse_if_lost()

    def _log(self) -> Log:
        _, wal, shm = self._files
        return filesystem.file_id(wal), filesystem.file_id(shm)

    def _log_was_lost(self) -> None:
        """The log was removed or replaced. Open no new connection: it could combine one log's index with another log.

        If no process has made a new log, the last connection to close writes the old log into the database, which
        saves its contents. If there is a new log, the old one must not be written over it: its connections are never
        closed.
        """
        self._lost = (
            f"{self.path.name}-wal or -shm was removed or replaced while this process had {self.path} open; tokens "
            "that were handed out may be lost with it. Stop all processes that use the file and start them again. If "
            "tokens are missing, grants then fail and say so: run `fenced authority raise`"
        )
        self.close_idle()

    def _has_another_log(self, connection: StoreConnection) -> bool:
        pairs = zip(self._log(), connection.log, strict=True)
        return any(now not in (filesystem.NO_FILE, before) for now, before in pairs)

    def refuse_if_lost(self) -> None:
        if self._lost:
            raise Misconfigured(self._lost)

    # The operations.

    def ask(self, ask: Ask, wake: str, deadline: Deadline | None = None) -> AskAnswer:
        answer = self._ask(ask, wake, deadline)
        if type(answer) is Granted:
            self._floor.rise(answer.token)  # after its commit, before the caller gets it
        return answer

    def _ask(self, ask: Ask, wake: str, deadline: Deadline | None) -> AskAnswer:
        public = grant_id(ask.secret)
        names = _names_text(ask.names)
        ticket = 0
        with self._write(deadline, durable=True) as db:
            now = self._clock()
            row = db.execute(SQL["attempt"], (public,)).fetchone()
            if row is not None:
                tombstone = row[2] == "[]"  # withdrawn before it arrived
                same = row[0] == self._namespace and row[2] == names and row[3] == int(ask.ttl * _NS)
                if not (same or tombstone):
                    raise reused_attempt()
                state, ticket, token, expires = row[1], row[5], row[6], row[7]
                if state in ("granted", "waiting") and expires <= now:
                    self._end(db, public, state, ask.names, ticket, "expired", now, row[3])
                    state = "expired"
                if state == "granted":
                    return Granted(token, (expires - now) / _NS, ask.ttl)
                if state != "waiting":
                    return Ended(state)
            return self._grant_or_queue(db, ask, public, names, ticket, wake, now)

    def _grant_or_queue(
        self, db: sqlite3.Connection, ask: Ask, public: str, names: str, ticket: int, wake: str, now: int
    ) -> AskAnswer:
        until, claims = self._look(db, ask.names, ticket or _LAST, now)
        ttl, delay = int(ask.ttl * _NS), int(ask.lock_delay * _NS)
        holder = holder_text(ask.holder)
        if until <= now:
            token = self._mint(db)
            for claim in claims:
                db.execute(
                    SQL["end_attempt"], ("expired", "expired", now, now, _remember(claim[7]), claim[0])
                )
            expires = now + ttl
            forget = expires + delay + _remember(ttl)
            db.execute(
                SQL["put_attempt"],
                (
                    public,
                    self._namespace,
                    "granted",
                    names,
                    ttl,
                    delay,
                    ticket,
                    token,
                    expires,
                    forget,
                    "",
                    holder,
                ),
            )
            for name in ask.names:
                db.execute(SQL["put_claim"], (self._namespace, name, public))
                if ticket:
                    db.execute(SQL["dequeue"], (self._namespace, name, ticket))
            if token % TIDY_EVERY_TOKENS == 0:
                self._sweep(db, public, now, 200)
            return Granted(token, ask.ttl, ask.ttl)
        held_by = next((_held_by(claim, now) for claim in claims if claim[2] > now), None)
        ahead = max(self._ahead(db, name, ticket or _LAST) for name in ask.names)
        if not ticket:
            if not ask.wait or ahead >= QUEUE_MAX:
                return Busy(ahead, held_by)
            (ticket,) = _one(db.execute(SQL["next_ticket"], (self._namespace,)))
            for name in ask.names:
                db.execute(SQL["enqueue"], (self._namespace, name, ticket, public))
            self._sweep(db, public, now, 4)
        expires = now + int(timing.waiter_ttl(ask.ttl) * _NS)
        forget = expires + _remember(ttl)
        db.execute(
            SQL["put_attempt"],
            (public, self._namespace, "waiting", names, ttl, delay, ticket, 0, expires, forget, wake, holder),
        )
        return Waiting((until - now) / _NS, ahead, held_by)

    def _look(
        self, db: sqlite3.Connection, names: Sequence[str], ticket: int, now: int
    ) -> tuple[int, list[tuple[Any, ...]]]:
        """From when on an attempt with this ticket could be granted, and the claims on its names."""
        until = now
        claims = []
        for name in names:
            claim = db.execute(SQL["claim"], (self._namespace, name)).fetchone()
            if claim is not None:
                claims.append(claim)
                until = max(until, claim[2] + claim[3])
            before = db.execute(SQL["before"], (self._namespace, name, ticket)).fetchone()
            while before is not None and before[1] <= now:
                self._expire(db, before[0], now)
                before = db.execute(SQL["before"], (self._namespace, name, ticket)).fetchone()
            if before is not None:
                until = max(until, before[1])
        return until, claims

    def _ahead(self, db: sqlite3.Connection, name: str, ticket: int) -> int:
        (ahead,) = _one(db.execute(SQL["ahead"], (self._namespace, name, ticket)))
        return int(ahead)

    def _mint(self, db: sqlite3.Connection) -> int:
        row = db.execute(SQL["mint"], (self._namespace,)).fetchone()
        if row is None:
            raise tokens_used_up()
        token, floor = int(row[0]), self._floor.read()
        if token <= floor:
            raise Misconfigured(
                f"{self.path}: tokens up to {floor} were handed out, but the file's last token is {token - 1}: it was "
                "restored, or its write-ahead log was removed. Nothing is granted until you run "
                f"`fenced authority raise --above {floor}`, or above every token that a guard has seen"
            )
        return token

    def _expire(self, db: sqlite3.Connection, public: str, now: int) -> None:
        """A waiter fell silent: take it out of all its queues."""
        row = _one(db.execute(SQL["attempt"], (public,)))
        self._end(db, public, row[1], json.loads(row[2]), row[5], "expired", now, row[3])

    def _end(
        self,
        db: sqlite3.Connection,
        public: str,
        was: str,
        names: Sequence[str],
        ticket: int,
        state: str,
        now: int,
        ttl: int,
    ) -> None:
        db.execute(SQL["end_attempt"], (state, state, now, now, _remember(ttl), public))
        if was == "waiting":
            for name in names:
                db.execute(SQL["dequeue"], (self._namespace, name, ticket))

    def renew(self, secrets: Sequence[str], deadline: Deadline | None = None) -> list[RenewAnswer]:
        publics = [grant_id(secret) for secret in secrets]
        with self._write(deadline, durable=False) as db:
            now = self._clock()
            batch = {
                "ids": json.dumps(publics),
                "now": now,
                "waiter_ttl": int(timing.WAITER_TTL_MAX * _NS),
                "remember": int(timing.REMEMBER_SECONDS_MIN * _NS),
            }
            db.execute(SQL["extend"], batch)
            found = {row[0]: row for row in db.execute(SQL["batch"], {"ids": batch["ids"]})}
            return [self._renewed(db, found.get(public), now) for public in publics]

    def _renewed(self, db: sqlite3.Connection, row: tuple[Any, ...] | None, now: int) -> RenewAnswer:
        if row is None or row[1] != self._namespace:
            return Gone()
        _, _, state, names, ticket, expires = row
        if state not in ("granted", "waiting"):
            return Ended(state)
        if expires <= now:
            return Ended("expired")
        if state == "granted":
            return Kept((expires - now) / _NS)
        until, _ = self._look(db, json.loads(names), ticket, now)
        return Waiting((until - now) / _NS)

    def release(self, secret: str, deadline: Deadline | None = None) -> tuple[ReleaseAnswer, list[Wake]]:
        public = grant_id(secret)
        with self._write(deadline, durable=False) as db:
            now = self._clock()
            row = db.execute(SQL["attempt"], (public,)).fetchone()
            if row is None:
                return Gone(), []
            return self._finish(db, public, row, "released", now)

    def withdraw(self, secret: str, deadline: Deadline | None = None) -> tuple[ReleaseAnswer, list[Wake]]:
        public = grant_id(secret)
        with self._write(deadline, durable=False) as db:
            now = self._clock()
            row = db.execute(SQL["attempt"], (public,)).fetchone()
            if row is None:
                forget = now + _remember(0)
                tombstone = (public, self._namespace, "withdrawn", "[]", 0, 0, 0, 0, 0, forget, "", "[]")
                db.execute(SQL["put_attempt"], tombstone)
                self._sweep(db, public, now, 4)
                return Released(), []
            return self._finish(db, public, row, "withdrawn", now)

    def _finish(
        self, db: sqlite3.Connection, public: str, row: tuple[Any, ...], state: str, now: int
    ) -> tuple[ReleaseAnswer, list[Wake]]:
        """End an attempt by its owner's wish; the names that this frees go to their heads."""
        namespace, was, encoded, ttl, _, ticket, _, expires = row
        if namespace != self._namespace:
            return Gone(), []
        names = json.loads(encoded)
        if was in ("released", "withdrawn"):
            return Released(), []
        if was not in ("granted", "waiting"):
            return Ended(was), []
        if expires <= now:
            self._end(db, public, was, names, ticket, "expired", now, ttl)
            return Ended("expired"), []
        self._end(db, public, was, names, ticket, state, now, ttl)
        return Released(), self._free(db, public, names, now)

    def _free(self, db: sqlite3.Connection, public: str, names: Sequence[str], now: int) -> list[Wake]:
        wakes: dict[Wake, None] = {}
        for name in names:
            db.execute(SQL["drop_claim"], (self._namespace, name, public))
            head = db.execute(SQL["head"], (self._namespace, name)).fetchone()
            while head is not None and head[1] <= now:
                self._expire(db, head[0], now)
                head = db.execute(SQL["head"], (self._namespace, name)).fetchone()
            if head is not None:
                wakes[(head[2], head[0])] = None
        return list(wakes)

    def force_release(self, name: str, deadline: Deadline | None = None) -> tuple[int | None, list[Wake]]:
        token, wakes = self._force_release(name, deadline)
        if token is not None:
            self._floor.rise(token)
        return token, wakes

    def _force_release(self, name: str, deadline: Deadline | None) -> tuple[int | None, list[Wake]]:
        with self._write(deadline, durable=True) as db:
            now = self._clock()
            claim = db.execute(SQL["claim"], (self._namespace, name)).fetchone()
            if claim is None or claim[1] != "granted" or claim[2] <= now:
                return None, []
            token = self._mint(db)
            names = json.loads(claim[6])
            self._end(db, claim[0], "granted", names, 0, "revoked", now, claim[7])
            return token, self._free(db, claim[0], names, now)

    def raise_floor(self, above: int, deadline: Deadline | None = None) -> int:
        """Raise it above `above` and above the last token that the floor file records."""
        check_floor(above)
        with self._write(deadline, durable=True) as db:
            floor = max(above, self._floor.read())
            row = _one(db.execute(SQL["raise_floor"], (floor, self._namespace)))
        self._floor.rise(int(row[0]))
        return int(row[0])

    def tidy(self, deadline: Deadline | None = None) -> int:
        with self._write(deadline, durable=False) as db:
            return self._forget(db, db.execute(SQL["overdue"], (self._clock(),)).fetchall())

    def _sweep(self, db: sqlite3.Connection, near: str, now: int, limit: int) -> None:
        """Forget what is over among the rows near a random id: every row that comes in looks at a few."""
        self._forget(db, db.execute(SQL["overdue_near"], (near, limit, now)).fetchall())

    def _forget(self, db: sqlite3.Connection, over: list[tuple[Any, ...]]) -> int:
        for public, namespace, state, names, ticket in over:
            for name in json.loads(names):
                db.execute(SQL["drop_claim"], (namespace, name, public))
                if state == "waiting":
                    db.execute(SQL["dequeue"], (namespace, name, ticket))
            db.execute(SQL["forget"], (public,))
        return len(over)

    # Looking.

    def survey(self, after: str, limit: int, deadline: Deadline | None = None) -> list[NameView]:
        views: list[NameView] = []
        with self._read(deadline) as db:
            now = self._clock()
            while len(views) < limit:
                page = {"namespace": self._namespace, "after": after, "limit": limit}
                names = [row[0] for row in db.execute(SQL["names"], page)]
                for name in names:
                    view = self._view(db, name, now)
                    if view.held_by or view.waiters or view.free_in > 0:
                        views.append(view)
                if len(names) < limit:
                    break
                after = names[-1]
        return views[:limit]

    def observe(self, name: str, deadline: Deadline | None = None) -> NameView:
        with self._read(deadline) as db:
            return self._view(db, name, self._clock())

    def _view(self, db: sqlite3.Connection, name: str, now: int) -> NameView:
        claim = db.execute(SQL["claim"], (self._namespace, name)).fetchone()
        held_by = _held_by(claim, now) if claim is not None else None
        waiters = tuple(
            Waiter(holder_from(holder), tuple(json.loads(names)), (expires - now) / _NS)
            for holder, names, expires in db.execute(SQL["waiters"], (self._namespace, name))
            if expires > now
        )
        return NameView(
            name,
            held_by,
            tuple(json.loads(claim[6])) if held_by else (),
            claim[7] / _NS if held_by else None,
            max(0, claim[2] + claim[3] - now) / _NS if claim is not None else 0.0,
            waiters,
        )

    def close_idle(self) -> None:
        while self.idle:
            self.discard(self.idle.pop())

    def close(self) -> None:
        """Close the idle connections; one that is in use is closed by `put_back`. Never waits, may be repeated."""
        self._abandoned = True
        self.close_idle()
        self._floor.close()


def _one(cursor: sqlite3.Cursor) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = cursor.fetchone()
    if row is None:
        raise InvariantBroken("a row that must be there is missing")
    return row


def _remember(ttl_ns: int) -> int:
    return max(int(timing.REMEMBER_SECONDS_MIN * _NS), 4 * ttl_ns)


@lru_cache(maxsize=1024)
def _names_text(names: tuple[str, ...]) -> str:
    return json.dumps(names, ensure_ascii=False)


def _held_by(claim: tuple[Any, ...], now: int) -> HeldBy | None:
    public, state, expires, _, token, holder, _, _ = claim
    if state != "granted" or expires <= now:
        return None
    return HeldBy(holder_from(holder), token, public, (expires - now) / _NS)
