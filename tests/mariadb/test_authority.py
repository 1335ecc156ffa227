"""What MariaDB adds to the kit: privileges, stopped clients, settings that do not fit, processes and threads."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pymysql
import pytest
from click.testing import CliRunner
from pymysql.constants import CLIENT

import fenced
from fenced.cli.operating import authority as authority_commands
from fenced.drills.relay import Proxy
from fenced.errors import FencedError, Indeterminate, Misconfigured, NotGranted, Unavailable
from fenced.leases.rows import SWEEP_EVERY_TOKENS
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.mariadb.authority.authority import CONNECTIONS_MAX, MariadbAuthority
from fenced.stores.mariadb.authority.rows import KEEP_NUMBERS, lock_query
from fenced.stores.mariadb.authority.session import STOPPED_SECONDS, WATCHED, WRITES
from fenced.stores.mariadb.authority.settings import MariadbSettings
from fenced.testing.kit import asking, granted
from fenced.values.model import Ended, Granted, Kept, Released, Waiting
from fenced_testkit.servers import MariadbServer
from tests.conftest import NewMariadb

RUNTIME = BlockingRuntime()


_opened: list[MariadbAuthority] = []


@pytest.fixture(autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    while _opened:
        step(_opened.pop().close())


def made(url: str, namespace: str = "default") -> MariadbAuthority:
    _opened.append(MariadbAuthority(url, RUNTIME, namespace=namespace))
    return _opened[-1]


def opened(url: str) -> MariadbAuthority:
    authority = made(url)
    step(authority.open())
    return authority


def database_of(url: str) -> str:
    return urlsplit(url).path[1:]


# proves authority mariadb: wall-clock
def test_leases_expire_by_the_servers_wall_clock(mariadb_server: MariadbServer, mariadb_url: str) -> None:
    """The row holds a time of day; were the clock an hour ahead, the lease would be over, and tokens go on."""
    authority, database = opened(mariadb_url), database_of(mariadb_url)
    ask = asking(RUNTIME, "orders", ttl=30.0)
    token = step(granted(authority, ask)).token
    ((expires,),) = mariadb_server.execute("SELECT expires FROM fenced_attempt", database)
    assert 20 < expires / 1e9 - time.time() <= 31
    mariadb_server.execute("UPDATE fenced_attempt SET expires = expires - 3600000000000", database)
    again = step(authority.ask(asking(RUNTIME, "orders")))
    assert isinstance(again, Granted) and again.token > token
    assert step(authority.renew([ask.secret])) == [Ended("expired")]


# proves authority mariadb: stopped-client-delays
def test_a_client_that_stops_in_a_transaction_delays_the_others_for_seconds(
    mariadb_server: MariadbServer, mariadb_url: str
) -> None:
    """It has locked the name and says nothing more, and its connection stays open: the server ends it."""
    authority = opened(mariadb_url)
    address: dict[str, Any] = {"host": mariadb_server.host, "port": mariadb_server.port, "user": "root"}
    with pymysql.connect(
        **address, database=database_of(mariadb_url), client_flag=CLIENT.MULTI_STATEMENTS
    ) as other:
        script = [*WRITES, lock_query(1, ["orders"]), WATCHED]
        with other.cursor() as cursor:
            cursor.execute("; ".join(script))
            while cursor.nextset():
                pass
        began, hurried = time.monotonic(), asking(RUNTIME, "orders")
        with pytest.raises(Indeterminate):  # the server goes on waiting for it
            step(authority.ask(hurried, RUNTIME.now() + 0.2))
        assert step(authority.withdraw(hurried.secret)) == Released()
        step(granted(authority, asking(RUNTIME, "another")))
        assert isinstance(step(authority.ask(asking(RUNTIME, "orders"), RUNTIME.now() + 30)), Granted)
        assert STOPPED_SECONDS - 1 < time.monotonic() - began < STOPPED_SECONDS + 20
    assert step(authority.ask(hurried)) == Ended("withdrawn")


# proves authority mariadb: polled
def test_a_waiter_asks_rarely_and_is_granted_soon(mariadb_server: MariadbServer, mariadb_url: str) -> None:
    """One query for all of a client's waiters; many at first, then four a second."""
    with fenced.Client(mariadb_url) as one, fenced.Client(mariadb_url) as two:
        held = [one.acquire(f"orders/{number}") for number in range(8)]
        tokens: list[int] = []

        def wait(number: int) -> None:
            with two.hold(f"orders/{number}", wait=60) as lease:
                tokens.append(lease.token)

        waiters = [threading.Thread(target=wait, args=(number,)) for number in range(8)]
        for waiter in waiters:
            waiter.start()
        onlooker = opened(mariadb_url)
        while sum(len(view.waiters) for view in step(onlooker.survey())) < 8:
            time.sleep(0.02)
        time.sleep(2.0)
        before = _selects(mariadb_server)
        time.sleep(2.0)
        assert _selects(mariadb_server) - before <= 2 * 4 + 8 + 8, (
            "looks, and renewals of what is held and waited for"
        )
        released = time.monotonic()
        for lease in held:
            lease.release()
        for waiter in waiters:
            waiter.join()
        assert time.monotonic() - released < 10
        assert min(tokens) > max(lease.token for lease in held)


