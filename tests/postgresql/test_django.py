"""Django's own transactions, views and migrations over the PostgreSQL guard."""

from __future__ import annotations

import asyncio
import io
import threading
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import django
import psycopg
import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import DatabaseError, IntegrityError, connection, connections, models, transaction
from django.db.migrations import CreateModel, Migration, RunPython
from django.db.migrations.state import ProjectState
from django.db.migrations.writer import MigrationWriter
from django.db.models import F
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, TestCase, override_settings
from django.urls import path
from psycopg.conninfo import conninfo_to_dict

import fenced
import fenced.django
import fenced.http
from fenced import sql
from fenced.values.decision import Rule
from fenced.values.model import Stamp
from fenced.work import Claims

ERRORS = {
    "stale": fenced.StaleToken("x", name="orders/42", holder="abc"),
    "lost": fenced.LeaseLost("x", reason="expired"),
    "contended": fenced.Contended("x"),
    "unavailable": fenced.Unavailable("x"),
    "indeterminate": fenced.Indeterminate("x"),
    "bug": fenced.Misuse("x"),
}


def view(request: HttpRequest, what: str) -> HttpResponse:
    raise ERRORS[what]


async def suspending_view(request: HttpRequest, what: str) -> HttpResponse:
    raise ERRORS[what]


def late_view(request: HttpRequest) -> HttpResponse:
    with fenced.django.atomic(GUARD, stamp(1)):
        raise AssertionError


def unstamped_view(request: HttpRequest) -> HttpResponse:
    Order.objects.filter(id=42).update(qty=0)
    return HttpResponse()


def receiving_view(request: HttpRequest) -> HttpResponse:
    guard = sql.Guard(table="shop_order", name="orders/{id}", rule="sequenced")
    with fenced.http.atomic(guard, connection, request, replies="fenced_replies") as operation:
        Order.objects.filter(id=42).update(qty=F("qty") - 1)
        return operation.keep(HttpResponse("sold", status=201))


BEFORE = fenced.http.BeforeHandler("memory:django?mode=require", rule="sequenced")
ASYNC_BEFORE = fenced.http.BeforeHandler("memory:async-django?mode=require", rule="sequenced")


@BEFORE("valves/{number}")
def decorated_view(request: HttpRequest, number: int) -> HttpResponse:
    return HttpResponse("opened", status=201)


@ASYNC_BEFORE("valves/{number}")
async def decorated_suspending_view(request: HttpRequest, number: int) -> HttpResponse:
    return HttpResponse("opened", status=201)


settings.configure(
    ALLOWED_HOSTS=["testserver"],
    DATABASES={
        "default": {"ENGINE": "django.db.backends.postgresql"},
        "lite": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
    },
    LOGGING_CONFIG=None,
    MIDDLEWARE=["fenced.django.ReceiverMiddleware"],
    ROOT_URLCONF=(
        path("plain/<what>", view),
        path("suspending/<what>", suspending_view),
        path("late", late_view),
        path("unstamped", unstamped_view),
        path("received", receiving_view),
        path("plain/valves/<int:number>", decorated_view),
        path("suspending/valves/<int:number>", decorated_suspending_view),
    ),
)
django.setup()


class Order(models.Model):
    id = models.IntegerField(primary_key=True)
    qty = models.PositiveIntegerField()

    class Meta:
        app_label = "shop"


GUARD = sql.Guard(table="shop_order", name="orders/{id}")


def stamp(token: int, *names: str) -> Stamp:
    return Stamp("ab" * 8, names or ("orders/42",), token, 1, f"{token:032x}")


