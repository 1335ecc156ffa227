"""Transactions on one connection: the lease algorithm between two requests of one transaction.

The first request begins the transaction, locks the names, reads the clock after that, and fetches what the algorithm
will ask for. The second one writes and commits. No state of a session outlives a transaction, so a pooler may give each
of them another session. One thing is set in between: `wait_timeout`, so that the server ends a transaction whose client
was stopped. It is set last, and put back first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from fenced.errors import FencedError, Indeterminate, Misconfigured, Unavailable
from fenced.leases.rowauthority import Kind, Work
from fenced.leases.rows import LeaseAlgorithm
from fenced.net.pool import ConnectionBroken
from fenced.stores.mariadb.authority.journal import Missing, StatementJournal
from fenced.stores.mariadb.authority.rows import SQL, MariadbRows, NotLocked, lock_query
from fenced.stores.mariadb.authority.settings import QUERIES, MariadbSettings
from fenced.stores.mariadb.wire.connection import MariadbConnection, Result, Row
from fenced.stores.mariadb.wire.failures import CONFLICTS, DUPLICATE, ServerRefusal, refused
from fenced.values.contracts import Runtime

T = TypeVar("T")
STOPPED_SECONDS = 3
"""How long a client may take between two requests of a transaction. Then the server undoes it, and frees its names."""
NOT_MADE = 1146

WRITES = ("SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE", "START TRANSACTION")
"""At this level each statement sees what was committed before it began, and no lock covers the gap between two rows."""
READS = ("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY", "START TRANSACTION")
WATCHED = f"SET wait_timeout = {STOPPED_SECONDS}"
UNWATCHED = "SET wait_timeout = DEFAULT"


class _OtherServer(Exception):
    """The settings were read from another start of a server: it was restarted, or a proxy has turned to another one."""


@dataclass
class LeaseTransaction:
    """One operation, over all its tries."""

    namespace: int
    kind: Kind
    names: frozenset[str]
    """What is locked; more once the rows say so."""
    facts: Sequence[str]
    """What the algorithm asks for first."""
    doubts: tuple[str, ...]
    """Those that `open` has reported. A server with any other doubt mints no token."""
    floor: int = 0
    """The floor as it was found last."""
    near: str = ""
    """Near which id to sweep, if `tidy` is not to look everywhere."""
    committing: bool = False
    """From here on this try may have been carried out."""
    doubt: bool = False
    """An earlier try may have been carried out."""


class LeaseSession:
    """A connection of the pool."""

    def __init__(self, connection: MariadbConnection, runtime: Runtime, where: str) -> None:
        self._connection = connection
        self._runtime = runtime
        self.where = where
        self.settings = MariadbSettings(0, {})
        self.lineage = ""

    def close(self) -> None:
        self._connection.close()

    def interrupt(self) -> None:
        self._connection.interrupt()

    async def read_settings(self, until: float) -> MariadbSettings:
        """In one request, so that one server answers all of it."""
        *found, made = await self.run([*QUERIES, SQL["made"]], until)
        self.settings = MariadbSettings.of(found)
        self.settings.check(self.where)
        self.lineage = self.settings.lineage(made.rows[0][0] if made.rows else "")
        return self.settings

    async def run(self, statements: Sequence[str], until: float) -> list[Result]:
        """Statements of which each is complete in itself."""
        try:
            return await self._connection.run(statements, until)
        except ServerRefusal as refusal:
            if refusal.code == NOT_MADE:
                raise
            raise refused(refusal, self.where) from refusal

    async def look(self, query: str, until: float) -> Sequence[Row]:
        """One query in a transaction of its own, also where a setting of the session would keep one open after it."""
        try:
            results = await self.run([*READS, query, "COMMIT"], until)
        except (FencedError, ServerRefusal):
            await self._undo(until)
            raise
        return results[-2].rows

    async def shorten(
        self, script: Sequence[str], todo: LeaseTransaction, until: float
    ) -> list[Result] | None:
        """Carry a script out that is a whole transaction. None: it was refused, and nothing happened."""
        todo.committing = True
        try:
            results = await self._connection.run([*WRITES, *script, "COMMIT"], until)
        except ServerRefusal as refusal:
            if refusal.at == len(WRITES) + len(script) and refusal.code not in CONFLICTS:
                raise Indeterminate(f"{self.where}: the commit was answered with {refusal}") from refusal
            await self._undo(until)
            todo.committing = False
            return None
        return results[len(WRITES) : -1]

    async def transact(self, work: Work[T], todo: LeaseTransaction, until: float) -> T:
        """Do `work`. After a ConnectionBroken it may have been done if `todo.committing` says so, else it was not."""
        if todo.kind is Kind.MINTS and self.weakened(todo):
            await self.read_settings(until)  # they may have been corrected since
        while True:
            try:
                return await self._try(work, todo, until)
            except NotLocked as missing:
                todo.names |= missing.names
            except _OtherServer:
                await self.read_settings(until)
            except ServerRefusal as refusal:
                # Rolled back as a whole: a deadlock's victim, or a copy of the same request was faster.
                if refusal.code not in CONFLICTS | {DUPLICATE} or self._runtime.now() >= until:
                    raise refused(refusal, self.where) from refusal
                pause = self._runtime.now() + 0.02 * self._runtime.random()
                await self._runtime.wait(self._runtime.wakeup(), min(pause, until))

    async def _try(self, work: Work[T], todo: LeaseTransaction, until: float) -> T:
        try:
            answer, journal = await self._decide(work, todo, until)
            if journal.changes:
                await self._commit(journal.unsent, todo, until)
                return answer
        except (FencedError, ServerRefusal, NotLocked, _OtherServer):
            await self._undo(until)
            raise
        await self._undo(until)  # there is nothing to keep, and no commit to wait for
        return answer

    async def _decide(
        self, work: Work[T], todo: LeaseTransaction, until: float
    ) -> tuple[T, StatementJournal]:
        """Lock, read the clock, and run the algorithm until it has all that it asks for."""
        reads, mints = todo.kind is Kind.READS, todo.kind is Kind.MINTS
        names = sorted(todo.names, key=str.encode)
        opening = [*(READS if reads else WRITES)]
        if names and not reads:
            # All transactions lock names in the order of their bytes, so that none waits for another in a circle.
            opening.append(lock_query(todo.namespace, names))
        floor = [SQL["floor"].format(namespace=todo.namespace)] if mints else []
        asked = [*floor, SQL["clock"], *todo.facts]
        results = await self._connection.run([*opening, *asked, WATCHED], until)
        found = results[len(opening) : -1]
        stopped = None
        if mints:
            (todo.floor, lineage, start), *_ = found.pop(0).rows
            stopped = self._stopped(lineage.decode(), start, todo)
        ((now,),) = found.pop(0).rows
        journal = StatementJournal(dict(zip(todo.facts, found, strict=True)))
        while True:
            journal.rewind()
            locked = None if reads else todo.names
            rows = MariadbRows(journal, todo.namespace, locked, todo.floor, self.lineage, stopped, todo.near)
            try:
                answer, _ = work(LeaseAlgorithm(rows, now * 1000))
                rows.settle(answer)
                todo.floor = rows.floor
            except Missing:
                journal.record(await self._connection.run(journal.unsent, until))
            else:
                return answer, journal

    def _stopped(self, lineage: str, start: int, todo: LeaseTransaction) -> FencedError | None:
        """Why this server may not mint a token."""
        if start != self.settings.start:
            raise _OtherServer
        if new := self.weakened(todo):
            return Misconfigured(
                f"{self.where}: tokens could not repeat when this client was opened, and now they could: "
                f"{'; '.join(new)}. Correct the settings, or open a client with guarantee='best-effort' "
                "(fenced run: --guarantee best-effort)"
            )
        if lineage != self.lineage:
            return Misconfigured(f"{self.where}: {other_history(lineage, self.lineage)}")
        return None

    def weakened(self, todo: LeaseTransaction) -> list[str]:
        """The doubts about this server that `open` did not report."""
        return [doubt for doubt in self.settings.doubts() if doubt not in todo.doubts]

    async def _commit(self, writes: Sequence[str], todo: LeaseTransaction, until: float) -> None:
        script = [UNWATCHED, *writes, "COMMIT"]
        if self._runtime.now() >= until:
            raise Unavailable(f"{self.where}: the deadline passed before the transaction was committed")
        todo.committing = True
        try:
            await self._connection.run(script, until)
        except ServerRefusal as refusal:
            if refusal.at == len(script) - 1 and refusal.code not in CONFLICTS:
                raise Indeterminate(f"{self.where}: the commit was answered with {refusal}") from refusal
            todo.committing = False  # it was refused before it could be committed
            raise

    async def _undo(self, until: float) -> None:
        """Free what is locked. The connection cannot be used again if that is not certain."""
        try:
            await self._connection.run(["ROLLBACK", UNWATCHED], until)
        except (ServerRefusal, Unavailable) as error:
            raise ConnectionBroken(f"{self.where}: {error}") from error


def other_history(known: str, found: str) -> str:
    return (
        f"the history {known} became {found}. Another server took over, or this was restored from a backup, and tokens "
        "may be missing here that guards have seen: run `fenced authority raise --above N` first"
    )
