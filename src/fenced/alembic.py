"""Guards in Alembic's migrations, for databases whose engine supports SQLAlchemy's connections.

    op.install_guard("orders", name="orders/{id}")
    op.install_claims("runs", name="runs/{id}", ready="status = 'pending'")
    op.uninstall_guard("orders")

Import this module in `env.py`. Autogenerate then compares the guards of the database with those of the models, which
are in the `info` of their tables:

    orders = fenced.sql.Guard(table="orders", name="orders/{id}")

    class Order(Base):
        __tablename__ = "orders"
        __table_args__ = {"info": {"fenced": orders}}
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fenced.client import registry

try:
    from alembic.autogenerate import comparators, renderers
    from alembic.autogenerate.api import AutogenContext
    from alembic.operations import MigrateOperation, Operations
    from alembic.operations.ops import (
        CreateTableOp,
        DropColumnOp,
        DropIndexOp,
        DropTableOp,
        ModifyTableOps,
        UpgradeOps,
    )
    from alembic.util import DispatchPriority
    from sqlalchemy import Table
except ImportError as error:
    raise registry.needs_package(__name__, error) from error

from fenced.errors import Misuse, Unsupported, shown
from fenced.guards.claims import COLUMNS, Claiming
from fenced.guards.engine import Registered, TableGuard
from fenced.guards.spec import FAILS, Spec, described
from fenced.runtime.blocking import step
from fenced.sql import AsyncGuard, Guard
from fenced.sql.engines import on
from fenced.values.decision import Mode, Rule
from fenced.work import Claims
from fenced.work.claims import ClaimsBase

__all__ = ["InstallGuardOp", "UninstallGuardOp"]

INFO = "fenced"
"""The key in `Table.info` for the guard of a table."""


@Operations.register_operation("install_claims")
@Operations.register_operation("install_guard")
class InstallGuardOp(MigrateOperation):
    """Installs a guard in the migration's transaction. An installed guard keeps its mode unless one is given."""

    def __init__(
        self, asked: Registered, mode: str | None = None, *, before: Registered | None = None, replaces: bool
    ) -> None:
        self.asked = asked
        self.mode = None if mode is None else str(Mode.parse(mode))
        self.before = before
        self.replaces = replaces

    @classmethod
    def install_guard(
        cls,
        operations: Operations,
        table: str,
        *,
        name: str,
        rule: Rule = "retry",
        mode: str | None = None,
        epoch: str | None = None,
        mandatory: bool = True,
        replace: bool = False,
    ) -> None:
        """Guard a table, as `fenced.sql.Guard(...).install(op.get_bind(), ...)` does."""
        asked = Registered(Spec(table, name, rule, epoch), mandatory)
        operations.invoke(cls(asked, mode, replaces=replace))

    @classmethod
    def install_claims(
        cls,
        operations: Operations,
        table: str,
        *,
        mode: str | None = None,
        replace: bool = False,
        **options: Any,
    ) -> None:
        """Install claims on a table, as `fenced.work.Claims(...).install(op.get_bind(), ...)` does."""
        asked = Registered(_installed(Claims(table=table, **options)), True)
        operations.invoke(cls(asked, mode, replaces=replace))

    def reverse(self) -> MigrateOperation:
        if self.before is None:
            return UninstallGuardOp(self.asked.spec.table, self.asked)
        return InstallGuardOp(self.before, before=self.asked, replaces=True)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        return (
            "replace_guard" if self.before else "add_guard",
            self.asked.spec.table,
            described(*self.asked),
        )


@Operations.register_operation("uninstall_guard")
class UninstallGuardOp(MigrateOperation):
    """Removes the guard of a table in the migration's transaction. The marks stay."""

    def __init__(self, table: str, before: Registered | None = None) -> None:
        self.table = table
        self.before = before

    @classmethod
    def uninstall_guard(cls, operations: Operations, table: str) -> None:
        """Remove the guard of a table, as `fenced.sql.Guard(...).uninstall(op.get_bind())` does."""
        operations.invoke(cls(table))

    def reverse(self) -> MigrateOperation:
        if self.before is None:
            raise Misuse(f"which guard did {self.table} have? Write op.install_guard in the other direction")
        return InstallGuardOp(self.before, replaces=False)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        return ("remove_guard", self.table)


