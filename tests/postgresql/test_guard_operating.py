"""What an operator is told about PostgreSQL guards is true, and what an operator does keeps nobody waiting."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from fenced import cli
from fenced.errors import Contended, Misconfigured, Misuse, StaleToken
from fenced.runtime.blocking import step
from fenced.sql import Guard
from fenced.stores.postgresql.guard.operator import PostgresqlOperator
from fenced.stores.postgresql.guard.refusals import IN_THE_LOG
from fenced.stores.postgresql.guard.sessions import AsyncpgSession, PsycopgSession
from fenced.testing.kit import stamp
from fenced.values.rollout import DatabaseStatus, DecisionCount, GuardStatus, Override, Stage, advised
from fenced_testkit.servers import PostgresqlServer
from tests.conftest import NewDatabase

NOW = datetime(2026, 1, 2, tzinfo=UTC)
DAY = 86_400.0
ORDERS = Guard(table="orders", name="orders/{id}")


class Shop:
    """A guarded, partitioned table, and those who write to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.db = self.connect("setup")
        self.operator = PostgresqlOperator(PsycopgSession(self.connect("operator")))

    def connect(self, application: str) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(self.url, autocommit=True, application_name=application)

    def write(self, number: int, token: int | None, application: str) -> None:
        sql = f"UPDATE orders SET qty = qty + 1 WHERE id = {number}"
        with self.connect(application) as connection:
            if token is None:
                connection.execute(sql)
                return
            with ORDERS.transaction(connection, stamp(token, 1, f"orders/{number}")) as tx:
                tx.execute(sql)

    def status(self, quiet_for: float = DAY) -> DatabaseStatus:
        return step(self.operator.status(None, quiet_for))

    def orders(self, quiet_for: float = DAY) -> GuardStatus:
        return next(guard for guard in self.status(quiet_for).guards if guard.guard == "public.orders")


