"""The guard on the program's own tables: triggers, clauses, transactions, and everybody who tries to go round."""

import asyncio
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import aiosqlite
import pytest

import fenced
from fenced.errors import Misconfigured, Misuse, Unsupported
from fenced.sql import AsyncGuard, Guard, refusal
from fenced.testing.kit import stamp
from fenced.values.decision import RULES
from tests.entering import is_entered_once, is_entered_once_by_tasks


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
def db(path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(
        "CREATE TABLE orders (id INTEGER PRIMARY KEY, qty INTEGER, ref TEXT UNIQUE, epoch INTEGER)"
    )
    connection.execute("INSERT INTO orders VALUES (42, 0, 'a', NULL), (43, 0, 'b', NULL)")
    yield connection
    connection.close()


ORDERS = Guard(table="orders", name="orders/{id}")


def qty(db: sqlite3.Connection, row: int = 42) -> int:
    (found,) = db.execute("SELECT qty FROM orders WHERE id = ?", (row,)).fetchone()
    return int(found)


def write(db: sqlite3.Connection, fence: fenced.Stamp, statement: str, guard: Guard = ORDERS) -> None:
    with guard.transaction(db, fence) as tx:
        tx.execute(statement)


def test_a_name_of_the_lease_that_was_not_announced_is_not_written(db: sqlite3.Connection) -> None:
    ORDERS.install(db, mode="enforce")
    both = stamp(6, 1, "orders/42", "orders/43")
    told = "orders/43: covered by the lease .*not announced in this transaction; announce it too"
    with pytest.raises(fenced.Uncovered, match=told), ORDERS.transaction(db, both, "orders/42") as tx:
        tx.execute("UPDATE orders SET qty = 1 WHERE id = 43")
    assert qty(db, 43) == 0


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("UPDATE orders SET qty = 1 WHERE id = 42", {"orders/42"}),
        ("DELETE FROM orders WHERE id = 42", {"orders/42"}),
        ("DELETE FROM orders", {"orders/42", "orders/43"}),
        ("INSERT INTO orders (id) VALUES (7)", {"orders/7"}),
        ("INSERT INTO orders (qty) VALUES (5)", {"orders/44"}),  # the rowid is known only afterwards
        ("UPDATE orders SET id = 9 WHERE id = 42", {"orders/42", "orders/9"}),  # moving needs both
        ("UPDATE orders SET rowid = 9 WHERE id = 42", {"orders/42", "orders/9"}),
        ("INSERT OR REPLACE INTO orders VALUES (42, 1, 'c', NULL)", {"orders/42"}),
        (
            "REPLACE INTO orders VALUES (7, 1, 'a', NULL)",
            {"orders/7", "orders/42"},
        ),  # removes row 42 silently
        ("UPDATE OR REPLACE orders SET ref = 'a' WHERE id = 43", {"orders/43", "orders/42"}),
        (
            "INSERT INTO orders VALUES (42, 1, 'c', NULL) ON CONFLICT (id) DO UPDATE SET qty = 9",
            {"orders/42"},
        ),
        ("UPDATE orders SET qty = 1", {"orders/42", "orders/43"}),
        (
            "WITH few AS (SELECT 42 AS id) UPDATE orders SET qty = 1 WHERE id IN (SELECT id FROM few)",
            {"orders/42"},
        ),
        ("INSERT INTO orders (id) SELECT 7 UNION SELECT 8", {"orders/7", "orders/8"}),
    ],
)
def test_every_kind_of_write_needs_every_name(
    db: sqlite3.Connection, statement: str, names: set[str]
) -> None:
    """With all names it goes through; with one of them missing, or none, nothing of it is seen."""
    ORDERS.install(db, mode="require")
    before = db.execute("SELECT * FROM orders").fetchall()
    with pytest.raises(sqlite3.IntegrityError, match="fenced:missing:orders") as caught:
        db.execute(statement)
    assert isinstance(refusal(caught.value), fenced.MissingStamp)
    for missing in names:
        with pytest.raises(fenced.Uncovered):
            write(db, stamp(5, 1, *(names - {missing} or {"elsewhere"})), statement)
        assert db.execute("SELECT * FROM orders").fetchall() == before
    write(db, stamp(6, 1, *names), statement)
    assert db.execute("SELECT * FROM orders").fetchall() != before


