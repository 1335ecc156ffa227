"""Ways round the guard that somebody found, each closed: they stay here so that they stay closed."""

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiosqlite
import pytest

import fenced
from fenced.errors import Misconfigured, Misuse, Unsupported
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.sql import AsyncGuard, Guard
from fenced.stores.sqlite.guard.values import SqliteValues
from fenced.testing.kit import stamp
from fenced.values.model import Credential
from tests.forking import said_by_child


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
def db(path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, qty INTEGER DEFAULT 0)")
    connection.execute("INSERT INTO orders VALUES (42, 0), (43, 0)")
    yield connection
    connection.close()


ORDERS = Guard(table="orders", name="orders/{id}")


def write(db: sqlite3.Connection, fence: fenced.Stamp, statement: str, guard: Guard = ORDERS) -> None:
    with guard.transaction(db, fence) as tx:
        tx.execute(statement)


def test_one_guards_leniency_does_not_bind_another(db: sqlite3.Connection) -> None:
    """Two tables under one name, the one observed, the other required: the stale stamp passes the first only."""
    db.execute("CREATE TABLE lines (id INTEGER PRIMARY KEY, of INTEGER)")
    lines = Guard(table="lines", name="orders/{of}")
    ORDERS.install(db, mode="require")
    lines.install(db, mode="observe")
    write(db, stamp(9), "UPDATE orders SET qty = 9 WHERE id = 42")
    write(db, stamp(5), "INSERT INTO lines VALUES (1, 42)", lines)
    with pytest.raises(fenced.StaleToken):
        write(db, stamp(5, 2), "UPDATE orders SET qty = 5 WHERE id = 42", lines)
    with lines.transaction(db, stamp(9, 2)) as tx:  # the honest holder writes both in one transaction
        tx.execute("INSERT INTO lines VALUES (2, 42)")
        tx.execute("UPDATE orders SET qty = 10 WHERE id = 42")
    assert db.execute("SELECT qty FROM orders WHERE id = 42").fetchone() == (10,)


@pytest.mark.parametrize(
    ("create", "name", "honest", "attack"),
    [
        ("id TEXT COLLATE NOCASE PRIMARY KEY", "{id}", "bob", "REPLACE INTO t (id) VALUES ('BOB')"),
        ("id PRIMARY KEY", "{id}", "1", "REPLACE INTO t (id) VALUES (1.0)"),
        ("id TEXT", "{id}", "bob", "REPLACE INTO t (rowid, id) VALUES (1, 'eve')"),
        ("id TEXT", "{id}", "bob", "UPDATE OR REPLACE t SET rowid = 1 WHERE id = 'eve'"),
        ("n INTEGER PRIMARY KEY, id TEXT", "{id}", "bob", "UPDATE OR REPLACE t SET rowid = 1 WHERE id = 'eve'"),
        ("id TEXT, ref TEXT; CREATE UNIQUE INDEX u ON t (ref COLLATE NOCASE)", "{id}", "bob",
         "REPLACE INTO t (id, ref) VALUES ('eve', 'REF')"),
        ("id TEXT, ref TEXT UNIQUE NOT NULL DEFAULT 'ref'", "{id}", "bob",
         "INSERT OR REPLACE INTO t (id, ref) VALUES ('eve', NULL)"),
        ("id TEXT, ref TEXT UNIQUE", "{id}", None, "REPLACE INTO t (id, ref) VALUES ('eve', 'ref')"),
        ("id TEXT COLLATE NOCASE PRIMARY KEY", "{id}", "bob", "UPDATE t SET id = 'BOB' WHERE id = 'bob'"),
    ],
)  # fmt: skip
def test_no_row_of_another_name_is_removed(
    db: sqlite3.Connection, create: str, name: str, honest: str | None, attack: str
) -> None:
    head, _, rest = create.partition(";")
    db.executescript(f"CREATE TABLE t ({head}); {rest}")
    columns = [row[1] for row in db.execute("PRAGMA table_info(t)")]
    values = {"id": honest if honest != "1" else 1, "ref": "ref", "n": 1}
    for row, extra in ((values, 0), ({**values, "id": "eve", "ref": "other", "n": 2}, 1)):
        if extra and "SET rowid" not in attack:
            continue
        marks = ", ".join("?" * len(columns))
        db.execute(f"INSERT INTO t VALUES ({marks})", [row[column] for column in columns])
    before = db.execute("SELECT * FROM t").fetchall()
    guard = Guard(table="t", name=name)
    guard.install(db, mode="require")
    with pytest.raises(fenced.Uncovered):
        write(db, stamp(5, 1, "eve", "BOB", "1.0"), attack, guard)
    assert db.execute("SELECT * FROM t").fetchall() == before


