"""Every kind of write to a guarded PostgreSQL table needs every name that it touches, however it gets there."""

import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import fenced
from fenced.errors import Misconfigured, Misuse, Unsupported
from fenced.sql import Guard, refusal
from fenced.testing.kit import stamp
from fenced_testkit.servers import PostgresqlServer

Db = psycopg.Connection[tuple[object, ...]]

ORDERS = Guard(table="orders", name="orders/{id}")
LINES = Guard(table="lines", name="lines/{id}")

TABLES = """
CREATE TABLE orders (id integer PRIMARY KEY, qty integer, ref text UNIQUE);
INSERT INTO orders VALUES (42, 0, 'a'), (43, 0, 'b');
CREATE TABLE lines (id integer PRIMARY KEY, of integer REFERENCES orders ON DELETE CASCADE ON UPDATE CASCADE,
  gift integer REFERENCES orders ON DELETE SET NULL);
INSERT INTO lines VALUES (1, 42, NULL), (2, 43, 42);
CREATE TABLE other (id integer, qty integer);
INSERT INTO other VALUES (42, 7), (7, 7);

CREATE VIEW few AS SELECT id, qty FROM orders WHERE id < 100;
CREATE VIEW ruled AS SELECT id FROM orders;
CREATE RULE goes AS ON INSERT TO ruled DO INSTEAD UPDATE orders SET qty = -1 WHERE id = NEW.id;
CREATE FUNCTION bump(which integer) RETURNS void LANGUAGE plpgsql AS
  'BEGIN UPDATE orders SET qty = qty + 1 WHERE id = which; END';
CREATE FUNCTION swallow(which integer) RETURNS void LANGUAGE plpgsql AS
  'BEGIN UPDATE orders SET qty = qty + 1 WHERE id = which; EXCEPTION WHEN OTHERS THEN NULL; END';
CREATE TABLE inbox (id integer);
CREATE FUNCTION hand_on() RETURNS trigger LANGUAGE plpgsql AS
  'BEGIN DELETE FROM orders WHERE id = NEW.id; RETURN NULL; END';
CREATE TRIGGER hand_on AFTER INSERT ON inbox FOR EACH ROW EXECUTE FUNCTION hand_on();
CREATE CONSTRAINT TRIGGER hand_on_late AFTER UPDATE ON inbox DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW EXECUTE FUNCTION hand_on();
INSERT INTO inbox VALUES (7);
"""


@pytest.fixture(scope="module")
def url(postgresql_server: PostgresqlServer) -> Iterator[str]:
    database = postgresql_server.create_database()
    yield postgresql_server.url(database)
    postgresql_server.drop_database(database)


