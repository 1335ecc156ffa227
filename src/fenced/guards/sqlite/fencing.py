"""Announcing and deciding on an SQLite connection, in whichever colour it is.

`BEGIN IMMEDIATE` holds the database's one write lock, so what the pure function decides here stays true
until COMMIT; the triggers only see to it that no row is written round it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from fenced.decision import Judgement, Mark, Mode, Rule, Ruling, Verdict, judge, rule_on
from fenced.errors import (
    Contended,
    FencedError,
    Indeterminate,
    Misconfigured,
    Misuse,
    Unavailable,
)
from fenced.guards.answers import error_for, mode_of
from fenced.guards.sqlite.sessions import READY, Source
from fenced.model import Stamp

_OPERATION = "this transaction"
_AT_THE_WRITE = (Verdict.ADMIT, Verdict.APPLIED, Verdict.DUPLICATE, Verdict.OUT_OF_ORDER)
_FOREIGN_KEYS = """
SELECT 1 FROM sqlite_schema s, pragma_foreign_key_list(s.name)
WHERE s.type = 'table' AND s.name <> 'fenced_stamp' LIMIT 1"""
_LOOK = """
SELECT 'guard', rule, realm FROM fenced_guard WHERE guard = ?
UNION ALL SELECT 'mode', pattern, mode FROM fenced_mode WHERE guard = ?"""
_MARK = "SELECT token, grant_id, seq FROM fenced_mark WHERE name = ?"
_RAISE = """
INSERT INTO fenced_mark (name, token, grant_id, seq, stamp) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE
SET token = excluded.token, grant_id = excluded.grant_id, seq = excluded.seq, stamp = excluded.stamp"""
_STAMP = """
INSERT OR REPLACE INTO fenced_stamp (name, stamp, seq, verdict, refuse, mode, open)
VALUES (?, ?, ?, ?, ?, ?, ?)"""
_TALLY = """
INSERT INTO fenced_tally (guard, verdict, mode, count) VALUES (?, ?, ?, 1)
ON CONFLICT (guard, verdict, mode) DO UPDATE SET count = count + 1"""
_RECORD = """
INSERT INTO fenced_record (time, guard, name, stamp, token, grant_id, seq, verdict, ruling, mode)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""


class Session(Protocol):
    """A connection on which we may run our own statements."""

    @property
    def in_transaction(self) -> bool: ...

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]: ...

    async def reenter(self, guard: str, stamp: Stamp, names: Sequence[str]) -> Sequence[str]:
        """`sessions.reenter` on this connection."""

    async def commit(self, names: Sequence[str]) -> None:
        """`sessions.commit` on this connection."""

    async def make_ready(self) -> None:
        """`sessions.make_ready` on this connection."""


@dataclass(frozen=True, slots=True)
class Note:
    """A decision that has to be written down."""

    name: str | None
    stamp: Stamp | None
    mark: Mark | None
    verdict: Verdict
    ruling: Ruling
    mode: str


