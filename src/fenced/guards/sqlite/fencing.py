"""Announcing and deciding on an SQLite connection, in both colours.

`BEGIN IMMEDIATE` holds the database's one write lock, so what the pure function decides here stays true
until COMMIT. The triggers make sure that no row is written without that decision.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass

from fenced.decision import Judgement, Mark, Mode, Rule, Ruling, Verdict, judge, mode_of, rule_on
from fenced.errors import FencedError, Misconfigured
from fenced.guards.shared.answers import error_for
from fenced.guards.sqlite.refusals import translate, verdict_in
from fenced.guards.sqlite.sessions import SqliteSession
from fenced.model import Stamp

_AT_THE_WRITE = (Verdict.ADMIT, Verdict.APPLIED, Verdict.DUPLICATE, Verdict.OUT_OF_ORDER)
_FOREIGN_KEYS = """
SELECT 1 FROM sqlite_schema s, pragma_foreign_key_list(s.name)
WHERE s.type = 'table' AND s.name <> 'fenced_stamp' LIMIT 1"""
_LOOK = """
SELECT rule, realm, triggers = (
  SELECT count(*) FROM main.sqlite_schema WHERE type = 'trigger' AND name GLOB 'fenced_*'
  AND tbl_name IN (guard, 'fenced_' || guard || '_gate')
), NULL, NULL FROM fenced_guard WHERE guard = ?
UNION ALL SELECT NULL, NULL, NULL, pattern, mode FROM fenced_mode WHERE guard = ?"""
_MARK = "SELECT token, grant_id, seq FROM fenced_mark WHERE name = ?"
_RAISE = """
INSERT INTO fenced_mark (name, token, grant_id, seq, stamp) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE
SET token = excluded.token, grant_id = excluded.grant_id, seq = excluded.seq, stamp = excluded.stamp"""
_STAMP = """
INSERT OR REPLACE INTO fenced_stamp (name, guard, stamp, seq, verdict, refuse, open)
VALUES (?, ?, ?, ?, ?, ?, ?)"""
_TALLY = """
INSERT INTO fenced_tally (guard, verdict, mode, count) VALUES (?, ?, ?, 1)
ON CONFLICT (guard, verdict, mode) DO UPDATE SET count = count + 1"""
_RECORD = """
INSERT INTO fenced_record (time, guard, name, stamp, token, grant_id, seq, verdict, ruling, mode)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""


@dataclass(frozen=True, slots=True)
class Note:
    """A decision that must be recorded, with the whole mark."""

    name: str | None
    stamp: Stamp | None
    mark: Mark | None
    verdict: Verdict
    ruling: Ruling
    mode: str


