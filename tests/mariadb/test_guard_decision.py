"""What the guard's SQL decides by itself agrees with the pure functions: the verdict, the mode, the ruling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pymysql
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenced.errors import REFUSALS, AlreadyApplied, FencedError
from fenced.sql import Guard
from fenced.stores.mariadb.guard.install import mode_row
from fenced.stores.mariadb.guard.refusals import VERDICTS, Detail, read
from fenced.testing import vectors
from fenced.testing.inputs import ODD_NAMES
from fenced.testing.kit import stamp
from fenced.values.decision import Mode, Ruling, Verdict, mode_of, rule_on
from fenced.values.model import TOKEN_MAX, is_seq
from fenced_testkit.servers import MariadbServer

ORDERS = Guard(table="orders", name="orders/{id}")
FILE = json.loads(vectors.PATH.read_text())
TEXT = str(stamp(4, 1, "y"))


class Database:
    """A database with a guarded table, and its name."""

    def __init__(self, connection: Any, name: str) -> None:
        self.connection = connection
        self.name = name

    def run(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters or None)
            return list(cursor.fetchall())


@pytest.fixture(scope="module")
def database(mariadb_server: MariadbServer) -> Iterator[Database]:
    name = mariadb_server.create_database()
    connection = pymysql.connect(
        host=mariadb_server.host, port=mariadb_server.port, user="root", database=name, autocommit=True
    )
    with connection:
        found = Database(connection, name)
        found.run("CREATE TABLE orders (id int PRIMARY KEY) ENGINE = InnoDB")
        ORDERS.install(connection, mode="enforce")
        yield found


# The verdict.


def test_every_verdict_is_that_of_the_vectors(database: Database) -> None:
    """`judge` gets what passed the screening: a stamp that can be read, covers the name, is proven and not foreign."""
    cases = [
        case
        for case in vectors.cases()
        if case.covered and case.proven and case.stamp_realm == case.guard_realm
        if case.token is not None and 1 <= case.token <= TOKEN_MAX and is_seq(case.seq)
    ]
    asked = [
        (
            *(case.mark_token or 0, case.mark_grant or "", case.mark_seq or 0, case.mark_operation),
            *(case.token, case.grant, case.seq or 0, case.rule, case.announce, case.operation),
        )
        for case in cases
    ]
    call = "SELECT fenced_guard.judge(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
    found = [database.run(call, arguments)[0][0].decode() for arguments in asked]
    due = ["rises" if case.rises else case.verdict for case in cases]
    different = [each for each in zip(cases, found, due, strict=True) if each[1] != each[2]]
    assert not different, different[:3]
    assert len(cases) > 1000


# The mode.

PATTERNS = ("*", "a*", "*b", "a/*", "a/b", "*_*", "%", "a\\*", "\u00e9*", "?", "**", "a*b*", "a|*")
NAMES = ("a", "b", "a/b", "a/b/c", "x_y", "xzy", "%", "a\\b", "\u00e9t\u00e9", "?", "aXbX", "*", "a|b")
MODES = [Mode("observe"), Mode("shadow"), Mode("canary", 40.0), Mode("enforce"), Mode("require")]


def set_modes(database: Database, modes: list[tuple[str, Mode]]) -> None:
    """As `set_mode` does it, which also waits for writers."""
    first = dict(modes).get("*", Mode("observe"))
    database.run("DELETE FROM fenced_guard.mode WHERE scope = %s", (database.name,))
    for pattern, mode in modes:
        database.run(mode_row(database.name, "orders", mode, pattern))
    database.run(
        "UPDATE fenced_guard.guard SET mode = %s, percent = %s, patterned = %s WHERE scope = %s",
        (str(first), first.percent, any(pattern != "*" for pattern, _ in modes), database.name),
    )


def ruled(database: Database, name: str) -> tuple[str, bool, bool]:
    database.run("CALL fenced_guard.mode_of(DATABASE(), 'orders', %s, @m, @f, @r)", (name,))
    ((mode, refuses, requires),) = database.run("SELECT @m, @f, @r")
    return (mode.decode() if isinstance(mode, bytes) else mode), bool(refuses), bool(requires)


@settings(max_examples=60, deadline=None)
@given(
    modes=st.dictionaries(st.sampled_from(PATTERNS), st.sampled_from(MODES)).map(lambda d: list(d.items()))
)
def test_the_mode_of_a_name_is_the_pure_one(database: Database, modes: list[tuple[str, Mode]]) -> None:
    set_modes(database, modes)
    for name in NAMES:
        due = mode_of(name, modes)
        refuses = rule_on(Verdict.STALE, due, name) is Ruling.REFUSE
        requires = rule_on(Verdict.MISSING, due, name) is Ruling.REFUSE
        assert ruled(database, name) == (str(due), refuses, requires), (name, modes)


def test_every_share_and_pattern_is_that_of_the_vectors(database: Database) -> None:
    for percent in (5, 50):
        set_modes(database, [("*", Mode("canary", percent))])
        for name, point in FILE["canary"]["rows"]:
            assert ruled(database, name)[1] == (point < percent / 100 * 2**32), name
    for story in FILE["mode_of"]:
        set_modes(database, [(pattern, Mode.parse(mode)) for pattern, mode in story["modes"].items()])
        assert {name: ruled(database, name)[0] for name in story["names"]} == story["names"]


@pytest.mark.parametrize("percent", [0, 0.5, 33, 99.9, 100])
def test_the_canary_takes_the_same_names(percent: float, database: Database) -> None:
    mode = Mode("canary", percent)
    set_modes(database, [("*", mode)])
    for name in (*ODD_NAMES, *(f"orders/{number}" for number in range(100))):
        assert ruled(database, name)[1] == mode.refuses(name), name


# The ruling.


def test_every_ruling_is_that_of_the_vectors(database: Database) -> None:
    for verdict, mode, name, ruling in FILE["rule_on"]["rows"]:
        if verdict == "admit":
            continue  # nothing is to be done about it
        set_modes(database, [("*", Mode.parse(mode))])
        database.run("DELETE FROM fenced_guard.record WHERE scope = %s", (database.name,))
        try:
            database.run("SET @fenced_noted = NULL")
            call = "CALL fenced_guard.rule_on(DATABASE(), 'orders', %s, %s, 5, %s, 0, %s)"
            database.run(call, (name, TEXT, "0" * 32, verdict))
            ((found,),) = database.run(
                "SELECT ruling FROM fenced_guard.record WHERE scope = %s", (database.name,)
            )
            found = found.decode()
        except pymysql.InternalError as error:
            raised = VERDICTS[error.args[0]]
            found = "admit" if raised is Verdict.APPLIED else "refuse" if raised == verdict else raised
        assert found == ruling, (verdict, mode, name)


@pytest.mark.parametrize("verdict", [verdict for verdict in Verdict if verdict != "admit"])
def test_each_verdict_is_its_own_error(verdict: Verdict, database: Database) -> None:
    """With details that begin the same sentence as every guard's."""
    set_modes(database, [("*", Mode("require"))])
    call = "CALL fenced_guard.refuse(DATABASE(), 'orders', %s, %s, 5, %s, 0, %s, 'require')"
    with pytest.raises(pymysql.InternalError) as refused:
        database.run(call, ("orders/\u00e9", TEXT, "0" * 32, str(verdict)))
    ((told,),) = database.run("SELECT @fenced_refused")
    found: FencedError | None = read(refused.value).refusal(Detail.read(told))
    assert type(found) is REFUSALS.get(verdict.value, AlreadyApplied)
    assert str(found).startswith("orders/\u00e9: ")


@pytest.mark.parametrize("name", ["x" * 200, "\U0001f512" * 50, "\u00e9" * 100])
def test_a_long_name_does_not_hide_the_refusal(name: str, database: Database) -> None:
    """A message of more than 128 characters would be another error."""
    call = "CALL fenced_guard.refuse(DATABASE(), 'orders', %s, NULL, 5, NULL, 0, 'out_of_order', 'require')"
    with pytest.raises(pymysql.InternalError) as refused:
        database.run(call, (name,))
    assert refused.value.args[0] == 903
