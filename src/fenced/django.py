"""Guarded transactions in Django, for databases whose engine supports Django's connections (PostgreSQL).

    orders = fenced.sql.Guard(table="shop_order", name="orders/{id}")

    with client.hold("orders/42") as lease, fenced.django.atomic(orders, lease):
        Order.objects.filter(id=42).update(qty=F("qty") + 1)

`HeldCommand` is a management command that runs on one machine at a time. `ReceiverMiddleware` reads stamps of requests
and answers refusals; `InstallGuard` and `InstallClaims` are migration operations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from fenced.client import registry

try:
    from django.conf import settings
    from django.core.exceptions import RequestDataTooBig
    from django.core.management.base import BaseCommand, CommandError
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

from fenced.client.faces import Client
from fenced.client.guarding import Fences
from fenced.client.leases import Lease
from fenced.errors import FencedError, LeaseLost, Misconfigured, Misuse, NotGranted, Refused
from fenced.guards.engine import TableGuard
from fenced.guards.spec import Spec
from fenced.http.bodies import RememberedBody
from fenced.http.receiving import ANSWERED, SCOPE_KEY, answer, read_request
from fenced.proofs import VerifyingKey
from fenced.runtime.blocking import step
from fenced.sql import Guard, refusal
from fenced.sql.engines import on
from fenced.values import timing
from fenced.values.decision import Mode, Rule
from fenced.values.model import CallTemplate
from fenced.values.timing import Seconds
from fenced.work import Claims

__all__ = ["HeldCommand", "InstallClaims", "InstallGuard", "ReceiverMiddleware", "atomic", "leases"]

_clients: dict[tuple[str, str], Client] = {}
_lock = threading.Lock()


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


def leases(alias: str = "default") -> Client:
    """The client of this process for an entry of the setting FENCED; it connects at first use.

    FENCED = {"default": {"URL": "postgresql://leases.internal/leases", "LABEL": "billing"}}

    The other keys are the options of `fenced.Client`, in capitals.
    """
    entries = getattr(settings, "FENCED", {})
    if alias not in entries or "URL" not in entries[alias]:
        raise Misconfigured(
            f'the setting FENCED has no entry {alias!r}: FENCED = {{{alias!r}: {{"URL": "..."}}}}'
        )
    options = {key.lower(): value for key, value in entries[alias].items()}
    key = alias, repr(sorted(options.items()))  # other settings, as in tests: another client
    with _lock:  # two threads that ask first must not make two
        if key not in _clients:
            try:
                _clients[key] = Client(options.pop("url"), **options)
            except TypeError as error:
                raise Misconfigured(f"the setting FENCED[{alias!r}]: {error}") from error
        return _clients[key]


class HeldCommand(BaseCommand):  # type: ignore[misc]
    """A management command that runs while it holds a lease: started on several machines, it runs on one at a time.

    Write `handle_held(self, lease, *args, **options)` in place of `handle`. If the lease is not granted, the command
    says who has it, and ends with status 75; if it was lost, with 76; if a guard has refused a write, with 77.
    """

    lease: ClassVar[str]
    """The name. `billing/{shop}` is filled from the command's options."""
    guards: ClassVar[Sequence[Guard]] = ()
    """They get the lease announced before the command begins, so what it reads is fenced."""
    ttl: ClassVar[Seconds] = timing.TTL_DEFAULT
    wait: ClassVar[Seconds | None] = 0.0
    """0: if another machine has it, do nothing."""
    at_least_for: ClassVar[Seconds] = 0.0
    """After a success nobody else is granted the name before this time: longer than the clocks of machines differ."""
    leases: ClassVar[str] = "default"
    """An entry of the setting FENCED."""
    using: ClassVar[str] = DEFAULT_DB_ALIAS

    def handle(self, *args: Any, **options: Any) -> Any:
        connection = connections[self.using]
        held = leases(self.leases).hold(
            self._name(options),
            ttl=self.ttl,
            wait=self.wait,
            at_least_for=self.at_least_for,
            guards=[guard.on(connection) for guard in self.guards],
        )
        try:
            with held as lease:
                return self.handle_held(lease, *args, **options)
        except (NotGranted, LeaseLost, Refused) as error:
            status = next(status for kind, status in _STATUSES.items() if isinstance(error, kind))
            raise CommandError(str(error), returncode=status) from error

    def handle_held(self, lease: Lease, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"write {type(self).__name__}.handle_held(self, lease, *args, **options)")

    def _name(self, options: dict[str, Any]) -> str:
        template = CallTemplate(self.lease)
        if missing := sorted(field for field in template.fields if options.get(field) is None):
            raise Misuse(
                f"the lease {self.lease!r} has a field {missing[0]!r}, and the command no such option"
            )
        name = template.filled(options) if template.fields else self.lease
        if name is None:
            raise Misuse(f"a value for {self.lease!r} has a slash: two things could have the same name")
        return name


_STATUSES: dict[type[FencedError], int] = {NotGranted: 75, LeaseLost: 76, Refused: 77}
"""As `fenced run` has them."""


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
