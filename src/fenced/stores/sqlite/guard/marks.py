"""Announcing and deciding on an SQLite connection, in both colours.

`BEGIN IMMEDIATE` takes the database's one write lock. So a decision that the pure function makes here stays true until
COMMIT. The triggers make sure that no row is written without that decision.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from fenced.errors import FencedError, Misconfigured
from fenced.guards.answers import error_for, expect_rule, tell_raised
from fenced.stores.sqlite.guard.refusals import translate, verdict_in
from fenced.stores.sqlite.guard.sessions import SqliteSession
from fenced.values.decision import Judgement, Mark, Mode, Rule, Ruling, Verdict, judge, mode_of, rule_on
from fenced.values.model import Stamp
from fenced.values.rollout import Decision

_AT_THE_WRITE = (Verdict.ADMIT, Verdict.APPLIED, Verdict.DUPLICATE, Verdict.OUT_OF_ORDER)
FOREIGN_KEYS = """
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


class RefusalPending(Exception):
    """Leaves the transaction that a refusal ends; the decision is recorded after its rollback."""

    def __init__(self, error: FencedError, decision: Decision | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.decision = decision


@dataclass(slots=True)
class SqliteMarks:
    """A guard on one SQLite table, for one transaction at a time."""

    guard: str
    mandatory: bool = True
    rule: Rule | None = None
    """The one that the program names: Misconfigured if another one is installed. None: whichever is."""

    @property
    def may_be_retry(self) -> bool:
        """Whether the short way, which is for installed guards with rule `retry`, may be tried."""
        return self.rule in (None, "retry")

    async def begin(self, session: SqliteSession) -> None:
        try:
            await session.run("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise translate(error) from error

    async def make_ready(self, session: SqliteSession) -> None:
        """Once per connection: turn on foreign keys, which make COMMIT fail if a stamp was left behind.

        They stay on, because every change of the setting makes SQLite compile all statements of the connection again.
        """
        if await session.run("PRAGMA foreign_keys") == [(0,)]:
            if await session.run(FOREIGN_KEYS):
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
                # The verdict of the write is known, but the write has not happened yet: only announce.
                announced = judge(before, stamp, name=name, rule=rule, realm=realm, announce=True)
                await self._raise(session, name, stamp, before, announced.mark)
            else:
                await self._carry_out(session, name, stamp, before, judged, mode, realm)
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
        expect_rule(self.guard, own[0], self.rule)
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
            tell_raised(self.guard, name, before, after)

    async def _carry_out(
        self,
        session: SqliteSession,
        name: str,
        stamp: Stamp,
        before: Mark | None,
        judged: Judgement,
        mode: Mode,
        realm: str | None,
    ) -> None:
        """Act on a judgement: raise the mark, refuse, or record that the operation was let through."""
        if judged.verdict is Verdict.ADMIT:
            await self._raise(session, name, stamp, before, judged.mark)
            return
        ruling = rule_on(judged.verdict, mode, name)
        await self._let_through(session, name, stamp, before, judged.verdict, ruling, mode, realm)

    async def _put(
        self, session: SqliteSession, name: str, stamp: Stamp, verdict: Verdict, mode: Mode, rule: Rule
    ) -> None:
        """Insert the stamp's row, with the verdict that a write under it will get."""
        refuse = verdict is Verdict.APPLIED or rule_on(verdict, mode, name) is Ruling.REFUSE
        # Open: the write needs no further decision. It is admitted, or it was recorded and is let through.
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
        realm: str | None = None,
    ) -> None:
        """Refuse, or record that the operation was let through."""
        decision = Decision.about(
            datetime.now(UTC), self.guard, name, stamp, mark, verdict, ruling, str(mode)
        )
        if verdict is Verdict.APPLIED or ruling is Ruling.REFUSE:
            refused = error_for(verdict, name=name, stamp=stamp, mark=mark, realm=realm, guard=self.guard)
            raise RefusalPending(refused, None if verdict is Verdict.APPLIED else decision)
        await self._record(session, decision)

    async def _record(self, session: SqliteSession, made: Decision) -> None:
        """Count a decision, and record it unless the mode only counts."""
        await session.run(_TALLY, (made.guard, made.verdict.value, made.mode))
        if made.ruling is not Ruling.COUNT:
            mark = (made.mark, made.mark_grant, made.mark_seq)
            words = (made.verdict.value, made.ruling.value, made.mode)
            row = (made.at.timestamp(), made.guard, made.name, made.stamp, *mark, *words)
            await session.run(_RECORD, row)

    async def refusal(
        self, session: SqliteSession, error: BaseException, stamp: Stamp | None, names: Sequence[str]
    ) -> FencedError | None:
        """The typed error for a refusal; it is recorded here, after its transaction was rolled back."""
        if isinstance(error, RefusalPending):
            await self.record_late(session, error.error, error.decision)
            return error.error
        raised = verdict_in(error)
        if raised is None:
            return None
        verdict, guard, name = raised
        # Only the message for an uncovered row names it. If one name was announced, other refused rows have that name.
        if len(names) == 1 and verdict is not Verdict.UNCOVERED:
            name = names[0]
        mark, mode, realm = None, "unknown", None
        try:
            mark = await self.mark(session, name) if name else None
            _, realm, _, modes = await SqliteMarks(guard, self.mandatory)._look(session)
            mode = str(mode_of(name or "", modes))
        except (sqlite3.Error, FencedError):
            mark = None  # the refusal itself matters more than its details
        refused = error_for(verdict, name=name, stamp=stamp, mark=mark, table=guard, realm=realm)
        if verdict is not Verdict.APPLIED:
            decision = Decision.about(
                datetime.now(UTC), guard, name, stamp, mark, verdict, Ruling.REFUSE, mode
            )
            await self.record_late(session, refused, decision)
        return refused

    async def record_late(
        self, session: SqliteSession, refused: FencedError, decision: Decision | None
    ) -> None:
        """Record a refusal in a separate transaction."""
        if decision is None:
            return
        try:
            await session.run("BEGIN IMMEDIATE")
            await self._record(session, decision)
            await session.run("COMMIT")
        except sqlite3.Error as error:
            refused.add_note(f"(this refusal could not be recorded: {error})")
            await session.rollback()
