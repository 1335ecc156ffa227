"""SQL engines by registration: one that fenced does not know by name works everywhere, by its entry point alone."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

import fenced as library
from fenced.client import registry
from fenced.sql import Guard, engines, refusal
from fenced.testing.kit import stamp
from tests.toy_engine import ToyConnection, ToyError

ROOT = Path(__file__).parents[2]
ORDERS = Guard(table="orders", name="orders/{id}")
UPDATE = "UPDATE orders SET qty = qty + 1 WHERE id = 42"


def forget_engines() -> None:
    registry._other_engines.cache_clear()
    engines._found.cache_clear()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The toy as an installed distribution; returns the folder that must be on the path."""
    site = tmp_path / "site"
    about = site / "toy-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[fenced.engines]\ntoy = tests.toy_engine:ENGINE\n")
    monkeypatch.syspath_prepend(str(site))
    forget_engines()
    yield site
    forget_engines()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "shop.toy"
    connection = ToyConnection(path)
    connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, qty INTEGER DEFAULT 0, epoch INTEGER)")
    connection.execute("INSERT INTO orders (id) VALUES (42), (43)")
    connection.close()
    return path


def test_guards_work_on_its_connections(installed: Path, path: Path) -> None:
    db = ToyConnection(path)
    ORDERS.install(db, mode="require")
    with ORDERS.transaction(db, stamp(6)) as tx:
        assert tx is db
        tx.execute(UPDATE)
    with pytest.raises(library.StaleToken), ORDERS.transaction(db, stamp(5)):
        raise AssertionError
    with pytest.raises(library.Uncovered), ORDERS.transaction(db, stamp(6)) as tx:
        tx.execute("UPDATE orders SET qty = 9")
    with pytest.raises(ToyError) as caught:
        db.execute(UPDATE)
    assert isinstance(refusal(caught.value), library.MissingStamp)
    assert refusal(ToyError("something else")) is None
    mark = ORDERS.peek(db, "orders/42")
    assert mark is not None and mark.token == 6


def test_a_clause_quotes_as_its_engine_does(installed: Path, path: Path) -> None:
    db = ToyConnection(path)
    clause = Guard(table="orders", name="orders/{id}", mandatory=False).clause(db, stamp(6))
    assert (clause.assign, clause.where) == ("`epoch` = 6", "coalesce(`epoch`, 0) <= 6")
    done = db.execute(f"UPDATE orders SET qty = 1, {clause.assign} WHERE id = 42 AND {clause.where}")
    assert clause.admitted(done.rowcount, "id = 42")
    late = Guard(table="orders", name="orders/{id}").clause(db, stamp(5))
    done = db.execute(f"UPDATE orders SET qty = 2, {late.assign} WHERE id = 42 AND {late.where}")
    with pytest.raises(library.StaleToken):
        late.admitted(done.rowcount, "id = 42")


def test_a_framework_s_session_goes_to_the_engine_of_its_dialect(installed: Path, path: Path) -> None:
    with Session(sa.create_engine(f"sqlite:///{path}")) as session:
        ORDERS.install(session, mode="require")
        with ORDERS.transaction(session, stamp(6)) as tx:
            tx.execute(sa.text(UPDATE))
        assert session.execute(sa.text("SELECT qty FROM orders WHERE id = 42")).scalar() == 1


def test_without_it_the_same_is_unsupported(path: Path) -> None:
    with pytest.raises(library.Unsupported, match=r"not on .*ToyConnection"):
        ORDERS.transaction(ToyConnection(path), stamp(6))
    with (
        Session(sa.create_engine(f"sqlite:///{path}")) as session,
        pytest.raises(library.Unsupported, match="sqlalchemy over mariadb, postgresql, not over sqlite"),
    ):
        ORDERS.transaction(session, stamp(6))


def test_the_command_line_finds_it_by_its_scheme(fenced: Any, installed: Path, path: Path) -> None:
    fenced.environment["PYTHONPATH"] = f"{installed}:{ROOT}:{ROOT / 'src'}"
    url = f"toy://{path}"
    made = fenced("guard", "install", url, "--table", "orders", "--name", "orders/{id}")
    assert made.stdout == "orders is guarded under orders/{id}, rule retry, mode observe\n", made.stderr
    assert fenced("guard", "mode", url, "--table", "orders", "enforce").stdout == "orders: enforce\n"
    said = fenced("guard", "status", url)
    assert said.returncode == 0 and "mode          enforce\n" in said.stdout, said.stderr
    lacking = fenced("guard", "reset", url, "orders/42", "--why", "x")
    assert (lacking.returncode, lacking.stderr) == (78, "fenced: an SQLite guard has no reset of a mark\n")
    gone = fenced("guard", "status", "toy:///nowhere")
    assert (gone.returncode, gone.stderr) == (78, "fenced: there is no toy /nowhere\n")


def test_a_program_with_sqlite_alone_loads_no_other_engine(tmp_path: Path) -> None:
    """And never looks for entry points: that takes longer than opening the database."""
    program = f"""
import sqlite3, sys, fenced.sql
from fenced.values.model import Stamp
db = sqlite3.connect({str(tmp_path / "x.db")!r}, isolation_level=None)
db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
guard = fenced.sql.Guard(table="t", name="t/{{id}}")
guard.install(db, mode="enforce")
with guard.transaction(db, Stamp("0" * 16, ("t/1",), 1, 1, "a" * 32)) as tx:
    tx.execute("INSERT INTO t VALUES (1)")
print(*sys.modules, sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "fenced.stores.sqlite.guard.tables" in loaded
    others = {
        "fenced.stores.postgresql.guard.tables",
        "importlib.metadata",
        "psycopg",
        "sqlalchemy",
        "django",
    }
    assert not loaded & others


def test_every_built_in_engine_can_be_loaded() -> None:
    for engine in registry.engines():
        for classes in engine.drivers.values():
            for (package, _), load in classes.items():
                assert importlib.util.find_spec(package) is not None
                assert load().table is not None