def test_names_are_text_whatever_the_column_is(db: sqlite3.Connection) -> None:
    """`042` and `42.0` are other names than `42`; a BLOB does not make a shadowed statement fail."""
    guard = Guard(table="orders", name="{id}")
    guard.install(db, mode="require")
    for other in ("042", "42.0"):
        with pytest.raises(fenced.Uncovered):
            write(db, stamp(5, 1, other), "UPDATE orders SET qty = 1 WHERE id = 42", guard)
    db.execute("CREATE TABLE blobs (id BLOB)")
    blobs = Guard(table="blobs", name="{id}")
    blobs.install(db, mode="shadow")
    db.execute("INSERT INTO blobs VALUES (x'00ff')")


@pytest.mark.parametrize("name", ["t/{a}{b}", "t/{a}-{b}", "t/{a", "t/a}", "t/x{a}", "{a}{b}"])
def test_a_column_is_a_whole_segment(name: str) -> None:
    with pytest.raises(Misuse, match="whole segment"):
        Guard(table="t", name=name)


def test_columns_that_cannot_name_a_row_are_refused(db: sqlite3.Connection) -> None:
    db.execute("CREATE TABLE t (r REAL, a TEXT, g TEXT AS (a), u TEXT AS (a) STORED)")
    db.execute("CREATE UNIQUE INDEX by_u ON t (u)")
    for column in ("r", "g"):
        with pytest.raises(Unsupported):
            Guard(table="t", name=f"t/{{{column}}}").install(db)
    with pytest.raises(Unsupported, match="generated column"):
        Guard(table="t", name="t/{a}").install(db)
    for own in ("fenced_mark", "fenced_stamp"):
        with pytest.raises(Misuse):
            Guard(table=own, name="x").install(db)
    for value in (True, None, 1.5, b"x"):
        with pytest.raises(Misuse):
            ORDERS.name_for(id=value)


def test_a_rebuilt_table_is_noticed(db: sqlite3.Connection) -> None:
    """Migration tools copy a table and rename it; the triggers are gone, and nothing else says so."""
    ORDERS.install(db, mode="enforce")
    write(db, stamp(5), "UPDATE orders SET qty = 1 WHERE id = 42")
    db.executescript(
        "CREATE TABLE o2 AS SELECT * FROM orders; DROP TABLE orders; ALTER TABLE o2 RENAME TO orders"
    )
    with pytest.raises(Misconfigured, match="rebuilt"):
        write(db, stamp(6), "UPDATE orders SET qty = 2 WHERE id = 42")
    ORDERS.set_mode(db, "observe")
    write(db, stamp(6), "UPDATE orders SET qty = 2 WHERE id = 42")  # observe never fails a statement


def test_a_temporary_table_of_the_same_name_takes_no_trigger(db: sqlite3.Connection, path: Path) -> None:
    db.execute("CREATE TEMP TABLE orders (id INTEGER)")
    ORDERS.install(db, mode="require")
    other = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError, match="fenced:missing"):
        other.execute("UPDATE orders SET qty = 1")
    other.close()


def test_many_unique_keys(db: sqlite3.Connection) -> None:
    columns = ", ".join(f"c{i} TEXT UNIQUE" for i in range(20))
    db.execute(f"CREATE TABLE wide (id INTEGER PRIMARY KEY, {columns})")
    wide = Guard(table="wide", name="wide/{id}")
    wide.install(db)
    wide.install(db)
    wide.uninstall(db)
    assert not db.execute(
        "SELECT 1 FROM sqlite_schema WHERE type = 'trigger' AND tbl_name = 'wide'"
    ).fetchall()


def test_a_forked_child_writes_on_a_connection_of_its_own(path: Path) -> None:
    """Else its acknowledged writes may go into a log that another process has deleted."""
    guard = SqliteValues(path, BlockingRuntime())
    step(guard.open())
    step(guard.write(Credential((stamp(5),)), "orders/42", b"parent"))
    inherited = list(guard._idle)

    def child() -> bool:
        fresh = all(connection not in inherited for connection in guard._idle)
        step(guard.write(Credential((stamp(9),)), "orders/42", b"child"))
        return fresh and guard._idle[0] not in inherited

    assert said_by_child(child) is True
    mark = step(guard.mark("orders/42"))
    assert mark is not None and mark.token == 9
    step(guard.close())