def prepare(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    connection.execute("CREATE TABLE orders (id bigint, qty int NOT NULL DEFAULT 0) PARTITION BY RANGE (id)")
    connection.execute("CREATE TABLE orders_low PARTITION OF orders FOR VALUES FROM (0) TO (100)")
    connection.execute("INSERT INTO orders SELECT generate_series(40, 49)")
    connection.execute("CREATE TABLE spare (id bigint PRIMARY KEY)")
    ORDERS.install(connection, mode="enforce")


@pytest.fixture
def shop(new_database: NewDatabase) -> Iterator[Shop]:
    made = Shop(new_database(prepare))
    yield made
    made.db.close()
    made.operator._session.connection.close()  # type: ignore[attr-defined]


def test_status_tells_what_happened(shop: Shop) -> None:
    """Unstamped writers, would-be refusals, a refusal, an override, a switched-off trigger, a new partition."""
    shop.write(42, 5, "billing")
    shop.write(43, 9, "billing")
    with pytest.raises(StaleToken):
        shop.write(42, 4, "billing")
    ORDERS.set_mode(shop.db, "shadow", "orders/43")
    shop.write(43, 8, "billing")
    for _ in range(3):
        shop.write(44, None, "cron")
    shop.write(44, None, "psql")
    step(shop.operator.override("orders", "orders/4*", 900, "ticket 4711"))
    shop.write(42, 3, "rescue")
    shop.db.execute("ALTER TABLE orders DISABLE TRIGGER fenced_delete")
    shop.db.execute("CREATE TABLE orders_high PARTITION OF orders FOR VALUES FROM (100) TO (200)")
    shop.db.execute("ALTER TABLE orders_high DISABLE TRIGGER fenced_row_update")

    told = shop.orders()
    assert (told.template, told.rule, told.marks, told.highest, told.refused) == (
        "orders/{id}",
        "retry",
        2,
        9,
        1,
    )
    assert [(s.pattern, s.mode) for s in told.stages] == [("*", "enforce"), ("orders/43", "shadow")]
    assert [(o.pattern, o.who, o.why) for o in told.overrides] == [("orders/4*", "postgres", "ticket 4711")]
    seen = {(c.verdict, c.ruling, c.mode, c.application, c.pattern): (c.count, c.recent) for c in told.counts}
    assert seen == {
        ("stale", "refuse", "enforce", "billing", "*"): (1, 1),
        ("stale", "record", "shadow", "billing", "orders/43"): (1, 1),
        ("missing", "count", "enforce", "cron", "*"): (3, 3),
        ("missing", "count", "enforce", "psql", "*"): (1, 1),
        ("stale", "record", "override", "rescue", "*"): (1, 1),
    }
    assert list(told.wrong) == [
        "trigger fenced_delete is disabled",
        "trigger fenced_row_update is disabled on partition public.orders_high",
        "partition public.orders_high can be truncated: install the guard again",
    ]
    require, canary = (stage.next for stage in told.stages)
    assert (require.stage, require.safe, canary.stage, canary.safe) == ("require", False, "canary", False)
    assert require.reasons[:2] == ("3 things are wrong", "an override lets writes through")
    (unstamped, _), (would, _) = require.reasons[2:], canary.reasons[2:]
    assert re.fullmatch(
        r"4 unstamped writes in the last 24 h, last \d+ s ago by postgres, psql and 1 other", unstamped
    )
    assert re.fullmatch(r"1 would-be refusal in the last 24 h, last \d+ s ago by postgres, billing", would)
    assert shop.status().realm == stamp(1).realm

    # Mended, over, and quiet for as long as is asked: the same counts speak against nothing any more.
    shop.db.execute("ALTER TABLE orders ENABLE TRIGGER fenced_delete")
    shop.db.execute("ALTER TABLE orders_high ENABLE TRIGGER fenced_row_update")
    ORDERS.install(shop.db)
    assert step(shop.operator.end_overrides("orders", None)) == 1
    told = shop.orders(quiet_for=0.0)
    assert (told.wrong, told.overrides) == ((), ())
    assert [stage.next.safe for stage in told.stages] == [True, True]
    assert not shop.status().wrong


def typed(*words: str) -> int:
    """A command of `fenced guard`, in this process."""
    return cli._guarded(["guard", *words])


def test_status_accounts_for_every_refusal_in_require(
    shop: Shop, postgresql_server: PostgresqlServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wrapper's refusals are recorded. The others are counted, and the server's log has them as `status` says.

    A command that skips stages prints what is known by then, and does it.
    """
    ORDERS.set_mode(shop.db, "observe")
    shop.write(44, None, "cron")
    assert typed("mode", shop.url, "--table", "orders", "require") == 0
    out, err = capsys.readouterr()
    first, judged, unstamped, lasted = err.splitlines()
    assert (out, first) == ("orders: require\n", "caution: this skips shadow, canary and enforce:")
    assert judged.startswith("caution: - nothing was judged yet")
    assert unstamped.startswith("caution: - 1 unstamped write in the last 24 h, last ")
    assert lasted.startswith("caution: - observe has lasted ")
    for mode in ("enforce", "require"):  # back, and one step
        assert typed("mode", shop.url, "--table", "orders", mode) == 0
    assert capsys.readouterr().err == ""
    shop.write(42, 5, "billing")
    with pytest.raises(StaleToken):
        shop.write(42, 4, "billing")
    for number in (43, 44):
        with pytest.raises(psycopg.DatabaseError, match="carries no stamp"):
            shop.write(number, None, "old cron job")
    (recorded,) = step(shop.operator.records("orders", 1))
    assert (recorded.address, recorded.application) == ("127.0.0.1", "billing")
    assert (shop.orders().refused, shop.orders().not_recorded) == (3, 2)
    assert typed("status", shop.url) == 0
    said = capsys.readouterr().out
    assert "refused       3; recorded: 1 stale\n" in said
    assert re.search(r" 1 by postgres, billing; last \d+ s ago from 127\.0\.0\.1, process \d+\n", said)
    assert f"2 outside the wrapper, without a record. Look for\n                {IN_THE_LOG}\n" in said
    search = IN_THE_LOG.partition(": ")[2].replace("LOGFILE", str(postgresql_server.log))
    logged = subprocess.run(search, shell=True, capture_output=True, text=True, check=True).stdout
    details = [line for line in logged.splitlines() if '"application": "old cron job"' in line]
    assert all('"verdict": "missing"' in line and '"address": "127.0.0.1"' in line for line in details)
    assert {name for name in ("orders/43", "orders/44") if name in "".join(details)} == {
        "orders/43",
        "orders/44",
    }
    assert typed("records", shop.url) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[-2:] == ["127.0.0.1", str(recorded.pid)]


def test_a_monitor_reads_and_changes_nothing(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    """Also a guard that is installed later, in a schema that the role may not use, and after an upgrade."""
    shop.write(42, 5, "billing")
    shop.write(43, None, "")
    shop.db.execute("CREATE ROLE shop_monitor LOGIN")
    monitor = shop.url.replace("//postgres@", "//shop_monitor@")
    try:
        assert typed("status", monitor) == 78
        assert "`fenced guard grant-monitor ROLE`" in capsys.readouterr().err
        assert typed("grant-monitor", monitor, "shop_monitor") == 78
        assert typed("grant-monitor", shop.url, "nobody_there") == 78
        assert typed("grant-monitor", shop.url, "shop_monitor") == 0
        shop.db.execute("CREATE SCHEMA hidden CREATE TABLE secrets (id bigint PRIMARY KEY)")
        Guard(table="hidden.secrets", name="secrets/{id}").install(shop.db)
        shop.db.execute("REVOKE EXECUTE ON FUNCTION fenced_guard.pending(text) FROM shop_monitor")
        shop.db.execute("UPDATE fenced_guard.schema SET functions = 'of an earlier version'")
        ORDERS.install(shop.db)
        capsys.readouterr()
        for words in (["status"], ["status", "--check"], ["records"], ["history"], ["key", "list"]):
            assert typed(*words, monitor) == 0, capsys.readouterr().err
        said = capsys.readouterr().out
        assert "hidden.secrets" in said and "1 by postgres; last " in said
        assert "(let each program set application_name, and it is listed separately)" in said
        for words in (
            ["mode", "--table", "orders", "observe"],
            ["reset", "orders/42", "--why", "x"],
            ["tidy"],
        ):
            assert typed(words[0], monitor, *words[1:]) == 78
        with psycopg.connect(monitor, autocommit=True) as connection:
            for secret in ("seal FROM fenced_guard.trust", "secret FROM fenced_guard.key", "* FROM orders"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(f"SELECT {secret}".encode())
        assert typed("grant-monitor", shop.url, "shop_monitor", "--revoke") == 0
        assert typed("status", monitor) == 78
        granted = "SELECT 1 FROM pg_class WHERE relacl::text LIKE '%shop_monitor%'"
        assert shop.db.execute(granted.encode()).fetchall() == []
    finally:
        shop.db.execute("DROP OWNED BY shop_monitor")
        shop.db.execute("DROP ROLE shop_monitor")


def test_a_missing_trigger_and_a_renamed_table(shop: Shop) -> None:
    """What nobody announced: somebody dropped a trigger, or the table is not where the guard was put."""
    shop.db.execute("DROP TRIGGER fenced_update ON orders")
    assert shop.orders().wrong == ("trigger fenced_update is missing: install the guard again",)
    shop.db.execute("ALTER TABLE orders RENAME TO orders_old")
    assert shop.orders().wrong == ("the table was dropped or renamed",)


def test_a_table_that_was_rebuilt_and_one_that_inherits(shop: Shop) -> None:
    """Both were unguarded without a word. Where nothing is refused, nothing fails."""
    spare = Guard(table="spare", name="spare/{id}")
    spare.install(shop.db, mode="observe")

    def write(token: int) -> None:
        with spare.transaction(shop.db, stamp(token, 1, "spare/1")) as tx:
            tx.execute("INSERT INTO spare VALUES (1) ON CONFLICT DO NOTHING")

    def wrong() -> tuple[str, ...]:
        return step(shop.operator.status("spare")).guards[0].wrong

    shop.db.execute("CREATE TABLE fresh (LIKE spare INCLUDING ALL); ALTER TABLE spare RENAME TO old")
    shop.db.execute("ALTER TABLE fresh RENAME TO spare")
    write(5)
    spare.set_mode(shop.db, "enforce")
    with pytest.raises(Misconfigured, match="lacks the triggers of its guard"):
        write(6)
    assert "trigger fenced_update is missing: install the guard again" in wrong()
    spare.install(shop.db)
    write(6)
    shop.db.execute("CREATE TABLE child () INHERITS (spare)")
    with pytest.raises(Misconfigured, match=r"child inherits from public\.spare"):
        write(7)
    assert wrong() == ("table child inherits from it, and its rows are not guarded",)
    shop.db.execute("DROP TABLE child, old CASCADE")
    write(7)


def test_status_names_the_roles_that_can_bypass(shop: Shop) -> None:
    """Superusers, the owner and its members, and those who were granted what switches triggers off; nobody else."""
    roles = ("fenced_owner", "fenced_member", "fenced_tricky", "fenced_plain")
    try:
        for role in roles:
            shop.db.execute(f"CREATE ROLE {role} LOGIN")
        shop.db.execute("GRANT fenced_owner TO fenced_member")
        shop.db.execute("ALTER TABLE orders OWNER TO fenced_owner")
        shop.db.execute("GRANT TRIGGER ON orders TO fenced_tricky")
        shop.db.execute("GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON orders TO fenced_plain")
        assert [who for who in shop.orders().bypass if "fenced_" in who] == [
            "fenced_member (owner of the table)",
            "fenced_owner (owner of the table)",
            "fenced_tricky (may add triggers)",
        ]
        assert shop.orders().bypass[0] == "postgres (superuser)"
    finally:
        for role in roles:
            shop.db.execute(f"DROP OWNED BY {role}")
            shop.db.execute(f"DROP ROLE {role}")


def test_objects_made_by_a_superuser_belong_to_the_owner(postgresql_url: str) -> None:
    """The guard's functions run with the owner's rights: what they need must be the owner's, whoever has created it."""
    with psycopg.connect(postgresql_url, autocommit=True) as db:
        for role in ("guard_owner", "guard_writer"):
            db.execute(f"CREATE ROLE {role} LOGIN".encode())
        try:
            db.execute(
                "CREATE TABLE orders (id bigint PRIMARY KEY, qty int); INSERT INTO orders VALUES (42, 0)"
            )
            db.execute(f'GRANT CREATE ON DATABASE "{db.info.dbname}" TO guard_owner'.encode())
            db.execute(
                "ALTER TABLE orders OWNER TO guard_owner; GRANT SELECT, UPDATE ON orders TO guard_writer"
            )
            with psycopg.connect(postgresql_url, user="guard_owner", autocommit=True) as owner:
                Guard(table="fenced_guard.value", name="{name}").install(owner)
            ORDERS.install(db, mode="enforce")
            for new in (
                "TABLE fenced_guard.turn",
                "SEQUENCE fenced_guard.record_id",
                "FUNCTION fenced_guard.carried()",
            ):
                db.execute(f"ALTER {new} OWNER TO postgres".encode())  # as if the upgrade had created it
            db.execute("UPDATE fenced_guard.schema SET functions = 'of an earlier version'")
            step(PostgresqlOperator(PsycopgSession(db)).upgrade())
            with psycopg.connect(postgresql_url, user="guard_writer", autocommit=True) as writer:
                for token in (5, 6):
                    with ORDERS.transaction(writer, stamp(token, 1, "orders/42")) as tx:
                        tx.execute("UPDATE orders SET qty = qty + 1 WHERE id = 42")
                with pytest.raises(StaleToken), ORDERS.transaction(writer, stamp(5, 2, "orders/42")):
                    raise AssertionError
            owners = (
                "SELECT relowner::regrole::text FROM pg_class WHERE relnamespace = 'fenced_guard'::regnamespace "
                "UNION SELECT proowner::regrole::text FROM pg_proc WHERE pronamespace = 'fenced_guard'::regnamespace"
            )
            assert db.execute(owners).fetchall() == [("guard_owner",)]
        finally:
            for role in ("guard_writer", "guard_owner"):
                db.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}".encode())


def test_tidied_records_still_count_against_the_next_stage(shop: Shop) -> None:
    """Tidying makes sums of records; they still speak against the next stage. What was not recorded is counted."""
    for _ in range(5):
        shop.write(44, None, "cron")
    with shop.connect("maintenance") as blocking, blocking.transaction():
        blocking.execute("LOCK TABLE fenced_guard.record IN SHARE MODE")
        shop.write(44, None, "cron")  # does not wait, and is not recorded
    assert (shop.status().unrecorded, shop.status().wrong) == (1, True)
    assert step(shop.operator.tidy(keep=2)) == {"summed": 3, "overrides": 0, "unrecorded": 1}
    assert (shop.status().unrecorded, shop.status().wrong) == (0, False)
    counts = {c.pattern: (c.count, c.recent) for c in shop.orders().counts}
    assert counts == {"*": (2, 2), None: (3, 3)}
    assert shop.orders().stages[0].next.reasons[1].startswith("5 unstamped writes")
    assert [change.what for change in step(shop.operator.history(None, 1))] == ["unrecorded"]


def test_an_operator_waits_for_no_writer(shop: Shop) -> None:
    """A mode is switched and a status read while a writer has rows and its fence locked; a reset gives up soon."""
    shop.write(42, 5, "billing")
    with shop.connect("billing") as writer, ORDERS.transaction(writer, stamp(6, 1, "orders/42")) as tx:
        tx.execute("UPDATE orders SET qty = 7 WHERE id = 42")
        shop.db.execute("SET statement_timeout = '1s'")
        ORDERS.set_mode(shop.db, "require")
        assert shop.orders().stages[0].mode == "require"
        with pytest.raises(Contended):
            step(shop.operator.reset("orders/42", "test"))
    assert step(shop.operator.reset("orders/42", "test")) == 6
    assert step(shop.operator.reset("orders/42", "test")) is None
    with pytest.raises(Misuse):
        step(shop.operator.reset("orders/41", " "))


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_an_operator_decides_by_what_is_there_whatever_the_default(shop: Shop, level: str) -> None:
    """Not by an old snapshot, which a higher isolation level would keep."""
    shop.write(42, 5, "billing")
    database = shop.db.info.dbname
    shop.db.execute(f"ALTER DATABASE \"{database}\" SET default_transaction_isolation = '{level}'")
    with shop.connect("operator") as fresh:
        operator = PostgresqlOperator(PsycopgSession(fresh))
        assert step(operator.reset("orders/42", "test")) == 5
        assert step(operator.override("orders", "*", 60, "test")).pattern == "*"


def test_the_same_on_asyncpg(shop: Shop) -> None:
    shop.write(42, 5, "billing")
    shop.write(44, None, "cron")
    step(shop.operator.override("orders", "orders/4*", 900, r"a 'quote' and a \n backslash"))

    async def told() -> tuple[DatabaseStatus, list[object], str]:
        import asyncpg

        connection = await asyncpg.connect(shop.url)
        try:
            operator = PostgresqlOperator(AsyncpgSession(connection))
            status = await operator.status()
            history = await operator.history("orders", 1)
            return (
                status,
                [change.detail for change in history],
                (await operator.records("orders", 1))[0].name or "",
            )
        finally:
            await connection.close()

    status, details, name = asyncio.run(told())
    own = shop.status()
    assert (status.guards[0].counts, status.guards[0].overrides) == (
        own.guards[0].counts,
        own.guards[0].overrides,
    )
    assert [detail["why"] for detail in details] == [r"a 'quote' and a \n backslash"]  # type: ignore[index]
    assert name == "orders/44"


def _count(verdict: str, ruling: str, mode: str, recent: int = 1, pattern: str | None = "*") -> DecisionCount:
    return DecisionCount(verdict, ruling, mode, 1, recent, NOW, "app", "cron", pattern)


@pytest.mark.parametrize(
    "mode, counts, following, safe",
    [
        ("observe", [_count("stale", "count", "observe")], "shadow", True),  # shadow stops nothing
        ("shadow", [], "canary", True),
        ("shadow", [_count("missing", "record", "shadow")], "canary", True),  # not stopped before require
        ("shadow", [_count("stale", "record", "shadow")], "canary", False),
        ("shadow", [_count("stale", "record", "shadow", recent=0)], "canary", True),
        ("shadow", [_count("stale", "record", "shadow", pattern="other/*")], "canary", True),
        ("shadow", [_count("stale", "record", "shadow", pattern=None)], "canary", False),
        ("shadow", [_count("stale", "refuse", "enforce", pattern=None)], "canary", True),
        ("canary(5%)", [_count("reused", "record", "canary(5%)")], "enforce", False),
        ("canary(5%)", [_count("stale", "refuse", "canary(5%)")], "enforce", False),
        ("enforce", [_count("stale", "refuse", "enforce")], "require", True),  # what it is there for
        ("enforce", [_count("missing", "count", "enforce")], "require", False),
        ("require", [_count("missing", "refuse", "require")], None, False),
    ],
)
def test_when_the_next_stage_is_safe(
    mode: str, counts: list[DecisionCount], following: str | None, safe: bool
) -> None:
    def next_after(days: float, **facts: object) -> tuple[str | None, bool]:
        stage = Stage("*", mode, NOW - timedelta(days=days))
        facts = {"marks": 1, "counts": tuple(counts), **facts}
        status = GuardStatus("t", "t", "retry", True, None, (stage,), **facts)  # type: ignore[arg-type]
        found = advised(status, NOW, DAY).stages[0].next
        return found.stage, found.safe

    assert next_after(1.1) == (following, safe)
    assert next_after(0.9) == (following, mode == "observe")
    override = Override("*", NOW, "me", "why")
    assert next_after(1.1, overrides=(override,)) == (following, mode == "observe")
    assert next_after(1.1, wrong=("a trigger is missing",)) == (following, False)
    assert next_after(1.1, marks=0, counts=()) == (following, mode == "observe"), "no stamp was judged"
