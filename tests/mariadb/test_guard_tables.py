"""Every kind of write to a guarded table of MariaDB needs every name that it touches, however it gets there."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymysql
import pytest

import fenced
from fenced.errors import Misconfigured, Misuse, StaleToken, Uncovered, Unsupported
from fenced.sql import Guard
from fenced.testing.inputs import ODD_NAMES
from fenced.testing.kit import stamp
from fenced_testkit.servers import MariadbServer

ORDERS = Guard(table="orders", name="orders/{id}")
TABLES = """
CREATE TABLE orders (id int PRIMARY KEY, qty int, ref varchar(20) UNIQUE) ENGINE = InnoDB;
INSERT INTO orders VALUES (42, 0, 'a'), (43, 0, 'b');
CREATE TABLE other (id int PRIMARY KEY, qty int) ENGINE = InnoDB;
INSERT INTO other VALUES (42, 7), (7, 7);
CREATE VIEW few AS SELECT id, qty FROM orders WHERE id < 100;
CREATE PROCEDURE bump(which int) UPDATE orders SET qty = qty + 1 WHERE id = which;
CREATE PROCEDURE swallow(which int) BEGIN
  DECLARE CONTINUE HANDLER FOR SQLEXCEPTION SET @swallowed = 1; UPDATE orders SET qty = qty + 1 WHERE id = which; END;