async def test_a_cancelled_transaction_leaves_nothing_open(path: Path) -> None:
    """Loss of the lease cancels the body by design: whatever hop that hits, nobody else is locked out."""
    orders = AsyncGuard(table="orders", name="orders/{id}")
    async with aiosqlite.connect(path, isolation_level=None) as db:
        await db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, qty INTEGER)")
        await db.execute("INSERT INTO orders VALUES (42, 0)")
        await orders.install(db, mode="require")

        async def guarded(seq: int) -> None:
            async with orders.transaction(db, stamp(5, seq)) as tx:
                await tx.execute("UPDATE orders SET qty = qty + 1 WHERE id = 42")

        await guarded(1)
        for hops in range(0, 60, 2):
            task = asyncio.create_task(guarded(hops + 2))
            for _ in range(hops):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert not db.in_transaction, hops
            other = sqlite3.connect(path, timeout=1)
            assert other.execute("SELECT count(*) FROM fenced_stamp").fetchone() == (0,)
            other.execute("BEGIN IMMEDIATE")
            other.close()


def test_switching_the_mode_leaves_an_open_transaction_alone(db: sqlite3.Connection) -> None:
    ORDERS.install(db)
    db.execute("BEGIN")
    db.execute("UPDATE orders SET qty = 7")
    with pytest.raises(Misuse, match="commit or roll back first"):
        ORDERS.set_mode(db, "enforce")
    db.execute("ROLLBACK")
    assert db.execute("SELECT max(qty) FROM orders").fetchone() == (0,)
    with pytest.raises(Misconfigured):
        Guard(table="unknown", name="x").set_mode(db, "enforce")


def test_an_inner_announcement_clears_its_own_stamps_only(db: sqlite3.Connection) -> None:
    ORDERS.install(db, mode="require")
    with ORDERS.transaction(db, stamp(5)) as tx:
        with ORDERS.announce_within(tx, stamp(6, 1, "orders/43")):
            tx.execute("UPDATE orders SET qty = 1 WHERE id = 43")
        tx.execute("UPDATE orders SET qty = 1 WHERE id = 42")
        with pytest.raises(Misuse, match="already"):
            ORDERS.announce_within(tx, stamp(5, 2))
        with pytest.raises(fenced.Uncovered):  # all names or none: nothing of it stays
            ORDERS.announce_within(tx, stamp(7, 1, "orders/7"), "orders/7", "orders/8")
        assert tx.execute("SELECT count(*) FROM fenced_stamp").fetchone() == (1,)
    assert ORDERS.peek(db, "orders/7") is None


def test_a_stamp_that_covers_too_little_is_cleared_as_well(path: Path, db: sqlite3.Connection) -> None:
    ORDERS.install(db, mode="observe")
    fresh = sqlite3.connect(path, isolation_level=None)
    with (
        pytest.raises(Misuse, match="COMMIT belongs to the block"),
        ORDERS.transaction(fresh, stamp(5), "orders/42", "orders/43") as tx,
    ):
        tx.execute("COMMIT")
    assert db.execute("SELECT count(*) FROM fenced_stamp").fetchone() == (0,)
    with pytest.raises(sqlite3.IntegrityError):
        db.execute("INSERT INTO fenced_nothing VALUES (1)")
    fresh.close()


@pytest.mark.parametrize("level", [None, ""])
def test_a_rollback_inside_the_block_is_noticed(db: sqlite3.Connection, path: Path, level: Any) -> None:
    """What is written after it carries no stamp, and must not be committed as if it did."""
    ORDERS.install(db, mode="enforce")
    mine = sqlite3.connect(path, isolation_level=level)
    for seq in (1, 2):
        with pytest.raises(Misuse, match="ended inside"), ORDERS.transaction(mine, stamp(5, seq)) as tx:
            tx.execute("UPDATE orders SET qty = 1 WHERE id = 42")
            tx.rollback()
            if level == "":
                tx.execute("UPDATE orders SET qty = 2 WHERE id = 42")
        assert not mine.in_transaction
    assert db.execute("SELECT max(qty) FROM orders").fetchone() == (0,)
    mine.close()


async def _closed_by_aiosqlite(path: Path) -> None:
    guard = AsyncGuard(table="orders", name="orders/{id}")
    db = await aiosqlite.connect(path, isolation_level=None)
    await db.close()
    with pytest.raises(Misuse, match="this connection is closed"):
        async with guard.transaction(db, stamp(5)):
            pass
    with pytest.raises(Misuse, match="this connection is closed"):
        await guard.peek(db, "orders/42")


