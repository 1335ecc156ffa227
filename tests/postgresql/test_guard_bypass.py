"""Who can go round the PostgreSQL guard, and who cannot: by settings, by rights, by other ways in and out."""

import json
import secrets
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

import fenced
from fenced.sql import Guard
from fenced.testing.kit import stamp
from fenced_testkit.servers import Pgbouncer, PostgresqlServer
from fenced_testkit.servers.base import find_program
from tests.conftest import NewDatabase

Db = psycopg.Connection[tuple[object, ...]]

ORDERS = Guard(table="orders", name="orders/{id}")
TABLE = (
    "CREATE TABLE orders (id integer PRIMARY KEY, qty integer); INSERT INTO orders VALUES (42, 0), (43, 0)"
)
UPDATE = "UPDATE orders SET qty = qty + 1 WHERE id = 42"
own_worker = pytest.mark.xdist_group("postgresql")


def prepare(connection: Db) -> None:
    connection.execute(TABLE)
    ORDERS.install(connection, mode="require")


@pytest.fixture
def postgresql_url(new_database: NewDatabase) -> str:
    return new_database(prepare)


@pytest.fixture
def db(postgresql_url: str) -> Iterator[Db]:
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def other(postgresql_url: str) -> Iterator[Db]:
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def role(postgresql_server: PostgresqlServer) -> Iterator[str]:
    """A role that may log in, and nothing else."""
    name = f"role_{secrets.token_hex(4)}"
    postgresql_server.execute(f"CREATE ROLE {name} LOGIN")
    yield name
    postgresql_server.execute(f"DROP ROLE {name}")


@pytest.fixture
def writer(db: Db, postgresql_url: str, role: str) -> Iterator[Db]:
    """A writer with the rights that writing takes."""
    db.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON orders TO {role}".encode())
    with psycopg.connect(postgresql_url.replace("postgres@", f"{role}@"), autocommit=True) as connection:
        yield connection
    db.execute(f"DROP OWNED BY {role} CASCADE".encode())


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresqlServer]:
    """With what the shared one has not: prepared transactions and logical decoding."""
    with PostgresqlServer({"wal_level": "logical", "max_prepared_transactions": "5"}) as server:
        yield server


def write(db: Db, fence: fenced.Stamp, statement: str = UPDATE, guard: Guard = ORDERS) -> None:
    with guard.transaction(db, fence) as tx:
        tx.execute(statement.encode())


def one(db: Db, query: str) -> object:
    found = db.execute(query.encode()).fetchone()
    assert found is not None
    return found[0]


def refused(db: Db, *statements: str) -> None:
    """In one transaction; the last of them is refused for want of a stamp."""
    *first, last = statements
    with db.transaction(force_rollback=True):
        for statement in first:
            db.execute(statement.encode())
        with pytest.raises(psycopg.DatabaseError) as caught:
            db.execute(last.encode())
    assert caught.value.sqlstate == "ZF007"


@own_worker
def test_a_crash_does_not_change_the_count_of_refusals(own_server: PostgresqlServer) -> None:
    """A sequence jumps ahead otherwise: the server writes the next 32 numbers into its log at once."""
    url = own_server.url(own_server.create_database())
    with psycopg.connect(url, autocommit=True) as db:
        prepare(db)
        for _ in range(3):
            refused(db, UPDATE)
        before = one(db, "SELECT fenced_guard.refusals('public.orders')")
        write(db, stamp(5))  # its COMMIT flushes the log
    own_server.kill()
    own_server.start()
    with psycopg.connect(url, autocommit=True) as db:
        assert (before, one(db, "SELECT fenced_guard.refusals('public.orders')")) == (3, 3)
        refused(db, UPDATE)
        assert one(db, "SELECT fenced_guard.refusals('public.orders')") == 4


def test_a_closed_connection(postgresql_url: str) -> None:
    closed = psycopg.connect(postgresql_url)
    closed.close()
    with pytest.raises(fenced.Misuse, match="this connection is closed"):
        write(closed, stamp(5))


def test_refusals_at_the_same_time_are_all_counted(db: Db, postgresql_url: str) -> None:
    def late(_: int) -> None:
        with psycopg.connect(postgresql_url, autocommit=True) as mine:
            for _ in range(20):
                refused(mine, UPDATE)

    assert one(db, "SELECT fenced_guard.refusals('public.orders')") == 0
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(late, range(4)))
    assert one(db, "SELECT fenced_guard.refusals('public.orders')") == 80