CREATE TABLE inbox (id int) ENGINE = InnoDB;
CREATE TRIGGER hand_on AFTER INSERT ON inbox FOR EACH ROW DELETE FROM orders WHERE id = NEW.id;
"""
WRITES = {
    "INSERT": "INSERT INTO orders VALUES ({new}, 1, 'n')",
    "INSERT IGNORE": "INSERT IGNORE INTO orders VALUES ({new}, 1, 'n')",
    "INSERT SELECT": "INSERT INTO orders SELECT {new}, 1, 'n' FROM other WHERE id = 7",
    "UPDATE": "UPDATE orders SET qty = 1 WHERE id = {old}",
    "UPDATE IGNORE": "UPDATE IGNORE orders SET qty = 1 WHERE id = {old}",
    "UPDATE to the same": "UPDATE orders SET qty = qty WHERE id = {old}",
    "UPDATE of several tables": "UPDATE orders JOIN other ON other.id = orders.id SET orders.qty = 1, other.qty = 8 "
    "WHERE orders.id = {old}",
    "UPDATE by a view": "UPDATE few SET qty = 1 WHERE id = {old}",
    "DELETE": "DELETE FROM orders WHERE id = {old}",
    "DELETE IGNORE": "DELETE IGNORE FROM orders WHERE id = {old}",
    "DELETE from several tables": "DELETE orders, other FROM orders JOIN other ON other.id = orders.id "
    "WHERE orders.id = {old}",
    "REPLACE": "REPLACE INTO orders VALUES ({old}, 1, 'a')",
    "ON DUPLICATE KEY": "INSERT INTO orders VALUES ({old}, 1, 'z') ON DUPLICATE KEY UPDATE qty = 1",
    "a procedure": "CALL bump({old})",
    "a trigger of another table": "INSERT INTO inbox VALUES ({old})",
    "a new name": "UPDATE orders SET id = {new} WHERE id = {old}",
    "REPLACE by another key": "REPLACE INTO orders VALUES ({new}, 1, 'a')",
}


def connected(server: MariadbServer, database: str, **options: Any) -> Any:
    where: dict[str, Any] = {"host": server.host, "port": server.port, "user": "root", "autocommit": True}
    return pymysql.connect(**{**where, **options}, database=database)


def run(db: Any, *statements: str) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    with db.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
            rows = list(cursor.fetchall())
    return rows


@pytest.fixture
def database(mariadb_server: MariadbServer) -> str:
    return mariadb_server.create_database()


@pytest.fixture
def db(mariadb_server: MariadbServer, database: str) -> Iterator[Any]:
    with connected(mariadb_server, database, local_infile=True) as connection:
        yield connection


def split(script: str) -> list[str]:
    found, depth, current = [], 0, ""
    for line in script.strip().splitlines():
        current += line + "\n"
        depth += line.count(" BEGIN") - line.count("END;")
        if line.endswith(";") and depth == 0:
            found.append(current.strip().rstrip(";"))
            current = ""
    return found


@pytest.fixture(scope="module")
def kept(mariadb_server: MariadbServer) -> Iterator[Any]:
    """A guarded table, in require; a test that uses it leaves every row as it was."""
    with connected(mariadb_server, mariadb_server.create_database()) as connection:
        run(connection, *split(TABLES))
        ORDERS.install(connection, mode="require")
        yield connection


def shell_options(server: MariadbServer) -> list[str]:
    return ["--no-defaults", "--skip-ssl", f"--host={server.host}", f"--port={server.port}", "--user=root"]


class Undo(Exception):
    """Roll back what the test did."""


def orders(db: Any) -> list[tuple[Any, ...]]:
    return run(db, "SELECT * FROM orders ORDER BY id")


@pytest.mark.parametrize("kind", WRITES)
def test_a_write_needs_every_name_that_it_touches(kind: str, kept: Any) -> None:
    statement = WRITES[kind].format(old=42, new=44)
    before = orders(kept)
    touched = [
        name for name, field in (("orders/42", "{old}"), ("orders/44", "{new}")) if field in WRITES[kind]
    ]
    if kind == "REPLACE by another key":
        touched = ["orders/42", "orders/44"]
    with pytest.raises(pymysql.InternalError, match="carries no stamp"):
        run(kept, statement)
    assert orders(kept) == before
    for name in touched:
        with pytest.raises(Uncovered, match=name), ORDERS.transaction(kept, _others(touched, name)):
            run(kept, statement)
        assert orders(kept) == before
    with pytest.raises(Undo), ORDERS.transaction(kept, stamp(5, 1, *touched)):
        run(kept, statement)
        raise Undo
    assert orders(kept) == before


def _others(touched: list[str], name: str) -> fenced.Stamp:
    return stamp(5, 1, *(other for other in touched if other != name), "something/else")


def test_a_procedure_that_swallows_the_refusal(kept: Any) -> None:
    before = orders(kept)
    run(kept, "CALL swallow(42)")
    assert orders(kept) == before
    with (
        pytest.raises(Misuse, match="nothing was committed"),
        ORDERS.transaction(kept, stamp(5, 1, "orders/43")),
    ):
        run(kept, "CALL swallow(42)", "UPDATE orders SET qty = 9 WHERE id = 43")
    assert orders(kept) == before


def test_a_statement_of_many_rows_is_whole_or_nothing(kept: Any) -> None:
    before = orders(kept)
    with pytest.raises(Uncovered, match="orders/43"), ORDERS.transaction(kept, stamp(5)):
        run(kept, "UPDATE orders SET qty = 9 ORDER BY id")
    assert orders(kept) == before


@pytest.mark.parametrize("how", ["", "REPLACE", "IGNORE"])
def test_load_data(how: str, db: Any, mariadb_server: MariadbServer, tmp_path: Path) -> None:
    run(db, "SET GLOBAL local_infile = ON", *split(TABLES))
    ORDERS.install(db, mode="require")
    file = tmp_path / "rows.csv"
    file.write_text("44,1,n\n")
    load = f"LOAD DATA LOCAL INFILE '{file}' {how} INTO TABLE orders FIELDS TERMINATED BY ','"
    with pytest.raises(pymysql.InternalError, match="orders/44: the write carries no stamp"):
        run(db, load)
    with ORDERS.transaction(db, stamp(5, 1, "orders/44")):
        run(db, load)
    assert (44, 1, "n") in orders(db)


def test_truncating_fires_no_trigger_and_needs_a_right(
    db: Any, database: str, mariadb_server: MariadbServer
) -> None:
    """A user without DROP and TRIGGER, who may write and call the guard, cannot go round it."""
    run(db, *split(TABLES))
    ORDERS.install(db, mode="require")
    user = f"w_{database[-8:]}"
    run(
        db,
        f"CREATE USER {user}@'%'",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON `{database}`.* TO {user}@'%'",
        f"GRANT EXECUTE ON fenced_guard.* TO {user}@'%'",
    )
    with connected(mariadb_server, database, user=user) as writer:
        for forbidden in (
            "TRUNCATE TABLE orders",
            "DROP TRIGGER fenced_orders_update",
            "UPDATE fenced_guard.mark SET token = 0",
            "UPDATE fenced_guard.guard SET mode = 'observe'",
        ):
            with pytest.raises(pymysql.OperationalError, match="denied"):
                run(writer, forbidden)
        with pytest.raises(pymysql.InternalError, match="carries no stamp"):
            run(writer, "DELETE FROM orders")
        with ORDERS.transaction(writer, stamp(5)):
            run(writer, "UPDATE orders SET qty = 1 WHERE id = 42")
        with pytest.raises(StaleToken), ORDERS.transaction(writer, stamp(4)):
            raise AssertionError("the block must not run")
    run(db, "TRUNCATE TABLE orders")  # the administrator may
    assert orders(db) == []


@pytest.mark.parametrize("action", ["ON DELETE CASCADE", "ON DELETE SET NULL", "ON UPDATE CASCADE"])
def test_a_child_of_a_cascading_key_is_refused(action: str, db: Any) -> None:
    """A cascade fires no trigger of the child."""
    run(
        db,
        *split(TABLES),
        "CREATE TABLE parts (id int PRIMARY KEY, whole int, "
        f"FOREIGN KEY (whole) REFERENCES orders (id) {action}) ENGINE = InnoDB",
    )
    parts = Guard(table="parts", name="parts/{id}")
    with pytest.raises(Unsupported, match="without firing its triggers"):
        parts.install(db)
    ORDERS.install(db)  # the parent can be guarded


def test_only_innodb(db: Any) -> None:
    run(db, "CREATE TABLE orders (id int PRIMARY KEY) ENGINE = MyISAM")
    with pytest.raises(Unsupported, match="ENGINE = InnoDB"):
        ORDERS.install(db)


def test_a_raw_shell_is_refused(db: Any, database: str, mariadb_server: MariadbServer) -> None:
    run(db, *split(TABLES))
    ORDERS.install(db, mode="require")
    shell = shutil.which("mariadb")
    assert shell is not None
    command = [shell, *shell_options(mariadb_server)]
    done = subprocess.run(
        [*command, "-e", "UPDATE orders SET qty = 1 WHERE id = 42", database],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ERROR 907 (ZF001) at line 1: fenced: orders/42: the write carries no stamp, and the mode is require"
    )
    assert orders(db)[0] == (42, 0, "a")


# Names.


def test_names_are_made_of_the_usual_types(db: Any) -> None:
    """And a value's slash and percent sign are escaped, so that no two rows share a name by accident."""
    run(
        db,
        "CREATE TABLE things (a bigint unsigned, b varchar(80), c char(5), d enum('x', 'y/z'), "
        "PRIMARY KEY (a, b)) ENGINE = InnoDB",
    )
    things = Guard(table="things", name="things/{a}/{b}/{c}/{d}")
    things.install(db, mode="require")
    big = 2**64 - 1
    name = things.name_for(a=big, b="é/%\U0001f512", c="ab", d="y/z")
    with things.transaction(db, stamp(5, 1, name)):
        run(db, f"INSERT INTO things VALUES ({big}, 'é/%\U0001f512', 'ab', 'y/z')")
    with pytest.raises(Uncovered), things.transaction(db, stamp(5, 1, name)):
        run(db, "INSERT INTO things VALUES (1, 'É/%\U0001f512', 'ab', 'y/z')")
    for whole in ODD_NAMES:
        assert Guard(table="things", name="{b}").name_for(b=whole) == whole