class RefusalPending(Exception):
    """Leaves the transaction that a refusal ends; the note is recorded after its rollback."""

    def __init__(self, error: FencedError, note: Note | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.note = note


@dataclass(slots=True)
class SqliteFence:
    """A guard on one SQLite table, for one transaction at a time."""

    guard: str
    mandatory: bool = True

    async def begin(self, session: SqliteSession) -> None:
        try:
            await session.run("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise translate(error) from error

    async def make_ready(self, session: SqliteSession) -> None:
        """Once per connection: turn foreign keys on, by which COMMIT fails if a stamp was left behind.

        They stay on: every switch makes SQLite compile all statements of the connection again.
        """
        if await session.run("PRAGMA foreign_keys") == [(0,)]:
            if await session.run(_FOREIGN_KEYS):
                raise Misconfigured(
                    "this connection does not enforce foreign keys though its tables declare some; a stamp "
                    "needs that enforcement: run PRAGMA foreign_keys = ON when you connect"
                )
            await session.rollback()
            await session.run("PRAGMA foreign_keys = ON")
            await self.begin(session)
        await session.make_ready()

    async def announce(
        self, session: SqliteSession, stamp: Stamp, names: Sequence[str], *, stamping: bool
    ) -> None:
        """Judge the stamp for each name and raise the marks; with `stamping`, let writes follow."""
        rule, realm, whole, modes = await self._look(session)
        for name in sorted(names, key=str.encode):
            before = await self.mark(session, name)
            judged = judge(before, stamp, name=name, rule=rule, realm=realm, announce=not stamping)
            mode = mode_of(name, modes)
            if not whole and mode.name not in ("observe", "shadow"):
                raise Misconfigured(
                    f"the triggers of {self.guard!r} are not as they were installed; was the table rebuilt? "
                    "Run its install() again"
                )
            if judged.verdict is Verdict.ADMIT and realm is None:
                await session.run("UPDATE fenced_guard SET realm = ? WHERE realm IS NULL", (stamp.realm,))
                realm = stamp.realm
            if stamping and self.mandatory and judged.verdict in _AT_THE_WRITE:
                # What the write will be is known, but it has not happened yet: announce only.
                announced = judge(before, stamp, name=name, rule=rule, realm=realm, announce=True)
                await self._raise(session, name, stamp, before, announced.mark)
            else:
                await self._settle(session, name, stamp, before, judged, mode)
            if stamping:
                await self._put(session, name, stamp, judged.verdict, mode, rule)

    async def record_missing_stamp(self, session: SqliteSession, names: Sequence[str]) -> None:
        """Decide an operation without a stamp, for a guard without triggers."""
        _, _, _, modes = await self._look(session)
        for name in names:
            mode = mode_of(name, modes)
            ruling = rule_on(Verdict.MISSING, mode, name)
            await self._let_through(
                session, name, None, await self.mark(session, name), Verdict.MISSING, ruling, mode
            )

    async def _look(self, session: SqliteSession) -> tuple[Rule, str | None, bool, list[tuple[str, Mode]]]:
        """The installed guard: its rule, its realm, whether all its triggers exist, its modes."""
        try:
            rows = await session.run(_LOOK, (self.guard, self.guard))
        except sqlite3.OperationalError as error:
            raise translate(error) from error
        own = next((row for row in rows if row[0] is not None), None)
        if own is None:
            raise Misconfigured(f"no guard is installed for {self.guard!r}; run its install()")
        modes = [(pattern, Mode.parse(mode)) for _, _, _, pattern, mode in rows if pattern is not None]
        return own[0], own[1], bool(own[2]), modes

    async def installed(self, session: SqliteSession) -> None:
        """Raise Misconfigured if this guard is not installed."""
        await self._look(session)

    async def mark(self, session: SqliteSession, name: str) -> Mark | None:
        rows = await session.run(_MARK, (name,))
        return Mark(*rows[0]) if rows else None

    async def _raise(
        self, session: SqliteSession, name: str, stamp: Stamp, before: Mark | None, after: Mark | None
    ) -> None:
        if after is not None and after != before:
            await session.run(_RAISE, (name, after.token, after.grant, after.seq, stamp.bare_text))

    async def _settle(
        self,
        session: SqliteSession,
        name: str,
        stamp: Stamp,
        before: Mark | None,
        judged: Judgement,
        mode: Mode,
    ) -> None:
        """Act on a judgement: raise the mark, refuse, or record that the operation was let through."""
        if judged.verdict is Verdict.ADMIT:
            await self._raise(session, name, stamp, before, judged.mark)
            return
        ruling = rule_on(judged.verdict, mode, name)
        await self._let_through(session, name, stamp, before, judged.verdict, ruling, mode)

    async def _put(
        self, session: SqliteSession, name: str, stamp: Stamp, verdict: Verdict, mode: Mode, rule: Rule
    ) -> None:
        """Insert the stamp's row, with the verdict that a write under it will get."""
        refuse = verdict is Verdict.APPLIED or rule_on(verdict, mode, name) is Ruling.REFUSE
        # Open: nothing is left to decide at the write, be it admitted or noted and let through.
        opened = verdict not in _AT_THE_WRITE or (verdict is Verdict.ADMIT and rule == "retry")
        row = (name, self.guard, stamp.bare_text, stamp.seq or 0, verdict.value, int(refuse), int(opened))
        await session.run(_STAMP, row)

    async def _let_through(
        self,
        session: SqliteSession,
        name: str,
        stamp: Stamp | None,
        mark: Mark | None,
        verdict: Verdict,
        ruling: Ruling,
        mode: Mode,
    ) -> None:
        """Refuse, or record that the operation was let through."""
        note = Note(name, stamp, mark, verdict, ruling, str(mode))
        if verdict is Verdict.APPLIED:
            raise RefusalPending(error_for(verdict, name=name, stamp=stamp, mark=mark), None)
        if ruling is Ruling.REFUSE:
            raise RefusalPending(error_for(verdict, name=name, stamp=stamp, mark=mark), note)
        await self.note(session, note)

    async def note(self, session: SqliteSession, note: Note) -> None:
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
        self, session: SqliteSession, error: BaseException, stamp: Stamp | None, names: Sequence[str]
    ) -> FencedError | None:
        """The typed error for a refusal; it is recorded here, after its transaction was rolled back."""
        if isinstance(error, RefusalPending):
            await self._note_late(session, error.error, error.note)
            return error.error
        raised = verdict_in(error)
        if raised is None:
            return None
        verdict, guard = raised
        # A trigger's message cannot say which row it was; with one name, all but an uncovered one are that.
        name = names[0] if len(names) == 1 and verdict is not Verdict.UNCOVERED else None
        where = SqliteFence(guard, self.mandatory)
        mark, mode = None, "unknown"
        try:
            mark = await self.mark(session, name) if name else None
            _, _, _, modes = await where._look(session)
            mode = str(mode_of(name or "", modes))
        except (sqlite3.Error, FencedError):
            mark = None  # the refusal itself matters more than its details
        refused = error_for(verdict, name=name, stamp=stamp, mark=mark, table=guard, announced=names)
        if verdict is not Verdict.APPLIED:
            note = Note(name, stamp, mark, verdict, Ruling.REFUSE, mode)
            await where._note_late(session, refused, note)
        return refused

    async def _note_late(self, session: SqliteSession, refused: FencedError, note: Note | None) -> None:
        """Record a refusal in a separate transaction."""
        if note is None:
            return
        try:
            await session.run("BEGIN IMMEDIATE")
            await self.note(session, note)
            await session.run("COMMIT")
        except sqlite3.Error as error:
            refused.add_note(f"(this refusal could not be recorded: {error})")
            await session.rollback()
