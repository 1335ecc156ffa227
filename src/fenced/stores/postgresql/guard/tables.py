"""A guard on a table of the program, over one of the program's PostgreSQL connections, for all drivers.

The database decides. This module begins, announces and commits, and turns the server's errors into typed ones.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import quote

from fenced.errors import Conflict, Contended, FencedError, LeaseLost, Misconfigured, Misuse, Refused
from fenced.guards.answers import check_pattern
from fenced.guards.engine import Registered
from fenced.guards.spec import Spec, as_script, literal
from fenced.stores.postgresql.guard import install
from fenced.stores.postgresql.guard.refusals import (
    ANNOUNCE_FIRST,
    DEADLOCK,
    FAILED,
    IDLED,
    LOCK_TIMEOUT,
    SERIALIZATION,
    SQLSTATES,
    ServerError,
    read,
)
from fenced.stores.postgresql.guard.sessions import Aborted, PostgresqlSession
from fenced.stores.postgresql.guard.triggers import guard_of
from fenced.values.decision import Mark, Mode
from fenced.values.model import Credential, check_name, check_realm

T = TypeVar("T")

REPEATS = 10
"""How often an announcement is tried, if a newer commit makes it fail (SQLSTATE 40001)."""
BIND_SECONDS = 10.0
"""How long a mode change waits for older transactions, which it does not bind."""
LOOK_SECONDS = 0.05
WAITS = 3
"""How often an announcement ends older transactions and tries again: others may have begun in between."""
LEFT_MIN = 1.0
"""The shortest idle time, in seconds, after which the server may end a transaction."""


def _announce(credential: Credential, guard: str, *, exclusive: bool, repeats: bool) -> str:
    """The call. Its texts need no quoting. It passes every argument, because the server looks up defaults each time."""
    stamps, names, proofs = _texts(credential)
    left = "NULL" if credential.left is None else int(max(credential.left, LEFT_MIN) * 1000)
    options = f"{names}, {exclusive}, {credential.still_held}, {proofs}, {repeats}"
    return f"SELECT fenced_guard.announce('{stamps}', {left}, '{guard}', {options})"


def _announce_alone(credential: Credential, guard: str) -> str:
    stamps, names, proofs = _texts(credential)
    return f"SELECT fenced_guard.announce_alone('{stamps}', '{guard}', {names}, {proofs})"


def _texts(credential: Credential) -> tuple[str, str, str]:
    """The stamps, and as literals the names and the proofs. Naming all names of a lease is the same as naming none."""
    chosen = [check_name(name) for name in credential.names]
    if len(credential.stamps) == 1 and {*chosen} == {*credential.stamps[0].names}:
        chosen = []
    names = ",".join(quote(name, safe="/") for name in chosen)
    proofs = literal(" ".join(credential.proofs)) if credential.proofs else "NULL"
    return " ".join(map(str, credential.stamps)), f"'{names}'" if names else "NULL", proofs


class PostgresqlTable:
    """The operations of a guard on a table, over one connection."""

    def __init__(self, spec: Spec, session: PostgresqlSession, mandatory: bool = True) -> None:
        self.spec = spec
        self.guard = guard_of(spec)
        self.mandatory = mandatory
        self._session = session
        self._credential: Credential | None = None
        # In the statement of the announcement: it costs no round trip, and nothing is read before it.
        self._expect = f", fenced_guard.expect_rule('{self.guard}', '{spec.rule}')" if spec.rule else ""

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        return await self._session.run(sql, parameters)

    async def install(self, mode: str | None, *, replace: bool = False) -> None:
        for last in (*[False] * REPEATS, True):
            try:
                await self._change(lambda: self._statements(mode, replace))
                break
            except Conflict:  # another session has upgraded the schema since `statements` looked: look again
                if last:
                    raise
        for caution in await self._look(lambda: install.cautions(self._session)):
            warnings.warn(caution, stacklevel=4)

    async def _statements(self, mode: str | None, replace: bool) -> list[str]:
        parsed = Mode.parse(mode) if mode is not None else None
        return await install.script(
            self.spec, parsed, self._session, mandatory=self.mandatory, replace=replace
        )

    async def statements(self, mode: str | None, *, replace: bool = False) -> list[str]:
        return await self._look(lambda: self._statements(mode, replace))

    async def removal(self) -> list[str]:
        return await self._look(lambda: install.uninstall(self.spec, self._session))

    async def script(self, mode: str | None, *, replace: bool = False, transaction: bool = True) -> str:
        lines = await self.statements(mode, replace=replace)
        cautions = await self._look(lambda: install.cautions(self._session))
        return as_script(lines, transaction=transaction, comments=cautions)

    async def uninstall(self) -> None:
        await self._change(lambda: install.uninstall(self.spec, self._session), readers_wait=True)

    async def registered(self) -> list[Registered]:
        return await self._look(lambda: install.registered(self._session))

    def is_own(self, schema: str | None, table: str) -> bool:
        return schema in ("fenced", "fenced_guard")

    async def _change(self, look: Callable[[], Awaitable[list[str]]], *, readers_wait: bool = False) -> None:
        """Run the statements that `look` returns, in the caller's transaction or else in a separate one."""
        try:
            async with self._part() as joins:
                statements = await look()
                if joins:
                    await self._session.run_all(statements)
                else:
                    await rollback_quietly(self._session)  # ends the transaction that looking began
                    await self._session.run_in_own_transaction(statements)
        except Contended as error:
            if read(error).state != LOCK_TIMEOUT:
                raise
            users = await self._look(
                lambda: install.users_of(self.guard, self._session, readers=readers_wait)
            )
            raise _in_use(self.guard, users) from error.__cause__

    async def _look(self, look: Callable[[], Awaitable[list[T]]]) -> list[T]:
        """Read from the database. If this began a transaction, roll it back."""
        async with self._part() as joins:
            found = await look()
            if not joins:
                await rollback_quietly(self._session)
        return found

    @asynccontextmanager
    async def _part(self) -> AsyncIterator[bool]:
        """Undo what the block did if it fails, and raise the typed error. Yields whether the caller has a transaction.

        The block is then a savepoint of it: a failure leaves the transaction usable, and frees the block's locks.
        """
        joins = is_open(self._session)
        try:
            if joins:
                await self._session.run("SAVEPOINT fenced_part")
            yield joins
            if joins:
                await self._session.run("RELEASE SAVEPOINT fenced_part")
        except BaseException as error:
            with suppress(Exception):  # if this fails, the connection is broken and the server undoes it
                if joins:
                    await self._session.run("ROLLBACK TO SAVEPOINT fenced_part")
                    await self._session.run("RELEASE SAVEPOINT fenced_part")
                else:
                    await self._session.rollback()
            if isinstance(error, Exception) and not isinstance(error, FencedError):
                raise wrapped(error) from error
            raise

    async def _run_in_own_transaction(self, statements: Sequence[str]) -> None:
        if is_open(self._session):
            raise Misuse("this connection is in a transaction; commit or roll back first")
        try:
            await self._session.run_in_own_transaction(statements)
        except BaseException as error:
            await rollback_quietly(self._session)
            if isinstance(error, Exception):
                raise wrapped(error) from error
            raise

    async def set_mode(self, mode: str, pattern: str, wait: float = BIND_SECONDS) -> tuple[str, ...]:
        parsed = Mode.parse(mode)
        arguments = f"{literal(self.guard)}, '{parsed}', {text_literal(check_pattern(pattern))}"
        await self._run_in_own_transaction([f"SELECT fenced_guard.set_mode({arguments})"])
        # A mode that refuses nothing need not bind older transactions.
        return (
            ()
            if parsed.name in ("observe", "shadow")
            else await older_than_change(self._session, self.guard, wait)
        )

    async def adopt(self, realm: str) -> None:
        limit = f"SET LOCAL lock_timeout = '{install.LOCK_TIMEOUT}'"  # writers queue behind a waiting `adopt`
        await self._run_in_own_transaction([limit, f"SELECT fenced_guard.adopt('{check_realm(realm)}')"])

    async def announce(self, credential: Credential) -> None:
        """Announce in a separate transaction and commit it: reads that begin afterwards are fenced."""
        self.expect_idle()
        await self._repeated(self._announce, credential)

    async def _announce(self, credential: Credential, _: bool) -> None:
        await self._session.run_in_own_transaction(
            [
                "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",  # fewer conflicts; it reads no program rows
                _announce_alone(credential, self.guard) + self._expect,
            ]
        )

    async def enter(self, credential: Credential | None) -> None:
        """Begin a transaction, with the announcement as its first statement."""
        self.expect_idle()
        if credential is None:
            await self._begin_unstamped()
            return
        await self._repeated(self._begin, credential)
        self._credential = credential

    def expect_idle(self) -> None:
        if self._session.state() == "closed":
            raise Misuse("this connection is closed, or busy with another statement")
        if self._session.state() != "idle":
            raise Misuse(
                "this connection is in a transaction already: commit it first, or use announce_within"
            )

    async def _begin(self, credential: Credential, repeats: bool) -> None:
        await self._session.begin(self._announcement(credential, repeats=repeats))

    def _announcement(self, credential: Credential, *, repeats: bool) -> str:
        return _announce(credential, self.guard, exclusive=self._exclusive, repeats=repeats) + self._expect

    async def _begin_unstamped(self) -> None:
        try:
            await self._session.begin("SELECT 1")
        except BaseException as error:
            await rollback_quietly(self._session)
            if isinstance(error, Exception):
                raise wrapped(error) from error
            raise

    @property
    def _exclusive(self) -> bool:
        return self.spec.rule in ("once", "sequenced") or not self.mandatory

    async def _repeated(
        self, work: Callable[[Credential, bool], Awaitable[None]], credential: Credential
    ) -> None:
        """Announce, with retries.

        40001 and 40P01: try again. ZF012: announce in a separate READ COMMITTED transaction first. 55P03: end the older
        transactions that hold the lock, if that is allowed. ZF012 is requested once (`asks`): in a mode that refuses
        nothing, a second announcement that still cannot raise the mark is let through.
        """
        asks, waits = True, WAITS
        for _ in range(REPEATS):
            began = time.monotonic()
            try:
                await work(credential, asks)
                return
            except BaseException as error:
                answer = await self.undo(error)
                if not isinstance(error, Exception):
                    raise
                if answer.state == ANNOUNCE_FIRST:
                    asks = False
                    await self.announce(credential)
                elif answer.state == LOCK_TIMEOUT and waits:
                    waits -= 1
                    await self._make_way(credential, time.monotonic() - began, error)
                elif answer.state not in (SERIALIZATION, DEADLOCK):
                    raise wrapped(error, answer) from error
                last = error
        raise Contended(f"newer commits interfered {REPEATS} times; try again: {last}") from last

    async def _make_way(self, credential: Credential, waited: float, error: Exception) -> None:
        """End the older transactions that this announcement waited for; Contended names those that may not be ended."""
        _, names, _ = _texts(credential)
        proofs = credential.proofs or ("-",) * len(credential.stamps)
        stay: list[str] = []
        ends: list[str] = []
        try:
            for stamp, proof in zip(credential.stamps, proofs, strict=True):
                call = f"'{stamp}', {names}, {int(waited * 1000)}"
                found = await self._session.run(
                    f"SELECT name, who, may_end FROM fenced_guard.in_the_way({call})"
                )
                stay += [f"{name}: {who}" for name, who, may_end in found if not may_end]
                if any(may_end for _, _, may_end in found):
                    ends.append(f"SELECT fenced_guard.make_way({call}, {literal(proof)})")
            await rollback_quietly(self._session)
            if ends:
                await self._session.run_in_own_transaction(ends)
        except Exception as failed:  # noqa: BLE001 - raised again as a typed error
            await rollback_quietly(self._session)
            raise wrapped(failed) from error
        if ends and not stay:
            return
        whom = f" for {'; '.join(stay)}" if stay else ""
        raise Contended(
            f"waited {waited:.1f} s{whom}; see 'How long a successor waits' in the guard's documentation"
        ) from error

    async def undo(self, error: BaseException) -> ServerError:
        """Roll back. If the error is a refusal, record it in the same message, and raise its typed form."""
        answer = read(error)
        if answer.state not in SQLSTATES or isinstance(error, FencedError):
            await rollback_quietly(self._session)
            return answer
        refused = answer.typed()
        await self._rollback_and_report(answer.detail, refused)
        raise refused from error

    async def _rollback_and_report(self, detail: dict[str, Any], refused: FencedError) -> None:
        if not isinstance(refused, Refused) or not detail.get("guard"):
            await rollback_quietly(self._session)
            return
        try:
            await self._session.rollback_and(
                f"SELECT fenced_guard.report({text_literal(json.dumps(detail))})"
            )
        except BaseException as failed:
            await rollback_quietly(self._session)
            if not isinstance(failed, Exception):
                raise
            refused.add_note(f"(this refusal could not be recorded: {failed})")

    async def announce_within(self, credential: Credential) -> None:
        """Announce in the transaction that the program has begun."""
        if self._session.state() != "open":
            raise Misuse("begin a transaction first, or use transaction()")
        try:
            await self._session.run(self._announcement(credential, repeats=False))
        except Exception as error:
            raise wrapped(error) from error

    async def clear(self, credential: Credential) -> None:
        """Remove these stamps' lines from the settings; those of an earlier announcement of the same stamps stay."""
        if self._session.state() != "open":
            return
        names = credential.names or tuple(name for stamp in credential.stamps for name in stamp.names)
        lines = [f"{before}{name}" for before in ("/", f"|{self.guard}/") for name in names]
        for stamp in credential.stamps:
            lines += [f" {stamp}", f"@{stamp.token}", f"#{stamp.grant}"]
        own = ", ".join(map(text_literal, lines))
        kept = ", ".join(
            f"set_config('{setting}', (SELECT string_agg(line, E'\\n' ORDER BY n) FROM ("
            "SELECT line, n, row_number() OVER (PARTITION BY line ORDER BY n DESC) AS latest FROM string_to_table("
            f"current_setting('{setting}', true), E'\\n') WITH ORDINALITY AS u (line, n)) AS found "
            f"WHERE latest > 1 OR regexp_replace(line, '^[0-9]+', '') NOT IN ({own})), true)"
            for setting in (
                "fenced.stamp",
                *{f"fenced.token{stamp.token % 16}" for stamp in credential.stamps},
            )
        )
        try:
            await self._session.run(f"SELECT {kept}")
        except Exception as error:
            if read(error).state != FAILED:  # a failed transaction can write nothing anyway
                raise

    async def leave(self, error: BaseException | None) -> None:
        """Commit, or roll back after an error.

        A refusal is raised as its typed error. If the server has ended the connection of a lease that is lost, that is
        LeaseLost. Other errors are left alone.
        """
        if error is None:
            await self._commit()
            return
        await self._explain(error)

    async def _commit(self) -> None:
        if self._session.state() == "idle":
            raise Misuse(
                "the transaction was ended inside the guarded block; let the block commit or roll back"
            )
        try:
            await self._session.commit()
        except Aborted:
            await rollback_quietly(self._session)
            raise Misuse(
                "nothing was committed: a statement failed inside the block, and the program caught its error"
            ) from None
        except BaseException as error:
            answer = await self._explain(error, committing=True)
            if isinstance(error, Exception) and answer.broken:
                raise answer.typed(committing=True) from error
            raise

    async def _explain(self, error: BaseException, *, committing: bool = False) -> ServerError:
        """Roll back after an error of the program's statement. If it is a refusal, a serialization failure or the end
        of a lost lease's connection, raise its typed form."""
        closed = self._session.state() == "closed"  # read first: the rollback may replace the connection
        answer = await self.undo(error)
        if isinstance(error, FencedError) or not isinstance(error, Exception):
            return answer  # an inner guarded block has raised and recorded it; or the task is cancelled
        meaning = answer.refusal()
        if meaning is not None:
            raise meaning from error
        if answer.state == SERIALIZATION:
            raise Conflict("a newer commit interfered; run the whole transaction again") from error
        # A COMMIT whose answer is lost may have happened. IDLED means that the server did not process one.
        if answer.broken and (answer.state == IDLED or (closed and not committing)):
            self._raise_if_lost(error)
        return answer

    def _raise_if_lost(self, error: Exception) -> None:
        """LeaseLost if the lease is over: a successor, or the limit of `max_hold`, has ended the connection."""
        lost = self._credential.lost() if self._credential and self._credential.lost else None
        if lost is not None:
            says = (
                f"{lost}; the server has ended its connection, and nothing of the transaction was committed"
            )
            raise LeaseLost(says, reason=lost.reason) from error

    async def peek(self, name: str, at_least: int) -> Mark | None:
        ours = self._session.state() == "idle"
        try:
            ((token, grant, seq),) = await self._session.run(
                f"SELECT token, grant_id, seq FROM fenced_guard.peek({text_literal(check_name(name))})"
            )
        except Exception as error:
            if ours:
                await rollback_quietly(self._session)
            raise wrapped(error) from error
        if ours:
            await rollback_quietly(self._session)
        if at_least and (token is None or token < at_least):
            raise Contended(f"{name}: token {at_least} has not been seen here yet; look again")
        return Mark(token, grant, seq) if token is not None else None


