"""What PostgreSQL adds to the kit: privileges, poolers, locks that others hold, and settings that do not fit."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import psycopg
import pytest

import fenced
from fenced.errors import FencedError, Misconfigured, Misuse, Unavailable
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.postgresql.authority.authority import CONNECTIONS_MAX, PostgresqlAuthority
from fenced.testing import AUTHORITY_CHECKS, AuthorityHarness, Check, run
from fenced.testing.kit import asking, granted
from fenced.values.contracts import Authority, Colour, Runtime
from fenced.values.model import Busy, Ended, Granted, Kept, Released, Unknown, grant_id
from fenced_testkit.servers import Pgbouncer, PostgresqlServer
from tests.colours import alternating
from tests.conformance.authorities.test_postgresql import Harness
from tests.forking import inherits_no_lease

RUNTIME = BlockingRuntime()


def opened(url: str) -> PostgresqlAuthority:
    authority = PostgresqlAuthority(url, RUNTIME)
    step(authority.open())
    return authority


def database_of(url: str) -> str:
    return urlsplit(url).path[1:]


# Poolers.


class PooledHarness(Harness):
    """Clients behind pgbouncer; only the clean-up and the clock know the server itself."""

    def __init__(self, runtime: Runtime, server: PostgresqlServer, database: str, pooler: Pgbouncer) -> None:
        super().__init__(runtime, server, database)
        self._url = pooler.url(database)


POOLED = [check for check in AUTHORITY_CHECKS if check.name != "tokens_rise_over_a_restart"]


@pytest.fixture(scope="module")
def pooled_database(postgresql_server: PostgresqlServer) -> str:
    return postgresql_server.create_database()


# proves authority postgresql: any-pooler
@pytest.mark.parametrize(("check", "colour"), alternating(POOLED))
def test_the_kit_behind_pgbouncer_in_transaction_mode(
    check: Check[AuthorityHarness],
    colour: Colour,
    postgresql_server: PostgresqlServer,
    pooled_database: str,
    pgbouncer: Pgbouncer,
) -> None:
    run(check, lambda runtime: PooledHarness(runtime, postgresql_server, pooled_database, pgbouncer), colour)


@pytest.mark.parametrize("listening", ["", "off", "direct"])
def test_a_pooled_waiter_is_granted_soon(
    listening: str, postgresql_server: PostgresqlServer, postgresql_url: str, pgbouncer: Pgbouncer
) -> None:
    """Without a connection to listen on it looks four times a second; with one of its own it is told."""
    where = f"{postgresql_server.host}:{postgresql_server.port}" if listening == "direct" else listening
    url = pgbouncer.url(database_of(postgresql_url)) + (f"?listen={where}" if where else "")
    with fenced.Client(url) as one, fenced.Client(url) as two:
        first = one.acquire("orders")
        granted_at: list[float] = []

        def wait() -> None:
            two.acquire("orders", wait=20).release()
            granted_at.append(time.monotonic())

        waiter = threading.Thread(target=wait)
        waiter.start()
        while not step(opened(postgresql_url).observe("orders")).waiters:
            time.sleep(0.02)
        time.sleep(0.5)  # it listens by now, or has found out that it cannot
        released_at = time.monotonic()
        first.release()
        waiter.join()
        assert granted_at[0] - released_at < 5.0


# Locks that others hold.


def test_a_holder_behind_a_lock_is_unknown_and_never_revived(postgresql_url: str) -> None:
    """Somebody has the lease's row locked past its ttl: a renewal does not wait for that, nor revive it after."""
    authority = opened(postgresql_url)
    ask = asking(RUNTIME, "orders", ttl=0.5)
    step(granted(authority, ask))
    with psycopg.connect(postgresql_url) as other:
        other.execute("SELECT FROM fenced.attempt FOR UPDATE")
        assert step(authority.renew([ask.secret])) == [Unknown("its row was locked")]
        time.sleep(0.6)
    assert step(authority.renew([ask.secret])) == [Ended("expired")]


def test_a_release_behind_a_lock_is_too_late_and_delays(postgresql_url: str) -> None:
    """It reads the clock after its wait: the lease expired meanwhile, and its lock_delay counts."""
    authority = opened(postgresql_url)
    ask = asking(RUNTIME, "orders", ttl=0.5, lock_delay=30.0)
    step(granted(authority, ask))
    with psycopg.connect(postgresql_url) as other:
        other.execute("SELECT FROM fenced.attempt FOR UPDATE")
        threading.Timer(0.8, other.rollback).start()
        assert step(authority.release(ask.secret)) == Ended("expired")
    assert isinstance(step(authority.ask(asking(RUNTIME, "orders"))), Busy)


