"""Somebody else's program, stopped past its ttl: what is refused, and when nothing was shown."""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from click.testing import CliRunner

import fenced
from fenced.drills.command import drill
from fenced.drills.java import JDBC
from fenced.drills.programs import NotShown
from fenced.testing.late import overtake
from fenced_testkit.servers import PostgresqlServer, ServiceServer

pytestmark = pytest.mark.xdist_group("drills")

SQLITE = """
import os, signal, sqlite3, sys, fenced
db = sqlite3.connect(sys.argv[1], isolation_level=None)
stamp = fenced.Stamp.parse(os.environ["FENCED_STAMP"])
orders = fenced.sql.Guard(table="orders", name="orders/{id}")
print("begins", flush=True)
{before}
with orders.transaction(db, stamp) as tx:
    tx.execute("UPDATE orders SET qty = qty - 1 WHERE id = 42")
"""
PLAIN = """
import os, signal, sys, psycopg
os.kill(os.getpid(), signal.SIGSTOP)
with psycopg.connect(sys.argv[1]) as db:
    db.execute("SELECT fenced_guard.announce(%s)", (os.environ["FENCED_STAMP"],))
    db.execute("UPDATE orders SET qty = qty - 1 WHERE id = 42")
"""
JAVA = """
import java.sql.*;
public class Worker {
    public static void main(String[] url) throws Exception {
        try (Connection db = DriverManager.getConnection(url[0])) {
            new ProcessBuilder("kill", "-STOP", "" + ProcessHandle.current().pid()).start().waitFor();
            db.setAutoCommit(false);
            try (PreparedStatement announce = db.prepareStatement("SELECT fenced_guard.announce(?)")) {
                announce.setString(1, System.getenv("FENCED_STAMP"));
                announce.execute();
            }
            db.createStatement().execute("UPDATE orders SET qty = qty - 1 WHERE id = 42");
            db.commit();
        }
    }
}
"""
UNGUARDED = """
import sqlite3, sys
sqlite3.connect(sys.argv[1], isolation_level=None).execute("UPDATE orders SET qty = 0")
"""
STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path, isolation_level=None) as db:
        db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, qty INTEGER)")
        db.execute("INSERT INTO orders VALUES (42, 10)")
        fenced.sql.Guard(table="orders", name="orders/{id}").install(db, mode="require")
    return path


def quantity(db: Any) -> object:
    return db.execute("SELECT qty FROM orders WHERE id = 42").fetchone()[0]


def overtaken(shop: Path, program: str, **options: Any) -> Any:
    return overtake(
        [sys.executable, "-c", program, str(shop)],
        authority=f"sqlite:///{shop.parent / 'leases.db'}",
        guard=f"sqlite:///{shop}",
        table="orders",
        name="orders/42",
        ttl=0.3,
        check=quantity,
        **options,
    )


@pytest.mark.parametrize(
    ("before", "stop_at"),
    [("", "start"), (STOPS, "itself"), ("import time; time.sleep(2)", "begins")],
)
def test_a_late_write_of_a_stopped_worker_is_handed_back(shop: Path, before: str, stop_at: str) -> None:
    late = overtaken(shop, SQLITE.replace("{before}", before), stop_at=stop_at)
    assert (late.verdict, late.before, late.after) == ("held", 10, 10), late
    (record,) = late.refused
    assert (record.verdict, record.token, record.mark) == ("stale", late.token, late.newer)
    assert late.status == 1 and "StaleToken" in late.output


def test_a_worker_that_finished_before_it_was_stopped_shows_nothing(shop: Path) -> None:
    with pytest.raises(NotShown, match=r"ended .status 0. before it stopped itself"):
        overtaken(shop, SQLITE.replace("{before}", ""), stop_at="itself")


def test_a_worker_that_writes_nothing_late_shows_nothing(shop: Path) -> None:
    late = overtaken(shop, "print('nothing to do')")
    assert (late.verdict, late.refused, late.status) == ("inconclusive", (), 0)


def test_a_table_that_admits_everything_is_caught(shop: Path) -> None:
    with sqlite3.connect(shop, isolation_level=None) as db:
        fenced.sql.Guard(table="orders", name="orders/{id}").set_mode(db, "observe")
    late = overtaken(shop, UNGUARDED)
    assert (late.verdict, late.before, late.after) == ("broken", 10, 0)