async def older_than_change(session: PostgresqlSession, guard: str, wait: float) -> tuple[str, ...]:
    """Wait for the transactions that the last mode change does not bind; return those left after `wait` seconds."""
    limit = time.monotonic() + wait
    unseen: set[str] | None = None
    try:
        while True:
            found = await session.run(
                f"SELECT who, transaction, known FROM fenced_guard.pending({literal(guard)})"
            )
            await rollback_quietly(session)
            # We may not see the state of a hidden transaction. It counts only if the first look found it too, because
            # later ones are bound by the change.
            hidden = {transaction for _, transaction, known in found if not known}
            unseen = hidden if unseen is None else unseen & hidden
            left = tuple(who for who, transaction, known in found if known or transaction in unseen)
            if not left or time.monotonic() >= limit:
                return left
            await session.run(f"SELECT pg_sleep({LOOK_SECONDS})")
            await rollback_quietly(session)
    except Exception as error:
        await rollback_quietly(session)
        raise wrapped(error) from error


def text_literal(text: str) -> str:
    """A literal that does not depend on the session's settings or its encoding."""
    escaped = text.replace("\\", "\\\\").replace("'", "''")
    return "E'" + "".join(c if c.isascii() else f"\\U{ord(c):08x}" for c in escaped) + "'"