def test_clean_up_goes_page_by_page(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fenced.stores.postgresql.authority.authority._TIDY_AT_ONCE", b"2")
    authority = opened(postgresql_url)
    for number in range(5):
        step(authority.release(_held(authority, f"orders/{number}")))
    with psycopg.connect(postgresql_url, autocommit=True) as other:
        other.execute("UPDATE fenced.attempt SET forget = now()")
        assert step(authority.tidy()) == 5
        assert other.execute("SELECT count(*) FROM fenced.name").fetchone() == (0,)


def test_a_name_that_is_locked_for_long_is_unavailable(postgresql_url: str) -> None:
    """The server gives up before its client does: nothing happened, and nothing happens later either."""
    authority = opened(postgresql_url)
    step(authority.release(_held(authority, "orders")))
    with psycopg.connect(postgresql_url) as other:
        other.execute("SELECT FROM fenced.name FOR UPDATE")
        with pytest.raises(Unavailable, match="lock timeout"):
            step(authority.ask(asking(RUNTIME, "orders")))
        step(granted(authority, asking(RUNTIME, "another")))
    assert [view.name for view in step(authority.survey())] == ["another"]


def _held(authority: Authority, name: str) -> str:
    ask = asking(RUNTIME, name)
    step(granted(authority, ask))
    return ask.secret


# Who may do what.


@pytest.fixture
def role(postgresql_server: PostgresqlServer, postgresql_url: str) -> Iterator[str]:
    """A role that may log in, and nothing else; an operator has installed the schema."""
    step(opened(postgresql_url).close())
    name = f"app_{database_of(postgresql_url)}"
    postgresql_server.execute(f"CREATE ROLE {name} LOGIN")
    yield name
    postgresql_server.execute(f"DROP OWNED BY {name}", database_of(postgresql_url))
    postgresql_server.execute(f"DROP ROLE {name}")


def test_a_holder_needs_usage_of_the_schema_and_no_more(
    postgresql_server: PostgresqlServer, postgresql_url: str, role: str
) -> None:
    database = database_of(postgresql_url)
    url = postgresql_server.url(database, role)
    with pytest.raises(Misconfigured, match="USAGE on schema fenced"):
        opened(url)
    postgresql_server.execute(f"GRANT USAGE ON SCHEMA fenced TO {role}", database)
    app = opened(url)
    ask = asking(RUNTIME, "orders")
    token = step(granted(app, ask)).token
    assert step(app.renew([ask.secret])) == [Kept(10.0)]
    assert step(app.observe("orders")).held_by is not None and len(step(app.survey())) == 1
    with pytest.raises(Misconfigured, match="EXECUTE"):
        step(app.force_release("orders", token))
    with pytest.raises(Misconfigured, match="EXECUTE"):
        step(app.raise_floor(10**6))
    with psycopg.connect(url, autocommit=True) as connection:
        for forbidden in (
            "UPDATE fenced.namespace SET floor = 0",
            "SELECT setval('fenced.token', 1)",
            "DELETE FROM fenced.attempt",
            "SELECT nextval('fenced.token')",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(forbidden)
    assert step(app.release(ask.secret)) == Released() and step(app.tidy()) == 0
    postgresql_server.execute(
        f"GRANT EXECUTE ON FUNCTION fenced.force_release, fenced.raise_floor TO {role}", database
    )
    assert step(app.raise_floor(10**6)) >= 10**6 > token
    step(app.close())


def test_a_stamp_does_not_suffice_to_release(
    postgresql_server: PostgresqlServer, postgresql_url: str, role: str
) -> None:
    """Who may call our functions and knows a lease's public id can neither renew nor release nor repeat it."""
    database = database_of(postgresql_url)
    postgresql_server.execute(f"GRANT USAGE ON SCHEMA fenced TO {role}", database)
    authority = opened(postgresql_url)
    ask = asking(RUNTIME, "orders")
    step(granted(authority, ask))
    public, guess = grant_id(ask.secret), RUNTIME.secret()
    with psycopg.connect(postgresql_server.url(database, role), autocommit=True) as thief:
        row = thief.execute(
            "SELECT fenced.release(1, %s, %s, 'released', '600 s')", (public, guess)
        ).fetchone()
        assert row == ("gone",)
        rows = thief.execute("SELECT * FROM fenced.renew(1, %s, %s, '10 s', '600 s')", ([public], [guess]))
        assert rows.fetchall() == []
        row = thief.execute(
            "SELECT fenced.ask(1, %s, %s, '{orders}', '10 s', '0', '10 s', '600 s', false, 9, '', '[]')",
            (public, guess),
        ).fetchone()
        assert row == ("misuse",)
    assert step(authority.renew([ask.secret])) == [Kept(10.0)]


def test_a_role_without_create_gets_a_clear_error(
    postgresql_server: PostgresqlServer, postgresql_url: str
) -> None:
    postgresql_server.execute("CREATE ROLE powerless LOGIN")
    try:
        with pytest.raises(Misconfigured, match="may create"):
            opened(postgresql_server.url(database_of(postgresql_url), "powerless"))
    finally:
        postgresql_server.execute("DROP ROLE powerless")


def test_counting_state_is_not_deleted_even_by_its_owner(
    postgresql_server: PostgresqlServer, postgresql_url: str
) -> None:
    opened(postgresql_url)
    for attack in ("DELETE FROM fenced.namespace", "TRUNCATE fenced.namespace"):
        with pytest.raises(psycopg.errors.RaiseException, match="never deleted"):
            postgresql_server.execute(attack, database_of(postgresql_url))


def test_many_clients_install_at_once(postgresql_url: str) -> None:
    """They wait for each other, and all get one realm."""

    def enter(_: int) -> str:
        return step(PostgresqlAuthority(postgresql_url, BlockingRuntime()).open()).realm

    with ThreadPoolExecutor(8) as crew:
        assert len(set(crew.map(enter, range(8)))) == 1


# What does not fit.


def test_a_server_that_cannot_work_is_misconfigured(
    postgresql_server: PostgresqlServer, postgresql_url: str
) -> None:
    database = database_of(postgresql_url)
    with pytest.raises(Misconfigured, match="does not exist"):
        opened(postgresql_server.url("no_such_database"))
    postgresql_server.execute(
        f'ALTER DATABASE "{database}" SET default_transaction_isolation = "serializable"'
    )
    with pytest.raises(Misconfigured, match="read committed"):
        opened(postgresql_url)
    postgresql_server.execute(f'ALTER DATABASE "{database}" RESET default_transaction_isolation')
    postgresql_server.execute(f'ALTER DATABASE "{database}" SET client_min_messages = "error"')
    with pytest.raises(Misconfigured, match="client_min_messages"):
        opened(postgresql_url)
    ascii_only = f"{database}_ascii"
    postgresql_server.execute(f"CREATE DATABASE {ascii_only} ENCODING 'SQL_ASCII' TEMPLATE template0")
    with pytest.raises(Misconfigured, match="UTF8"):
        opened(postgresql_server.url(ascii_only))
    with psycopg.connect(postgresql_server.url(ascii_only)) as db, pytest.raises(Misconfigured, match="UTF8"):
        db.execute("CREATE TABLE orders (id integer PRIMARY KEY)")
        fenced.sql.Guard(table="orders", name="orders/{id}").install(db)
    postgresql_server.drop_database(ascii_only)


def test_an_address_is_libpqs_own(postgresql_server: PostgresqlServer, postgresql_url: str) -> None:
    """Options go through as they are, and a silent host does not use up the time of the next one."""
    database = database_of(postgresql_url)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ports = f"{silent.getsockname()[1]},{postgresql_server.port}"
        url = (
            f"postgresql://postgres@127.0.0.1,127.0.0.1/{database}?port={ports}&connect_timeout=1"
            "&application_name=two%20words&options=-c%20work_mem%3D1234kB"
        )
        began = time.monotonic()
        authority = opened(url)
        assert time.monotonic() - began < 4
    rows = postgresql_server.execute(
        f"SELECT application_name FROM pg_stat_activity WHERE datname = '{database}'"
    )
    assert ("two words",) in rows
    step(authority.close())


def test_a_newer_schema_is_left_alone(postgresql_server: PostgresqlServer, postgresql_url: str) -> None:
    opened(postgresql_url)
    database = database_of(postgresql_url)
    stored = "SELECT version, readable_by, release, functions FROM fenced.schema"
    newer = "UPDATE fenced.schema SET version = 99, release = '99.1', functions = 'later', readable_by = {}"
    postgresql_server.execute(newer.format(2), database)
    step(opened(postgresql_url).close())
    assert postgresql_server.execute(stored, database) == [(99, 2, "99.1", "later")], (
        "readable by this client"
    )
    postgresql_server.execute(newer.format(99), database)
    with pytest.raises(Misconfigured, match=r"install fenced 99\.1 or later"):
        opened(postgresql_url)


def test_functions_are_replaced_by_whom_they_belong_to(
    postgresql_server: PostgresqlServer, postgresql_url: str, role: str
) -> None:
    database = database_of(postgresql_url)
    postgresql_server.execute(f"GRANT USAGE ON SCHEMA fenced TO {role}", database)
    changed = "UPDATE fenced.schema SET functions = 'earlier', release = '0.1', version = {}"
    postgresql_server.execute(changed.format(2), database)
    step(opened(postgresql_server.url(database, role)).close())  # may not, and need not
    assert postgresql_server.execute("SELECT functions FROM fenced.schema", database) == [("earlier",)]
    step(opened(postgresql_url).close())
    assert postgresql_server.execute("SELECT functions FROM fenced.schema", database) != [("earlier",)]
    postgresql_server.execute(changed.format(1), database)
    with pytest.raises(
        Misconfigured, match="run `fenced authority install` as the role that owns the schema"
    ):
        opened(postgresql_server.url(database, role))


def test_without_create_nothing_is_made(postgresql_url: str) -> None:
    authority = PostgresqlAuthority(postgresql_url, RUNTIME)
    with pytest.raises(Misconfigured, match="no schema"):
        step(authority.open(create=False))
    opened(postgresql_url)
    with pytest.raises(Misconfigured, match="no namespace"):
        step(PostgresqlAuthority(postgresql_url, RUNTIME, namespace="other").open(create=False))
    step(authority.open(create=False))


@pytest.mark.parametrize(
    "bad",
    [
        "postgresql://host/db?password=hunter2#part",
        "postgresql://[::1",
        "postgresql://h/d?password=hunter2&x",
        "postgresql://h/\0",
        "postgresql://app:hunter/2@h/d",
    ],
)
def test_bad_addresses_are_misuse(bad: str) -> None:
    with pytest.raises(Misuse, match="postgresql://user:password@host") as caught:
        PostgresqlAuthority(bad, RUNTIME)
    assert "hunter" not in str(caught.value)


def test_secrets_are_never_shown(postgresql_server: PostgresqlServer) -> None:
    """Neither a refused connection, nor an unknown option, nor a repr tells the password."""
    port = postgresql_server.port
    for address in (
        "postgresql://app:hunter2@127.0.0.1:1/db",
        f"postgresql://nobody:hunter2@127.0.0.1:{port}/db?sslpassword=hunter2",
        f"postgresql://nobody@127.0.0.1:{port}/db?password=hunter2",
        f"postgresql://nobody:hunter2@127.0.0.1:{port}/db?no_such_option=1",
    ):
        authority = PostgresqlAuthority(address, RUNTIME)
        with pytest.raises(FencedError) as caught:
            step(authority.open())
        told = (
            f"{caught.value!r} {caught.value} {authority.url} {authority!r} {vars(authority)['_address']!r}"
        )
        assert "hunter2" not in told


# proves authority postgresql: wall-clock
def test_leases_expire_by_the_servers_wall_clock(
    postgresql_server: PostgresqlServer, postgresql_url: str
) -> None:
    """The row holds a time of day; were the clock an hour ahead, the lease would be over, and tokens go on."""
    authority = opened(postgresql_url)
    ask = asking(RUNTIME, "orders", ttl=30.0)
    token = step(granted(authority, ask)).token
    database = database_of(postgresql_url)
    ((left,),) = postgresql_server.execute(
        "SELECT extract(epoch FROM expires - clock_timestamp()) FROM fenced.attempt", database
    )
    assert 25 < left <= 30
    postgresql_server.execute("UPDATE fenced.attempt SET expires = expires - interval '1 hour'", database)
    again = step(authority.ask(asking(RUNTIME, "orders")))
    assert isinstance(again, Granted) and again.token > token
    assert step(authority.renew([ask.secret])) == [Ended("expired")]


# Processes and threads.


def test_a_forked_child_leaves_its_parents_connections_alone(postgresql_url: str) -> None:
    with fenced.Client(postgresql_url) as client:
        inherits_no_lease(client)


def test_threads_share_a_few_connections(postgresql_server: PostgresqlServer, postgresql_url: str) -> None:
    with fenced.Client(postgresql_url) as client:
        crew = [
            threading.Thread(target=lambda number=number: client.acquire(f"orders/{number % 4}").release())
            for number in range(40)
        ]
        for each in crew:
            each.start()
        for each in crew:
            each.join()
        ((count,),) = postgresql_server.execute(
            f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{database_of(postgresql_url)}'"
        )
    assert count <= CONNECTIONS_MAX + 2, "besides them one for the keeper and one to listen"