# The setting.


def test_a_stamp_counts_in_its_own_transaction_only(db: Db) -> None:
    with ORDERS.transaction(db, stamp(5)) as tx:
        old = str(one(tx, "SELECT current_setting('fenced.stamp')"))
        tx.execute(UPDATE)
    assert one(db, "SELECT current_setting('fenced.stamp', true)") == ""
    again = old.replace("'", "''")
    refused(db, f"SET LOCAL fenced.stamp = '{again}'", UPDATE)
    db.execute(f"SET fenced.stamp = '{again}'".encode())
    refused(db, UPDATE)
    write(db, stamp(5, 2))  # nor is an announcement confused by what was left
    refused(db, UPDATE)
    with pytest.raises(fenced.MissingStamp), ORDERS.transaction(db, stamp(5, 3)) as tx:
        tx.execute("RESET ALL")
        tx.execute(UPDATE)
    db.execute("DISCARD ALL")
    refused(db, UPDATE)
    refused(db, "SELECT fenced_guard.announce('')", UPDATE)  # no stamp at all


def test_a_stamp_stays_behind_on_no_pooled_connection(
    db: Db, pgbouncer: Pgbouncer, postgresql_url: str
) -> None:
    database = postgresql_url.rpartition("/")[2]
    address = pgbouncer.url(database)
    with (
        psycopg.connect(address, autocommit=True, prepare_threshold=None) as first,
        psycopg.connect(address, autocommit=True, prepare_threshold=None) as second,
    ):
        with ORDERS.transaction(first, stamp(5)) as tx:
            old = str(one(tx, "SELECT current_setting('fenced.stamp')"))
            server = one(tx, "SELECT pg_backend_pid()")
        assert one(second, "SELECT pg_backend_pid()") == server
        refused(second, UPDATE)
        # Leaks to the next client, and counts for nobody.
        first.execute(f"SET fenced.stamp = '{old}'".encode())
        assert one(second, "SELECT current_setting('fenced.stamp')") == old
        refused(second, UPDATE)
        write(second, stamp(6))
        with pytest.raises(fenced.StaleToken):
            write(first, stamp(5, 2))


def test_savepoints(db: Db, other: Db) -> None:
    with ORDERS.transaction(db, stamp(5)) as tx:
        tx.execute("SAVEPOINT s")
        tx.execute("UPDATE orders SET qty = 9 WHERE id = 42")
        tx.execute("ROLLBACK TO s")
        tx.execute(UPDATE)
        tx.execute("RELEASE s")
    assert one(db, "SELECT qty FROM orders WHERE id = 42") == 1
    # What was announced inside goes with it: the stamp, the mark, the lock on the fence.
    db.execute("BEGIN")
    db.execute("SAVEPOINT s")
    ORDERS.announce_within(db, stamp(7))
    db.execute(UPDATE)
    db.execute("ROLLBACK TO s")
    other.execute("SET lock_timeout = '5s'")
    write(other, stamp(6))
    with pytest.raises(psycopg.DatabaseError, match="no stamp"):
        db.execute(UPDATE)
    db.execute("ROLLBACK")
    mark = ORDERS.peek(db, "orders/42")
    assert mark is not None and mark.token == 6
    with db.transaction():  # a released one is a part of the transaction
        with db.transaction():
            ORDERS.announce_within(db, stamp(8))
        db.execute(UPDATE)


# proves guard postgresql: prepared-blocks
@own_worker
def test_a_prepared_transaction_keeps_its_fences(own_server: PostgresqlServer) -> None:
    """Its connection is gone, and its lease may be over: its successor waits until somebody decides."""
    url = own_server.url(own_server.create_database())
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(TABLE)
        ORDERS.install(db, mode="require")
        with psycopg.connect(url, autocommit=True) as holder:
            holder.execute("BEGIN")
            ORDERS.announce_within(holder, stamp(5))
            holder.execute(UPDATE)
            holder.execute("PREPARE TRANSACTION 'left'")
        db.execute("SET lock_timeout = '100ms'")
        with pytest.raises(fenced.Contended):
            write(db, stamp(6))
        db.execute("COMMIT PREPARED 'left'")
        write(db, stamp(6))
        with pytest.raises(fenced.StaleToken):
            write(db, stamp(5, 2))
        assert one(db, "SELECT qty FROM orders WHERE id = 42") == 2