@pytest.fixture(scope="module")
def kept(url: str) -> Iterator[Db]:
    """Both tables guarded, in require; a test that uses it leaves every row as it was."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(TABLES.encode())
        ORDERS.install(connection, mode="require")
        LINES.install(connection, mode="require")
        yield connection


@pytest.fixture
def db(postgresql_url: str) -> Iterator[Db]:
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        yield connection


class Undo(Exception):
    """Roll back what the test did."""


def rows(db: Db) -> list[list[tuple[object, ...]]]:
    return [
        db.execute(f"SELECT * FROM {table} ORDER BY 1".encode()).fetchall() for table in ("orders", "lines")
    ]


def write(db: Db, fence: fenced.Stamp, statement: str, guard: Guard = ORDERS, *names: str) -> None:
    with guard.transaction(db, fence, *names) as tx:
        tx.execute(statement.encode())


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("INSERT INTO orders VALUES (7, 1)", {"orders/7"}),
        ("INSERT INTO orders VALUES (7, 1), (8, 1)", {"orders/7", "orders/8"}),
        ("INSERT INTO orders SELECT id + 10, 5 FROM other", {"orders/17", "orders/52"}),
        ("UPDATE orders SET qty = 1 WHERE id = 42", {"orders/42"}),
        ("UPDATE orders SET qty = 1", {"orders/42", "orders/43"}),
        ("UPDATE orders o SET qty = x.qty FROM other x WHERE x.id = o.id", {"orders/42"}),
        ("UPDATE orders SET qty = 1 WHERE id = 42 RETURNING qty", {"orders/42"}),
        ("DELETE FROM orders o USING other x WHERE x.id = o.id", {"orders/42", "lines/1", "lines/2"}),
        ("DELETE FROM orders WHERE id = 43", {"orders/43", "lines/2"}),  # a cascade
        ("DELETE FROM orders WHERE id = 42", {"orders/42", "lines/1", "lines/2"}),  # and SET NULL
        # Moving a row, by its key or not, needs both names; so does what is cascaded.
        ("UPDATE orders SET id = 9 WHERE id = 43", {"orders/43", "orders/9", "lines/2"}),
        ("UPDATE lines SET id = 9 WHERE id = 1", {"lines/1", "lines/9"}),
        ("INSERT INTO orders VALUES (42, 1) ON CONFLICT (id) DO UPDATE SET qty = 9", {"orders/42"}),
        ("INSERT INTO orders VALUES (7, 1, 'a') ON CONFLICT (ref) DO UPDATE SET qty = 9", {"orders/42"}),
        ("INSERT INTO orders VALUES (42, 1), (7, 1) ON CONFLICT DO NOTHING", {"orders/7"}),
        (
            "MERGE INTO orders o USING other x ON o.id = x.id WHEN MATCHED THEN UPDATE SET qty = 3 \
            WHEN NOT MATCHED THEN INSERT (id) VALUES (x.id)",
            {"orders/42", "orders/7"},
        ),
        ("MERGE INTO lines l USING other x ON l.of = x.id WHEN MATCHED THEN DELETE", {"lines/1"}),
        (
            "WITH gone AS (DELETE FROM lines WHERE id = 2 RETURNING of) \
            UPDATE orders SET qty = 1 WHERE id IN (SELECT of FROM gone)",
            {"lines/2", "orders/43"},
        ),
        ("WITH new AS (INSERT INTO orders VALUES (7, 1) RETURNING id) SELECT * FROM new", {"orders/7"}),
        ("INSERT INTO few VALUES (7, 1)", {"orders/7"}),
        ("UPDATE few SET qty = 1 WHERE id = 42", {"orders/42"}),
        ("INSERT INTO ruled VALUES (42)", {"orders/42"}),
        ("SELECT bump(42)", {"orders/42"}),
        ("DO 'BEGIN PERFORM bump(43); END'", {"orders/43"}),
        ("INSERT INTO inbox VALUES (43)", {"orders/43", "lines/2"}),  # out of the program's own trigger
        ("UPDATE inbox SET id = 43", {"orders/43", "lines/2"}),  # of a deferred one
        ("COPY orders FROM STDIN", {"orders/7", "orders/8"}),
    ],
)
def test_every_kind_of_write_needs_every_name(kept: Db, statement: str, names: set[str]) -> None:
    """With all names it goes through; with one of them missing, or none, nothing of it is seen."""
    before = rows(kept)

    def do() -> None:
        if not statement.startswith("COPY"):
            kept.execute(statement.encode())
        else:
            with kept.cursor().copy(statement.encode()) as copy:
                copy.write(b"7\t1\tx\n8\t1\ty\n")
        kept.execute("SET CONSTRAINTS ALL IMMEDIATE")

    with pytest.raises(psycopg.DatabaseError) as caught, kept.transaction():
        do()
    assert caught.value.sqlstate == "ZF007"
    assert isinstance(refusal(caught.value), fenced.MissingStamp)
    for missing in names:
        given = names - {missing} or {"elsewhere"}
        with pytest.raises(fenced.Uncovered) as refused, ORDERS.transaction(kept, stamp(5, 1, *given)):
            do()
        assert refused.value.name == missing
    assert rows(kept) == before
    with pytest.raises(Undo), ORDERS.transaction(kept, stamp(5, 1, *names)):
        do()
        assert rows(kept) != before
        raise Undo


def test_truncate_is_for_nobody_who_leases_rows(kept: Db) -> None:
    """Whichever rows there are: no lease of single names covers a TRUNCATE, also not one that comes by CASCADE."""
    before = rows(kept)
    everything = stamp(5, 1, "orders/42", "orders/43", "lines/1", "lines/2")
    for statement in ("TRUNCATE orders, lines", "TRUNCATE orders CASCADE", "TRUNCATE lines"):
        with pytest.raises(fenced.Uncovered):
            write(kept, everything, statement)
        with pytest.raises(psycopg.DatabaseError, match="no stamp"):
            kept.execute(statement.encode())
    assert rows(kept) == before


def test_truncate_under_one_name_and_by_the_strictest_mode(db: Db) -> None:
    db.execute("CREATE TABLE jobs (id text); INSERT INTO jobs VALUES ('a')")
    whole = Guard(table="jobs", name="jobs")
    whole.install(db, mode="require")
    write(db, stamp(5, 1, "jobs"), "TRUNCATE jobs", whole)
    with pytest.raises(fenced.StaleToken):
        write(db, stamp(4, 1, "jobs"), "TRUNCATE jobs", whole)
    whole.uninstall(db)
    each = Guard(table="jobs", name="jobs/{id}")
    each.install(db, mode="observe")
    db.execute("TRUNCATE jobs")
    each.set_mode(db, "require", "jobs/a")  # a row of it may be among those that would go
    each.set_mode(db, "shadow", "jobs/another")
    with pytest.raises(psycopg.DatabaseError, match="no stamp"):
        db.execute("TRUNCATE jobs")


def test_a_function_that_swallows_the_refusal_has_written_nothing(kept: Db) -> None:
    before = rows(kept)
    kept.execute("SELECT swallow(42)")
    write(kept, stamp(5, 1, "orders/43"), "SELECT swallow(42)")
    assert rows(kept) == before


@pytest.mark.parametrize("when", ["a_first", "zz_last"])
@pytest.mark.parametrize("epoch", [None, "epoch"])
def test_the_row_that_counts_is_the_one_that_is_stored(db: Db, when: str, epoch: str | None) -> None:
    """A trigger of the program's own moves the row, before ours or after it."""
    db.execute("CREATE TABLE t (id text PRIMARY KEY, qty integer)")
    guard = Guard(table="t", name="t/{id}", epoch=epoch)
    guard.install(db, mode="require")
    db.execute(
        "CREATE FUNCTION moves() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.id := 'other'; RETURN NEW; END $$"
    )
    write(db, stamp(5, 1, "t/mine"), "INSERT INTO t VALUES ('mine', 1)", guard)
    db.execute(
        f"CREATE TRIGGER {when} BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION moves()".encode()
    )
    for statement in ("INSERT INTO t VALUES ('new', 1)", "UPDATE t SET qty = 2"):
        with pytest.raises(fenced.Uncovered) as caught:
            write(db, stamp(5, 1, "t/mine", "t/new"), statement, guard)
        assert caught.value.name == "t/other"