def test_many_waiters_of_one_name_are_renewed_and_shown_in_a_few_requests(
    mariadb_server: MariadbServer, mariadb_url: str
) -> None:
    """However many there are: what the algorithm asks for about each of them is fetched at once."""
    step(opened(mariadb_url).close())
    with Proxy(mariadb_server.host, mariadb_server.port) as proxy:
        authority = opened(f"mariadb://root@{proxy.host}:{proxy.port}/{database_of(mariadb_url)}")
        waiters = [asking(RUNTIME, "orders", wait=True) for _ in range(60)]
        for ask in waiters:
            step(authority.ask(ask))
        leases = [asking(RUNTIME, f"orders/{number}") for number in range(60)]
        for ask in leases:
            step(granted(authority, ask))
        before = proxy.requests
        answers = step(authority.renew([ask.secret for ask in (*waiters, *leases)]))
        assert [type(answer) for answer in answers] == [Kept] + [Waiting] * 59 + [Kept] * 60
        assert len(step(authority.survey())) == 61
        assert proxy.requests - before < 25, "of which most make the connection for renewals"
        step(authority.close())


def test_short_calls_also_look(mariadb_url: str) -> None:
    """A caller whose calls are shorter than the pause between two looks misses none of them."""
    authority, held, waits = opened(mariadb_url), asking(RUNTIME, "a"), asking(RUNTIME, "a", wait=True)
    step(granted(authority, held))
    step(authority.ask(waits))
    for _ in range(30):  # until the pause is at its longest
        step(authority.next_wakeups(RUNTIME.now() + 1))
    step(authority.release(held.secret))
    limit = time.monotonic() + 30
    while not step(authority.next_wakeups(RUNTIME.now() + 0.01)):
        assert time.monotonic() < limit


def _selects(server: MariadbServer) -> int:
    return int(server.execute("SHOW GLOBAL STATUS LIKE 'Com_begin'")[0][1])


def test_a_grant_that_is_told_again_is_committed_again(
    mariadb_server: MariadbServer, mariadb_url: str
) -> None:
    """The server shows what is committed and not yet synced: who reads that may not tell it as a grant."""
    authority, ask = opened(mariadb_url), asking(RUNTIME, "orders")
    token = step(granted(authority, ask)).token

    def commits() -> int:
        return int(mariadb_server.execute("SHOW GLOBAL STATUS LIKE 'Com_commit'")[0][1])

    for other in (authority, opened(mariadb_url)):
        before = commits()
        assert step(granted(other, ask)).token == token
        assert commits() > before
        ((last,),) = mariadb_server.execute("SELECT MAX(id) FROM fenced_number", database_of(mariadb_url))
        assert last > token, "and it has written"
        token_now = step(granted(other, asking(RUNTIME, f"next/{last}"))).token
        assert token_now > last


def test_contenders_on_many_connections_never_share_a_name(new_mariadb: NewMariadb) -> None:
    """Several names a lease, in any order: no deadlock is told, and of each name's tokens each is greater."""
    url = new_mariadb()
    held: dict[str, list[int]] = {name: [] for name in "abcd"}
    inside: dict[str, int] = dict.fromkeys("abcd", 0)
    faults: list[str] = []

    def contend(number: int) -> None:
        pairs = list(itertools.combinations("abcd", 2))
        with fenced.Client(url) as client:
            for turn in range(12):
                names = pairs[(number + turn) % len(pairs)] if turn % 3 else ("abcd"[(number + turn) % 4],)
                try:
                    lease = client.acquire(*names, wait=60, ttl=30)
                except FencedError as error:
                    faults.append(repr(error))
                    return
                for name in names:
                    inside[name] += 1
                    held[name].append(lease.token)
                    if inside[name] != 1:
                        faults.append(f"{name} twice")
                for name in names:
                    inside[name] -= 1
                lease.release()

    with ThreadPoolExecutor(6) as crew:
        list(crew.map(contend, range(6)))
    assert faults == []
    assert all(tokens == sorted(set(tokens)) for tokens in held.values())


