"""Random statements on a guarded table and on its twin without a guard: who writes a row of another name is refused.

On the twin, triggers note the name of every row that is written, also of those that a REPLACE removes.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from fenced.errors import Uncovered
from fenced.sql import Guard
from fenced.stores.sqlite.guard import install
from fenced.stores.sqlite.guard.unique import TableKeys, look_at
from fenced.testing.kit import stamp

GUARD = Guard(table="t", name="t/{id}")
REFS = ("x", "y", "z")
SHAPES = {
    "no key but the rowid": ("id TEXT, ref TEXT UNIQUE, qty INTEGER DEFAULT 0)", ("(ref)", "")),
    "a key and another": (
        "id TEXT PRIMARY KEY, ref TEXT UNIQUE, qty INTEGER DEFAULT 0)",
        ("(id)", "(ref)", ""),
    ),
    "the name is the rowid": (
        "id INTEGER PRIMARY KEY, ref TEXT UNIQUE, qty INTEGER DEFAULT 0)",
        ("(id)", "(ref)", ""),
    ),
    "without rowid": ("id TEXT, ref TEXT PRIMARY KEY, qty INTEGER DEFAULT 0) WITHOUT ROWID", ("(ref)", "")),
    "it replaces by itself": (
        "id TEXT, ref TEXT UNIQUE ON CONFLICT REPLACE, qty INTEGER DEFAULT 0)",
        ("(ref)", ""),
    ),
    "it ignores by itself": (
        "id TEXT, ref TEXT UNIQUE ON CONFLICT IGNORE, qty INTEGER DEFAULT 0)",
        ("(ref)", ""),
    ),
}
NOTING = """
PRAGMA recursive_triggers = ON;
CREATE TABLE written (id);
CREATE TRIGGER i AFTER INSERT ON t BEGIN INSERT OR ABORT INTO written VALUES (NEW.id); END;
CREATE TRIGGER u AFTER UPDATE ON t BEGIN INSERT OR ABORT INTO written VALUES (NEW.id), (OLD.id); END;
CREATE TRIGGER d AFTER DELETE ON t BEGIN INSERT OR ABORT INTO written VALUES (OLD.id); END;
"""
POLICIES = ("", "", "", "OR IGNORE", "OR REPLACE", "OR FAIL", "OR ABORT")


def statement(draw: random.Random, ids: tuple[str, ...], targets: tuple[str, ...]) -> str:
    one, ref, policy = draw.choice(ids), draw.choice(REFS), draw.choice(POLICIES)
    row = f"({one}, '{ref}', 5)"
    kind = draw.randrange(7)
    if kind == 0:
        return f"INSERT {policy} INTO t (id, ref, qty) VALUES {row}"
    if kind == 1:
        return f"INSERT {policy} INTO t (id, ref, qty) VALUES {row}, ({draw.choice(ids)}, '{draw.choice(REFS)}', 6)"
    if kind == 2:
        changes = ("qty = t.qty + 1", "id = excluded.id", "qty = 9 WHERE t.qty > 3")
        change = draw.choice(("NOTHING", *(f"UPDATE SET {each}" for each in changes)))
        policy = policy if draw.randrange(4) == 0 else ""
        return f"INSERT {policy} INTO t (id, ref, qty) VALUES {row} ON CONFLICT {draw.choice(targets)} DO {change}"
    if kind == 3:
        return f"UPDATE {policy} t SET ref = '{ref}' WHERE id = {one}"
    if kind == 4:
        return f"UPDATE {policy} t SET id = {draw.choice(ids)} WHERE id = {one}"
    if kind == 5:
        return f"INSERT {policy} INTO other VALUES ({one}, '{ref}')"  # whose trigger writes to t
    return f"DELETE FROM t WHERE ref = '{ref}'"


def tables(draw: random.Random, shape: str, ids: tuple[str, ...]) -> str:
    first, second = draw.sample(ids, 2)
    return f"""
    CREATE TABLE t ({SHAPES[shape][0]};
    CREATE TABLE other (id, ref);
    CREATE TRIGGER o AFTER INSERT ON other BEGIN INSERT INTO t (id, ref) VALUES (NEW.id, NEW.ref); END;
    INSERT INTO t (id, ref, qty) VALUES ({first}, 'x', 0), ({second}, 'y', 4);
    """


def outcome(db: sqlite3.Connection, run: Callable[[], object]) -> tuple[type[Exception] | None, list[object]]:
    """What was raised, and the rows afterwards."""
    raised = None
    try:
        run()
    except (sqlite3.Error, Uncovered) as error:
        raised = type(error)
    return raised, db.execute("SELECT id, ref, qty FROM t ORDER BY id, ref").fetchall()


def compare(shape: str, case: int) -> str:
    """How the guard did with one statement: right, or what was wrong."""
    draw = random.Random(f"{shape} {case}")
    ids = ("1", "2", "3") if "INTEGER PRIMARY" in SHAPES[shape][0] else ("'a'", "'b'", "'c'")
    made, asked = tables(draw, shape, ids), statement(draw, ids, SHAPES[shape][1])
    covered = {each.strip("'") for each in draw.sample(ids, draw.choice((1, 2)))}
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as twin:
        twin.executescript(made + NOTING)
        before = twin.execute("SELECT id, ref, qty FROM t ORDER BY id, ref").fetchall()
        failed, expected = outcome(twin, lambda: twin.execute(asked))
        written = {str(name) for (name,) in twin.execute("SELECT id FROM written")}
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.executescript(made)
        GUARD.install(db, mode="require")

        def guarded() -> None:
            with GUARD.transaction(db, stamp(5, 1, *(f"t/{name}" for name in covered))) as tx:
                tx.execute(asked)

        raised, found = outcome(db, guarded)
    told = f"{asked!r} by the holder of {sorted(covered)}, on {before}"
    if written <= covered and failed is None and (raised, found) != (None, expected):
        # Two policies in one statement, or one in the table and another here, are refused to be on the safe side.
        twice = " OR " in asked and ("ON CONFLICT" in asked or shape == "it replaces by itself")
        return "right" if raised is not None and twice else f"harmless, and refused: {told}"
    if not written <= covered and failed is None and raised is None:
        return f"not refused: {told}"
    if raised is not None and found != before:
        return f"half of it is there: {told}"
    return "right"


def verdicts() -> Iterator[str]:
    return (compare(shape, case) for case in range(80) for shape in SHAPES)


def test_a_statement_is_refused_if_it_writes_a_row_of_another_name() -> None:
    assert set(verdicts()) == {"right"}


def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(install.SQL, "replaced", install.SQL["trigger"])


def never(monkeypatch: pytest.MonkeyPatch) -> None:
    text = install.SQL["replaced"].replace("WHERE replaces = 1;\n  UPDATE", "WHERE 0;\n  UPDATE")
    assert text != install.SQL["replaced"]
    monkeypatch.setitem(install.SQL, "replaced", text)


def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def changed(*arguments: object) -> TableKeys:
        return replace(await look_at(*arguments), replaces=False)  # type: ignore[arg-type]

    monkeypatch.setattr(install, "look_at", changed)


@pytest.mark.parametrize(
    ("plant", "says"),
    [(always, "harmless"), (never, "not refused"), (believed, "not refused")],
    ids=["every conflict counts as a REPLACE", "no conflict does", "the table's own policy is forgotten"],
)
def test_the_twin_finds_what_is_wrong(
    plant: Callable[[pytest.MonkeyPatch], None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert next(verdict for verdict in verdicts() if verdict.startswith(says))