def raise_mark(token: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT fenced_guard.announce_alone(%s)", (str(stamp(token)),))


NOTHING: dict[str, object] = {}


def migration(*more: Any, rule: Rule = "retry") -> Migration:
    made = Migration("0001_initial", "shop")
    made.operations = [
        CreateModel("Order", [(field.name, field.clone()) for field in Order._meta.fields]),
        fenced.django.InstallGuard(table="shop_order", name="orders/{id}", mode="require", rule=rule),
        *more,
    ]
    return made


def migrate(rule: Rule = "retry", *more: Any) -> None:
    with connection.schema_editor() as editor:
        migration(*more, rule=rule).apply(ProjectState(), editor)
    with transaction.atomic(), GUARD.announce_within(connection, stamp(1, "orders/42", "orders/43")):
        Order.objects.create(id=42, qty=10)
        Order.objects.create(id=43, qty=10)


@pytest.fixture
def database(postgresql_url: str) -> Iterator[dict[str, Any]]:
    """An empty database behind Django's default alias."""
    parts = conninfo_to_dict(postgresql_url)
    configured = connections.databases["default"]
    before = dict(configured)
    configured.update(
        NAME=parts["dbname"], USER=parts["user"], HOST=parts["host"], PORT=str(parts["port"]), OPTIONS={}
    )
    try:
        yield configured
    finally:
        connections["default"].close()
        del connections["default"]
        configured.update(before)


def test_a_block_commits_runs_its_hooks_and_refuses_in_types(database: dict[str, Any]) -> None:
    migrate()
    ran: list[str] = []
    with fenced.django.atomic(GUARD, stamp(5)):
        order = Order.objects.get(id=42)
        order.qty -= 1
        order.save()
        transaction.on_commit(lambda: ran.append("committed"))
        assert not ran
    assert ran == ["committed"]
    with pytest.raises(fenced.StaleToken) as stale, fenced.django.atomic(GUARD, stamp(4)):
        raise AssertionError
    assert isinstance(stale.value.__cause__, DatabaseError) and stale.value.mark == 5
    with pytest.raises(fenced.Uncovered, match="orders/43"), fenced.django.atomic(GUARD, stamp(5)):
        Order.objects.filter(id=42).update(qty=0)
        transaction.on_commit(lambda: ran.append("refused"))
        Order.objects.filter(id=43).update(qty=0)
    with pytest.raises(IntegrityError), fenced.django.atomic(GUARD, stamp(5)):  # the program's own
        Order.objects.filter(id=42).update(qty=-1)
    assert [(order.id, order.qty) for order in Order.objects.order_by("id")] == [(42, 9), (43, 10)]
    with pytest.raises(KeyError, match="mine"), fenced.django.atomic(GUARD, stamp(5)):
        Order.objects.filter(id=42).update(qty=8)
        transaction.on_commit(lambda: NOTHING["mine"])  # fails when it is committed: the program's own
    assert Order.objects.get(id=42).qty == 8
    assert ran == ["committed"] and not connection.in_atomic_block and connection.get_autocommit()


def test_the_announcement_is_one_statement_more(database: dict[str, Any]) -> None:
    migrate()
    sent: list[str] = []

    def note(execute: Any, statement: str, *rest: Any) -> Any:
        sent.append(statement.split("(")[0])
        return execute(statement, *rest)

    with connection.execute_wrapper(note), fenced.django.atomic(GUARD, stamp(5)):
        Order.objects.filter(id=42).update(qty=1)
    assert sent == [
        "SELECT fenced_guard.announce",
        'UPDATE "shop_order" SET "qty" = %s WHERE "shop_order"."id" = %s',
    ]


def test_it_is_the_outermost_block_and_a_swallowed_error_is_no_commit(
    database: dict[str, Any], postgresql_url: str, lost_lease: fenced.Lease
) -> None:
    migrate()
    with transaction.atomic():
        with pytest.raises(fenced.Misuse, match="announce_within"), fenced.django.atomic(GUARD, stamp(5)):
            raise AssertionError
        with GUARD.announce_within(connection, stamp(5)):
            Order.objects.filter(id=42).update(qty=9)
    with pytest.raises(fenced.Misuse, match="nothing was committed"), fenced.django.atomic(GUARD, stamp(5)):
        Order.objects.filter(id=42).update(qty=8)
        with connection.cursor() as cursor, pytest.raises(DatabaseError):
            cursor.execute("SELECT 1/0")
    with pytest.raises(fenced.Misuse, match="nothing was committed"), fenced.django.atomic(GUARD, stamp(5)):
        Order.objects.filter(id=42).update(qty=8)
        transaction.set_rollback(True)
    with pytest.raises(fenced.Misuse, match="nothing was committed"), fenced.django.atomic(GUARD, stamp(5)):
        Order.objects.filter(id=42).update(qty=8)
        connection.close()
    GUARD.adopt(connection, lost_lease.realm)
    with pytest.raises(fenced.LeaseLost, match="max_hold") as lost, fenced.django.atomic(GUARD, lost_lease):
        with psycopg.connect(postgresql_url, autocommit=True) as onlooker:
            onlooker.execute(
                "SELECT pg_terminate_backend(%s, 5000)", [connection.connection.info.backend_pid]
            )
        Order.objects.create(id=44, qty=1)
    assert isinstance(lost.value.__cause__, DatabaseError)
    GUARD.adopt(connection, stamp(5).realm)
    connection.set_autocommit(False)
    with pytest.raises(fenced.Misuse, match="autocommit"), fenced.django.atomic(GUARD, stamp(5)):
        raise AssertionError
    connection.set_autocommit(True)
    with fenced.django.atomic(GUARD, stamp(5)), transaction.atomic():
        assert Order.objects.get(id=42).qty == 9
    with pytest.raises(fenced.Unsupported), fenced.django.atomic(GUARD, stamp(5), using="lite"):
        raise AssertionError


def test_as_a_decorator_it_announces_at_each_call(database: dict[str, Any]) -> None:
    """Under rule sequenced the second call would be taken for the first one, repeated."""
    migrate(rule="sequenced")
    guard = sql.Guard(table="shop_order", name="orders/{id}", rule="sequenced")
    with connection.cursor() as cursor, fenced.Client("memory:") as client, client.hold("orders/42") as lease:
        cursor.execute("SELECT fenced_guard.adopt(%s)", (lease.realm,))
        cursor.execute("SELECT fenced_guard.reset('orders/42', 'another realm')")

        @fenced.django.atomic(guard, lease)
        def sell() -> None:
            Order.objects.filter(id=42).update(qty=models.F("qty") - 1)

        sell()
        sell()
    assert Order.objects.get(id=42).qty == 8


def test_a_newer_commit_during_the_announcement_repeats_it(database: dict[str, Any]) -> None:
    migrate()
    connection.close()
    database["OPTIONS"]["isolation_level"] = psycopg.IsolationLevel.REPEATABLE_READ
    address = {"dbname": database["NAME"], "user": database["USER"], "host": database["HOST"]}
    with psycopg.connect(**address, port=database["PORT"]) as other:
        other.execute("SELECT fenced_guard.announce(%s)", (str(stamp(5)),))
        other.execute("UPDATE shop_order SET qty = 9 WHERE id = 42")

        def commit() -> None:
            with psycopg.connect(**address, port=database["PORT"], autocommit=True) as onlooker:
                deadline = time.monotonic() + 90
                while time.monotonic() < deadline:
                    if onlooker.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone():
                        break
                    time.sleep(0.01)
            other.commit()

        committing = threading.Thread(target=commit)
        committing.start()
        with fenced.django.atomic(GUARD, stamp(6)):
            order = Order.objects.get(id=42)
            assert order.qty == 9
            order.qty -= 1
            order.save()
        committing.join()
    assert Order.objects.get(id=42).qty == 8


def test_an_older_transaction_is_ended(database: dict[str, Any]) -> None:
    migrate()
    address = {"dbname": database["NAME"], "user": database["USER"], "host": database["HOST"]}
    with psycopg.connect(**address, port=database["PORT"]) as old:
        old.execute("UPDATE fenced_guard.trust SET patience = 0.2")
        old.commit()
        old.execute("SELECT fenced_guard.announce(%s)", (str(stamp(5)),))
        with fenced.django.atomic(GUARD, stamp(6)):
            Order.objects.filter(id=42).update(qty=6)
        with pytest.raises(psycopg.OperationalError):
            old.execute("SELECT 1")
    assert Order.objects.get(id=42).qty == 6


def test_the_middleware_answers_for_refusals(database: dict[str, Any]) -> None:
    migrate()
    raise_mark(5)
    client = Client(raise_request_exception=False)
    expected = {
        "stale": (412, None),
        "lost": (412, None),
        "contended": (503, "1"),
        "unavailable": (503, "1"),
        "indeterminate": (504, None),
    }

    async def suspended(what: str) -> HttpResponse:
        return await AsyncClient(raise_request_exception=False).get(f"/suspending/{what}")

    for what, answer in expected.items():
        for got in (client.get(f"/plain/{what}"), asyncio.run(suspended(what))):
            assert (got.status_code, got.headers.get("Retry-After")) == answer
            assert got.json()["type"] == f"urn:fenced:problem:{what}"
    assert client.get("/plain/bug").status_code == 500
    late, unstamped = client.get("/late"), client.get("/unstamped")
    assert (late.status_code, late.json()["type"]) == (412, "urn:fenced:problem:stale")
    assert (unstamped.status_code, unstamped.json()["name"]) == (428, "orders/42")


def test_decorated_views() -> None:
    async def suspended(token: int) -> HttpResponse:
        headers = fenced.http.fence_headers(stamp(token, "valves/7"))
        return await AsyncClient().post("/suspending/valves/7", headers=headers)

    def plain(token: int) -> HttpResponse:
        headers = fenced.http.fence_headers(stamp(token, "valves/7"))
        return Client().post("/plain/valves/7", headers=headers)

    for call in (plain, lambda token: asyncio.run(suspended(token))):
        answers = [call(token) for token in (5, 5, 4)]
        assert [got.status_code for got in answers] == [201, 201, 412]
        assert [got.headers.get("Fenced-Replayed") for got in answers] == [None, "?1", None]


def test_a_request_writes_under_its_own_stamp(database: dict[str, Any]) -> None:
    migrate("sequenced")
    connection.cursor().execute(fenced.http.replies_table())
    client = Client(raise_request_exception=False)
    answers = [
        client.post("/received", headers=fenced.http.fence_headers(stamp(token))) for token in (5, 5, 4)
    ]
    assert [got.status_code for got in answers] == [201, 201, 412]
    assert [got.headers.get("Fenced-Replayed") for got in answers] == [None, "?1", None]
    assert client.post("/received").status_code == 428
    assert client.post("/received", headers={"Fenced-Stamp": "nonsense"}).status_code == 400
    assert Order.objects.get(id=42).qty == 9


def test_a_migration_installs_and_uninstalls(database: dict[str, Any]) -> None:
    seen: list[tuple[str, str]] = []

    def look(apps: Any, editor: Any) -> None:
        with editor.connection.cursor() as cursor:
            cursor.execute("SELECT current_setting('search_path'), current_setting('lock_timeout')")
            seen.append(cursor.fetchone())

    migrate("retry", RunPython(look, look))
    assert seen == [('"$user", public', "0")]  # what the installation set does not outlive it
    with pytest.raises(DatabaseError, match="no stamp"):
        Order.objects.filter(id=42).update(qty=1)
    made = migration()
    made.operations = made.operations[1:]
    state = ProjectState()
    with connection.schema_editor() as editor:
        made.unapply(state, editor)
    Order.objects.filter(id=42).update(qty=1)
    written = MigrationWriter(made).as_string()
    assert "import fenced.django" in written and "fenced.django.InstallGuard(" in written


def test_claims_on_a_model(database: dict[str, Any], postgresql_url: str) -> None:
    options: dict[str, Any] = {
        "table": "shop_order",
        "name": "orders/{id}",
        "ready": "qty = 10",
        "back": {"qty": 10},
    }
    made = Migration("0001_initial", "shop")
    made.operations = [
        CreateModel("Order", [(field.name, field.clone()) for field in Order._meta.fields]),
        fenced.django.InstallClaims(mode="require", **options),
    ]
    with connection.schema_editor() as editor:
        made.apply(ProjectState(), editor)
    assert "fenced.django.InstallClaims(" in MigrationWriter(made).as_string()
    Order.objects.create(id=42, qty=10)
    del options["table"]
    orders = Claims(model=Order, mint=False, **options)
    with fenced.Client("memory:django", guarantee="best-effort") as client, orders.worker(client) as worker:
        with worker.claim() as run, run.transaction():  # type: ignore[union-attr]
            Order.objects.filter(id=42).update(qty=F("qty") + 1)  # announced
            assert run is not None
            run.finish(None, qty=12)
        assert Order.objects.get(id=42).qty == 12
        with pytest.raises(DatabaseError, match="no stamp"):
            Order.objects.filter(id=42).update(qty=1)


def test_sqlmigrate_prints_what_can_be_run(database: dict[str, Any]) -> None:
    made = migration()
    create, install = made.operations
    with connection.schema_editor(collect_sql=True) as editor:
        made.apply(ProjectState(), editor, collect_sql=True)
    assert editor.collected_sql[-1].startswith("-- Not known before")
    made.operations = [create]
    with connection.schema_editor() as editor:
        made.apply(ProjectState(), editor)
    made.operations = [install]
    with connection.schema_editor(collect_sql=True) as editor:
        made.apply(ProjectState(), editor, collect_sql=True)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("\n".join(editor.collected_sql))
    with pytest.raises(DatabaseError, match="no stamp"):
        Order.objects.create(id=42, qty=1)


def test_it_works_inside_a_test_case(database: dict[str, Any]) -> None:
    """The block around a test does not count, as with Django's durable blocks."""
    migrate()

    class Shop(TestCase):
        def test_selling(self) -> None:
            with fenced.django.atomic(GUARD, stamp(5)):
                Order.objects.filter(id=42).update(qty=9)
            with pytest.raises(fenced.Uncovered), fenced.django.atomic(GUARD, stamp(5)):
                Order.objects.filter(id=43).update(qty=9)
            assert [order.qty for order in Order.objects.order_by("id")] == [9, 10]

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Shop).run(result)
    assert result.testsRun == 1 and result.wasSuccessful(), result.errors + result.failures
    assert Order.objects.get(id=42).qty == 10