def test_attempts_that_are_over_are_deleted_on_the_way(
    mariadb_server: MariadbServer, mariadb_url: str
) -> None:
    """Each grant deletes a little; nothing runs in the background, and nobody need run `tidy`."""
    database = database_of(mariadb_url)
    with fenced.Client(mariadb_url) as client:
        for number in range(150):
            client.acquire(f"old/{number}").release()
        last = client.acquire("last").token
        mariadb_server.execute("UPDATE fenced_attempt SET forget = 0 WHERE state = 'released'", database)
        for number in range(6 * SWEEP_EVERY_TOKENS):
            client.acquire(f"new/{number % 3}").release()
        old = mariadb_server.execute("SELECT names FROM fenced_attempt WHERE forget = 0", database)
        names = mariadb_server.execute("SELECT name FROM fenced_name WHERE name LIKE 'old/%'", database)
        assert len(old) < 75 and len(names) == len(old)
        mariadb_server.execute(f"INSERT INTO fenced_number VALUES ({last + 3 * KEEP_NUMBERS})", database)
        for number in range(SWEEP_EVERY_TOKENS):
            client.acquire(f"new/{number % 3}").release()
    ((count,),) = mariadb_server.execute("SELECT count(*) FROM fenced_number", database)
    assert count < 2 * SWEEP_EVERY_TOKENS + 100


# Who may do what.


@pytest.fixture
def user(mariadb_server: MariadbServer, mariadb_url: str) -> Iterator[str]:
    """A user who may log in, and nothing else; an operator has made the tables."""
    step(opened(mariadb_url).close())
    name = f"app_{database_of(mariadb_url)}"
    mariadb_server.execute(f"CREATE USER {name}@'%' IDENTIFIED BY 'hunter2'")
    yield name
    mariadb_server.execute(f"DROP USER {name}@'%'")


HOLDER = {
    "fenced_schema": "SELECT",
    "fenced_namespace": "SELECT",
    "fenced_number": "SELECT, INSERT, DELETE",
    "fenced_name": "SELECT, INSERT, UPDATE, DELETE",
    "fenced_attempt": "SELECT, INSERT, UPDATE, DELETE",
    "fenced_queue": "SELECT, INSERT, UPDATE, DELETE",
}
"""As docs/authorities/mariadb.md has them."""


def test_a_holder_needs_no_more_than_the_tables(
    mariadb_server: MariadbServer, mariadb_url: str, user: str
) -> None:
    database = database_of(mariadb_url)
    url = mariadb_server.url(database, user, "hunter2")
    with pytest.raises(Misconfigured, match="GRANT"):
        opened(url)
    for table, rights in HOLDER.items():
        mariadb_server.execute(f"GRANT {rights} ON `{database}`.{table} TO {user}@'%'")
    if not mariadb_server.execute("SELECT version() LIKE '%MariaDB%'")[0][0]:
        # MySQL locks no row for a user who may only read it.
        mariadb_server.execute(f"GRANT UPDATE (id) ON `{database}`.fenced_namespace TO {user}@'%'")
    app = opened(url)
    ask, waits = asking(RUNTIME, "orders"), asking(RUNTIME, "orders", wait=True)
    token = step(granted(app, ask)).token
    step(app.ask(waits))
    assert step(app.renew([ask.secret])) == [Kept(10.0)]
    assert step(app.observe("orders")).held_by is not None and len(step(app.survey())) == 1
    assert step(app.release(ask.secret)) == Released() and step(app.tidy()) == 0
    assert step(granted(app, waits)).token > token
    with pytest.raises(Misconfigured, match="privilege"):
        step(app.raise_floor(10**6))
    mariadb_server.execute(f"GRANT UPDATE ON `{database}`.fenced_namespace TO {user}@'%'")
    operator = opened(url)
    assert step(operator.raise_floor(10**6)) >= 10**6
    assert step(granted(app, asking(RUNTIME, "more"))).token > 10**6, "also for whoever was there before"
    for each in (app, operator):
        step(each.close())