@pytest.mark.parametrize(
    ("kind", "value", "name"),
    [
        ("text", "a/b", "t/a%2Fb"),
        ("text", "50%", "t/50%25"),
        ("text", "größe ✓", "t/größe ✓"),
        ("text", "o'clock \\n", "t/o'clock \\n"),
        ("varchar(9)", "a b", "t/a b"),
        ("char(9)", "a", "t/a"),
        ("name", "a", "t/a"),
        ("smallint", -3, "t/-3"),
        ("bigint", 2**62, f"t/{2**62}"),
        ("positive", 7, "t/7"),
        ("word", "a/b", "t/a%2Fb"),
        ("mood", "so/so", "t/so%2Fso"),
        ("moody", "fine", "t/fine"),
        ("uuid", uuid.UUID(int=5), f"t/{uuid.UUID(int=5)}"),
    ],
)
def test_database_and_client_make_the_same_name(db: Db, kind: str, value: object, name: str) -> None:
    """The database and `name_for` write every kind of column alike, and only the right lease covers the row."""
    db.execute("CREATE DOMAIN positive AS integer CHECK (VALUE > 0); CREATE DOMAIN word AS text")
    db.execute("CREATE TYPE mood AS ENUM ('fine', 'so/so'); CREATE DOMAIN moody AS mood")
    db.execute(f'CREATE TABLE "T" ("Key" {kind} PRIMARY KEY, n integer)'.encode())
    guard = Guard(table="T", name="t/{Key}")
    guard.install(db, mode="require")
    assert guard.name_for(Key=value) == name
    for token in (5, 5, 7):  # by the function, which judges, and by the setting, which it has written
        with guard.transaction(db, stamp(token, 1, name)) as tx:
            tx.execute('INSERT INTO "T" VALUES (%s, 1)', (value,))
            tx.execute('UPDATE "T" SET n = 2')
            tx.execute('UPDATE "T" SET "Key" = "Key"')
            tx.execute('DELETE FROM "T"')
        with pytest.raises(fenced.Uncovered), guard.transaction(db, stamp(6, 1, f"{name}x")) as tx:
            tx.execute('INSERT INTO "T" VALUES (%s, 1)', (value,))