def test_errors_of_our_own_statements_are_typed(db: sqlite3.Connection, path: Path, tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="install"):
        ORDERS.peek(db, "orders/42")
    ORDERS.install(db, mode="enforce")
    reader = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
    for seq in (1, 2):
        with pytest.raises(Misconfigured), ORDERS.transaction(reader, stamp(5, seq)):
            pass
        assert not reader.in_transaction
    reader.close()
    with pytest.raises(Misuse, match="this connection is closed"), ORDERS.transaction(reader, stamp(5)):
        pass
    asyncio.run(_closed_by_aiosqlite(path))
    with pytest.raises(Misuse, match="fetch all rows"), ORDERS.transaction(db, stamp(5)) as tx:
        _unfetched = tx.execute("UPDATE orders SET qty = 1 WHERE id = 42 RETURNING id")
    with pytest.raises(Misuse):
        ORDERS.transaction(db, stamp(5), 42)  # type: ignore[arg-type]
    (tmp_path / "no.db").write_bytes(b"not a database" * 100)
    nothing = sqlite3.connect(tmp_path / "no.db", isolation_level=None)
    with pytest.raises(Misconfigured):
        ORDERS.install(nothing)
    nothing.close()


@pytest.mark.parametrize("mode", ["enforce", "require"])
def test_an_uncovered_row_is_named(db: sqlite3.Connection, mode: str) -> None:
    """By the name that it wanted: a wrong name in hold() is the commonest cause."""
    db.execute("CREATE TABLE people (id TEXT, of TEXT)")
    people = Guard(table="people", name="people/{id}/{of}")
    people.install(db, mode=mode)
    for name, row in (("people/o'brien:x/42", "('o''brien:x', '42')"), ("people/%2F/ü", "('/', 'ü')")):
        with pytest.raises(fenced.Uncovered, match="not covered by the lease of people/other") as caught:
            write(db, stamp(5, 1, "people/other"), f"INSERT INTO people VALUES {row}", people)
        assert caught.value.name == name and str(caught.value).startswith(f"{name}: ")
    for row in ("(NULL, '1')", "('1', '')"):
        with pytest.raises(fenced.Uncovered, match="a column of its name is NULL or empty"):
            write(db, stamp(5, 1, "people/other"), f"INSERT INTO people VALUES {row}", people)
    records = db.execute("SELECT name FROM fenced_record WHERE verdict = 'uncovered' ORDER BY id").fetchall()
    assert [name for (name,) in records[:2]] == ["people/o'brien:x/42", "people/%2F/ü"]
    assert db.execute("SELECT count(*) FROM people").fetchone() == (0,)


def test_a_foreign_key_of_the_programs_own(db: sqlite3.Connection) -> None:
    """Its failure inside a block is not taken for a COMMIT."""
    ORDERS.install(db, mode="require")
    db.executescript("PRAGMA foreign_keys = ON; CREATE TABLE lines (of INTEGER REFERENCES orders (id))")
    own = pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY")
    with own, ORDERS.transaction(db, stamp(5, 2)) as tx:
        tx.execute("INSERT INTO lines VALUES (99)")


def test_a_program_that_reads_bytes(db: sqlite3.Connection) -> None:
    ORDERS.install(db, mode="enforce")
    db.text_factory = bytes
    write(db, stamp(5), "UPDATE orders SET qty = 1 WHERE id = 42")
    with pytest.raises(fenced.StaleToken):
        write(db, stamp(4), "UPDATE orders SET qty = 2 WHERE id = 42")
    assert db.text_factory is bytes


def test_an_invalid_stamp_does_not_spoil_the_audit(path: Path) -> None:
    guard = SqliteValues(path, BlockingRuntime())
    step(guard.open())
    with pytest.raises(fenced.InvalidStamp):
        step(guard.write(Credential((stamp(2**53),)), "orders/42", b"x"))
    (record,) = step(guard.operate(lambda operator: operator.records()))
    assert (record.verdict, record.stamp, record.token) == ("invalid", str(stamp(2**53)), None)
    step(guard.close())


def test_a_cooperative_file_opened_as_mandatory_gets_its_triggers(path: Path) -> None:
    for mandatory in (False, True):
        guard = SqliteValues(path, BlockingRuntime(), mode="require", mandatory=mandatory)
        step(guard.open())
        step(guard.close())
    with sqlite3.connect(path) as plain, pytest.raises(sqlite3.IntegrityError, match="fenced:missing"):
        plain.execute("INSERT INTO fenced_value VALUES ('a', x'62', 1)")
    plain.close()