def test_a_user_who_may_not_create_gets_a_clear_error(
    mariadb_server: MariadbServer, new_mariadb: NewMariadb, user: str
) -> None:
    url = new_mariadb()
    mariadb_server.execute(f"GRANT SELECT ON `{database_of(url)}`.* TO {user}@'%'")
    with pytest.raises(Misconfigured, match="fenced authority install"):
        opened(mariadb_server.url(database_of(url), user, "hunter2"))


def test_many_clients_install_at_once(mariadb_url: str) -> None:
    """They all get one realm."""

    def enter(_: int) -> str:
        return step(made(mariadb_url).open()).realm

    with ThreadPoolExecutor(8) as crew:
        assert len(set(crew.map(enter, range(8)))) == 1


def test_without_create_nothing_is_made(mariadb_server: MariadbServer, mariadb_url: str) -> None:
    authority = made(mariadb_url)
    with pytest.raises(Misconfigured, match="no tables of leases"):
        step(authority.open(create=False))
    opened(mariadb_url)
    with pytest.raises(Misconfigured, match="no namespace"):
        step(made(mariadb_url, "other").open(create=False))
    step(authority.open(create=False))
    mariadb_server.execute(
        "UPDATE fenced_schema SET version = 99, readable_by = 99, made_by = '99.1'", database_of(mariadb_url)
    )
    with pytest.raises(Misconfigured, match=r"install fenced 99\.1 or later"):
        opened(mariadb_url)


def test_operators_install_show_and_raise(mariadb_url: str) -> None:
    run = CliRunner().invoke
    made = run(authority_commands, ["install", mariadb_url])
    assert made.exit_code == 0 and "guarantee   strict" in made.output, made.output
    raised = run(authority_commands, ["raise", mariadb_url, "--above", "81204"])
    assert raised.exit_code == 0 and "the floor is 8" in raised.output, raised.output
    shown = run(authority_commands, ["show", mariadb_url.replace("mariadb://", "mysql://")])
    assert "schema      1, stored by fenced" in shown.output
    with fenced.Client(mariadb_url) as client:
        assert client.acquire("orders").token > 81204


# What does not fit.


def test_secrets_are_never_shown(mariadb_server: MariadbServer) -> None:
    """Neither a refused connection, nor an unknown option, nor a repr tells the password."""
    port = mariadb_server.port
    for address in ("app:hunter2@127.0.0.1:1/db", f"nobody:hunter2@127.0.0.1:{port}/db"):
        authority = made(f"mysql://{address}")
        with pytest.raises(FencedError) as caught:
            step(authority.open())
        assert "hunter2" not in f"{caught.value!r} {caught.value} {authority.url} {authority!r}"
        with pytest.raises(FencedError) as caught, fenced.Client(f"mysql://{address}") as client:
            client.acquire("orders")
        assert "hunter2" not in f"{caught.value!r} {caught.value} {client!r}"


def test_the_first_host_that_can_be_used_is_taken(mariadb_server: MariadbServer, mariadb_url: str) -> None:
    with MariadbServer({"read_only": "ON"}) as replica:
        replica.execute(f"CREATE DATABASE `{database_of(mariadb_url)}`")
        with pytest.raises(Unavailable, match="name the primary"):
            opened(replica.url(database_of(mariadb_url)))
        hosts = f"127.0.0.1:1,{replica.host}:{replica.port},{mariadb_server.host}:{mariadb_server.port}"
        authority = opened(f"mariadb://root@{hosts}/{database_of(mariadb_url)}")
        step(granted(authority, asking(RUNTIME, "orders")))
        step(authority.close())


SOUND = {
    "version": "10.11.6-MariaDB-log",
    "innodb_flush_log_at_trx_commit": "1",
    "sync_binlog": "0",
    "log_bin": "OFF",
    "server_id": "1",
    "gtid_domain_id": "0",
    "innodb_doublewrite": "ON",
    "innodb_flush_method": "fsync",
}