def test_names_are_compared_byte_by_byte(db: Any) -> None:
    """Whatever the collation calls equal."""
    run(
        db,
        "CREATE TABLE named (name varchar(200) PRIMARY KEY, n int) ENGINE = InnoDB COLLATE utf8mb4_general_ci",
    )
    named = Guard(table="named", name="{name}")
    named.install(db, mode="require")
    with named.transaction(db, stamp(5, 1, "Orders")):
        run(db, "INSERT INTO named VALUES ('Orders', 0)")
    with pytest.raises(Uncovered, match="Orders"), named.transaction(db, stamp(5, 1, "orders")):
        run(db, "UPDATE named SET n = 1 WHERE name = 'orders'")
    with pytest.raises(Uncovered, match="ORDERS"), named.transaction(db, stamp(5, 1, "Orders")):
        run(db, "UPDATE named SET name = 'ORDERS' WHERE name = 'orders'")


@pytest.mark.parametrize(
    ("column", "kind"),
    [("d", "decimal"), ("f", "double"), ("t", "timestamp"), ("b", "varbinary"), ("z", "zerofill")],
)
def test_other_types_are_refused(column: str, kind: str, db: Any) -> None:
    run(
        db,
        "CREATE TABLE odd (id int PRIMARY KEY, d decimal(5, 2), f double, t timestamp NULL, b varbinary(9), "
        "z int(8) zerofill) ENGINE = InnoDB",
    )
    with pytest.raises(Unsupported, match=f"is of type {kind}"):
        Guard(table="odd", name=f"odd/{{{column}}}").install(db)
    with pytest.raises(Misconfigured, match="has no column"):
        Guard(table="odd", name="odd/{missing}").install(db)


