"""What a guard does for a statement does not grow with its rows: calls, lines of the setting, records. No time is
measured here; `make bench` does that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fenced
from fenced.sql import Guard
from fenced.testing.kit import stamp
from fenced.values.decision import Mode
from fenced_testkit.servers import PostgresqlServer
from tests.postgresql.planted_guard_sql import changed, functions

ROWS = 500
RECORDS_MAX = 10
"""How many lines of the audit one statement leaves for one verdict and stage."""
ORDERS = Guard(table="orders", name="orders/{id}")
TABLE = f"""
CREATE TABLE orders (id integer PRIMARY KEY, shop integer NOT NULL DEFAULT 7, qty integer NOT NULL DEFAULT 0);
INSERT INTO orders SELECT generate_series(1, {ROWS})"""

Db = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture(scope="module")
def kept(postgresql_server: PostgresqlServer) -> Iterator[Db]:
    name = postgresql_server.create_database()
    with psycopg.connect(postgresql_server.url(name), autocommit=True) as connection:
        connection.execute(TABLE.encode())
        connection.execute("SET track_functions = 'all'")
        ORDERS.install(connection)
        yield connection
    postgresql_server.drop_database(name)


@pytest.fixture
def db(kept: Db) -> Db:
    kept.execute("TRUNCATE fenced_guard.record, fenced_guard.mark, fenced_guard.lease")
    kept.execute("DELETE FROM fenced_guard.mode; UPDATE fenced_guard.trust SET realm = NULL")
    ORDERS.set_mode(kept, "observe")
    return kept


def one(db: Db, sql: str) -> Any:
    row = db.execute(sql.encode()).fetchone()
    assert row is not None
    return row[0]


def calls(db: Db) -> int:
    """How often functions of the guard were called in this transaction so far."""
    return int(
        one(
            db,
            "SELECT coalesce(sum(calls), 0) FROM pg_stat_xact_user_functions WHERE schemaname LIKE 'fenced%'",
        )
    )


def length(db: Db) -> int:
    return len(one(db, "SELECT coalesce(current_setting('fenced.stamp', true), '')"))


@pytest.mark.parametrize("mode", ["observe", "shadow", "canary(1%)", "enforce"])
@pytest.mark.parametrize("stamped", [None, 5, 4], ids=["none", "another name", "stale, another name"])
@pytest.mark.parametrize("required", [False, True], ids=["", "some required"])
def test_letting_rows_through_costs_no_more_for_many(
    db: Db, mode: str, stamped: int | None, required: bool
) -> None:
    """One UPDATE of 20,000 rows took minutes: each row was a record, and a line that every next row looked through."""
    if stamped is not None and mode in ("canary(1%)", "enforce"):
        ORDERS.set_mode(db, mode, "elsewhere/*")  # there they are refused
        mode = "shadow"
    ORDERS.set_mode(db, mode)
    if required:
        ORDERS.set_mode(db, "require", "orders/x*")
    db.execute(f"SELECT fenced_guard.announce_alone('{stamp(5, 0, 'orders/0')}')".encode())
    before = one(db, "SELECT count(*) FROM fenced_guard.record")
    with db.transaction():
        if stamped is not None:
            ORDERS.announce_within(db, stamp(stamped, 1, "orders/0"))
        called, noted = calls(db), one(db, "SELECT count(*) FROM fenced_guard.record")
        db.execute("UPDATE orders SET qty = qty + 1")
        assert calls(db) - called < 40
        assert one(db, "SELECT count(*) FROM fenced_guard.record") - noted <= RECORDS_MAX
        assert length(db) < 9000
    verdict = "missing" if stamped is None else "uncovered"
    counted = one(db, f"SELECT sum(count) FROM fenced_guard.record WHERE verdict = '{verdict}'")
    assert counted == ROWS, "and yet all are counted"
    assert one(db, "SELECT count(*) FROM fenced_guard.record") - before <= RECORDS_MAX + 1


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("rule", ["retry", "sequenced"])
@pytest.mark.parametrize("name", ["shops", "shops of one/7"])
def test_admitting_rows_costs_no_more_for_many(kept: Db, isolation: str, rule: str, name: str) -> None:
    """Ten thousand rows cost nine times as much wherever the setting did not open their name beforehand."""
    template = "shops/{shop}" if name == "shops" else "shops of one/{shop}"
    kept.execute("DROP TABLE IF EXISTS many CASCADE; CREATE TABLE many (LIKE orders INCLUDING ALL)")
    kept.execute("INSERT INTO many SELECT id FROM orders")
    guard = Guard(table="many", name=template, rule=rule)  # type: ignore[arg-type]
    guard.install(kept, mode="require")
    own = guard.name_for(shop=7)
    token = one(kept, "SELECT coalesce(max(token), 0) + 1 FROM fenced_guard.mark")
    try:
        for seq in (1, 2):
            fences = [stamp(token, seq, own), stamp(token + 1, seq, f"{own}/other")]
            kept.execute(
                f"SELECT fenced_guard.announce_alone('{fences[0]} {fences[1]}', 'public.many')".encode()
            )
            kept.execute(f"BEGIN ISOLATION LEVEL {isolation}".encode())
            guard.announce_within(kept, fences)
            called = calls(kept)
            kept.execute("UPDATE many SET qty = qty + 1")
            assert calls(kept) - called < 40
            kept.execute("COMMIT")
    finally:
        kept.execute("ROLLBACK")
        guard.uninstall(kept)
    assert one(kept, "SELECT min(qty) FROM many") == 2


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO sold SELECT i, i % 10 FROM generate_series(1, 100) AS i",
        "DELETE FROM sold",
        "UPDATE sold SET qty = 1",
    ],
)
def test_a_name_counts_once_however_many_rows_it_has(kept: Db, statement: str) -> None:
    rows = "INSERT INTO sold SELECT i, i % 10 FROM generate_series(1, 100) AS i"
    kept.execute("CREATE TABLE sold (id integer PRIMARY KEY, shop integer, qty integer)")
    kept.execute((rows if "INSERT" not in statement else "SELECT 1").encode())
    guard = Guard(table="sold", name="shops/{shop}")
    guard.install(kept, mode="shadow")
    try:
        with guard.transaction(kept, stamp(5_000_000, 1, "shops/0")) as tx:
            tx.execute(statement.encode())
        noted = (
            "SELECT verdict, sum(count)::int FROM fenced_guard.record WHERE guard = 'public.sold' GROUP BY 1"
        )
        assert kept.execute(noted.encode()).fetchall() == [("uncovered", 9)]
    finally:
        guard.uninstall(kept)
        kept.execute("DROP TABLE sold; DELETE FROM fenced_guard.record")


def test_many_names_of_many_leases_are_decided_together(db: Db) -> None:
    """Each row under its own name, and no epoch column: those that are announced, those that are not, and strangers."""
    names = [f"orders/{number}" for number in range(1, ROWS + 1)]
    ORDERS.set_mode(db, "require")
    leases = [
        stamp(5 + first, 1, *sorted(names[first : first + 64], key=str.encode))
        for first in range(0, ROWS, 64)
    ]
    for _ in range(2):  # marks rise, then leases are whole
        with ORDERS.transaction(db, leases) as tx:
            called = calls(db)
            tx.execute("UPDATE orders SET qty = qty + 1")
            assert calls(db) - called < 40
    for missing in (0, len(leases) - 1):
        with (
            pytest.raises(fenced.Uncovered) as caught,
            ORDERS.transaction(db, [*leases[:missing], *leases[missing + 1 :]]) as tx,
        ):
            tx.execute("UPDATE orders SET qty = 0")
        assert caught.value.name in leases[missing].names
    newer = stamp(5000, 1, names[70])
    with ORDERS.transaction(db, newer) as tx:
        tx.execute("UPDATE orders SET qty = 9 WHERE id = 71")
    with db.transaction(), pytest.raises(psycopg.DatabaseError, match="announce it too"), db.transaction():
        for lease in leases:  # one name of each is announced, and all are written
            ORDERS.announce_within(db, lease, lease.names[0])
        db.execute("UPDATE orders SET qty = 0")
    assert one(db, "SELECT min(qty) FROM orders") > 0


PATTERNS = ("*", "a*", "*b", "a/*", "a/b", "*_*", "%", "a\\*", "\u00e9*", "?", "**", "a*b*")
NAMES = ("a", "b", "a/b", "a/b/c", "x_y", "xzy", "%", "a\\b", "\u00e9t\u00e9", "?")
MODES = [Mode("observe"), Mode("shadow"), Mode("canary", 40.0), Mode("enforce"), Mode("require")]


@settings(max_examples=80, deadline=None)
@given(
    modes=st.dictionaries(st.sampled_from(PATTERNS), st.sampled_from(MODES)),
    lifted=st.sampled_from((*PATTERNS, "")),
    verdict=st.sampled_from(("missing", "uncovered")),
)
def test_many_names_are_ruled_on_as_each_is(
    kept: Db, modes: dict[str, Mode], lifted: str, verdict: str
) -> None:
    guard = "public.orders"
    with kept.transaction(force_rollback=True):
        kept.execute("DELETE FROM fenced_guard.mode; DELETE FROM fenced_guard.record")
        for pattern, mode in modes.items():
            kept.execute("SELECT fenced_guard.set_mode(%s, %s, %s)", (guard, str(mode), pattern))
        if lifted:
            kept.execute("SELECT fenced_guard.override_for(%s, '1 hour', 'test', %s)", (guard, lifted))

        def noted() -> list[tuple[Any, ...]]:
            rows = kept.execute(
                "WITH gone AS (DELETE FROM fenced_guard.record RETURNING *) SELECT ruling, mode, sum(count)::int, "
                "CASE verdict WHEN 'missing' THEN '' ELSE string_agg(name, ' ' ORDER BY name) END FROM gone "
                "GROUP BY ruling, mode, verdict ORDER BY 1, 2"
            )
            return rows.fetchall()

        let_through, refused = [], set()
        for name in NAMES:
            try:
                with kept.transaction():
                    kept.execute("SELECT fenced_guard.rule_on(%s, %s, NULL, %s)", (guard, name, verdict))
                let_through.append(name)
            except psycopg.DatabaseError as error:
                refused.add(error.sqlstate)
        each = noted()
        kept.execute("SELECT fenced_guard.rule_on_all(%s, %s, NULL, %s)", (guard, let_through, verdict))
        assert noted() == each
        if refused:
            with pytest.raises(psycopg.DatabaseError) as caught, kept.transaction():
                kept.execute(
                    "SELECT fenced_guard.rule_on_all(%s, %s, NULL, %s)", (guard, list(NAMES), verdict)
                )
            assert {caught.value.sqlstate} == refused


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE p (LIKE orders) PARTITION BY RANGE (id); ALTER TABLE p ATTACH PARTITION orders DEFAULT",
        "CREATE TABLE p (LIKE orders); ALTER TABLE orders INHERIT p",
    ],
)
def test_a_guarded_table_becomes_no_child(db: Db, statement: str) -> None:
    """A statement that names the parent would fire row triggers alone."""
    with pytest.raises(psycopg.DatabaseError, match="fenced_alone"), db.transaction():
        db.execute(statement.encode())


def test_a_partition_that_is_made_later_is_no_slower_for_ever(db: Db) -> None:
    """Decided row by row until the guard is installed again; then all at once, and directly, too."""
    db.execute("CREATE TABLE wide (id integer, qty integer) PARTITION BY RANGE (id)")
    guard = Guard(table="wide", name="wide/{id}")
    guard.install(db, mode="observe")
    db.execute("CREATE TABLE wide1 PARTITION OF wide FOR VALUES FROM (0) TO (1000)")
    db.execute("INSERT INTO wide SELECT generate_series(1, 500), 0")
    for table, made_later in (("wide1", True), ("wide1", False), ("wide", False)):
        with db.transaction():
            guard.announce_within(db, stamp(5, 1, "wide/0"))
            called = calls(db)
            db.execute(f"UPDATE {table} SET qty = 1".encode())
            assert (calls(db) - called > ROWS) == made_later
            assert length(db) < 9000
        guard.install(db)
    guard.uninstall(db)
    assert one(db, "SELECT count(*) FROM pg_trigger WHERE tgrelid = 'wide1'::regclass") == 0
    db.execute("DROP TABLE wide")


PLANTED = {
    "a name of the lease is enough": (
        "decide_all",
        "    IF w.announced THEN\n",
        "    IF true THEN\n",
    ),
    "what nobody covers is noted, and not ruled on": (
        "decide_all",
        "    PERFORM fenced_guard.rule_on_all(p_guard, v_left, v_last,\n",
        "    PERFORM concat(p_guard, v_left, v_last,\n",
    ),
    "the shortest pattern counts": (
        "rule_on_all",
        "ORDER BY length(pattern) DESC, pattern DESC",
        "ORDER BY length(pattern), pattern",
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(db: Db, bug: str) -> None:
    """Mistakes in what decides about many names at once: each lets a row through that is refused otherwise."""
    name, right, wrong = PLANTED[bug]
    ORDERS.set_mode(db, "enforce", "orders/*")
    lease = stamp(5, 1, "orders/0", *(f"orders/{number}" for number in range(1, 21)))

    def refused(rows: str) -> bool:
        try:
            with db.transaction(force_rollback=True):
                ORDERS.announce_within(db, lease, "orders/0")
                db.execute(f"UPDATE orders SET qty = 0 WHERE id {rows}".encode())
        except psycopg.DatabaseError as error:
            return error.sqlstate == "ZF005"
        return False

    written = ("BETWEEN 1 AND 20", "> 20")
    assert [refused(rows) for rows in written] == [True, True]
    with db.transaction(force_rollback=True):
        db.execute(changed(functions()[name], ((right, wrong),), bug).encode())
        assert [refused(rows) for rows in written] != [True, True]
