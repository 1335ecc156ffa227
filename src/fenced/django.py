"""Guarded transactions in Django, for databases whose engine supports Django's connections (PostgreSQL).

    orders = fenced.sql.Guard(table="shop_order", name="orders/{id}")

    with client.hold("orders/42") as lease, fenced.django.atomic(orders, lease):
        Order.objects.filter(id=42).update(qty=F("qty") + 1)

`RefusalMiddleware` turns refusals that leave a view into responses; `InstallGuard` is a migration operation.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import (
    DEFAULT_DB_ALIAS,
    DatabaseError,
    connections,
    router,
)
from django.db.migrations.operations.base import (
    Operation,
    OperationCategory,
)
from django.http import HttpRequest, JsonResponse
from django.utils.deprecation import MiddlewareMixin

from fenced.decision import Mode, Rule
from fenced.errors import Conflict, Contended, Misconfigured, Overtaken, Refused, Unavailable
from fenced.guarding import Fences
from fenced.guards.shared.engine import TableGuard
from fenced.guards.shared.spec import Spec
from fenced.runtime.blocking import step
from fenced.sql import Guard, refusal
from fenced.sql.engines import on

__all__ = ["InstallGuard", "RefusalMiddleware", "atomic"]


@contextmanager
def atomic(
    guard: Guard, fence: Fences, *names: str, using: str | None = None, still_held: bool = False
) -> Iterator[None]:
    """`transaction.atomic` that announces first; a context manager, or a decorator that announces at each call.

    It must be the outermost block, because an inner block does not commit: Misuse inside another one.
    """
    connection = connections[using or DEFAULT_DB_ALIAS]
    with guard.transaction(connection, fence, *names, still_held=still_held):
        yield


class RefusalMiddleware(MiddlewareMixin):  # type: ignore[misc]
    """Turns errors that leave a view into responses: 409 for a refusal, which the client must not retry; 503 for
    errors that it may retry."""

    def process_exception(self, request: HttpRequest, exception: Exception) -> JsonResponse | None:
        error = refusal(exception) if isinstance(exception, DatabaseError) else exception
        if isinstance(error, Overtaken | Refused):
            return _answer(409, getattr(error, "kind", "lost"), getattr(error, "name", None))
        if isinstance(error, Contended | Conflict | Unavailable):
            return _answer(503, type(error).__name__.lower(), None)
        return None


def _answer(status: int, kind: str, name: str | None) -> JsonResponse:
    headers = {"Retry-After": "1"} if status == 503 else {}
    return JsonResponse({"kind": kind, "name": name}, status=status, headers=headers)


class InstallGuard(Operation):  # type: ignore[misc]
    """Installs a guard; backwards, uninstalls it. A new guard gets mode observe; an installed one keeps its mode."""

    reduces_to_sql = True
    reversible = True
    category = OperationCategory.SQL

    def __init__(
        self,
        *,
        table: str,
        name: str,
        mode: str | None = None,
        rule: Rule = "retry",
        epoch: str | None = None,
        replace: bool = False,
    ) -> None:
        self.spec = Spec(table, name, rule, epoch)
        self.mode = None if mode is None else str(Mode.parse(mode))
        self.replace = replace

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Nothing to do: guards are not part of the models' state."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if router.allow_migrate(schema_editor.connection.alias, app_label):
            table = _table(schema_editor, self.spec)
            if schema_editor.collect_sql:
                _collect(schema_editor, lambda: table.statements(self.mode, replace=self.replace))
            else:
                step(table.install(self.mode, replace=self.replace))

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if router.allow_migrate(schema_editor.connection.alias, app_label):
            table = _table(schema_editor, self.spec)
            if schema_editor.collect_sql:
                _collect(schema_editor, table.removal)
            else:
                step(table.uninstall())

    def describe(self) -> str:
        return f"Guard {self.spec.table} under {self.spec.name}"

    @property
    def migration_name_fragment(self) -> str:
        return f"guard_{self.spec.table.replace('.', '_')}"


def _table(schema_editor: Any, spec: Spec) -> TableGuard:
    return on(schema_editor.connection, "blocking").table(spec, True)


def _collect(schema_editor: Any, look: Callable[[], Coroutine[Any, Any, list[str]]]) -> None:
    """The statements that `look` returns, for `sqlmigrate`."""
    try:
        statements = step(look())
    except Misconfigured as error:
        schema_editor.collected_sql.append(f"-- Not known before the earlier migrations have run: {error}")
        return
    for statement in statements:
        schema_editor.execute(statement, params=None)