def test_a_null_in_the_name_is_covered_by_no_lease(db: Any) -> None:
    run(db, "CREATE TABLE loose (id int PRIMARY KEY, owner varchar(9)) ENGINE = InnoDB")
    loose = Guard(table="loose", name="loose/{owner}")
    loose.install(db, mode="require")
    with pytest.raises(Uncovered, match="NULL or empty"), loose.transaction(db, stamp(5, 1, "loose/a")):
        run(db, "INSERT INTO loose VALUES (1, NULL)")


def test_one_name_for_the_whole_table_and_many_rows(db: Any) -> None:
    run(db, "CREATE TABLE settings (id int AUTO_INCREMENT PRIMARY KEY, v text) ENGINE = InnoDB")
    whole = Guard(table="settings", name="settings")
    whole.install(db, mode="require")
    with whole.transaction(db, stamp(5, 1, "settings")):
        run(db, f"INSERT INTO settings (v) VALUES {', '.join(['(1)'] * 1000)}", "UPDATE settings SET v = 2")
    with pytest.raises(pymysql.InternalError, match="settings: the write carries no stamp"):
        run(db, "UPDATE settings SET v = 3")


def test_a_number_that_the_server_gives(db: Any) -> None:
    """The name of a row with AUTO_INCREMENT is known after the INSERT."""
    run(
        db, "CREATE TABLE jobs (id int AUTO_INCREMENT PRIMARY KEY, v text) ENGINE = InnoDB AUTO_INCREMENT = 7"
    )
    jobs = Guard(table="jobs", name="jobs/{id}")
    jobs.install(db, mode="require")
    with jobs.transaction(db, stamp(5, 1, "jobs/7")):
        run(db, "INSERT INTO jobs (v) VALUES ('x')")
    with pytest.raises(Uncovered, match="jobs/8"), jobs.transaction(db, stamp(5, 1, "jobs/7")):
        run(db, "INSERT INTO jobs (v) VALUES ('x')")


def test_a_long_table_name_and_one_in_another_database(db: Any, mariadb_server: MariadbServer) -> None:
    long, away = "t" * 60, mariadb_server.create_database()
    run(db, f"CREATE TABLE {long} (id int PRIMARY KEY) ENGINE = InnoDB")
    run(db, f"CREATE TABLE {away}.orders (id int PRIMARY KEY, qty int) ENGINE = InnoDB")
    for guard in (Guard(table=long, name="t/{id}"), Guard(table=f"{away}.orders", name="t/{id}")):
        guard.install(db, mode="require")
        with guard.transaction(db, stamp(5, 1, "t/1")):
            run(db, f"INSERT INTO {guard.table} (id) VALUES (1)")
        with pytest.raises(pymysql.InternalError, match="carries no stamp"):
            run(db, f"DELETE FROM {guard.table}")
        guard.uninstall(db)
        run(db, f"DELETE FROM {guard.table}")


# The epoch column, and the clause.


def test_the_epoch_column(db: Any) -> None:
    run(db, *split(TABLES))
    guard = Guard(table="orders", name="orders/{id}", epoch="epoch")
    guard.install(db, mode="enforce")
    with guard.transaction(db, stamp(5)):
        run(db, "UPDATE orders SET qty = 1 WHERE id = 42")
    assert run(db, "SELECT id, epoch FROM orders ORDER BY id") == [(42, 5), (43, 0)]
    run(db, "UPDATE orders SET qty = 2, epoch = 99 WHERE id = 42")  # unstamped, and let through
    assert run(db, "SELECT qty, epoch FROM orders WHERE id = 42") == [(2, 5)]
    with guard.transaction(db, stamp(6, 1, "orders/42", "orders/44")):
        run(db, "INSERT INTO orders (id, qty) VALUES (44, 1)", "UPDATE orders SET qty = 3 WHERE id = 42")
    assert run(db, "SELECT id, epoch FROM orders ORDER BY id") == [(42, 6), (43, 0), (44, 6)]
    run(db, "UPDATE orders SET id = 45 WHERE id = 44")
    assert run(db, "SELECT epoch FROM orders WHERE id = 45") == [(0,)]
    guard.uninstall(db)
    assert [column for column, *_ in run(db, "SHOW COLUMNS FROM orders")] == ["id", "qty", "ref"]


