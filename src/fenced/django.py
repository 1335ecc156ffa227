"""Guarded transactions in Django, for databases whose engine supports Django's connections (PostgreSQL).

    orders = fenced.sql.Guard(table="shop_order", name="orders/{id}")

    with client.hold("orders/42") as lease, fenced.django.atomic(orders, lease):
        Order.objects.filter(id=42).update(qty=F("qty") + 1)

`ReceiverMiddleware` reads stamps of requests and answers refusals; `InstallGuard` and
`InstallClaims` are migration operations.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fenced.client import registry

try:
    from django.core.exceptions import RequestDataTooBig
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
    from django.http import HttpRequest, HttpResponse
    from django.http.request import RawPostDataException, UnreadablePostError
    from django.utils.deprecation import MiddlewareMixin
except ImportError as error:
    raise registry.needs_package(__name__, error) from error

from fenced.client.guarding import Fences
from fenced.errors import FencedError, Misconfigured, Refused
from fenced.guards.engine import TableGuard
from fenced.guards.spec import Spec
from fenced.http.bodies import RememberedBody
from fenced.http.receiving import ANSWERED, SCOPE_KEY, answer, read_request
from fenced.proofs import VerifyingKey
from fenced.runtime.blocking import step
from fenced.sql import Guard, refusal
from fenced.sql.engines import on
from fenced.values.decision import Mode, Rule
from fenced.work import Claims

__all__ = ["InstallClaims", "InstallGuard", "ReceiverMiddleware", "atomic"]


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


class ReceiverMiddleware(MiddlewareMixin):  # type: ignore[misc]
    """Reads the stamp of each request for `fenced.http.atomic`, and answers errors that leave a view.

    The answers are those of the protocol: 412 for a stale token, which a client must not retry, 503 for what it may
    retry. With `keys`, set in a subclass, each stamp needs a proof by one of them.
    """

    keys: tuple[VerifyingKey, ...] = ()

    def process_request(self, request: HttpRequest) -> HttpResponse | None:
        pairs = [
            (name.lower().encode(), value.encode("latin-1", "replace"))
            for name, value in request.headers.items()
        ]
        try:
            request.META[SCOPE_KEY] = read_request(
                request.method or "",
                request.path,
                pairs,
                self.keys,
                query=request.META.get("QUERY_STRING", "").encode("latin-1", "replace"),
                body=_DjangoBody(request),
            )
        except Refused as error:
            return _answer(error)
        return None

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        error = refusal(exception) if isinstance(exception, DatabaseError) else exception
        return _answer(error) if isinstance(error, ANSWERED) else None


class _DjangoBody(RememberedBody):
    """Django keeps the body of a request, unless the view has read a form with files."""

    def __init__(self, request: HttpRequest) -> None:
        super().__init__()
        self._request = request

    def digest(self) -> str | None:
        if not self.ended:
            with suppress(RawPostDataException, RequestDataTooBig, UnreadablePostError):
                self.add(self._request.body)
                self.ended = True
        return super().digest()

    async def read_more(self) -> bool:
        return False  # `digest` reads it


def _answer(error: FencedError) -> HttpResponse:
    status, headers, body = answer(error)
    return HttpResponse(body, status=status, headers=dict(headers))


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


class InstallClaims(InstallGuard):
    """Installs claims on a table, with the options of `fenced.work.Claims`; backwards, uninstalls them."""

    def __init__(self, *, mode: str | None = None, replace: bool = False, **options: Any) -> None:
        self.spec = Claims(**options)._spec
        self.mode = None if mode is None else str(Mode.parse(mode))
        self.replace = replace

    def describe(self) -> str:
        return f"Claim rows of {self.spec.table} as {self.spec.name}"

    @property
    def migration_name_fragment(self) -> str:
        return f"claims_{self.spec.table.replace('.', '_')}"


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


def __dir__() -> list[str]:
    return __all__
