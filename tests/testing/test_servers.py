"""The servers that tests start: they break as told, keep what they should, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
import redis

from fenced.drills.relay import Proxy
from fenced_testkit.servers import (
    MissingProgram,
    Pgbouncer,
    PostgresqlServer,
    RedisServer,
    Server,
    ServerFailed,
    postgresql,
)

pytestmark = pytest.mark.xdist_group("servers")

SILENCE_SECONDS = 0.3
KEEPER = """
import sys, time
from fenced_testkit.servers import PostgresqlServer, RedisServer
for server in (PostgresqlServer(), RedisServer()):
    server.start()
    server.freeze()
    print(server.pid, server.folder, flush=True)
time.sleep(60)
"""


class Background(threading.Thread):
    """A call that may take its time."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.result: object = None
        self._work = work
        self.start()

    def run(self) -> None:
        self.result = self._work()

    def waits(self) -> bool:
        self.join(SILENCE_SECONDS)
        return self.is_alive()

    def outcome(self) -> object:
        self.join(90)
        assert not self.is_alive()
        return self.result


def alive(pid: int) -> bool:
    """Not gone, and not merely waiting to be reaped by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def processes_of(server: PostgresqlServer) -> list[int]:
    return [server.pid, *(pid for (pid,) in server.execute("SELECT pid FROM pg_stat_activity"))]


# Nothing is left behind.


@pytest.mark.parametrize("make", [PostgresqlServer, RedisServer])
def test_leaving_the_context_removes_everything(make: type[Server]) -> None:
    with make() as server:
        pid, folder = server.pid, server.folder
        assert alive(pid) and folder.is_dir()
    assert not alive(pid) and not folder.exists() and not server.running
    with pytest.raises(ServerFailed, match="not running"):
        _ = server.pid


def test_servers_die_with_a_killed_parent_also_frozen_ones() -> None:
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER], stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    with keeper.stdout as told:
        servers = [told.readline().split() for _ in range(2)]
    family = [int(pid) for pid in _descendants(keeper.pid)]
    assert {int(pid) for pid, _ in servers} < set(family)
    keeper.kill()
    keeper.wait()
    eventually(lambda: not any(map(alive, family)))
    assert not [folder for _, folder in servers if Path(folder).exists()]
    segments = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    assert not [segment for segment in segments if int(segment[4]) in family]


def _descendants(pid: int) -> list[str]:
    listing = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    pairs = [line.split() for line in listing.stdout.splitlines()]
    found = [str(pid)]
    for parent in found:
        found.extend(child for child, its_parent in pairs if its_parent == parent)
    return found[1:]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_server_outlives_the_thread_that_started_it_and_a_forked_child() -> None:
    with RedisServer() as server:
        server.stop()
        starter = Background(server.start)
        starter.outcome()
        child = os.fork()
        if child == 0:
            server._at_exit()  # what the interpreter does at the end of a child that returns
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.1)
        assert server.execute("PING") is True


def test_a_given_folder_stays(tmp_path: Path) -> None:
    with RedisServer(folder=tmp_path / "redis") as server:
        server.execute("SET", "a", 1)
    with RedisServer(folder=tmp_path / "redis") as server:
        assert server.execute("GET", "a") == b"1"


def test_a_missing_binary_is_reported_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(postgresql, "PROGRAMS", tmp_path)
    monkeypatch.setattr("fenced_testkit.servers.base.shutil.which", lambda *_args, **_options: None)
    for make, package in ((PostgresqlServer, "postgresql"), (RedisServer, "redis-server")):
        server = make()
        with pytest.raises(MissingProgram, match=f"apt-get install -y {package}$"), server:
            pass
        assert not server.folder.exists()


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(ServerFailed, match="no-such-setting"), RedisServer({"no-such-setting": "1"}):
        pass


# PostgreSQL.


@pytest.fixture(scope="module")
def broken_server() -> Iterator[PostgresqlServer]:
    with PostgresqlServer() as server:
        yield server


@pytest.fixture
def primary(broken_server: PostgresqlServer) -> PostgresqlServer:
    """Every test may kill it: it runs again for the next one, without that one's standby and table."""
    if not broken_server.running:
        broken_server.start()
    broken_server.no_synchronous_standby()
    broken_server.execute("DROP TABLE IF EXISTS kept")
    return broken_server


def test_a_killed_postgresql_keeps_what_was_committed(primary: PostgresqlServer) -> None:
    assert primary.execute("SHOW fsync") == [("on",)]
    primary.execute("CREATE TABLE kept (n int)")
    for number in range(3):
        primary.execute(f"INSERT INTO kept VALUES ({number})")
        family, port, folder = processes_of(primary), primary.port, primary.folder
        primary.kill()
        assert not any(map(alive, family)) and not primary.running
        primary.start()
        assert (primary.port, primary.folder) == (port, folder)
    assert primary.execute("SELECT count(*) FROM kept") == [(3,)]
    primary.restart()
    assert primary.execute("SELECT count(*) FROM kept") == [(3,)]


def test_a_frozen_postgresql_answers_when_thawed(primary: PostgresqlServer) -> None:
    with psycopg.connect(primary.url(), autocommit=True) as connection:
        connection.execute("SELECT 1")
        primary.freeze()
        old = Background(lambda: connection.execute("SELECT 2").fetchall())
        new = Background(lambda: primary.execute("SELECT 3"))
        assert old.waits() and new.waits()
        primary.thaw()
        assert (old.outcome(), new.outcome()) == ([(2,)], [(3,)])


