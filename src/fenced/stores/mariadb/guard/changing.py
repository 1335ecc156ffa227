"""Changing a guard: running the statements of an installation, and changing modes, overrides and the trusted realm.

Writers lock the row of a guard in share mode. So a change waits for every open transaction that has met the guard, and
binds every later one. New writers queue behind a lock that waits: so it waits for a second at a time.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from fenced.errors import Contended, FencedError, Misconfigured, Misuse
from fenced.guards.spec import Spec
from fenced.stores.mariadb.guard import install, schema
from fenced.stores.mariadb.guard.refusals import MariadbError, read, wrapped
from fenced.stores.mariadb.guard.sessions import MariadbSession
from fenced.stores.mariadb.wire.connection import literal
from fenced.stores.mariadb.wire.failures import LOCK_TIMEOUT
from fenced.values.model import check_realm

BIND_SECONDS = 10.0
"""How long a mode change waits for the open transactions that have met the guard."""
_FIRST = (
    "SET @fenced_wait = @@SESSION.lock_wait_timeout",
    f"SET SESSION lock_wait_timeout = {install.LOCK_SECONDS}",
)
_LAST = (
    install.UNLOCK,
    "SET SESSION lock_wait_timeout = COALESCE(@fenced_wait, @@SESSION.lock_wait_timeout)",
    "COMMIT",
)


async def refuse_open(session: MariadbSession) -> None:
    """Misuse if the program has a transaction: what an operator does commits."""
    state = session.state()
    if state == "closed":
        raise Misuse("this connection is closed, or busy with another statement")
    if state == "open" or (state == "unknown" and await schema.is_open(session)):
        raise Misuse("this connection is in a transaction; commit or roll back first")


async def run_script(spec: Spec, session: MariadbSession, look: Callable[[], Awaitable[list[str]]]) -> None:
    """Run the statements that `look` returns. DDL commits, so they are no transaction."""
    try:
        await refuse_open(session)
        statements = await look()
        await session.together(lambda plain: _run_script(plain, statements))
    except Exception as error:
        answer = MariadbError(0, "", False) if isinstance(error, FencedError) else read(error)
        if answer.code == LOCK_TIMEOUT:
            raise Contended(
                f"{spec.table} is in use, and was not changed (waited {install.LOCK_SECONDS} s): run this again"
            ) from error
        raise wrapped(error, answer) from error


async def _run_script(session: MariadbSession, statements: Sequence[str]) -> None:
    try:
        for statement in (*_FIRST, *statements):
            await session.run(statement)
    finally:
        with suppress(Exception):  # the connection is broken: its locks and settings are gone
            for statement in _LAST:
                await session.run(statement)


async def change_modes(
    spec: Spec,
    session: MariadbSession,
    change: Callable[[str], list[str]],
    says: str,
    wait: float,
    what: str = "mode",
) -> None:
    """Change the modes or overrides of a guard under its lock, and write that into the history."""
    try:
        await refuse_open(session)
        scope, table = await install.scope_of(spec, session), install.table_of(spec)
        where = f"scope = {literal(scope)} AND tbl = {literal(table)}"
        if not await session.run(f"SELECT 1 FROM fenced_guard.guard WHERE {where}"):
            raise Misconfigured(f"no guard is installed for {scope}.{table}")
        modes = f"fenced_guard.mode WHERE {where} AND pattern"
        copied = (
            f"UPDATE fenced_guard.guard SET mode = (SELECT m FROM (SELECT mode AS m FROM {modes} = '*') AS a), "
            f"percent = (SELECT p FROM (SELECT percent AS p FROM {modes} = '*') AS b), "
            f"patterned = EXISTS (SELECT 1 FROM {modes} <> '*'), "
            f"lifted = (SELECT MAX(until) FROM fenced_guard.override WHERE {where}) WHERE {where}"
        )
        lock = f"SELECT 1 FROM fenced_guard.guard WHERE {where} FOR UPDATE"
        statements = [*change(scope), copied, install.history(scope, table, what, says)]
        await session.together(lambda plain: _in_short_turns(plain, lock, statements, wait))
    except Exception as error:
        raise wrapped(error) from error


async def adopt(spec: Spec, session: MariadbSession, realm: str) -> None:
    try:
        await refuse_open(session)
        scope = await install.scope_of(spec, session)
        where = f"scope = {literal(scope)}"
        lock = f"SELECT 1 FROM fenced_guard.trust WHERE {where} FOR UPDATE"
        statements = [
            f"UPDATE fenced_guard.trust SET realm = '{check_realm(realm)}' WHERE {where}",
            install.history(scope, None, "adopt", realm),
        ]
        await session.together(lambda plain: _in_short_turns(plain, lock, statements, BIND_SECONDS))
    except Exception as error:
        raise wrapped(error) from error


async def _in_short_turns(session: MariadbSession, lock: str, statements: Sequence[str], wait: float) -> None:
    """Lock a row that writers share, and change what it stands for."""
    limit, run = time.monotonic() + wait, session.run
    ((before,),) = await run("SELECT @@SESSION.innodb_lock_wait_timeout")
    await run("SET SESSION innodb_lock_wait_timeout = 1")
    try:
        while not await _locked(session, lock):
            if time.monotonic() >= limit:
                raise Contended(
                    f"nothing was changed: after {wait:g} s transactions that have met the guard were still open. "
                    "End them (SHOW PROCESSLIST), and run this again"
                )
        for statement in (*statements, "COMMIT"):
            await run(statement)
    except BaseException:
        with suppress(Exception):
            await run("ROLLBACK")
        raise
    finally:
        with suppress(Exception):
            await run(f"SET SESSION innodb_lock_wait_timeout = {before}")


async def _locked(session: MariadbSession, lock: str) -> bool:
    """Begin a transaction and lock the row; False if others have it for a second."""
    await session.run("START TRANSACTION")
    try:
        await session.run(lock)
    except Exception as error:
        if read(error).code != LOCK_TIMEOUT:
            raise
        await session.run("ROLLBACK")
        return False
    return True
