"""A guard on a table of the program, over one of the program's connections, for all drivers.

The database decides. This module begins, announces and commits, and turns the server's errors into typed ones.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from fenced.errors import (
    Conflict,
    Contended,
    FencedError,
    InvalidStamp,
    LeaseLost,
    Misconfigured,
    Misuse,
    Refused,
    shown,
)
from fenced.guards.engine import Registered
from fenced.guards.spec import Spec
from fenced.stores.mariadb.guard import install
from fenced.stores.mariadb.guard.changing import BIND_SECONDS, adopt, change_modes, run_script
from fenced.stores.mariadb.guard.refusals import (
    ENDED,
    NO_ROUTINE,
    OPEN,
    OTHER_RULE,
    SWALLOWED,
    Detail,
    MariadbError,
    interferes,
    read,
    wrapped,
)
from fenced.stores.mariadb.guard.sessions import LEAVE, UNDO, MariadbSession
from fenced.stores.mariadb.wire.connection import literal
from fenced.values.decision import Mark, Mode
from fenced.values.model import SEQ_MAX, TOKEN_MAX, Credential, Stamp, check_name

REPEATS = 10
"""How often an announcement is tried, if a newer commit or a deadlock makes it fail."""
LEFT_MIN = 1
"""The shortest idle time, in seconds, after which the server may end a connection."""
_REMEMBERED = 4096
_BEGIN = "START TRANSACTION"
_IN_TRANSACTION = "this connection is in a transaction already: commit it first, or use announce_within"

_seen: OrderedDict[tuple[str, str, str], None] = OrderedDict()
"""Stamps, without their seq, that a server has admitted for a name of a table. Only a hint: the server looks again."""


class MariadbTable:
    """The operations of a guard on a table, over one connection."""

    def __init__(self, spec: Spec, session: MariadbSession, mandatory: bool = True) -> None:
        self.spec = spec
        self.mandatory = mandatory
        self._session = session
        self._credential: Credential | None = None
        self._announced = False
        named, _, self.table = spec.table.rpartition(".")
        self._scope = literal(named) if named else "DATABASE()"
        self._rule = f"'{spec.rule}'" if spec.rule else "NULL"

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        return await self._session.run(sql, parameters)

    # Installing.

    async def install(self, mode: str | None, *, replace: bool = False) -> None:
        await run_script(self.spec, self._session, lambda: self.statements(mode, replace=replace))

    async def statements(self, mode: str | None, *, replace: bool = False) -> list[str]:
        parsed = Mode.parse(mode) if mode is not None else None
        try:
            return await install.script(
                self.spec, parsed, self._session, mandatory=self.mandatory, replace=replace
            )
        except Exception as error:
            raise wrapped(error) from error

    async def script(self, mode: str | None, *, replace: bool = False, transaction: bool = True) -> str:
        """For the shells `mariadb` and `mysql`. DDL commits, so there is no transaction, whatever is asked for."""
        lines = await self.statements(mode, replace=replace)
        return "DELIMITER $$\n" + "".join(f"{line}$$\n\n" for line in lines) + "DELIMITER ;\n"

    async def uninstall(self) -> None:
        await run_script(self.spec, self._session, self.removal)

    async def removal(self) -> list[str]:
        try:
            return await install.uninstall(self.spec, self._session)
        except Exception as error:
            raise wrapped(error) from error

    async def registered(self) -> list[Registered]:
        try:
            return await install.registered(self._session)
        except Exception as error:
            raise wrapped(error) from error

    def is_own(self, schema: str | None, table: str) -> bool:
        return schema == "fenced_guard" or table.startswith("fenced_")

    # Operating.

    async def set_mode(self, mode: str, pattern: str, wait: float = BIND_SECONDS) -> tuple[str, ...]:
        """Returns nothing: the change waits for open transactions that have met the guard. Contended: not changed."""
        parsed = Mode.parse(mode)
        await change_modes(
            self.spec,
            self._session,
            lambda scope: [install.mode_row(scope, self.table, parsed, pattern)],
            f"{pattern}: {parsed}",
            wait,
        )
        return ()

    async def adopt(self, realm: str) -> None:
        await adopt(self.spec, self._session, realm)

    # Writing.

    async def announce(self, credential: Credential) -> None:
        """Announce in a separate transaction and commit it: reads that begin afterwards are fenced."""
        _check(credential)
        self.expect_idle()
        await self._repeated(self._announce, credential)

    async def _announce(self, credential: Credential) -> None:
        stamps, names, proofs = _texts(credential)
        arguments = f"{self._scope}, '{self.table}', {self._rule}, {stamps}, {names}, {proofs}"
        await self._ask(credential)  # nothing is written under it: whether it is held may be asked first
        await self._session.run(f"CALL fenced_guard.announce_alone({arguments})")

    async def enter(self, credential: Credential | None) -> None:
        """Begin a transaction, with the announcement as its first statement."""
        self.expect_idle()
        if credential is None:
            try:
                await self._session.begin(_BEGIN)
            except BaseException as error:
                await self._undo("ROLLBACK")
                if isinstance(error, Exception):
                    raise wrapped(error) from error
                raise
            return
        _check(credential)
        await self._repeated(self._begin, credential)
        self._credential, self._announced = credential, True

    async def begin(self, statement: str) -> None:
        """Begin a transaction by a statement that announces a claim; `leave` ends it."""
        await self._session.begin(statement)
        self._announced = True

    def expect_idle(self) -> None:
        if self._session.state() == "closed":
            raise Misuse("this connection is closed, or busy with another statement")
        if self._session.state() == "open":
            raise Misuse(_IN_TRANSACTION)

    async def _begin(self, credential: Credential) -> None:
        hint = self._hint(credential)
        again = hint is not None and hint in _seen
        left = "NULL" if credential.left is None else str(max(LEFT_MIN, round(credential.left)))
        step = "announce" if self.mandatory else "write"
        await self._session.begin(
            f"CALL fenced_guard.enter({self._arguments(credential, step)}, {int(again)}, {left})"
        )
        await self._ask(credential)
        if hint is not None and not again:
            _seen[hint] = None
            if len(_seen) > _REMEMBERED:
                _seen.popitem(last=False)

    async def _ask(self, credential: Credential) -> None:
        """Whether the leases are still held, if that is wanted; the marks are locked by now."""
        if credential.still_held:
            stamps, _, _ = _texts(credential)
            await self._session.run(f"CALL fenced_guard.still_held({self._scope}, {stamps})")

    def _hint(self, credential: Credential) -> tuple[str, str, str] | None:
        """Under which this announcement is remembered; None if it has to go the long way each time."""
        if len(credential.stamps) != 1 or not self.mandatory or credential.proofs or credential.still_held:
            return None
        (stamp,) = credential.stamps
        names = credential.names or stamp.names
        if (
            len(names) != 1
            or names[0] not in stamp.names
            or self.spec.rule not in (None, "retry")
            or _bad(stamp)
        ):
            return None
        return self.spec.table, names[0], stamp.bare_text

    def _arguments(self, credential: Credential, step: str) -> str:
        stamps, names, proofs = _texts(credential)
        operation = secrets.token_hex(16)
        return f"{self._scope}, '{self.table}', {self._rule}, {stamps}, {names}, '{step}', '{operation}', {proofs}"

    async def _repeated(self, work: Callable[[Credential], Awaitable[None]], credential: Credential) -> None:
        """Announce; again if a newer commit interfered. From the second time on a transaction's announcement is made
        alone first, so that the snapshot of the transaction is newer than the lock."""
        for tried in range(REPEATS):
            try:
                if tried and work != self._announce:
                    await self._announce(credential)
                await work(credential)
                return
            except BaseException as error:
                answer = await self.undo(error)
                if not isinstance(error, Exception):
                    raise
                if not interferes(answer):
                    raise wrapped(error, answer) from error
                last = error
        raise Contended(f"newer commits interfered {REPEATS} times; try again: {last}") from last

    async def undo(self, error: BaseException) -> MariadbError:
        """Roll back. If the error is a refusal, record it, and raise its typed form."""
        answer = read(error)
        if isinstance(error, FencedError) or answer.code == OPEN:
            if answer.code != OPEN:
                await self._undo(UNDO)
            return answer
        if answer.code == OTHER_RULE:
            await self._undo(UNDO)
            raise Misconfigured(_other_rule(self.spec, answer.says)) from error
        if not answer.refuses:
            await self._undo(UNDO)
            return answer
        detail = None
        with suppress(Exception):  # the refusal itself matters more than its details
            detail = Detail.read(await self._session.told())
        refused = answer.refusal(detail)
        assert refused is not None
        failed = await self._undo(UNDO)
        if failed is not None and isinstance(refused, Refused):
            refused.add_note(f"(this refusal could not be recorded: {failed})")
        raise refused from error

    async def _undo(self, statement: str) -> Exception | None:
        """Roll back. If that fails, the connection is broken and the server rolls the transaction back."""
        try:
            await self._session.undo(statement)
        except Exception as failed:  # noqa: BLE001 - returned
            if read(failed).code in NO_ROUTINE:
                with suppress(Exception):
                    await self._session.undo("ROLLBACK")
            return failed
        return None

    async def announce_within(self, credential: Credential) -> None:
        """Announce in the transaction that the program has begun."""
        _check(credential)
        if self._session.state() in ("idle", "closed"):
            raise Misuse("begin a transaction first, or use transaction()")
        step = "announce" if self.mandatory else "write"
        try:
            await self._session.run(f"CALL fenced_guard.announce_within({self._arguments(credential, step)})")
            await self._ask(credential)
        except Exception as error:
            raise await self.refusal_within(error) from error

    async def refusal_within(self, error: Exception) -> FencedError:
        """The typed error for one of our statements in the program's transaction, which stays as it is."""
        answer, detail = read(error), None
        if answer.code == OTHER_RULE:
            return Misconfigured(_other_rule(self.spec, answer.says))
        if answer.refuses:
            with suppress(Exception):
                detail = Detail.read(await self._session.told())
        return answer.refusal(detail) or wrapped(error, answer)

    async def clear(self, credential: Credential) -> None:
        """Remove the last announcement of these names; an earlier one of the same names stays."""
        if self._session.state() == "closed":
            return
        names = credential.names or tuple(name for stamp in credential.stamps for name in stamp.names)
        with suppress(Exception):  # a failed transaction, or a broken connection, writes nothing anyway
            await self._session.run(f"CALL fenced_guard.clear({self._scope}, {literal(chr(10).join(names))})")

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
            await self._undo(UNDO)
            raise Misuse(
                "the transaction was ended inside the guarded block; let the block commit or roll back"
            )
        try:
            await self._session.leave(LEAVE if self._announced else "COMMIT")
        except BaseException as error:
            answer = read(error)
            if answer.code in (ENDED, SWALLOWED):
                await self._undo(UNDO)
                raise answer.typed() from error
            answer = await self._explain(error, committing=True)
            if isinstance(error, Exception) and answer.broken:
                raise answer.typed(committing=True) from error
            raise

    async def _explain(self, error: BaseException, *, committing: bool = False) -> MariadbError:
        """Roll back after an error of the program's statement. If it is a refusal, a conflict or the end of the
        connection of a lost lease, raise its typed form."""
        answer = await self.undo(error)
        if isinstance(error, FencedError) or not isinstance(error, Exception):
            return answer
        meaning = answer.refusal()
        if meaning is not None:
            raise meaning from error
        if interferes(answer):
            raise Conflict("a newer commit interfered; run the whole transaction again") from error
        if answer.broken and not committing:
            self._raise_if_lost(error)
        return answer

    def _raise_if_lost(self, error: Exception) -> None:
        """LeaseLost if the lease is over: the limit of `max_hold` has ended the connection."""
        lost = self._credential.lost() if self._credential and self._credential.lost else None
        if lost is not None:
            says = (
                f"{lost}; the server has ended its connection, and nothing of the transaction was committed"
            )
            raise LeaseLost(says, reason=lost.reason) from error

    async def peek(self, name: str, at_least: int) -> Mark | None:
        try:
            ((told,),) = await self._session.run(
                f"SELECT fenced_guard.peek({self._scope}, {literal(check_name(name))})"
            )
        except Exception as error:
            raise wrapped(error) from error
        token, grant, seq = install.text(told).split(":") if told else (0, "", 0)
        if at_least and int(token) < at_least:
            raise Contended(f"{name}: token {at_least} has not been seen here yet; look again")
        return Mark(int(token), str(grant), int(seq)) if told else None