def test_the_clause_quotes_as_this_server_does(db: Any) -> None:
    run(db, "CREATE TABLE orders (id int PRIMARY KEY, qty int, `epoch` bigint) ENGINE = InnoDB")
    run(db, "INSERT INTO orders VALUES (42, 0, 34)")
    late = ORDERS.clause(db, stamp(33))
    run(db, f"UPDATE orders SET qty = 1, {late.assign} WHERE id = 42 AND {late.where}")
    assert run(db, "SELECT qty, epoch FROM orders") == [(0, 34)]
    with pytest.raises(StaleToken):
        late.admitted(0, "id = %s", (42,))
    newer = ORDERS.clause(db, stamp(35))
    run(db, f"UPDATE orders SET qty = 1, {newer.assign} WHERE id = 42 AND {newer.where}")
    assert run(db, "SELECT qty, epoch FROM orders") == [(1, 35)]


# Installing.


def test_nothing_is_left_after_uninstalling(db: Any, database: str) -> None:
    run(db, *split(TABLES))
    shown = "SHOW CREATE TABLE orders"
    before = run(db, shown)
    ORDERS.install(db, mode="require")
    ORDERS.install(db)  # harmless
    with ORDERS.transaction(db, stamp(5)):
        run(db, "UPDATE orders SET qty = 1 WHERE id = 42")
    ORDERS.uninstall(db)
    assert run(db, shown) == before
    assert run(db, "SHOW TRIGGERS LIKE 'orders'") == []
    run(db, "UPDATE orders SET qty = 0 WHERE id = 42")
    ORDERS.install(db, mode="enforce")
    with pytest.raises(StaleToken), ORDERS.transaction(db, stamp(4)):
        raise AssertionError("the marks stay")
    with pytest.raises(Misconfigured, match="no guard is installed"):
        Guard(table="other", name="other/{id}").uninstall(db)


def test_another_guard_of_the_table(db: Any) -> None:
    run(db, *split(TABLES))
    ORDERS.install(db)
    other = Guard(table="orders", name="orders/{ref}", rule="once")
    with pytest.raises(Misconfigured, match=r"is guarded under orders/\{id\}, rule retry"):
        other.install(db)
    other.install(db, replace=True)
    with pytest.raises(Misconfigured, match="its rule must be once too"):
        Guard(table="other", name="orders/{id}").install(db)


def test_a_table_in_use_is_not_waited_for(db: Any, database: str, mariadb_server: MariadbServer) -> None:
    run(db, *split(TABLES))
    with connected(mariadb_server, database) as other:
        run(other, "START TRANSACTION", "SELECT * FROM orders")
        with pytest.raises(fenced.errors.Contended, match="in use"):
            ORDERS.install(db)
    ORDERS.install(db)
    assert run(db, "SELECT @@lock_wait_timeout") != [(2,)]


def test_not_in_a_transaction_of_the_program(db: Any) -> None:
    """DDL would commit it."""
    run(db, *split(TABLES), "START TRANSACTION", "UPDATE orders SET qty = 9 WHERE id = 42")
    with pytest.raises(Misuse, match="in a transaction"):
        ORDERS.install(db)
    run(db, "ROLLBACK")
    assert orders(db)[0] == (42, 0, "a")


def test_the_script_for_a_migration(db: Any, database: str, mariadb_server: MariadbServer) -> None:
    """The shells run it, on a server that has no guard yet or has one."""
    run(db, *split(TABLES))
    script = ORDERS.script(db, "require")
    shell = shutil.which("mariadb")
    assert shell is not None
    command = [shell, *shell_options(mariadb_server)]
    for _ in range(2):
        subprocess.run([*command, database], input=script, text=True, check=True)
    with pytest.raises(pymysql.InternalError, match="carries no stamp"):
        run(db, "UPDATE orders SET qty = 1 WHERE id = 42")