@pytest.mark.parametrize(
    ("found", "doubt"),
    [
        ({}, None),
        ({"innodb_flush_log_at_trx_commit": "3"}, None),
        ({"log_bin": "ON", "sync_binlog": "1"}, None),
        ({"innodb_flush_log_at_trx_commit": "2"}, "innodb_flush_log_at_trx_commit is 2"),
        ({"innodb_flush_log_at_trx_commit": "0"}, "set it to 1"),
        ({"log_bin": "ON"}, "sync_binlog is 0"),
        ({"log_bin": "ON", "sync_binlog": "100"}, "sync_binlog is 100"),
        ({"innodb_doublewrite": "DETECT_ONLY"}, "doublewrite"),
        ({"innodb_flush_method": "nosync"}, "does not sync"),
        ({"debug_no_sync": "ON"}, "does not sync"),
        ({"Innodb_redo_log_enabled": "OFF"}, "does not sync"),
        ({"wsrep_on": "ON"}, "Galera"),
        (
            {"group_replication_group_name": "g", "group_replication_single_primary_mode": "OFF"},
            "several primaries",
        ),
    ],
)
def test_settings_under_which_tokens_could_repeat(found: dict[str, str], doubt: str | None) -> None:
    doubts = MariadbSettings(1, {**SOUND, **found}).doubts()
    assert len(doubts) == (doubt is not None) and all(str(doubt) in each for each in doubts)


@pytest.mark.parametrize(
    ("found", "error", "message"),
    [
        ({"version": "10.5.29-MariaDB"}, Misconfigured, "MariaDB 10.5.29.*need 10.6"),
        ({"version": "5.7.44"}, Misconfigured, "MySQL 5.7.44; leases need 8.0"),
        ({"read_only": "ON"}, Unavailable, "replica"),
        ({"super_read_only": "ON"}, Unavailable, "replica"),
    ],
)
def test_servers_that_cannot_keep_leases(found: dict[str, str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MariadbSettings(1, {**SOUND, **found}).check("mariadb://h/d")
    MariadbSettings(1, {**SOUND, "version": "9.7.4"}).check("mysql://h/d")


def test_a_failover_that_would_lose_grants_is_a_doubt() -> None:
    replicated = {**SOUND, "log_bin": "ON", "sync_binlog": "1", "Slaves_connected": "1"}
    assert MariadbSettings(1, SOUND).warnings() == ()
    (told,) = MariadbSettings(1, replicated).warnings()
    assert "loses the leases that they had not received" in told and "authority raise" in told
    semi = {"rpl_semi_sync_master_wait_point": "AFTER_SYNC", "Rpl_semi_sync_master_status": "ON"}
    assert MariadbSettings(1, {**replicated, **semi}).warnings() == ()
    late = {**semi, "rpl_semi_sync_master_wait_point": "AFTER_COMMIT"}
    assert len(MariadbSettings(1, {**replicated, **late}).warnings()) == 1
    assert "a majority" in MariadbSettings(1, {**SOUND, "group_replication_group_name": "g"}).warnings()[0]


# Processes and threads.


def test_a_forked_child_leaves_its_parents_connections_alone(mariadb_url: str) -> None:
    with fenced.Client(mariadb_url) as client:
        lease = client.acquire("orders")
        pid = os.fork()
        if pid == 0:  # the child opens connections of its own, and its end closes only those
            status = 1
            try:
                with client.hold("another") as mine:
                    status = 0 if mine.token > lease.token and lease.state == "lost" else 2
            finally:
                os._exit(status)
        _, ended = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(ended) == 0
        lease.check()
        lease.release()


def test_threads_share_a_few_connections(mariadb_server: MariadbServer, mariadb_url: str) -> None:
    with fenced.Client(mariadb_url) as client:
        crew = [
            threading.Thread(target=lambda number=number: client.acquire(f"orders/{number % 4}").release())
            for number in range(40)
        ]
        for each in crew:
            each.start()
        for each in crew:
            each.join()
        ((count,),) = mariadb_server.execute(
            f"SELECT count(*) FROM information_schema.processlist WHERE db = '{database_of(mariadb_url)}'"
        )
    assert count <= CONNECTIONS_MAX + 1, "besides them one for the keeper"


def test_busy_is_told_at_once(mariadb_url: str) -> None:
    with (
        fenced.Client(mariadb_url) as one,
        fenced.Client(mariadb_url) as two,
        one.hold_all(["orders", "more"]),
    ):
        for name in ("orders", "more"):
            with pytest.raises(NotGranted):
                two.acquire(name, wait=0)