class Refusing(Exception):
    """Carries a refusal out of the transaction that it ends, with the note that must survive it."""

    def __init__(self, error: FencedError, note: Note | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.note = note


@dataclass(slots=True)
class Fence:
    """A guard on one SQLite table, for one transaction at a time."""

    guard: str
    mandatory: bool = True

    async def begin(self, session: Session) -> None:
        try:
            await session.run("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise began_badly(session, error) from error

    async def make_ready(self, session: Session) -> None:
        """Once per connection: a stamp that is left behind fails COMMIT by a foreign key alone.

        It stays on: every switch makes SQLite compile all statements of the connection anew.
        """
        if await session.run("PRAGMA foreign_keys") == [(0,)]:
            if await session.run(_FOREIGN_KEYS):
                raise Misconfigured(
                    "this connection does not enforce foreign keys though its tables declare some; a stamp "
                    "needs that enforcement: run PRAGMA foreign_keys = ON when you connect"
                )
            await session.run("ROLLBACK")
            await session.run("PRAGMA foreign_keys = ON")
            await session.run("BEGIN IMMEDIATE")
        await session.make_ready()

    async def announce(self, session: Session, stamp: Stamp, names: Sequence[str], *, stamping: bool) -> None:
        """Judge the stamp for each name and raise the marks; with `stamping`, let writes follow."""
        rule, realm, modes = await self._look(session)
        for name in sorted(names, key=str.encode):
            before = await self.mark(session, name)
            judged = judge(
                before, stamp, name=name, rule=rule, realm=realm, announce=not stamping, operation=_OPERATION
            )
            mode = mode_of(name, modes)
            if judged.verdict is Verdict.ADMIT and realm is None:
                await session.run("UPDATE fenced_guard SET realm = ? WHERE realm IS NULL", (stamp.realm,))
                realm = stamp.realm
            if stamping and self.mandatory and judged.verdict in _AT_THE_WRITE:
                # What the write will be is known, but it has not happened yet: announce only.
                announced = judge(before, stamp, name=name, rule=rule, realm=realm, announce=True)
                await self._raise(session, name, stamp, before, announced.mark)
            else:
                await self._settle(session, name, stamp, before, judged, mode)
            if stamping and self.mandatory:
                await self._put(session, name, stamp, judged.verdict, mode, rule)

    async def miss(self, session: Session, names: Sequence[str]) -> None:
        """An operation without a stamp, where no trigger would notice."""
        _, _, modes = await self._look(session)
        for name in names:
            mode = mode_of(name, modes)
            ruling = rule_on(Verdict.MISSING, mode, name)
            await self._let_through(
                session, name, None, await self.mark(session, name), Verdict.MISSING, ruling, mode
            )

    async def _look(self, session: Session) -> tuple[Rule, str | None, list[tuple[str, Mode]]]:
        rule: Rule | None = None
        realm: str | None = None
        modes: list[tuple[str, Mode]] = []
        try:
            rows = await session.run(_LOOK, (self.guard, self.guard))
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                raise Misconfigured("no guard is installed in this database; run its install()") from error
            raise
        for kind, first, second in rows:
            if kind == "guard":
                rule, realm = first, second
            else:
                modes.append((first, Mode.parse(second)))
        if rule is None:
            raise Misconfigured(f"no guard is installed for {self.guard!r}; run its install()")
        return rule, realm, modes

    async def mark(self, session: Session, name: str) -> Mark | None:
        rows = await session.run(_MARK, (name,))
        return Mark(*rows[0]) if rows else None

    async def _raise(
        self, session: Session, name: str, stamp: Stamp, before: Mark | None, after: Mark | None
    ) -> None:
        if after is not None and after != before:
            await session.run(_RAISE, (name, after.token, after.grant, after.seq, stamp.bare_text))

    async def _settle(
        self,
        session: Session,
        name: str,
        stamp: Stamp,
        before: Mark | None,
        judged: Judgement,
        mode: Mode,
    ) -> None:
        """Carry a judgement out at once: raise the mark, refuse, or write down that neither was done."""
        if judged.verdict is Verdict.ADMIT:
            await self._raise(session, name, stamp, before, judged.mark)
            return
        ruling = rule_on(judged.verdict, mode, name)
        await self._let_through(session, name, stamp, before, judged.verdict, ruling, mode)

    async def _put(
        self, session: Session, name: str, stamp: Stamp, verdict: Verdict, mode: Mode, rule: Rule
    ) -> None:
        """Put the stamp into the transaction, together with what a write under it will be."""
        refuse = verdict is Verdict.APPLIED or rule_on(verdict, mode, name) is Ruling.REFUSE
        # Open: nothing is left to decide at the write, be it admitted or noted and let through.
        opened = verdict not in _AT_THE_WRITE or (verdict is Verdict.ADMIT and rule == "retry")
        row = (name, stamp.bare_text, stamp.seq or 0, verdict.value, int(refuse), mode.name, int(opened))
        await session.run(_STAMP, row)

    async def _let_through(
        self,
        session: Session,
        name: str,
        stamp: Stamp | None,
        mark: Mark | None,
        verdict: Verdict,
        ruling: Ruling,
        mode: Mode,
    ) -> None:
        """Refuse, or write down that it was not done."""
        note = Note(name, stamp, mark, verdict, ruling, str(mode))
        if verdict is Verdict.APPLIED:
            raise Refusing(error_for(verdict, name=name, stamp=stamp, mark=mark), None)
        if ruling is Ruling.REFUSE:
            raise Refusing(error_for(verdict, name=name, stamp=stamp, mark=mark), note)
        await self.note(session, note)

    async def note(self, session: Session, note: Note) -> None:
        """Count a decision, and record it unless the mode only counts."""
        await session.run(_TALLY, (self.guard, note.verdict.value, note.mode))
        if note.ruling is Ruling.COUNT:
            return
        mark = note.mark
        await session.run(
            _RECORD,
            (
                time.time(),
                self.guard,
                note.name,
                str(note.stamp) if note.stamp else None,
                mark.token if mark else None,
                mark.grant if mark else None,
                mark.seq if mark else None,
                note.verdict.value,
                note.ruling.value,
                note.mode,
            ),
        )

    async def refusal(
        self, session: Session, error: BaseException, stamp: Stamp | None, names: Sequence[str]
    ) -> FencedError | None:
        """The typed error for a refusal, written down now that its own transaction is rolled back."""
        if isinstance(error, Refusing):
            await self._note_late(session, error)
            return error.error
        verdict = verdict_in(error)
        if verdict is None:
            return None
        named = len(names) == 1 and verdict not in (Verdict.UNCOVERED, Verdict.MISSING)
        name = names[0] if named else None  # a trigger's message cannot say which row it was
        mark = await self.mark(session, name) if name else None
        _, _, modes = await self._look(session)
        mode = mode_of(name or "", modes)
        note = Note(name, stamp, mark, verdict, Ruling.REFUSE, str(mode))
        refused = error_for(verdict, name=name, stamp=stamp, mark=mark)
        await self._note_late(session, Refusing(refused, None if verdict is Verdict.APPLIED else note))
        return refused

    async def _note_late(self, session: Session, refusing: Refusing) -> None:
        if refusing.note is None:
            return
        try:
            await self.note(session, refusing.note)
            if session.in_transaction:  # a driver that begins by itself
                await session.run("COMMIT")
        except sqlite3.Error as error:
            refusing.error.add_note(f"(this refusal could not be recorded: {error})")


class Guarded:
    """One guarded transaction on a connection: begun, announced, and ended by us."""

    __slots__ = ("_fence", "_session", "_stamp", "_stamping", "names")

    def __init__(
        self, fence: Fence, session: Session, stamp: Stamp | None, names: Sequence[str], stamping: bool = True
    ) -> None:
        self._fence = fence
        self._session = session
        self._stamp = stamp
        self.names = names
        self._stamping = stamping

    async def enter(self) -> None:
        """Begin and announce. Who comes again with the mark's own stamp is through in two statements."""
        stamp, session = self._stamp, self._session
        if stamp is None or not self._stamping or not covers(stamp, self.names):
            await self._fence.begin(session)
            left = self.names if stamp is not None or not self._fence.mandatory else ()
        else:
            try:
                left = await session.reenter(self._fence.guard, stamp, self.names)
            except sqlite3.Error as error:
                left = await self.recover(error)
        if left:
            await self.announce(left)

    async def recover(self, error: sqlite3.Error) -> Sequence[str]:
        """The fast path failed: find out whether the long way is open."""
        if not str(error).startswith("no such"):
            raise began_badly(self._session, error) from error
        if READY in str(error):
            try:
                await self._fence.make_ready(self._session)
            except BaseException:
                if self._session.in_transaction:
                    await self._session.run("ROLLBACK")
                raise
        return self.names  # or no guard is there, which announcing finds out

    async def announce(self, names: Sequence[str]) -> None:
        try:
            if self._stamp is None:
                await self._fence.miss(self._session, names)
            else:
                await self._fence.announce(self._session, self._stamp, names, stamping=self._stamping)
        except BaseException as error:
            await self.leave(error)
            if isinstance(error, sqlite3.Error):
                raise translate(error) from error
            raise

    async def leave(self, error: BaseException | None) -> None:
        """Commit, or roll back; a refusal leaves as its typed error, anything else as it is."""
        session = self._session
        if error is None:
            await self._commit()
            return
        if session.in_transaction:
            await session.run("ROLLBACK")
        refused = await self._fence.refusal(session, error, self._stamp, self.names)
        if refused is not None:
            raise refused from (None if isinstance(error, Refusing) else error)

    async def _commit(self) -> None:
        if not self._session.in_transaction:
            await self._session.run("DELETE FROM fenced_stamp")
            raise Misuse("the transaction was ended inside the guarded block; leave that to the wrapper")
        try:
            await self._session.commit(self.names)
        except sqlite3.Error as error:
            await self.commit_failed(error)

    async def commit_failed(self, error: sqlite3.Error) -> NoReturn:
        if self._session.in_transaction:
            await self._session.run("ROLLBACK")
        if isinstance(error, sqlite3.IntegrityError):
            raise error  # a deferred constraint of the program's own tables
        raise translate(error) from error


def covers(source: Source, names: Sequence[str]) -> bool:
    """Whether the fast path may be tried: it looks at marks, not at what a stamp covers."""
    return names is source.names or set(names) <= set(source.names)


def began_badly(session: Session, error: sqlite3.Error) -> FencedError:
    if session.in_transaction:
        return Misuse("this connection is in a transaction already; commit it, or use announce_on")
    return translate(error)


def verdict_in(error: BaseException) -> Verdict | None:
    """The verdict that one of our triggers raised, or None when the error is none of ours."""
    if not isinstance(error, sqlite3.IntegrityError):
        return None
    head, _, rest = str(error).partition(":")
    word = rest.partition(":")[0]
    return Verdict(word) if head == "fenced" and word in set(Verdict) else None


def translate(error: sqlite3.Error) -> FencedError:
    """What an error of one of our own statements means."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Contended(f"the guarded database is locked by another writer: {error}")
    if code == sqlite3.SQLITE_FULL:
        return Unavailable("the disk under the guarded database is full; free some space")
    if code == sqlite3.SQLITE_IOERR:
        return Indeterminate(f"the disk under the guarded database failed: {error}")
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return Misconfigured(f"the guarded database cannot be written: {error}")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return Misconfigured(f"the guarded database is damaged: {error}")
    return Unavailable(f"the guarded database answered: {error}")