# Rights.


def test_a_writer_has_no_more_rights_than_it_needs(db: Db, writer: Db, role: str) -> None:
    for number, mode in enumerate(("observe", "shadow", "canary(50%)", "enforce", "require")):
        ORDERS.set_mode(db, mode)
        write(writer, stamp(10 + number))
        write(writer, stamp(10 + number, 2))
    with pytest.raises(fenced.StaleToken):
        write(writer, stamp(5))
    assert one(db, "SELECT who FROM fenced_guard.record WHERE ruling = 'refuse'") == role, "and tells of it"
    relations = "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'fenced_guard'::regnamespace "
    rights = "SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER"
    assert (
        db.execute(
            f"{relations} AND relkind = 'r' AND has_table_privilege('{role}', oid, '{rights}')".encode()
        ).fetchall()
        == []
    )
    usable = f"CASE relkind WHEN 'S' THEN has_sequence_privilege('{role}', oid, 'USAGE, SELECT, UPDATE') END"
    assert db.execute(f"{relations} AND {usable}".encode()).fetchall() == []
    functions = db.execute(
        "SELECT DISTINCT proname FROM pg_proc WHERE pronamespace = 'fenced_guard'::regnamespace "
        f"AND prorettype <> 'trigger'::regtype AND has_function_privilege('{role}', oid, 'EXECUTE')".encode()
    ).fetchall()
    assert {name for (name,) in functions} == {
        *("version", "installed", "announce", "announce_alone", "peek", "report", "still_stamped"),
        *("in_the_way", "make_way", "expect_rule"),
        *("begin_work", "check_worker", "announce_claim", "over_workers", "idle_until"),
    }
    for attempt in (
        "ALTER TABLE orders DISABLE TRIGGER fenced_update",
        "DROP TRIGGER fenced_update ON orders",
        "SET session_replication_role = replica",
        "TRUNCATE orders",
        "CREATE TRIGGER mine BEFORE UPDATE ON orders EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        "CREATE TABLE fenced_guard.mine (id integer)",
        "SELECT fenced_guard.set_mode('public.orders', 'observe')",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            writer.execute(attempt.encode())


def test_functions_are_pinned_and_the_installers(db: Db) -> None:
    ORDERS.install(db)
    Guard(table="orders", name="orders/{id}", epoch="epoch").install(db, replace=True)
    loose = db.execute(
        "SELECT proname FROM pg_proc WHERE pronamespace = 'fenced_guard'::regnamespace AND "
        "(proowner <> 'postgres'::regrole OR NOT coalesce(proconfig, '{}') @> ARRAY['search_path=pg_catalog, pg_temp'])"
    ).fetchall()
    assert loose == []


def test_a_hostile_search_path_changes_nothing(db: Db, writer: Db, role: str) -> None:
    """Neither the writer's, while it writes, nor what it left for whoever installs."""
    db.execute(f"GRANT CREATE ON SCHEMA public TO {role}".encode())
    db.execute(f"GRANT TEMPORARY, CREATE ON DATABASE {db.info.dbname} TO {role}".encode())
    writer.execute(
        "CREATE SCHEMA evil;"
        "CREATE FUNCTION evil.strpos(text, text) RETURNS integer LANGUAGE sql AS 'SELECT 1';"
        "CREATE FUNCTION evil.current_setting(text, boolean) RETURNS text LANGUAGE sql AS $$ SELECT 'x' $$;"
        "CREATE FUNCTION evil.equal(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT true';"
        "CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.equal);"
        "CREATE FUNCTION concat(text, xid8, text, text, integer, text) RETURNS text LANGUAGE sql AS $$ SELECT '' $$;"
        "CREATE TEMP TABLE guard (guard text, rule text); CREATE TEMP TABLE mode (guard text, mode text, likes text)"
    )
    writer.execute("SET search_path = pg_temp, evil, public, pg_catalog")
    refused(writer, "SET LOCAL fenced.stamp = 'x'", UPDATE)
    with pytest.raises(fenced.Uncovered):
        write(writer, stamp(5, 1, "orders/43"))
    write(writer, stamp(5))
    db.execute("SET search_path = evil, public, pg_catalog")
    ORDERS.install(db)
    db.execute("RESET search_path")
    refused(writer, "SET LOCAL fenced.stamp = 'x'", UPDATE)
    write(writer, stamp(5, 2))


def test_a_types_owner_runs_nothing_as_the_guards_owner(db: Db, writer: Db, role: str) -> None:
    db.execute(f"GRANT CREATE ON SCHEMA public TO {role}".encode())
    writer.execute(
        "CREATE TYPE mood AS ENUM ('fine'); CREATE TABLE moods (m mood);"
        "CREATE FUNCTION evil(mood) RETURNS text LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE WARNING '%', current_user; RETURN 'x'; END $$;"
        "CREATE CAST (mood AS text) WITH FUNCTION evil(mood)"
    )
    guard = Guard(table="moods", name="moods/{m}")
    guard.install(db, mode="enforce")
    ran_as = []
    writer.add_notice_handler(lambda told: ran_as.append(told.message_primary))
    writer.execute("INSERT INTO moods VALUES ('fine')")
    assert ran_as == []


# proves guard postgresql: owner-bypass
@pytest.mark.parametrize(
    ("right", "way"),
    [
        ("ALTER TABLE orders OWNER TO {role}", "ALTER TABLE orders DISABLE TRIGGER ALL"),
        ("ALTER TABLE orders OWNER TO {role}", "DROP TRIGGER fenced_update ON orders"),
        (
            "GRANT TRIGGER ON orders TO {role}",
            "CREATE OR REPLACE TRIGGER fenced_update AFTER UPDATE ON orders FOR EACH ROW WHEN (false) \
            EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        ),
        ("GRANT SET ON PARAMETER session_replication_role TO {role}", "SET session_replication_role = replica"),
        ("SELECT 1", "SELECT set_config('fenced.stamp', E'\\n' || pg_current_xact_id() || E'/orders/42\\n', true)"),
    ],
)  # fmt: skip
def test_each_documented_bypass_needs_its_right(db: Db, writer: Db, role: str, right: str, way: str) -> None:
    """Each of these works; without the right it does not, and against the last there are proofs."""
    refused(writer, UPDATE)
    db.execute(right.format(role=role).encode())
    with writer.transaction():
        writer.execute(way.encode())
        writer.execute(UPDATE)
    assert one(db, "SELECT qty FROM orders WHERE id = 42") == 1
    db.execute("ALTER TABLE orders OWNER TO postgres")
    db.execute(f"GRANT SELECT, UPDATE ON orders TO {role}".encode())
    ORDERS.install(db)  # puts everything back that was dropped or replaced
    db.execute("ALTER TABLE orders ENABLE TRIGGER ALL")
    if way.startswith("SELECT"):
        db.execute("UPDATE fenced_guard.trust SET proof = true")
        ORDERS.install(db)
        refused(writer, way, UPDATE)
    else:
        writer.execute("RESET ALL")
        refused(writer, UPDATE)


# Other ways in and out.


# proves guard postgresql: mandatory, shell-unrecorded
def test_psql_goes_on_in_the_first_four_stages_and_is_refused_in_require(db: Db, postgresql_url: str) -> None:
    def type_in(statement: str) -> str:
        command = [
            find_program("psql", "postgresql-client"),
            "-Xqv",
            "VERBOSITY=verbose",
            postgresql_url,
            "-c",
            statement,
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stderr

    write(db, stamp(5))
    for mode in ("observe", "shadow", "canary(100%)", "enforce"):
        ORDERS.set_mode(db, mode)
        assert type_in(UPDATE) == ""
    assert one(db, "SELECT count(*) FROM fenced_guard.record WHERE verdict = 'missing'") == 4
    ORDERS.set_mode(db, "require")
    said = type_in(UPDATE)
    assert "ERROR:  ZF007: fenced: orders/42: the write carries no stamp" in said
    assert "fenced_guard.announce" in said, "and what would do"
    assert one(db, "SELECT count(*) FROM fenced_guard.record WHERE ruling = 'refuse'") == 0
    assert one(db, 'SELECT last_value FROM fenced_guard."public.orders refused"') == 1, "but counted"
    assert one(db, "SELECT qty FROM orders WHERE id = 42") == 5
    ORDERS.uninstall(db)
    assert type_in(UPDATE) == ""


# proves guard postgresql: refusals-counted
@own_worker
def test_a_refusal_that_nobody_reports_is_counted_and_in_the_log(own_server: PostgresqlServer) -> None:
    """The transaction is rolled back; the sequence and a message in the write-ahead log are not."""
    url = own_server.url(own_server.create_database())
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(TABLE)
        ORDERS.install(db, mode="require")
        write(db, stamp(6))
        db.execute("SELECT pg_create_logical_replication_slot('audit', 'test_decoding')")
        for _ in range(3):
            refused(db, UPDATE)
        with pytest.raises(psycopg.DatabaseError, match="stale"), db.transaction():
            db.execute(f"SELECT fenced_guard.announce('{stamp(5)}', NULL, 'public.orders')".encode())
        assert one(db, 'SELECT last_value FROM fenced_guard."public.orders refused"') == 4
        write(db, stamp(6, 2))  # the log is flushed with the next commit
        found = db.execute("SELECT data FROM pg_logical_slot_get_changes('audit', NULL, NULL)").fetchall()
        messages = [str(text).partition("content:")[2] for (text,) in found if "prefix: fenced" in str(text)]
        told = [json.loads(message) for message in messages]
        assert [one["verdict"] for one in told] == ["missing"] * 3 + ["stale"]
        assert (told[3]["mark"], told[3]["stamp"], told[3]["name"]) == (6, str(stamp(5)), "orders/42")
        db.execute("SELECT pg_drop_replication_slot('audit')")


@own_worker
def test_logical_replication(own_server: PostgresqlServer) -> None:
    """What the publisher has decided is applied as it is; writes made at the subscriber are decided there."""
    source, target = own_server.create_database(), own_server.create_database()
    with (
        psycopg.connect(own_server.url(source), autocommit=True) as publisher,
        psycopg.connect(own_server.url(target), autocommit=True) as subscriber,
    ):
        publisher.execute(TABLE)
        subscriber.execute(TABLE)
        for db in (publisher, subscriber):
            ORDERS.install(db, mode="require")
        publisher.execute("CREATE PUBLICATION p FOR TABLE orders")
        publisher.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        where = f"host={own_server.host} port={own_server.port} user=postgres dbname={source}"
        options = "create_slot = false, slot_name = 's', copy_data = false"
        subscriber.execute(
            f"CREATE SUBSCRIPTION s CONNECTION '{where}' PUBLICATION p WITH ({options})".encode()
        )
        write(publisher, stamp(5))
        arrived = "SELECT qty FROM orders WHERE id = 42"
        own_server.wait_until(lambda: one(subscriber, arrived) == 1, "the write is replicated")
        assert one(subscriber, "SELECT count(*) FROM fenced_guard.mark") == 0, "marks are not replicated"
        refused(subscriber, UPDATE)
        write(subscriber, stamp(5))
        subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
        subscriber.execute("ALTER SUBSCRIPTION s SET (slot_name = NONE)")
        subscriber.execute("DROP SUBSCRIPTION s")
        own_server.wait_until(
            lambda: one(publisher, "SELECT active FROM pg_replication_slots") is False, "the slot is free"
        )
        publisher.execute("SELECT pg_drop_replication_slot('s')")


def test_a_publication_of_all_tables(new_database: NewDatabase) -> None:
    """It publishes marks, too, and its subscribers stop for want of those tables: the installation says so."""
    with psycopg.connect(new_database(), autocommit=True) as db:
        db.execute(TABLE)
        db.execute('CREATE SCHEMA "Other"; CREATE TABLE "Other".t (id integer PRIMARY KEY)')
        db.execute("CREATE PUBLICATION everything FOR ALL TABLES")
        with pytest.warns(UserWarning, match="publication everything is FOR ALL TABLES") as told:
            ORDERS.install(db, mode="require")
        command = str(told[0].message).partition("only the other tables: ")[2].partition("; and at each")[0]
        assert f"{command};".encode() in ORDERS.script(db).replace("; and at each", ";; and at each").encode()
        db.execute(command.encode())
        db.execute("DROP PUBLICATION everything")
        published = db.execute(
            "SELECT schemaname, tablename FROM pg_publication_tables ORDER BY 1, 2"
        ).fetchall()
        assert published == [("Other", "t"), ("public", "orders")]
        ORDERS.install(db)  # and nothing is said
        db.execute("CREATE PUBLICATION everything FOR ALL TABLES")
        write(db, stamp(5))  # every table of ours has an identity: nothing fails where it is published
        with pytest.raises(fenced.StaleToken):
            write(db, stamp(4))
        with pytest.warns(UserWarning, match="ALL TABLES"):
            ORDERS.install(db, mode="observe")
        write(db, stamp(4))
        db.execute("SELECT fenced_guard.tidy_up(0), fenced_guard.reset('orders/42', 'test')")
        db.execute("SELECT fenced_guard.override_for('public.orders', '1 minute', 'test')")
        db.execute("SELECT fenced_guard.end_overrides('public.orders')")


# proves guard postgresql: durable-marks
def test_dump_and_restore(db: Db, postgresql_server: PostgresqlServer, postgresql_url: str) -> None:
    """A whole database comes back guarded, marks and modes included; a table by itself comes without its guard."""
    Guard(table="orders", name="orders/{id}", epoch="epoch").install(db, replace=True)
    write(db, stamp(6))
    refused(db, UPDATE)

    def dump(*options: str) -> bytes:
        return subprocess.run(
            [find_program("pg_dump", "postgresql-client"), *options, postgresql_url],
            capture_output=True,
            check=True,
        ).stdout

    def restore(text: bytes, url: str) -> tuple[int, str]:
        command = [find_program("psql", "postgresql-client"), "-Xqv", "ON_ERROR_STOP=1", url]
        done = subprocess.run(command, input=text, capture_output=True)
        return done.returncode, done.stderr.decode()

    whole, alone = dump(), dump("-t", "orders")
    databases = [postgresql_server.create_database() for _ in range(2)]
    try:
        assert restore(whole, postgresql_server.url(databases[0])) == (0, "")
        with psycopg.connect(postgresql_server.url(databases[0]), autocommit=True) as restored:
            refused(restored, UPDATE)
            with pytest.raises(fenced.StaleToken):
                write(restored, stamp(5))
            write(restored, stamp(6, 2))
            assert one(restored, "SELECT epoch FROM orders WHERE id = 42") == 6
            assert one(restored, 'SELECT last_value FROM fenced_guard."public.orders refused"') == 3
            ORDERS.uninstall(restored)
        status, said = restore(alone, postgresql_server.url(databases[1]))
        assert status != 0 and 'schema "fenced_guard" does not exist' in said
        with psycopg.connect(postgresql_server.url(databases[1]), autocommit=True) as restored:
            restored.execute(UPDATE)  # the rows are there, without triggers
            ORDERS.install(restored, mode="require")
            refused(restored, UPDATE)
        db.execute("DROP TABLE orders")
        assert restore(alone, postgresql_url) == (0, "")  # where the guard is known it finds it again
        refused(db, UPDATE)
        with pytest.raises(fenced.StaleToken):
            write(db, stamp(5, 3))
    finally:
        for name in databases:
            postgresql_server.drop_database(name)


def test_altering_a_guarded_table(db: Db) -> None:
    db.execute("ALTER TABLE orders ADD COLUMN note text DEFAULT 'x'")
    write(db, stamp(5))
    refused(db, UPDATE)
    for statement in ("ALTER TABLE orders DROP COLUMN id", "ALTER TABLE orders ALTER id TYPE bigint"):
        with pytest.raises(psycopg.Error, match="trigger fenced_"):
            db.execute(statement.encode())
    # Under its new name the same guard goes on, as the old one.
    db.execute("ALTER TABLE orders RENAME TO renamed")
    refused(db, "UPDATE renamed SET qty = 1")
    write(db, stamp(5, 2), "UPDATE renamed SET qty = 1 WHERE id = 42")
    # A column of the template under a new name: nothing that has to be decided passes until the guard is told.
    db.execute("ALTER TABLE renamed RENAME TO orders")
    db.execute("ALTER TABLE orders RENAME COLUMN id TO number")
    for mode in ("require", "observe"):
        ORDERS.set_mode(db, mode)
        with pytest.raises(psycopg.errors.UndefinedColumn):
            db.execute("UPDATE orders SET qty = 9")
    with pytest.raises(fenced.Misconfigured, match=r"no longer has.* fenced guard install .*--replace"):
        write(db, stamp(6), "UPDATE orders SET qty = 9 WHERE number = 42")
    with pytest.raises(psycopg.errors.UndefinedColumn), ORDERS.transaction(db, stamp(6)) as tx:
        # A mistake of the program's own statement stays its driver's error.
        tx.execute("SELECT nothing FROM orders")
    told = Guard(table="orders", name="orders/{number}")
    told.install(db, mode="require", replace=True)
    refused(db, "UPDATE orders SET qty = 9")
    write(db, stamp(6), "UPDATE orders SET qty = 9 WHERE number = 42", told)
    db.execute("DROP TABLE orders")
    told.uninstall(db)  # also when there is nothing left of it


# Observing.


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("mode", ["observe", "shadow"])
def test_observing_never_blocks_nor_fails(db: Db, other: Db, mode: str, isolation: str) -> None:
    """Whatever others have locked and whatever is announced; five seconds would be a block."""
    for token in (5, 6):
        write(db, stamp(token))
    ORDERS.set_mode(db, mode)
    db.execute("SET statement_timeout = '5s'")

    def everything() -> None:
        db.execute(UPDATE)
        for text in (
            str(stamp(5)),
            str(stamp(7)),
            "",
            "nonsense",
            "1:2:3 4:5:6",
            f"{stamp(5)} x",
            "?\n*",
            "%" * 5000,
        ):
            with db.transaction():
                db.execute("SELECT fenced_guard.announce(%s, 60000, 'public.orders')", (text,))
                db.execute(UPDATE)
        for fence in (stamp(5, 2), stamp(7, 3), stamp(7, 3, realm="00000000000000bb")):
            write(db, fence)

    db.execute(f"SET default_transaction_isolation = '{isolation}'".encode())
    before = int(str(one(db, "SELECT qty FROM orders WHERE id = 42")))
    writes = 0
    for lock in (
        "SELECT * FROM fenced_guard.mark FOR UPDATE",
        "LOCK TABLE fenced_guard.record",
        "SELECT * FROM fenced_guard.trust, fenced_guard.mode, fenced_guard.guard FOR UPDATE",
        "SELECT 1",
    ):
        with other.transaction():
            other.execute(lock.encode())
            everything()
            writes += 12
    assert one(db, "SELECT qty FROM orders WHERE id = 42") == before + writes
    assert one(db, "SELECT count(*) FROM fenced_guard.record WHERE verdict = 'stale'") != 0
    assert one(db, "SELECT last_value FROM fenced_guard.unrecorded") != 0, "what was locked out was counted"


def test_many_rows_without_a_stamp_are_one_record(db: Db) -> None:
    ORDERS.set_mode(db, "shadow")
    with db.transaction():
        db.execute("INSERT INTO orders SELECT i, 0 FROM generate_series(100, 10099) AS i")
        db.execute("UPDATE orders SET qty = 1")
    found = db.execute("SELECT verdict, ruling, who FROM fenced_guard.record").fetchall()
    assert found == [("missing", "record", "postgres")]


def test_the_audit_is_bounded(db: Db) -> None:
    """The newest are kept one by one, the others in sums: what was let through, and what was refused, alike."""
    note = "fenced_guard.note('public.orders', ARRAY['orders/42'], NULL, 'missing', 'count', 'enforce')"
    db.execute(f"SELECT {note} FROM generate_series(1, 11500)".encode())
    with pytest.raises(fenced.Uncovered):
        write(db, stamp(5, 1, "orders/43"))
    told = """jsonb_build_object('id', nextval('fenced_guard.record_id'), 'guard', 'public.orders', 'verdict', 'stale',
        'mode', 'require', 'who', 'x', 'application', 'x')"""
    seal = "jsonb_build_object('seal', fenced_guard.sealed(told))"
    refusals = f"SELECT {told} AS told FROM generate_series(1, 11500)"
    db.execute(f"SELECT fenced_guard.report((told || {seal})::text) FROM ({refusals}) AS refusals".encode())
    kept = one(db, "SELECT count(*) FROM fenced_guard.record")
    assert isinstance(kept, int) and 10_000 <= kept <= 11_000
    sums = "SELECT verdict, sum(count)::int FROM (SELECT verdict, count FROM fenced_guard.tally UNION ALL \
        SELECT verdict, count FROM fenced_guard.record) AS counted GROUP BY verdict ORDER BY verdict"
    assert db.execute(sums).fetchall() == [("missing", 11_500), ("stale", 11_500), ("uncovered", 1)]