def test_a_cascade_is_seen(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("CREATE TABLE lines (id INTEGER PRIMARY KEY, of REFERENCES orders (id) ON DELETE CASCADE)")
    db.execute("INSERT INTO lines VALUES (1, 42)")
    lines = Guard(table="lines", name="lines/{id}")
    lines.install(db, mode="require")
    with pytest.raises(sqlite3.IntegrityError, match="fenced:missing:lines"):
        db.execute("DELETE FROM orders WHERE id = 42")
    write(db, stamp(5, 1, "lines/1"), "DELETE FROM orders WHERE id = 42", lines)


# proves guard sqlite: mandatory, shell-unrecorded
def test_the_shell_goes_on_in_observe_and_is_refused_in_require(db: sqlite3.Connection, path: Path) -> None:
    shell = shutil.which("sqlite3")
    assert shell, "install it: apt-get install -y sqlite3"

    def type_in(statement: str) -> str:
        return subprocess.run([shell, path, statement], capture_output=True, text=True, timeout=30).stderr

    ORDERS.install(db)
    write(db, stamp(5), "UPDATE orders SET qty = 1 WHERE id = 42")
    for mode in ("observe", "shadow", "canary(50%)", "enforce"):
        ORDERS.set_mode(db, mode)
        assert type_in("UPDATE orders SET qty = qty + 1 WHERE id = 42") == ""
    assert qty(db) == 5
    ORDERS.set_mode(db, "require")
    assert "fenced:missing:orders" in type_in("UPDATE orders SET qty = 99 WHERE id = 42")
    assert db.execute("SELECT count(*) FROM fenced_record WHERE ruling = 'refuse'").fetchone() == (0,)
    assert qty(db) == 5
    ORDERS.uninstall(db)
    assert type_in("UPDATE orders SET qty = 6 WHERE id = 42") == ""


def test_a_stamp_left_behind_fails_the_commit(db: sqlite3.Connection, path: Path) -> None:
    """Whoever commits inside the block leaves no stamp for the next writer."""
    ORDERS.install(db, mode="require")
    for fence in (stamp(5), stamp(5, 2)):  # the long way, and the fast path
        with pytest.raises(Misuse, match="COMMIT belongs to the block"), ORDERS.transaction(db, fence) as tx:
            tx.execute("UPDATE orders SET qty = 1 WHERE id = 42")
            tx.execute("COMMIT")
        assert qty(db) == 0
        assert not db.in_transaction
    with pytest.raises(Misuse, match="inside the guarded block"), ORDERS.transaction(db, stamp(5, 3)) as tx:
        tx.execute("ROLLBACK")
    other = sqlite3.connect(path)
    assert other.execute("SELECT count(*) FROM fenced_stamp").fetchone() == (0,)
    with pytest.raises(sqlite3.IntegrityError, match="fenced:missing"):
        other.execute("UPDATE orders SET qty = 2")
    other.close()


def test_foreign_keys_that_the_program_does_not_enforce(db: sqlite3.Connection) -> None:
    """We turn them on where that changes nothing; where it would, the program decides."""
    ORDERS.install(db)
    write(db, stamp(5), "UPDATE orders SET qty = 1 WHERE id = 42")
    assert db.execute("PRAGMA foreign_keys").fetchone() == (1,)
    db.execute("PRAGMA foreign_keys = OFF")
    db.execute("CREATE TABLE child (of REFERENCES orders (id))")
    fresh = sqlite3.connect(db.execute("PRAGMA database_list").fetchone()[2], isolation_level=None)
    with pytest.raises(Misconfigured, match="foreign_keys = ON"), ORDERS.transaction(fresh, stamp(5, 2)):
        pass
    assert not fresh.in_transaction
    fresh.execute("PRAGMA foreign_keys = ON")
    write(fresh, stamp(5, 3), "UPDATE orders SET qty = 2 WHERE id = 42")
    fresh.close()


@pytest.mark.parametrize("level", [None, "", "IMMEDIATE"])
def test_the_programs_own_settings_are_left_alone(db: sqlite3.Connection, path: Path, level: Any) -> None:
    ORDERS.install(db, mode="require")
    mine = sqlite3.connect(path, isolation_level=level)
    mine.row_factory = sqlite3.Row
    write(mine, stamp(5), "UPDATE orders SET qty = qty + 1 WHERE id = 42")
    write(mine, stamp(5, 2), "UPDATE orders SET qty = qty + 1 WHERE id = 42")
    with pytest.raises(fenced.StaleToken):
        write(mine, stamp(4), "UPDATE orders SET qty = 9 WHERE id = 42")
    assert mine.execute("SELECT qty FROM orders WHERE id = 42").fetchone()["qty"] == 2
    assert mine.isolation_level == level
    mine.close()


def test_the_programs_own_errors_pass_unchanged(db: sqlite3.Connection) -> None:
    ORDERS.install(db, mode="enforce")
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"), ORDERS.transaction(db, stamp(5)) as tx:
        tx.execute("INSERT INTO orders (id) VALUES (42)")
    with pytest.raises(ZeroDivisionError), ORDERS.transaction(db, stamp(6)) as tx:
        tx.execute("UPDATE orders SET qty = 7 WHERE id = 42")
        1 / 0  # noqa: B018
    assert qty(db) == 0
    mark = ORDERS.peek(db, "orders/42")
    assert mark is None, "what was rolled back announced nothing"
    assert refusal(ZeroDivisionError()) is None
    with pytest.raises(Misuse, match="in a transaction already"):
        db.execute("BEGIN")
        ORDERS.transaction(db, stamp(7)).__enter__()


def test_announcing_alone_and_in_ones_own_transaction(db: sqlite3.Connection, path: Path) -> None:
    guard = Guard(table="orders", name="orders/{id}")
    guard.install(db, mode="require")
    guard.announce(db, stamp(6, 0))
    with pytest.raises(fenced.StaleToken):
        write(db, stamp(5), "UPDATE orders SET qty = 1 WHERE id = 42")
    with pytest.raises(Misuse, match="begin a transaction first"):
        guard.announce_within(db, stamp(6))
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("BEGIN IMMEDIATE")
    with guard.announce_within(db, stamp(6)) as tx:
        tx.execute("UPDATE orders SET qty = 6 WHERE id = 42")
    db.execute("COMMIT")
    db.execute("BEGIN IMMEDIATE")
    with pytest.raises(fenced.StaleToken):
        guard.announce_within(db, stamp(5, 2))
    db.execute("ROLLBACK")
    assert qty(db) == 6
    db.execute("BEGIN")
    with pytest.raises(Misuse, match="in a transaction already"):
        guard.announce(db, stamp(7, 0))


def test_several_leases_in_one_transaction(db: sqlite3.Connection) -> None:
    ORDERS.install(db, mode="require")
    with (
        ORDERS.transaction(db, stamp(5, 1, "orders/42")) as tx,
        ORDERS.announce_within(tx, stamp(6, 1, "orders/43")),
    ):
        tx.execute("UPDATE orders SET qty = 1")
    assert (qty(db, 42), qty(db, 43)) == (1, 1)


def test_clause(db: sqlite3.Connection) -> None:
    """Pattern A: the token in the program's own UPDATE. "0 rows" is told apart: stale, or no such row."""

    def update(token: int, row: int, value: int) -> bool:
        clause = ORDERS.clause(db, stamp(token))
        cursor = db.execute(
            f"UPDATE orders SET qty = ?, {clause.assign} WHERE id = ? AND {clause.where}", (value, row)
        )
        return clause.admitted(cursor.rowcount, "id = ?", (row,))

    assert update(5, 42, 1)
    assert update(5, 42, 2)
    assert update(6, 42, 3)
    with pytest.raises(fenced.StaleToken):
        update(5, 42, 99)
    assert update(5, 1000, 1) is False
    assert qty(db) == 3
    once = Guard(table="orders", name="orders/{id}", rule="once").clause(db, stamp(7))
    assert once.where.endswith("< 7")
    with pytest.raises(Unsupported):
        Guard(table="orders", name="orders/{id}", rule="sequenced").clause(db, stamp(7))
    with pytest.raises(Misuse):
        ORDERS.clause(db, stamp(7), column='epoch" = 1 --')


def test_names_do_not_collide(db: sqlite3.Connection) -> None:
    """Values with slashes are escaped, so that two rows never share a name by accident."""
    db.execute("CREATE TABLE parts (tenant TEXT, id TEXT, v INTEGER, PRIMARY KEY (tenant, id))")
    db.execute("INSERT INTO parts VALUES ('a/b', 'c', 0), ('a', 'b/c', 0), ('50%', 'x', 0)")
    parts = Guard(table="parts", name="parts/{tenant}/{id}")
    parts.install(db, mode="require")
    names = [parts.name_for(tenant=t, id=i) for t, i in (("a/b", "c"), ("a", "b/c"), ("50%", "x"))]
    assert names == ["parts/a%2Fb/c", "parts/a/b%2Fc", "parts/50%25/x"]
    for index, (name, tenant) in enumerate(zip(names, ("a/b", "a", "50%"), strict=True)):
        write(db, stamp(5 + index, 1, name), f"UPDATE parts SET v = 1 WHERE tenant = '{tenant}'", parts)
    with pytest.raises(fenced.Uncovered):
        write(db, stamp(9, 1, names[0]), "UPDATE parts SET v = 2 WHERE tenant = 'a'", parts)


def test_installing_again_keeps_the_marks_and_uninstalling_leaves_the_table(db: sqlite3.Connection) -> None:
    def schema() -> list[tuple[str]]:
        return db.execute("SELECT sql FROM sqlite_schema WHERE tbl_name = 'orders' ORDER BY 1").fetchall()

    before = schema()
    ORDERS.install(db, mode="enforce")
    write(db, stamp(5), "UPDATE orders SET qty = 1 WHERE id = 42")
    ORDERS.install(db, mode="require")
    ORDERS.uninstall(db)
    assert schema() == before
    ORDERS.install(db, mode="enforce")
    with pytest.raises(fenced.StaleToken):
        write(db, stamp(4), "UPDATE orders SET qty = 2 WHERE id = 42")


def test_installing_at_every_start_keeps_mode_and_realm(db: sqlite3.Connection) -> None:
    ORDERS.install(db)
    write(db, stamp(5), "UPDATE orders SET qty = 1 WHERE id = 42")
    ORDERS.set_mode(db, "require")
    ORDERS.install(db)
    with pytest.raises(sqlite3.IntegrityError, match="fenced:missing"):
        db.execute("UPDATE orders SET qty = 2")
    ORDERS.uninstall(db)
    ORDERS.install(db, mode="enforce")
    foreign = stamp(6, realm="00000000000000bb")
    with pytest.raises(fenced.ForeignRealm):
        write(db, foreign, "UPDATE orders SET qty = 2 WHERE id = 42")
    with pytest.raises(Misuse):
        ORDERS.adopt(db, "bb'; DROP TABLE orders; --")
    ORDERS.adopt(db, foreign.realm)
    write(db, foreign, "UPDATE orders SET qty = 3 WHERE id = 42")
    assert qty(db) == 3


def test_tables_that_share_names_share_the_rule(db: sqlite3.Connection) -> None:
    """Else the weaker rule would be the way in."""
    db.execute("CREATE TABLE lines (id INTEGER PRIMARY KEY, of INTEGER)")
    Guard(table="orders", name="orders/{id}", rule="once").install(db)
    with pytest.raises(Misconfigured, match="rule must be once"):
        Guard(table="lines", name="orders/{of}").install(db)
    Guard(table="lines", name="orders/{of}", rule="once").install(db)
    Guard(table="lines", name="lines/{id}", rule="retry").install(db, replace=True)


def test_a_forged_stamp_is_replaced_and_cleared(db: sqlite3.Connection) -> None:
    """A row that somebody put there with foreign keys off goes with the next announcement."""
    ORDERS.install(db, mode="require")
    db.execute("PRAGMA foreign_keys = OFF")
    db.execute(
        "INSERT INTO fenced_stamp (name, guard, stamp, seq, verdict, refuse, open) "
        "VALUES ('orders/42', 'orders', '', 1, 'admit', 0, 1)"
    )
    write(db, stamp(5), "UPDATE orders SET qty = 1 WHERE id = 42")
    assert db.execute("SELECT count(*) FROM fenced_stamp").fetchone() == (0,)


def test_the_script_is_what_install_does(db: sqlite3.Connection, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "other.db", isolation_level=None)
    db.backup(other)
    ORDERS.install(db, mode="enforce")
    other.executescript(ORDERS.script(other, mode="enforce"))
    assert list(db.iterdump()) == list(other.iterdump())
    other.close()


def test_marks_cannot_be_lowered_by_hand(db: sqlite3.Connection) -> None:
    ORDERS.install(db)
    write(db, stamp(5), "UPDATE orders SET qty = 1 WHERE id = 42")
    for statement in ("SET token = 4", "SET token = 'x'", "SET seq = -1"):
        with pytest.raises(sqlite3.IntegrityError):
            db.execute(f"UPDATE fenced_mark {statement}")
    replace = "REPLACE INTO fenced_mark SELECT name, 4, grant_id, seq, stamp FROM fenced_mark"
    for statement in ("DELETE FROM fenced_mark", replace):
        with pytest.raises(sqlite3.IntegrityError):
            db.execute(statement)


@pytest.mark.parametrize(
    ("create", "name", "error"),
    [
        (None, "t/{id}", Misconfigured),
        ("CREATE TABLE t (other)", "t/{id}", Misconfigured),
        ("CREATE VIEW t AS SELECT 1 AS id", "t/{id}", Misconfigured),
        ("CREATE VIRTUAL TABLE t USING fts5(id)", "t/{id}", Unsupported),
        ("CREATE TABLE t (id, x); CREATE UNIQUE INDEX u ON t (x) WHERE x > 0", "t/{id}", Unsupported),
        ("CREATE TABLE t (id, x); CREATE UNIQUE INDEX u ON t (x + 1)", "t/{id}", Unsupported),
    ],
)
def test_tables_that_cannot_be_guarded(
    db: sqlite3.Connection, create: str | None, name: str, error: type
) -> None:
    db.executescript(create or "")
    with pytest.raises(error):
        Guard(table="t", name=name).install(db)
    if create and "UNIQUE" in create:
        Guard(table="t", name="t").install(db)  # under one constant name it can


@pytest.mark.parametrize(
    ("table", "name"), [("a b", "x"), ("t;--", "x"), ("t", "x/{a b}"), ("t", ""), ("t", "x//{id}"), (5, "x")]
)
def test_bad_specs(table: str, name: str) -> None:
    with pytest.raises(Misuse):
        Guard(table=table, name=name)


def test_an_authoritys_own_file_is_not_guarded(tmp_path: Path) -> None:
    fenced.Client(f"sqlite:///{tmp_path}/leases.db").acquire("a")
    db = sqlite3.connect(tmp_path / "leases.db", isolation_level=None)
    with pytest.raises(Misconfigured, match="authority"):
        Guard(table="attempt", name="attempt").install(db)
    db.close()


def test_without_install_it_says_so(db: sqlite3.Connection) -> None:
    with pytest.raises(Misconfigured, match="install"), ORDERS.transaction(db, stamp(5)):
        pass
    assert not db.in_transaction
    with pytest.raises(Unsupported):
        ORDERS.transaction(object(), stamp(5))


# proves guard sqlite: canary-uncovered
def test_canary_records_uncovered_rows(db: sqlite3.Connection) -> None:
    ORDERS.install(db, mode="canary(100%)")
    write(db, stamp(5, 1, "orders/42"), "UPDATE orders SET qty = 1")
    assert (qty(db, 42), qty(db, 43)) == (1, 1)
    assert db.execute("SELECT name, verdict, mode FROM fenced_record").fetchall() == [
        ("orders/43", "uncovered", "canary(100%)")
    ]


# proves guard sqlite: single-writer
def test_a_holder_inside_its_transaction_blocks_its_successor(db: sqlite3.Connection, path: Path) -> None:
    """Nothing stale is admitted; the successor is told to try again."""
    ORDERS.install(db, mode="require")
    successor = sqlite3.connect(path, isolation_level=None, timeout=0.05)
    with ORDERS.transaction(db, stamp(5)) as tx:
        tx.execute("UPDATE orders SET qty = 5 WHERE id = 42")
        with pytest.raises(fenced.Contended) as caught:
            write(successor, stamp(6), "UPDATE orders SET qty = 6 WHERE id = 42")
        assert caught.value.retry == "transaction"
    write(successor, stamp(6), "UPDATE orders SET qty = 6 WHERE id = 42")
    assert qty(db) == 6
    successor.close()


def test_the_story_end_to_end(tmp_path: Path, db: sqlite3.Connection) -> None:
    """The README's story: a lease expires under its holder, and the database refuses the late write."""
    ORDERS.install(db, mode="require")
    zombie = fenced.Client(f"sqlite:///{tmp_path}/leases.db")
    lease = zombie.acquire("orders/42", ttl=0.2)
    zombie._engine.keeper.drop(lease._grant.secret)  # a paused process renews nothing
    assert lease.wait_lost(5)
    with fenced.Client(f"sqlite:///{tmp_path}/leases.db").hold("orders/42") as newer:
        with ORDERS.transaction(db, newer) as tx:
            tx.execute("UPDATE orders SET qty = 10 WHERE id = 42")
        with pytest.raises(fenced.Overtaken) as caught, ORDERS.transaction(db, lease) as tx:
            tx.execute("UPDATE orders SET qty = 0 WHERE id = 42")
    assert isinstance(caught.value, fenced.StaleToken)
    assert (caught.value.mark, caught.value.name) == (newer.token, "orders/42")
    assert qty(db) == 10


@pytest.mark.parametrize("installed", ["retry", "sequenced"])
def test_a_rule_that_is_not_installed(db: sqlite3.Connection, path: Path, installed: Any) -> None:
    """Misconfigured at the first operation, also for a holder that has the mark already; nothing is written."""
    options: dict[str, Any] = {"table": "orders", "name": "orders/{id}"}
    Guard(**options, rule=installed).install(db, mode="require")
    write(db, stamp(6), "UPDATE orders SET qty = 1 WHERE id = 42")
    for rule in RULES:
        guard = Guard(**options, rule=rule)
        told = (
            nullcontext()
            if rule == installed
            else pytest.raises(Misconfigured, match=f"rule {installed}.*says {rule}")
        )
        with told:
            guard.announce(db, stamp(6, 0))
        with told:
            write(db, stamp(6, 2), "UPDATE orders SET qty = 2 WHERE id = 42", guard)
        with told:
            db.execute("BEGIN IMMEDIATE")
            with guard.announce_within(db, stamp(6, 3)):
                pass
        db.rollback()
        with told:
            asyncio.run(_update_by_aiosqlite(path, AsyncGuard(**options, rule=rule)))
    assert qty(db) == 4


async def _update_by_aiosqlite(path: Path, guard: AsyncGuard) -> None:
    async with aiosqlite.connect(path, isolation_level=None) as db, guard.transaction(db, stamp(6, 4)) as tx:
        await tx.execute("UPDATE orders SET qty = 4 WHERE id = 42")


async def test_a_transaction_is_entered_once(db: sqlite3.Connection, path: Path) -> None:
    """A second block would have the stamp of the first, and count as a repeat of it."""
    ORDERS.install(db, mode="require")
    more = "UPDATE orders SET qty = qty + 1 WHERE id = 42"
    for fence in (stamp(6), [stamp(6)]):  # without coroutines, and with them
        is_entered_once(lambda fence=fence: ORDERS.transaction(db, fence), lambda tx: tx.execute(more))  # type: ignore[misc]
    orders = AsyncGuard(table="orders", name="orders/{id}")
    async with aiosqlite.connect(path, isolation_level=None) as suspending:
        make = lambda: orders.transaction(suspending, stamp(6))  # noqa: E731
        await is_entered_once_by_tasks(make, lambda tx: tx.execute(more))
    assert qty(db) == 3