@pytest.mark.parametrize("template", ["t/{id}", "{id}"])
def test_no_value_looks_like_a_line_of_the_setting(db: Db, template: str) -> None:
    """A row's name with line ends in it opened every other row of the table."""
    db.execute("CREATE TABLE t (id text, qty integer); INSERT INTO t VALUES ('t/a'), (NULL)")
    guard = Guard(table="t", name=template)
    guard.install(db, mode="enforce")
    guard.set_mode(db, "require", "t/*")
    guard.set_mode(db, "observe", "t/x*")
    guard.set_mode(db, "observe", "x*")
    attack = "INSERT INTO t VALUES (%s || E'\\n' || pg_current_xact_id() || %s)"
    with pytest.raises(psycopg.DatabaseError, match="no stamp"), db.transaction():
        db.execute(attack, ("x", "*public.t"))
        db.execute("UPDATE t SET qty = 1 WHERE id = 't/a'")
    with pytest.raises(psycopg.DatabaseError, match="no stamp"), db.transaction():
        db.execute("SELECT fenced_guard.decide('public.t', E'x\\n' || pg_current_xact_id() || '*public.t')")
        db.execute("UPDATE t SET qty = 1 WHERE id = 't/a'")
    with pytest.raises(psycopg.DatabaseError, match="not covered"), db.transaction():
        names = "x%0A' || pg_current_xact_id() || '*public.t"
        db.execute(
            f"SELECT fenced_guard.announce('{stamp(5, 1, 'x')}', p_guard => 'public.t', p_names => '{names}')"
        )
        db.execute("UPDATE t SET qty = 1 WHERE id = 't/a'")
    own = "a" if template == "{id}" else "t/a"
    for rest in ("@5", f" {stamp(5, 1, own)}"):
        with pytest.raises(fenced.Uncovered), guard.transaction(db, stamp(5, 1, own)) as tx:
            tx.execute(attack, ("a", rest))
    # A row without a name is covered by no lease, and is not in the way of those that have one.
    for statement in ("UPDATE t SET qty = 1 WHERE id IS NULL", "UPDATE t SET id = NULL"):
        with pytest.raises(fenced.Uncovered):
            write(db, stamp(6, 1, "t/a", "a"), statement, guard)