@pytest.mark.parametrize("language", ["python", "java"])
def test_a_program_without_fenced_is_counted_on_postgresql(
    language: str, postgresql_server: PostgresqlServer, tmp_path: Path
) -> None:
    """It announces its stamp in plain SQL: nobody makes a record, and the server counts."""
    url = postgresql_server.url(postgresql_server.create_database())
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("CREATE TABLE orders (id int PRIMARY KEY, qty int)")
        db.execute("INSERT INTO orders VALUES (42, 10)")
        fenced.sql.Guard(table="orders", name="orders/{id}").install(db, mode="require")
    command = [sys.executable, "-c", PLAIN, url]
    if language == "java":
        worker, place = tmp_path / "Worker.java", urlsplit(url)
        worker.write_text(JAVA)
        there = f"jdbc:postgresql://{place.hostname}:{place.port}{place.path}?user={place.username}"
        command = ["java", "-XX:TieredStopAtLevel=1", "-cp", JDBC, str(worker), there]
    late = overtake(
        command,
        authority=f"sqlite:///{tmp_path / 'leases.db'}",
        guard=url,
        table="orders",
        name="orders/42",
        ttl=0.3,
        stop_at="itself",
        check=quantity,
    )
    assert (late.verdict, late.counted, late.before, late.after) == ("held", 1, 10, 10), late


def test_the_command_line_says_what_was_refused(shop: Path) -> None:
    worker = shop.parent / "worker.py"
    worker.write_text(SQLITE.replace("{before}", STOPS))
    words = [
        "sigstop",
        "--holder",
        f"{sys.executable} {worker} {shop}",
        "--stop-at",
        "itself",
        "--ttl",
        "0.3",
    ]
    words += ["--authority", f"sqlite:///{shop.parent / 'leases.db'}", "--guard", f"sqlite:///{shop}"]
    words += ["--table", "orders", "--lease", "orders/42", "--check", "SELECT qty FROM orders"]
    result = CliRunner().invoke(drill, words)
    assert result.exit_code == 0, result.output
    assert "refused and recorded: stale, token 2 had been seen" in result.stdout
    assert "SELECT qty FROM orders: [(10,)] before it went on, [(10,)] after" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("HELD  The program wrote with token 1")
    told = json.loads(CliRunner().invoke(drill, [*words, "--json"]).stdout)
    assert (told["verdict"], told["token"], told["newer"]) == ("held", 3, 4)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["crash", "--holder", "true"], "--holder goes with sigstop"),
        (["sigstop", "--holder", "true"], "--holder needs --authority"),
        (["sigstop", "--holder", "/no/such/worker"], "before it"),
    ],
)
def test_a_holder_that_cannot_be_drilled(words: list[str], says: str, shop: Path) -> None:
    """The last one has all that is needed, but its command does not exist."""
    if "/no" in words[-1]:
        words = [
            *words,
            "--authority",
            f"sqlite:///{shop.parent / 'leases.db'}",
            "--guard",
            f"sqlite:///{shop}",
        ]
        words += ["--table", "orders", "--lease", "orders/42", "--stop-at", "ready"]
    result = CliRunner().invoke(drill, words)
    assert result.exit_code == 2
    assert says in result.output + result.stderr


OVER_HTTP = """
import json, os, sqlite3, sys, time, urllib.request, fenced
db = sqlite3.connect(sys.argv[1], isolation_level=None)
orders = fenced.sql.Guard(table="orders", name="orders/{id}")
with fenced.Client(os.environ["FENCED_AUTHORITY"]) as leases:
    lease = leases.acquire(os.environ["FENCED_NAME"], ttl=float(os.environ["FENCED_TTL"]))
    stamp = lease.bare_stamp()
    db.execute("BEGIN"); db.execute("ROLLBACK")
    until = time.monotonic() + 60
    while orders.peek(db, "orders/42") is None and time.monotonic() < until:
        time.sleep(0.05)  # working, until somebody newer is there
    with orders.transaction(db, stamp) as tx:
        tx.execute("UPDATE orders SET qty = qty - 1 WHERE id = 42")
"""


@pytest.mark.parametrize("fault", ["sigstop", "partition", "cpu-starvation"])
def test_a_worker_that_takes_its_lease_over_http(fault: str, shop: Path) -> None:
    """Stopped, cut off from its authority, and slowed: it renews by itself, and is late all the same."""
    with ServiceServer() as service:
        try:
            late = overtake(
                [sys.executable, "-c", OVER_HTTP, str(shop)],
                authority=service.url(),
                guard=f"sqlite:///{shop}",
                table="orders",
                name="orders/42",
                ttl=1.0,
                takes_lease=True,
                fault=fault,  # type: ignore[arg-type]
                check=quantity,
            )
        except NotShown as error:  # starvation is not dependable: it may renew in time all the same
            if fault != "cpu-starvation" or "was not late" not in str(error):
                raise
            return
    assert (late.verdict, [each.verdict for each in late.refused]) == ("held", ["stale"]), late