def _check(credential: Credential) -> None:
    """Unsupported or InvalidStamp for what no part may be dropped of."""
    for stamp in credential.stamps:
        if not stamp.names:  # an operation about no name would be compared with no mark, and admitted
            raise InvalidStamp(f"a stamp covers at least one name, and {shown(stamp)} none")


def _bad(stamp: Stamp) -> bool:
    return not (1 <= stamp.token <= TOKEN_MAX and (stamp.seq is None or 0 <= stamp.seq <= SEQ_MAX))


def _texts(credential: Credential) -> tuple[str, str, str]:
    """As literals: the stamps, a line for each name with the place of its stamp, and the proofs."""
    lines = []
    if credential.names:
        for name in credential.names:
            places = [
                place for place, stamp in enumerate(credential.stamps, 1) if check_name(name) in stamp.names
            ]
            lines += [(name, place) for place in places or [0]]
    else:
        lines = [(name, place) for place, stamp in enumerate(credential.stamps, 1) for name in stamp.names]
    # In one order for everybody, so that two announcements of the same names never wait for each other.
    lines.sort(key=lambda line: (line[0].encode(), line[1]))
    names = "\n".join(f"{place} {name}" for name, place in lines)
    proofs = literal(" ".join(credential.proofs)) if credential.proofs else "NULL"
    return literal(" ".join(map(str, credential.stamps))), literal(names), proofs


def _other_rule(spec: Spec, says: str) -> str:
    installed = says.removeprefix("rule ")
    return (
        f"{spec.table}: the guard is installed with rule {installed}, and this program says {spec.rule}; by the "
        "installed rule a repeat would be judged in another way. Name that one or none, or use a guard "
        "with the other rule"
    )