@pytest.mark.parametrize(
    ("create", "name", "error"),
    [
        (None, "t/{id}", Misconfigured),
        ("CREATE TABLE t (other integer)", "t/{id}", Misconfigured),
        ("CREATE VIEW t AS SELECT 1 AS id", "t/{id}", Unsupported),
        ("CREATE TABLE t (id float8)", "t/{id}", Unsupported),
        ("CREATE TABLE t (id timestamptz)", "t/{id}", Unsupported),
        ("CREATE TABLE t (id integer); CREATE TABLE c () INHERITS (t)", "t/{id}", Unsupported),
        ("CREATE TABLE r (id integer) PARTITION BY LIST (id); CREATE TABLE t PARTITION OF r DEFAULT", "t", Unsupported),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_guarded(db: Db, create: str | None, name: str, error: type[Exception]) -> None:
    db.execute((create or "SELECT 1").encode())
    with pytest.raises(error):
        Guard(table="t", name=name).install(db)
    with pytest.raises(Misuse):
        Guard(table="fenced_guard.mark", name="x").install(db)
    assert db.execute("SELECT to_regnamespace('fenced_guard') IS NULL").fetchone() == (True,)


def test_a_table_that_inherits_is_guarded_by_itself(db: Db) -> None:
    """Written through its parent or not. The parent is refused above: its triggers would not see these rows."""
    db.execute(
        "CREATE TABLE p (id integer, qty integer); CREATE TABLE c () INHERITS (p); INSERT INTO c VALUES (1)"
    )
    guard = Guard(table="c", name="c/{id}")
    guard.install(db, mode="require")
    for table in ("p", "c"):
        with pytest.raises(psycopg.DatabaseError, match="no stamp"):
            db.execute(f"UPDATE {table} SET qty = 1".encode())
    write(db, stamp(5, 1, "c/1"), "UPDATE p SET qty = 1", guard)


def test_long_names_and_another_schema(db: Db) -> None:
    """Two tables whose names differ in their last byte, in a schema with a long name of its own, do not meet."""
    schema, one, two = "s" * 63, "T" * 62 + "a", "T" * 62 + "b"
    db.execute(f'CREATE SCHEMA "{schema}"'.encode())
    guards = []
    for table in (one, two):
        db.execute(f'CREATE TABLE "{schema}"."{table}" ("{table}" integer, "Order" text)'.encode())
        guards.append(Guard(table=f"{schema}.{table}", name=f"{table}/{{{table}}}/{{Order}}", epoch="Epoch"))
        guards[-1].install(db, mode="require")
    for table, guard in zip((one, two), guards, strict=True):
        insert = f"""INSERT INTO "{schema}"."{table}" VALUES (1, 'x')"""
        with pytest.raises(psycopg.DatabaseError, match="no stamp"):
            db.execute(insert.encode())
        write(db, stamp(5, 1, f"{table}/1/x"), insert, guard)
    guards[0].uninstall(db)
    db.execute(f'TRUNCATE "{schema}"."{one}"'.encode())
    with pytest.raises(psycopg.DatabaseError, match="no stamp"):
        db.execute(f'TRUNCATE "{schema}"."{two}"'.encode())


def test_generated_columns(db: Db) -> None:
    db.execute("CREATE TABLE t (id integer, at text GENERATED ALWAYS AS ('k' || id % 10) STORED)")
    guard = Guard(table="t", name="t/{at}")
    guard.install(db, mode="require")
    write(db, stamp(5, 1, "t/k1"), "INSERT INTO t VALUES (1)", guard)
    with pytest.raises(fenced.Uncovered) as caught:
        write(db, stamp(5, 1, "t/k1"), "UPDATE t SET id = 2", guard)
    assert caught.value.name == "t/k2"
    write(db, stamp(6, 1, "t/k1", "t/k2"), "UPDATE t SET id = 2", guard)
    with pytest.raises(Unsupported, match="generated"):
        Guard(table="t", name="t/{at}", epoch="epoch").install(db)


# Partitions.


def test_partitions(db: Db) -> None:
    """Through the root or not, there before or made later: every write is decided, also one that moves a row."""
    db.execute(
        "CREATE TABLE t (id integer, qty integer) PARTITION BY RANGE (id);"
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10) PARTITION BY LIST (id);"
        "CREATE TABLE t1d PARTITION OF t1 DEFAULT; INSERT INTO t VALUES (1, 0)"
    )
    guard = Guard(table="t", name="t/{id}", epoch="epoch")
    guard.install(db, mode="require")
    db.execute("CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (10) TO (20)")
    db.execute("CREATE TABLE t3 (id integer, qty integer, epoch bigint); INSERT INTO t3 VALUES (21, 0)")
    db.execute("ALTER TABLE t ATTACH PARTITION t3 FOR VALUES FROM (20) TO (30)")

    def refused(*statements: str) -> None:
        for statement in statements:
            with pytest.raises(psycopg.DatabaseError, match="no stamp"):
                db.execute(statement.encode())

    for table, key in (("t1d", 1), ("t1", 1), ("t2", 11), ("t3", 21), ("t", 22)):
        refused(f"INSERT INTO {table} VALUES ({key}, 5)")
        write(db, stamp(5, 1, f"t/{key}"), f"INSERT INTO {table} VALUES ({key}, 5)", guard)
        refused(f"UPDATE {table} SET qty = 9", f"DELETE FROM {table}")
    with pytest.raises(fenced.Uncovered) as caught:
        write(db, stamp(5, 1, "t/11"), "UPDATE t SET id = 5 WHERE id = 11", guard)  # into another partition
    assert caught.value.name == "t/5"
    write(db, stamp(5, 1, "t/11", "t/5"), "UPDATE t SET id = 5 WHERE id = 11", guard)
    assert db.execute("SELECT epoch FROM t1d WHERE id = 5").fetchone() == (5,)

    # TRUNCATE has triggers of its own, which a new partition inherits only with the next installation.
    refused("TRUNCATE t", "TRUNCATE t1", "TRUNCATE t1d")
    db.execute("TRUNCATE t2")
    guard.install(db)
    refused("TRUNCATE t2", "TRUNCATE t3")
    db.execute("ALTER TABLE t DETACH PARTITION t3")
    guard.uninstall(db)
    for table in ("t1d", "t2", "t3", "t"):  # nothing is left, also not where it was detached
        db.execute(f"UPDATE {table} SET qty = 1; TRUNCATE {table}".encode())
    assert db.execute("SELECT count(*) FROM pg_trigger").fetchone() == (0,)


# The epoch column.


def test_the_epoch_column_keeps_the_token(db: Db) -> None:
    db.execute(TABLES.encode())
    guard = Guard(table="orders", name="orders/{id}", epoch="epoch")
    guard.install(db, mode="enforce")
    guard.install(db)

    def epochs() -> list[tuple[object, ...]]:
        return db.execute("SELECT epoch, qty FROM orders WHERE id IN (42, 43) ORDER BY id").fetchall()

    db.execute("UPDATE orders SET qty = 1")  # let through
    assert epochs() == [(0, 1), (0, 1)]
    write(db, stamp(5, 1), "UPDATE orders SET qty = 2 WHERE id = 42", guard)
    # Not the program's to say.
    write(db, stamp(5, 2), "UPDATE orders SET qty = 3, epoch = 999 WHERE id = 42", guard)
    assert epochs() == [(5, 3), (0, 1)]
    with guard.transaction(db, [stamp(6, 1, "orders/42"), stamp(7, 1, "orders/43")]) as tx:
        tx.execute("UPDATE orders SET qty = 4")
        tx.execute("UPDATE orders SET qty = qty + 1")
    assert epochs() == [(6, 5), (7, 5)]
    db.execute("UPDATE orders SET qty = 6")
    assert epochs() == [(6, 6), (7, 6)]
    others = [stamp(11, 1, "orders/50"), stamp(12, 1, "orders/51")]
    for statement in (
        "SELECT 1",
        "INSERT INTO orders VALUES (50, 0), (51, 0)",
    ):
        # New marks, then whole leases.
        with guard.transaction(db, others) as tx:
            tx.execute(statement.encode())
    assert db.execute("SELECT epoch FROM orders WHERE id > 43 ORDER BY id").fetchall() == [(11,), (12,)]
    write(db, stamp(8, 1, "orders/43", "lines/2"), "DELETE FROM orders WHERE id = 43", guard)
    with pytest.raises(fenced.StaleToken):  # the mark is not the row's
        write(db, stamp(7, 2, "orders/43"), "INSERT INTO orders VALUES (43, 0)", guard)
    write(db, stamp(8, 2, "orders/43"), "INSERT INTO orders (id, qty, epoch) VALUES (43, 9, 3)", guard)
    assert epochs() == [(6, 6), (8, 9)]
    guard.uninstall(db)
    assert db.execute("SELECT * FROM orders WHERE id = 43").fetchall() == [(43, 9, None)]


def test_an_epoch_column_that_was_there_stays(db: Db) -> None:
    db.execute("CREATE TABLE t (id integer, qty integer, epoch bigint NOT NULL)")
    guard = Guard(table="t", name="t/{id}", epoch="epoch")
    guard.install(db, mode="enforce")
    write(db, stamp(5, 1, "t/1"), "INSERT INTO t VALUES (1, 1)", guard)
    db.execute("INSERT INTO t VALUES (2, 1)")  # let through, under no token
    guard.uninstall(db)
    assert db.execute("SELECT * FROM t ORDER BY id").fetchall() == [(1, 1, 5), (2, 1, 0)]
    db.execute("ALTER TABLE t ALTER epoch TYPE integer")
    with pytest.raises(Misconfigured, match="bigint"):
        guard.install(db)


def test_a_rows_epoch_opens_no_fence_that_was_not_locked(db: Db) -> None:
    """The successor has announced, and not yet written: its row still carries the old token."""
    db.execute(TABLES.encode())
    guard = Guard(table="orders", name="orders/{id}", epoch="epoch")
    guard.install(db, mode="require")
    lenient = Guard(table="other", name="orders/{id}")
    lenient.install(db, mode="observe")
    both = ("orders/42", "orders/43")
    write(db, stamp(5, 1, *both), "UPDATE orders SET qty = 5", guard)
    write(db, stamp(6, 0, "orders/43"), "SELECT 1", guard)
    with pytest.raises(fenced.Uncovered):  # a part of the lease is announced, another part written
        write(db, stamp(5, 2, *both), "UPDATE orders SET qty = 9 WHERE id = 43", guard, "orders/42")
    with pytest.raises(fenced.StaleToken):  # announced to a guard that only observes
        write(db, stamp(5, 3, *both), "UPDATE orders SET qty = 9 WHERE id = 43", lenient)
    assert db.execute("SELECT max(qty) FROM orders").fetchone() == (5,)


@pytest.mark.parametrize("rule", ["retry", "sequenced"])
def test_values_of_the_programs_own_are_no_tokens(db: Db, rule: Any) -> None:
    """A `version` column of an ORM holds 1, 2, 3: they opened the rows of every low token."""
    db.execute("CREATE TABLE t (id integer, version bigint); INSERT INTO t VALUES (1, 0), (2, 5), (3, NULL)")
    guard = Guard(table="t", name="t/{id}", epoch="version", rule=rule)
    with pytest.raises(Misconfigured, match=r"column version of public.t.*SET \"version\" = 0"):
        guard.install(db, mode="require")
    assert db.execute("SELECT to_regnamespace('fenced_guard') IS NULL").fetchone() == (True,)
    db.execute("UPDATE t SET version = 0 WHERE version <> 0")
    guard.install(db, mode="require")
    write(db, stamp(5, 1, "t/2"), "UPDATE t SET version = 7 WHERE id = 2", guard)
    guard.install(db)  # what is there now is its own
    with pytest.raises(fenced.Uncovered):
        write(db, stamp(6, 1, "t/1"), "UPDATE t SET version = 7 WHERE id = 2", guard)
    assert db.execute("SELECT version FROM t WHERE id = 2").fetchone() == (5,)