@Operations.implementation_for(InstallGuardOp)
def _install(operations: Operations, operation: InstallGuardOp) -> None:
    spec, mandatory = operation.asked
    if operations.migration_context.as_sql and spec.claims is not None:
        says = f"-- Replace the next statement by Claims(table={spec.table!r}, ...).script(db, transaction=False)"
        operations.migration_context.impl.static_output(says)
        operations.execute(FAILS)
    elif operations.migration_context.as_sql:
        options = {"--name": spec.name, "--rule": spec.rule, "--mode": operation.mode, "--epoch": spec.epoch}
        words = [word for option, value in options.items() if value for word in (option, value)]
        words += ["--replace"] if operation.replaces else []
        _stop_here(operations, "install", spec.table, *words, "--print", "--no-transaction")
    else:
        with _between_statements(operations) as connection:
            guard = _table(connection, spec, mandatory)
            step(guard.install(operation.mode, replace=operation.replaces))


@Operations.implementation_for(UninstallGuardOp)
def _uninstall(operations: Operations, operation: UninstallGuardOp) -> None:
    if operations.migration_context.as_sql:
        _stop_here(operations, "uninstall", operation.table, "--print", "--no-transaction")
    else:
        with _between_statements(operations) as connection:
            step(_table(connection, Spec(operation.table, "any")).uninstall())


@contextmanager
def _between_statements(operations: Operations) -> Iterator[Any]:
    """The migration's connection; where DDL commits, another one, for the migration is no transaction there.

    What it has done is committed by its driver: Alembic's own block goes on, and commits the version at its end.
    """
    connection = operations.get_bind()
    if connection.dialect.name not in ("mariadb", "mysql"):
        yield connection
        return
    connection.connection.commit()
    with connection.engine.connect() as own:
        yield own


def _installed(claims: ClaimsBase) -> Spec:
    return replace(claims._spec, rule=claims._spec.installs)


def _stop_here(operations: Operations, command: str, table: str, *words: str) -> None:
    """Offline, the table cannot be read, and its guard depends on it: the script must not run without the real SQL."""
    line = shlex.join(["fenced", "guard", command, "--table", table, *words])
    operations.migration_context.impl.static_output(f"-- Replace the next statement by the output of: {line}")
    operations.execute(FAILS)


def _table(connection: Any, spec: Spec, mandatory: bool = True) -> TableGuard:
    return on(connection, "blocking").table(spec, mandatory)


@comparators.dispatch_for("schema", priority=DispatchPriority.LAST)
def _compare(context: AutogenContext, upgrade: UpgradeOps, schemas: set[str | None]) -> None:
    """Compare the guards of the database with those of the models. Modes are not compared: operators change them."""
    assert context.dialect is not None
    default = str(context.dialect.default_schema_name)
    models = {_key(table.name, table.schema or default): table for table in context.sorted_tables}
    asked = {key: guard for key, table in models.items() if (guard := _declared(table, key, default))}
    try:
        database = _table(context.connection, Spec("any", "any"))
    except Unsupported:
        if asked:
            raise
        return
    live = {_key(found.spec.table, default): found for found in step(database.registered())}
    epochs = {(key, guard.spec.epoch) for guards in (asked, live) for key, guard in guards.items()}
    kept = [operation for operation in upgrade.ops if not _is_ours(operation, database, epochs, default)]
    dropped = {
        _key(operation.table_name, operation.schema or default)
        for operation in kept
        if isinstance(operation, DropTableOp)
    }
    gone = [
        UninstallGuardOp(found.spec.table, found)
        for key, found in live.items()
        if key not in asked and (key in models or key in dropped)
    ]
    wanted = [
        InstallGuardOp(guard, before=live.get(key), replaces=key in live)
        for key, guard in asked.items()
        if key not in live or not _same(guard, live[key])
    ]
    upgrade.ops[:] = [*gone, *kept, *wanted]