def test_a_commit_waits_for_a_synchronous_standby_that_is_cut_off(primary: PostgresqlServer) -> None:
    with (
        Proxy(primary.host, primary.port) as proxy,
        primary.standby(synchronous=True, through=proxy) as standby,
    ):
        primary.execute("CREATE TABLE kept (n int)")
        primary.execute("INSERT INTO kept VALUES (1)")
        proxy.black_hole()
        commit = Background(lambda: primary.execute("INSERT INTO kept VALUES (2)"))
        assert commit.waits()
        proxy.heal()
        commit.outcome()
        standby.caught_up_with(primary)
        primary.kill()
        standby.promote()
        standby.execute("INSERT INTO kept VALUES (3)")  # waits for no standby of its own
        standby.restart()
        assert standby.execute("SELECT n FROM kept ORDER BY n") == [(1,), (2,), (3,)]


def test_an_asynchronous_standby_that_is_cut_off_lacks_what_came_after(primary: PostgresqlServer) -> None:
    with (
        Proxy(primary.host, primary.port) as proxy,
        primary.standby(through=proxy) as standby,
    ):
        primary.execute("CREATE TABLE kept (n int)")
        primary.execute("INSERT INTO kept VALUES (1)")
        standby.caught_up_with(primary)
        proxy.black_hole(drop=True)
        primary.execute("INSERT INTO kept VALUES (2)")
        primary.kill()
        standby.promote()
        assert standby.execute("SELECT n FROM kept") == [(1,)]


def test_postgresql_restored_from_a_backup(primary: PostgresqlServer, tmp_path: Path) -> None:
    with primary.standby(synchronous=True):
        primary.execute("CREATE TABLE kept (n int)")
        primary.execute("INSERT INTO kept VALUES (1)")
        primary.backup(tmp_path / "backup")
        primary.execute("INSERT INTO kept VALUES (2)")
        for _ in range(2):
            with PostgresqlServer.restored(tmp_path / "backup") as restored:
                assert restored.execute("SELECT n FROM kept") == [(1,)]
                restored.execute("INSERT INTO kept VALUES (3)")


def test_databases_of_their_own(postgresql_server: PostgresqlServer, postgresql_url: str) -> None:
    with psycopg.connect(postgresql_url) as connection:
        connection.execute("CREATE TABLE kept (n int)")
        name = connection.info.dbname
    copy = postgresql_server.create_database(template=name)
    assert postgresql_server.execute("SELECT count(*) FROM kept", copy) == [(0,)]
    with psycopg.connect(postgresql_server.url(copy)):
        postgresql_server.drop_database(copy)


def test_pgbouncer_shares_connections_between_transactions(
    pgbouncer: Pgbouncer, postgresql_server: PostgresqlServer
) -> None:
    with Pgbouncer(postgresql_server, pool_size=1) as bouncer:
        with psycopg.connect(bouncer.url()) as one, psycopg.connect(bouncer.url()) as other:
            pids = []
            for connection in (one, other):
                pids += connection.execute("SELECT pg_backend_pid()").fetchall()
                connection.commit()
        assert pids[0] == pids[1]
    postgresql_server.execute("CREATE ROLE somebody LOGIN")
    try:
        with psycopg.connect(pgbouncer.url("postgres", "somebody")) as connection:
            assert connection.execute("SELECT current_user").fetchall() == [("somebody",)]
    finally:
        postgresql_server.execute("DROP ROLE somebody")


# Redis.


def test_a_killed_redis_keeps_what_was_acknowledged() -> None:
    with RedisServer() as server:
        for number in range(1, 4):
            assert server.execute("INCR", "n") == number
            server.kill()
            with pytest.raises(redis.ConnectionError):
                server.execute("PING")
            server.start()
        assert server.execute("GET", "n") == b"3"


def test_a_frozen_redis_answers_when_thawed() -> None:
    with RedisServer() as server:
        server.freeze()
        reply = Background(lambda: server.execute("INCR", "n"))
        assert reply.waits()
        server.thaw()
        assert reply.outcome() == 1
        server.freeze()
        server.stop()  # a frozen one too


def test_a_replica_takes_over() -> None:
    with RedisServer() as primary, Proxy(primary.host, primary.port) as proxy:
        primary.execute("INCR", "n")
        with primary.replica(through=proxy) as replica:
            primary.execute("INCR", "n")
            replica.caught_up_with(primary)
            proxy.black_hole()
            primary.execute("INCR", "n")
            primary.kill()
            replica.promote()
            assert replica.execute("INCR", "n") == 3  # the primary's third is lost
            replica.kill()
            replica.start()
            assert replica.execute("GET", "n") == b"3"


def test_redis_restored_from_a_backup(tmp_path: Path) -> None:
    with RedisServer() as server:
        server.execute("INCR", "n")
        server.backup(tmp_path / "backup")
        server.execute("INCR", "n")
    for _ in range(2):
        with RedisServer.restored(tmp_path / "backup") as restored:
            assert restored.execute("INCR", "n") == 2


def test_redis_with_tls_and_a_password() -> None:
    with RedisServer(tls=True, password='odd /@"\\ one') as server, server.replica() as replica:
        server.execute("SET", "a", 1)
        replica.caught_up_with(server)
        assert replica.execute("GET", "a") == b"1"
        for wrong in (server.url(password="wrong"), server.url().partition("?")[0]):
            with redis.Redis.from_url(wrong) as client, pytest.raises(redis.ConnectionError):
                client.ping()