def is_open(session: PostgresqlSession) -> bool:
    """Whether the caller has begun a transaction. Misuse if no statement can run on this connection now."""
    state = session.state()
    if state == "closed":
        raise Misuse("this connection is closed, or busy with another statement")
    if state == "failed":
        raise Misuse("a statement of this transaction has failed; roll back first")
    return state == "open"


def _in_use(guard: str, users: Sequence[str]) -> Contended:
    who = f"it is in use by {', '.join(users)}" if users else "it was in use, and is free now"
    then = "when they have ended" if users else "now"
    return Contended(
        f"{guard} was not changed: {who}. Run this again {then} (it waits {install.LOCK_TIMEOUT} for a lock)"
    )


async def rollback_quietly(session: PostgresqlSession) -> None:
    """Roll back. If that fails, the connection is broken and the server rolls the transaction back."""
    with suppress(Exception):
        await session.rollback()


def wrapped(error: Exception, answer: ServerError | None = None) -> FencedError:
    """The typed error for an error of one of our own statements. `answer`: that error, if it was already read."""
    if isinstance(error, FencedError):
        return error
    if isinstance(error, (TypeError, AttributeError, NameError)):
        raise error  # a bug in this program, not an answer of the database
    if isinstance(error, Aborted):
        return Misconfigured("the server rolled back instead of committing")
    return (answer or read(error)).typed()