def _key(table: str, schema: str) -> str:
    return table if "." in table else f"{schema}.{table}"


def _declared(table: Table, key: str, default: str) -> Registered | None:
    guard = table.info.get(INFO)
    if guard is None:
        return None
    if not isinstance(guard, Guard | AsyncGuard | ClaimsBase) or _key(guard.table, default) != key:
        raise Misuse(
            f"info[{INFO!r}] of the table {key} is its fenced.sql.Guard or fenced.work.Claims, not {shown(guard)}"
        )
    return Registered(replace(guard._spec, rule=guard._spec.installs), guard._mandatory)


def _same(one: Registered, other: Registered) -> bool:
    mine, installed = one.spec.claims, other.spec.claims
    if mine is not None and installed is not None and mine.minted is None:
        # The installation has found it out.
        one = Registered(replace(one.spec, claims=replace(mine, minted=installed.minted)), one.mandatory)
    return one == Registered(replace(other.spec, table=one.spec.table), other.mandatory)


def _is_ours(
    operation: MigrateOperation, database: TableGuard, epochs: set[tuple[str, str | None]], default: str
) -> bool:
    """Whether the operation would only drop what fenced has created: its own tables, or epoch columns."""
    if isinstance(operation, CreateTableOp):
        operation.info.pop(INFO, None)  # Alembic would render it; our own operation has it
    if not isinstance(operation, DropTableOp | ModifyTableOps):
        return False
    if database.is_own(operation.schema, operation.table_name):
        return True
    if isinstance(operation, DropTableOp):
        return False
    key = _key(operation.table_name, operation.schema or default)
    operation.ops[:] = [
        one
        for one in operation.ops
        if not (
            isinstance(one, DropColumnOp) and ((key, one.column_name) in epochs or one.column_name in COLUMNS)
        )
        and not (isinstance(one, DropIndexOp) and str(one.index_name).startswith("fenced_"))
    ]
    return operation.is_empty()


@renderers.dispatch_for(InstallGuardOp)
def _render_install(context: AutogenContext, operation: InstallGuardOp) -> str:
    spec, mandatory = operation.asked
    words = [repr(spec.table), f"name={spec.name!r}"]
    if spec.claims is not None:
        words += _claim_words(spec.claims)
        words += ["replace=True"] if operation.replaces else []
        return _rendered(context, f"install_claims({', '.join(words)})")
    words += [f"rule={spec.rule!r}"] if spec.rule != "retry" else []
    words += [f"mode={operation.mode!r}"] if operation.mode else []
    words += [f"epoch={spec.epoch!r}"] if spec.epoch else []
    words += ["mandatory=False"] if not mandatory else []
    words += ["replace=True"] if operation.replaces else []
    return _rendered(context, f"install_guard({', '.join(words)})")


def _claim_words(claims: Claiming) -> list[str]:
    words = [f"ready={claims.ready!r}", f"order={claims.order!r}", f"key={claims.key!r}"]
    sets = {"taken": claims.taken, "back": claims.back, "dead": claims.dead}
    words += [f"{what}={dict(columns)!r}" for what, columns in sets.items() if columns]
    words.append(f"max_attempts={claims.max_attempts}")
    return words + ([f"mint={claims.minted!r}"] if claims.minted is not None else [])


@renderers.dispatch_for(UninstallGuardOp)
def _render_uninstall(context: AutogenContext, operation: UninstallGuardOp) -> str:
    return _rendered(context, f"uninstall_guard({operation.table!r})")


def _rendered(context: AutogenContext, call: str) -> str:
    context.imports.add("import fenced.alembic")
    return f"{context.opts['alembic_module_prefix']}{call}"


def __dir__() -> list[str]:
    return __all__
