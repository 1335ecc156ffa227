"""`fenced guard`: the operator's whole way through a rollout, on a server and on a file."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

import psycopg
import pytest

import fenced as library
from fenced.sql import Guard
from fenced.testing.kit import stamp

ORDERS = Guard(table="orders", name="orders/{id}")
INSTALL = ("guard", "install", "--table", "orders", "--name", "orders/{id}")


@pytest.fixture
def db(postgresql_url: str) -> Any:
    with psycopg.connect(postgresql_url, autocommit=True, application_name="app") as connection:
        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY, qty int NOT NULL DEFAULT 0)")
        connection.execute("INSERT INTO orders SELECT generate_series(40, 49)")
        yield connection


@pytest.fixture
def guarded(fenced: Any, db: Any, postgresql_url: str) -> Any:
    """A command line whose FENCED_GUARD is a database with a guarded table."""
    fenced.environment["FENCED_GUARD"] = postgresql_url
    ended = fenced(*INSTALL)
    assert ended.stdout == "orders is guarded under orders/{id}, rule retry, mode observe\n", ended.stderr
    return fenced


def told(fenced: Any, *args: str) -> Any:
    ended = fenced("guard", *args, "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def write(db: Any, token: int) -> None:
    with ORDERS.transaction(db, stamp(token, 1, "orders/42")) as tx:
        tx.execute("UPDATE orders SET qty = qty + 1 WHERE id = 42")


def test_a_migration_is_printed_and_nothing_is_changed(fenced: Any, db: Any, postgresql_url: str) -> None:
    printed = fenced(*INSTALL, postgresql_url, "--mode", "require", "--print")
    assert printed.returncode == 0 and printed.stderr == ""
    assert db.execute("SELECT to_regnamespace('fenced_guard')").fetchone() == (None,)
    db.execute(printed.stdout)
    with pytest.raises(psycopg.Error, match="carries no stamp"):
        db.execute("UPDATE orders SET qty = 1")
    ended = fenced("guard", "uninstall", postgresql_url, "--table", "orders")
    assert ended.stdout == "orders is not guarded any more; its marks are kept\n"
    db.execute("UPDATE orders SET qty = 1")


def test_through_the_stages(guarded: Any, db: Any) -> None:
    """Each stage by one command, in force for the next statement; the status says what speaks against the next."""
    write(db, 5)
    write(db, 4)
    assert "next          shadow: safe" in guarded("guard", "status").stdout
    assert guarded("guard", "mode", "--table", "orders", "shadow").stdout == "orders: shadow\n"
    write(db, 3)
    said = guarded("guard", "status", "--table", "orders", "--quiet-for", "7d").stdout
    assert "would refuse  2 stale; last " in said
    assert "next          canary: not yet\n" in said
    assert "- 1 would-be refusal in the last 7 d, last " in said
    assert "- shadow has lasted " in said
    guarded("guard", "mode", "--table", "orders", "enforce")
    with pytest.raises(library.StaleToken):
        write(db, 4)
    db.execute("UPDATE orders SET qty = 0 WHERE id = 42")
    said = guarded("guard", "status").stdout
    assert "refused       1; recorded: 1 stale" in said
    assert "unstamped     1 by postgres, app; last " in said
    assert "next          require: not yet\n                - 1 unstamped write in the last 24 h" in said
    assert told(guarded, "mode", "--table", "orders", "require", "--names", "orders/4*")["mode"] == "require"
    with pytest.raises(psycopg.Error, match="carries no stamp"):
        db.execute("UPDATE orders SET qty = 0 WHERE id = 42")
    ended = guarded("guard", "mode", "--table", "orders", "--names", "orders/4*", "--unset")
    assert ended.stdout == "orders: no mode of its own for orders/4*\n"
    db.execute("UPDATE orders SET qty = 0 WHERE id = 42")
    assert [c["detail"]["after"] for c in told(guarded, "history", "--table", "orders")[1:]] == [
        *("observe", "shadow", "enforce", "require", None)
    ]
    audit = told(guarded, "records", "--limit", "3")
    assert [(r["verdict"], r["ruling"], r["mode"]) for r in audit] == [
        ("stale", "refuse", "enforce"),
        ("missing", "count", "enforce"),
        ("missing", "count", "enforce"),
    ]
    shown = guarded("guard", "records", "--limit", "3").stdout.splitlines()
    assert shown[1].split()[2:10] == [
        "public.orders",
        "orders/42",
        "stale",
        "refused",
        "enforce",
        "4",
        "5",
        "postgres",
    ]


def test_a_stage_that_does_not_bind_everybody_yet(guarded: Any, db: Any) -> None:
    guarded("guard", "mode", "--table", "orders", "observe")
    with db.transaction():
        db.execute("UPDATE orders SET qty = 0 WHERE id = 42")
        (pending,) = told(guarded, "mode", "--table", "orders", "require", "--wait", "0")["pending"]
        assert pending.startswith(f"process {db.info.backend_pid} (")
        assert (
            f"{pending}: began before the last change, which does not bind it"
            in guarded("guard", "status").stdout
        )
        shown = guarded("guard", "mode", "--table", "orders", "require", "--wait", "0").stdout
        assert f"pending: {pending} began before" in shown
    assert told(guarded, "mode", "--table", "orders", "require")["pending"] == []


def test_emergencies(guarded: Any, db: Any) -> None:
    guarded("guard", "mode", "--table", "orders", "require")
    overriding = ("override", "--table", "orders", "--names", "orders/42")
    made = told(guarded, *overriding, "--for", "15m", "--why", "ticket 4711")
    assert (made["pattern"], made["who"], made["why"]) == ("orders/42", "postgres", "ticket 4711")
    db.execute("UPDATE orders SET qty = 0 WHERE id = 42")
    assert "orders/42 for 15 min more, by postgres: ticket 4711" in guarded("guard", "status").stdout
    assert told(guarded, *overriding, "--end") == {"table": "orders", "ended": 1, "pending": []}
    with pytest.raises(psycopg.Error, match="carries no stamp"):
        db.execute("UPDATE orders SET qty = 0 WHERE id = 42")
    assert (
        guarded("guard", "override", "--table", "orders", "--end").stdout
        == "orders: no override was in force\n"
    )

    # A name that a wrong token has wedged.
    write(db, 10**15)
    with pytest.raises(library.StaleToken):
        write(db, 6)
    assert told(guarded, "reset", "orders/42", "--why", "invented") == {
        "name": "orders/42",
        "reset": True,
        "token": 10**15,
    }
    write(db, 6)
    assert told(guarded, "trust", "--max-jump", "1000", "--sample", "100%") == {
        "realm": stamp(6).realm,
        "max_jump": 1000,
        "sample": 1.0,
        "proof": False,
        "patience": 5.0,
    }
    assert told(guarded, "trust", "--patience", "30")["patience"] == 30.0
    with pytest.raises(library.ForgedStamp):
        write(db, 10**15)
    write(db, 6)
    assert told(guarded, "records", "--limit", "1")[0]["ruling"] == "admit"
    assert told(guarded, "trust", "--max-jump", "off")["max_jump"] is None
    guarded("guard", "adopt", "00000000000000bb")
    with pytest.raises(library.ForeignRealm):
        write(db, 7)
    assert told(guarded, "tidy", "--keep", "1")["overrides"] == 1
    whats = [change["what"] for change in told(guarded, "history")]
    assert whats[-7:] == ["override", "override ended", "reset", "trust", "trust", "trust", "adopt"]
    assert "adopt 00000000000000aa -> 00000000000000bb" in guarded("guard", "history").stdout


def test_for_monitoring(guarded: Any, db: Any) -> None:
    assert guarded("guard", "status", "--check").returncode == 0
    db.execute("ALTER TABLE orders DISABLE TRIGGER fenced_update")
    ended = guarded("guard", "status", "--check", "--json")
    assert ended.returncode == 1
    status = json.loads(ended.stdout)
    assert (status["wrong"], status["guards"][0]["wrong"]) == (True, ["trigger fenced_update is disabled"])
    assert guarded("guard", "status").returncode == 0


def test_an_authority_is_raised_above_a_server_s_marks(guarded: Any, db: Any, postgresql_url: str) -> None:
    write(db, 7000)
    raised = guarded("authority", "raise", "--above-guards", postgresql_url, "--json")
    assert json.loads(raised.stdout)["floor"] == 7000


def test_on_a_file(fenced: Any) -> None:
    """What SQLite keeps is shown; what it does not keep is said."""
    url = f"sqlite:///{fenced.folder}/data.db"
    db = sqlite3.connect(fenced.folder / "data.db", isolation_level=None)
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, qty INTEGER)")
    db.execute("INSERT INTO orders VALUES (42, 0)")
    assert "CREATE TRIGGER" in fenced(*INSTALL, url, "--print").stdout
    assert told(fenced, *INSTALL[1:], url, "--mode", "shadow")["mode"] == "shadow"
    write(db, 5)
    write(db, 4)
    db.execute("UPDATE orders SET qty = 1")
    (orders,) = told(fenced, "status", url)["guards"]
    assert (orders["marks"], orders["highest"], orders["wrong"]) == (1, 5, [])
    said = fenced("guard", "status", url).stdout
    assert "would refuse  1 stale\n" in said
    assert "next          canary: not yet\n                - 1 would-be refusal in this mode\n" in said
    assert [r["verdict"] for r in told(fenced, "records", url)] == ["stale", "missing"]
    fenced("guard", "mode", url, "--table", "orders", "require", "--names", "orders/4*")
    with pytest.raises(sqlite3.Error):
        db.execute("UPDATE orders SET qty = 2")
    assert told(fenced, "mode", url, "--table", "orders", "--names", "orders/4*", "--unset")["mode"] is None
    db.execute("UPDATE orders SET qty = 2")
    db.execute("DROP TRIGGER fenced_orders_update")
    assert fenced("guard", "status", url, "--check").returncode == 1
    fenced("guard", "adopt", url, "00000000000000bb")
    assert told(fenced, "status", url)["realm"] == "00000000000000bb"
    for args in (["history"], ["tidy"], ["trust"], ["reset", "orders/42", "--why", "x"]):
        ended = fenced("guard", args[0], url, *args[1:])
        assert (ended.returncode, "an SQLite guard has no" in ended.stderr) == (78, True)
    assert fenced("guard", "uninstall", url, "--table", "orders").returncode == 0
    assert fenced("guard", "status", url).returncode == 78
    db.close()


CANNOT_BE_DONE: list[tuple[list[str], int, str]] = [
    (["status", "--table", "nothing"], 78, "no guard is installed for public.nothing"),
    (["records", "--table", "nothing"], 78, "no guard is installed for public.nothing"),
    (["status", "--quiet-for", "soon"], 64, "5m, 2h or 1h30m"),
    (["status", "postgresql://127.0.0.1:1/x"], 69, "cannot be reached"),
    (["status", "sqlite:////nothing/here.db"], 78, "no file"),
    (["reset", "memory://", "x", "--why", "y"], 78, "a memory guard has no reset of a mark"),
    (["install", "--table", "nothing", "--name", "x"], 78, "no table public.nothing"),
    (["install", "memory://", "--table", "t", "--name", "x"], 78, "no SQL engine for 'memory'"),
    (["mode", "enforce"], 64, "which table? Pass --table TABLE"),
    (["mode", "--table", "orders"], 64, "say the MODE"),
    (["mode", "--table", "orders", "strict"], 64, "not 'strict'"),
    (["mode", "--table", "orders", "observe", "shadow"], 64, "extra argument (shadow)"),
    (["mode", "--table", "orders", "--names", "x*", "--unset"], 64, "no mode of its own"),
    (["override", "--table", "orders", "--names", "x*", "--for", "15m"], 64, "--why TEXT"),
    (["override", "--table", "orders", "--names", "*", "--for", "25h", "--why", "x"], 64, "from 1s to 24h"),
    (["reset", "--why", "x"], 64, "Missing argument 'NAME'"),
    (["reset", "orders/42", "--why", " "], 64, "say why"),
    (["adopt", "mine"], 64, "16 hexadecimal"),
    (["trust", "--max-jump", "0"], 64, "at least 1"),
    (["trust", "--sample", "101"], 64, "0 to 100 percent"),
]


def test_an_impossible_command_is_refused_in_one_line(guarded: Any) -> None:
    for args, status, message in CANNOT_BE_DONE:
        ended = guarded("guard", *args)
        assert ended.returncode == status, (args, ended.stderr)
        assert message in ended.stderr, args
        assert ended.stderr.startswith("fenced: ") and ended.stderr.count("\n") == 1, args


def test_a_guard_without_tables_needs_no_table(fenced: Any) -> None:
    assert told(fenced, "mode", "memory://", "shadow") == {
        "table": None,
        "names": "*",
        "mode": "shadow",
        "pending": [],
    }


def test_without_a_database_both_ways_to_name_one_are_told(fenced: Any) -> None:
    fenced.environment.pop("FENCED_GUARD", None)
    ended = fenced("guard", "status")
    assert ended.returncode == 64
    assert "DSN" in ended.stderr and "FENCED_GUARD" in ended.stderr


def test_every_command_has_its_example(fenced: Any) -> None:
    from fenced.cli.guards import guard

    for name, command in guard.commands.items():
        assert "Example" in (command.help or ""), name
        assert not command.get_short_help_str().endswith("..."), name


def test_marks_of_names_that_are_gone(guarded: Any, db: Any, tmp_path: Any) -> None:
    """The authority says which tokens are dead; a late holder of a name whose mark is gone is refused all the same."""
    url = f"sqlite:///{tmp_path}/leases.db"
    guarded("guard", "mode", "--table", "orders", "require")

    def update(lease: Any, number: int) -> None:
        with ORDERS.transaction(db, lease) as tx:
            tx.execute("UPDATE orders SET qty = qty + 1 WHERE id = %s", [number])

    with library.Client(url) as client:
        for number in (40, 41, 42):
            with client.hold(f"orders/{number}") as lease:
                update(lease, number)
                late = lease.next_stamp()
        with client.hold("orders/43") as held, client.hold("orders/44") as busy:
            update(held, 43)
            update(busy, 44)
            with (
                psycopg.connect(guarded.environment["FENCED_GUARD"], autocommit=True) as other,
                ORDERS.transaction(other, late),  # in the middle of a transaction: its mark stays
            ):
                ended = guarded("guard", "forget", "--authority", url)
                assert ended.stdout.startswith("deleted 2 marks below token 4"), ended.stderr
                assert told(guarded, "forget", "--authority", url) == {"below": 4, "dropped": 0}
            assert told(guarded, "forget", "--authority", url)["dropped"] == 1
            assert db.execute("SELECT name FROM fenced_guard.mark ORDER BY 1").fetchall() == [
                ("orders/43",),
                ("orders/44",),
            ]
            for name in ("orders/42", "orders/45"):
                with (
                    pytest.raises(library.StaleToken),
                    ORDERS.transaction(db, stamp(3, 1, name, realm=held.realm)),
                ):
                    raise AssertionError("announced")
            update(held, 43)
    with library.Client(f"sqlite:///{tmp_path}/others.db") as client, client.hold("x"):
        ended = guarded("guard", "forget", "--authority", f"sqlite:///{tmp_path}/others.db")
        assert ended.returncode != 0 and "name the authority of the trusted realm" in ended.stderr
