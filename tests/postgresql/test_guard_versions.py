"""The guard on every version of PostgreSQL that can be had: the kit, and the ways round that are closed.

`make test` installs further versions into `.postgresql`; without them the one that is installed is all there is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import fenced
from fenced.errors import Unsupported
from fenced.runtime.blocking import step
from fenced.sql import Guard
from fenced.stores.postgresql.guard.operator import PostgresqlOperator
from fenced.stores.postgresql.guard.sessions import PsycopgSession
from fenced.testing import GUARD_CHECKS, run
from fenced.testing.kit import stamp
from fenced_testkit.servers import PostgresqlServer
from tests.conformance.guards.test_postgresql import Harness

PROGRAMS = {
    folder.parents[1].name.removeprefix("pg"): folder
    for folder in sorted(Path(__file__).parents[2].glob(".postgresql/node_modules/pg*/native/bin"))
}


VERSIONS = [
    pytest.param(version, marks=pytest.mark.xdist_group(f"postgresql {version}"))  # one server for each
    for version in PROGRAMS or ["installed"]
]


@pytest.fixture(scope="module", params=VERSIONS)
def server(request: pytest.FixtureRequest) -> Iterator[PostgresqlServer]:
    with PostgresqlServer({"fsync": "off"}, programs=PROGRAMS.get(request.param)) as found:
        if request.param in PROGRAMS:
            assert found.execute("SHOW server_version")[0][0].startswith(f"{request.param}.")
        yield found


def test_the_kit(server: PostgresqlServer, request: pytest.FixtureRequest) -> None:
    """Each version runs its share of the checks, which all run on the one that is installed."""
    versions = list(PROGRAMS or ["installed"])
    version = request.node.callspec.params["server"]
    for check in GUARD_CHECKS[versions.index(version) :: len(versions)]:
        run(check, lambda runtime: Harness(runtime, server, True, None), "blocking")


def test_ways_round_that_are_closed(server: PostgresqlServer) -> None:
    """Partitions by every way, cascades, moves, MERGE, TRUNCATE, an epoch column, and what the catalogs say."""
    with psycopg.connect(server.url(server.create_database()), autocommit=True) as db:
        db.execute(
            "CREATE TABLE t (id integer, qty integer, PRIMARY KEY (id)) PARTITION BY RANGE (id);"
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10);"
            "CREATE TABLE lines (id integer PRIMARY KEY, of integer REFERENCES t ON DELETE CASCADE ON UPDATE CASCADE);"
            "INSERT INTO t VALUES (1, 0), (2, 0); INSERT INTO lines VALUES (1, 1)"
        )
        guard = Guard(table="t", name="t/{id}", epoch="epoch")
        lines = Guard(table="lines", name="lines/{id}")
        guard.install(db, mode="require")
        lines.install(db, mode="require")
        db.execute("CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (10) TO (20)")
        statements = [
            *(
                "UPDATE t SET qty = 1",
                "UPDATE t1 SET qty = 1",
                "DELETE FROM t",
                "DELETE FROM t1 WHERE id = 1",
            ),
            *("INSERT INTO t VALUES (3)", "INSERT INTO t1 VALUES (3)", "INSERT INTO t2 VALUES (13)"),
            *(
                "UPDATE t SET id = 12 WHERE id = 2",
                "TRUNCATE t CASCADE",
                "TRUNCATE t1 CASCADE",
                "DELETE FROM lines",
            ),
            "WITH gone AS (DELETE FROM t WHERE id = 2 RETURNING id) INSERT INTO t SELECT id + 1 FROM gone",
            "INSERT INTO t VALUES (1) ON CONFLICT (id) DO UPDATE SET qty = 9",
        ]
        if server.execute("SHOW server_version_num")[0][0] >= "150000":
            statements.append(
                "MERGE INTO t USING (VALUES (1)) AS v (id) ON t.id = v.id WHEN MATCHED THEN UPDATE SET qty = 9"
            )
        for statement in statements:
            with pytest.raises(psycopg.DatabaseError, match="no stamp"):
                db.execute(statement.encode())
            with pytest.raises(fenced.Uncovered), guard.transaction(db, stamp(5, 1, "elsewhere")) as tx:
                tx.execute(statement.encode())
        with pytest.raises(fenced.Uncovered) as caught, guard.transaction(db, stamp(5, 1, "t/1")) as tx:
            tx.execute("DELETE FROM t WHERE id = 1")
        assert caught.value.name == "lines/1"
        with guard.transaction(db, stamp(6, 1, "t/1", "t/12", "t/2")) as tx:
            tx.execute("UPDATE t SET qty = 5")
            tx.execute("UPDATE t SET id = 12 WHERE id = 2")
        assert db.execute("SELECT epoch, qty FROM t ORDER BY id").fetchall() == [(6, 5), (6, 5)]
        with pytest.raises(fenced.StaleToken), guard.transaction(db, stamp(5, 2, "t/12")):
            raise AssertionError("announced")
        wrong = step(PostgresqlOperator(PsycopgSession(db)).status("t")).guards[0].wrong
        assert wrong == ("partition public.t2 can be truncated: install the guard again",)
        guard.install(db)
        assert step(PostgresqlOperator(PsycopgSession(db)).status("t")).guards[0].wrong == ()
        with pytest.raises(psycopg.DatabaseError, match="fenced_alone"):
            db.execute("CREATE TABLE parent (LIKE lines); ALTER TABLE lines INHERIT parent")
        guard.uninstall(db)
        lines.uninstall(db)
        db.execute("UPDATE t SET qty = 7; TRUNCATE t CASCADE")


def test_a_name_is_made_of_what_is_stored(server: PostgresqlServer) -> None:
    """Since PostgreSQL 18 a generated column may be virtual: no trigger sees its value."""
    with psycopg.connect(server.url(server.create_database()), autocommit=True) as db:
        db.execute("CREATE TABLE s (id integer, at integer GENERATED ALWAYS AS (id + 1) STORED)")
        Guard(table="s", name="s/{at}").install(db, mode="require")
        with pytest.raises(psycopg.DatabaseError, match=re.escape("s/8: the write carries no stamp")):
            db.execute("INSERT INTO s VALUES (7)")
        if server.execute("SHOW server_version_num")[0][0] < "180000":
            return
        db.execute("CREATE TABLE v (id integer, at integer GENERATED ALWAYS AS (id + 1) VIRTUAL)")
        with pytest.raises(Unsupported, match="virtual"):
            Guard(table="v", name="v/{at}").install(db)


def test_a_successor_takes_a_name_over_on_every_version(server: PostgresqlServer) -> None:
    """What a row's lock shows, what the server says of other transactions, and how one is ended."""
    url = server.url(server.create_database())
    with psycopg.connect(url, autocommit=True) as db, psycopg.connect(url, autocommit=True) as old:
        db.execute("CREATE TABLE t (id integer PRIMARY KEY, qty integer); INSERT INTO t VALUES (1, 0)")
        guard = Guard(table="t", name="t/{id}")
        guard.install(db, mode="observe")
        db.execute("UPDATE fenced_guard.trust SET patience = 0.2")
        with guard.transaction(old, stamp(5, 1, "t/1")) as tx:
            tx.execute("UPDATE t SET qty = 1")
        old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT 1")
        assert len(guard.set_mode(db, "require", wait=0)) == 1
        old.execute("COMMIT")
        assert guard.set_mode(db, "require") == ()
        wanted = "SELECT fenced_guard.has_successor(%s)"
        with psycopg.connect(url) as taker:
            taker.execute("SELECT fenced_guard.lock_turn_rows(%s)", [["/t/1"]])
            assert db.execute(wanted, ["/t/1"]).fetchone() == (True,)
            taker.rollback()
        assert db.execute(wanted, ["/t/1"]).fetchone() == (False,)
        old.execute("BEGIN")
        guard.announce_within(old, stamp(5, 2, "t/1"))
        with guard.transaction(db, stamp(6, 1, "t/1")) as tx:
            tx.execute("UPDATE t SET qty = 2")
        with pytest.raises(psycopg.OperationalError):
            old.execute("SELECT 1")