class Bill(fenced.django.HeldCommand):
    lease = "billing/{shop}"
    guards = (GUARD,)
    ttl = 10
    tokens: ClassVar[list[int]] = []

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("--shop", default="main")
        parser.add_argument("--lose", action="store_true")
        parser.add_argument("--late", action="store_true")

    def handle_held(self, lease: fenced.Lease, *args: Any, **options: Any) -> None:
        self.tokens.append(lease.token)
        with connection.cursor() as cursor:
            cursor.execute("SELECT token FROM fenced_guard.mark WHERE name = %s", (lease.name,))
            assert cursor.fetchone() == (lease.token,), "what it reads is fenced"
        if options["lose"]:
            lease._grant.lose("expired")
        if options["late"]:
            with fenced.django.atomic(GUARD, stamp(1)._replace(realm=lease.realm)):
                raise AssertionError
        self.stdout.write(lease.name)


class Slashes(Bill):
    lease = "billing/{no_such}"


@pytest.fixture
def fenced_setting(tmp_path: Path) -> Iterator[str]:
    url = f"sqlite:///{tmp_path}/leases.db"
    with override_settings(FENCED={"default": {"URL": url, "LABEL": "billing"}}):
        yield url
        fenced.django.leases().close()


def test_a_command_runs_on_one_machine_at_a_time(database: dict[str, Any], fenced_setting: str) -> None:
    migrate()
    with fenced.django.leases().hold("set-up") as lease:
        realm = lease.realm
        GUARD.adopt(connection, realm)
    out = io.StringIO()
    call_command(Bill(), stdout=out)
    call_command(Bill(), shop="north", stdout=out)
    assert out.getvalue() == "billing/main\nbilling/north\n" and Bill.tokens == [2, 3]
    assert fenced.django.leases() is fenced.django.leases()
    with (
        fenced.Client(fenced_setting, label="other machine") as other,
        other.hold("billing/main"),
        pytest.raises(CommandError, match="held by other machine") as busy,
    ):
        call_command(Bill())
    with pytest.raises(CommandError, match="expired") as lost:
        call_command(Bill(), lose=True)
    GUARD.announce(connection, stamp(99)._replace(realm=realm))
    with pytest.raises(CommandError, match="is stale") as late:
        call_command(Bill(), late=True)
    assert [each.value.returncode for each in (busy, lost, late)] == [75, 76, 77]
    with pytest.raises(fenced.Misuse, match="'no_such'"):
        call_command(Slashes())
    with pytest.raises(fenced.Misuse, match="slash"):
        call_command(Bill(), shop="a/b")


def test_the_setting_is_checked() -> None:
    with pytest.raises(fenced.Misconfigured, match="FENCED has no entry 'default'"):
        fenced.django.leases()
    wrong = {"default": {"URL": "memory:django", "LABLE": "x"}}
    with override_settings(FENCED=wrong), pytest.raises(fenced.Misconfigured, match="lable"):
        fenced.django.leases()
