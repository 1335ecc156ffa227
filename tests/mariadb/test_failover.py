"""MariaDB that is killed, fails over, is restored, or has weaker settings than before, and what is noticed of it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import fenced
from fenced.errors import Indeterminate, Misconfigured, ReusedToken, StaleToken
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.mariadb.authority.authority import MariadbAuthority
from fenced.testing.kit import asking, granted
from fenced.values.model import Kept, Released
from fenced_testkit.servers import MariadbServer
from fenced_testkit.servers.mysql import MYSQL_VARIABLE
from tests.mariadb.pooler import TransactionPooler

pytestmark = [
    pytest.mark.xdist_group("mariadb"),
    pytest.mark.skipif(bool(os.environ.get(MYSQL_VARIABLE)), reason="these are settings of MariaDB"),
]
RUNTIME = BlockingRuntime()
REPLICATES = {"log_bin": "binlog", "sync_binlog": "1", "log_slave_updates": "ON"}
TABLES = ("number", "namespace", "name", "attempt", "queue", "schema")


class Opens:
    """Opens authorities that are closed at the end."""

    def __init__(self) -> None:
        self._made: list[MariadbAuthority] = []

    def __call__(self, server: MariadbServer, database: str = "mysql") -> MariadbAuthority:
        return self.at(server.url(database))

    def at(self, url: str) -> MariadbAuthority:
        self._made.append(MariadbAuthority(url, RUNTIME))
        step(self._made[-1].open())
        return self._made[-1]

    def close(self) -> None:
        for each in self._made:
            step(each.close())


@pytest.fixture
def opened() -> Iterator[Opens]:
    opens = Opens()
    yield opens
    opens.close()


def token_of(authority: MariadbAuthority, name: str = "orders") -> int:
    ask = asking(RUNTIME, name)
    token = step(granted(authority, ask)).token
    assert step(authority.release(ask.secret)) == Released()
    return token


# proves authority mariadb: synced-grants
def test_a_grant_outlives_a_kill_where_the_server_syncs(opened: Opens) -> None:
    """With innodb_flush_log_at_trx_commit 0 a kill may take away what was acknowledged, so that is best-effort."""
    with MariadbServer({"innodb_flush_log_at_trx_commit": "0"}) as server:
        (doubt,) = step(opened(server).open()).doubts
        assert "innodb_flush_log_at_trx_commit" in doubt
    with MariadbServer() as server:
        # Nothing but the commit itself makes the server write its log within the time of this test.
        server.execute("SET GLOBAL innodb_flush_log_at_timeout = 2700")
        authority = opened(server)
        assert not step(authority.open()).doubts
        held = asking(RUNTIME, "held", ttl=600)
        tokens = [token_of(authority), step(granted(authority, held)).token]
        server.kill()
        server.start()
        after = opened(server)
        assert step(after.renew([held.secret])) == [Kept(600.0)]
        assert token_of(after) > max(tokens)


# proves authority mariadb: settings-watched
def test_a_server_that_is_no_longer_strict_grants_nothing(opened: Opens) -> None:
    """Also through connections that know nothing of it, as those of a pooler; and once it is corrected, it goes on."""
    with MariadbServer() as server:
        authority = opened(server)
        ask = asking(RUNTIME, "held", ttl=60)
        step(granted(authority, ask))
        server.settings["innodb_flush_log_at_trx_commit"] = "2"
        server.restart()
        with pytest.raises((Misconfigured, Indeterminate)):  # its connection broke: who knows
            step(authority.ask(asking(RUNTIME, "orders")))
        with pytest.raises(Misconfigured, match="innodb_flush_log_at_trx_commit is 2"):
            step(authority.ask(asking(RUNTIME, "orders")))
        assert step(authority.renew([ask.secret])) == [Kept(60.0)], "who holds may go on"
        with fenced.Client(server.url()) as strict, pytest.raises(Misconfigured, match="set it to 1"):
            strict.acquire("orders")
        with fenced.Client(server.url(), guarantee="best-effort") as client:
            client.acquire("orders").release()
        server.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
        step(granted(authority, asking(RUNTIME, "orders")))


def test_a_server_behind_a_proxy_is_looked_at_again_after_its_restart(opened: Opens) -> None:
    """The client's connection outlives the server: the proxy has turned to another start of it."""
    with MariadbServer() as server, TransactionPooler(server.port, "mysql") as first:
        authority = opened.at(f"mariadb://root@{first.host}:{first.port}/mysql")
        token_of(authority)
        time.sleep(1.1)  # a server tells its starts apart by whole seconds
        server.settings["innodb_flush_log_at_trx_commit"] = "2"
        server.restart()
        first.reconnect()
        with pytest.raises(Misconfigured, match="innodb_flush_log_at_trx_commit is 2"):
            step(authority.ask(asking(RUNTIME, "orders")))


# proves authority mariadb: history-noticed
def test_a_promoted_replica_grants_nothing_until_raised(opened: Opens) -> None:
    """Grants that never reached the replica are lost with the primary. Nothing is granted below them."""
    with (
        MariadbServer({**REPLICATES, "server_id": "1"}) as primary,
        MariadbServer({**REPLICATES, "server_id": "2", "read_only": "ON"}) as replica,
    ):
        database = primary.create_database("leases")
        authority = opened(primary, database)
        held = asking(RUNTIME, "held", ttl=60)
        step(granted(authority, held))
        replica.execute(
            f"CHANGE MASTER TO MASTER_HOST = '{primary.host}', MASTER_PORT = {primary.port}, MASTER_USER = 'root', "
            "MASTER_USE_GTID = slave_pos"
        )
        replica.execute("START SLAVE")
        token_of(authority)
        _caught_up(primary, replica)
        (told,) = step(authority.open()).warnings
        assert "loses the leases" in told
        replica.execute("STOP SLAVE")
        lost = max(token_of(authority) for _ in range(5))
        primary.stop()
        replica.execute("RESET SLAVE ALL")
        replica.execute("SET GLOBAL read_only = OFF")
        promoted = opened(replica, database)
        assert "raise --above" in str(step(promoted.open()).stopped)
        with pytest.raises(Misconfigured, match="authority raise"):
            step(promoted.ask(asking(RUNTIME, "orders")))
        assert step(promoted.renew([held.secret])) == [Kept(60.0)], "who holds may go on"
        assert step(promoted.raise_floor(lost)) >= lost
        assert token_of(promoted) > lost


def _caught_up(primary: MariadbServer, replica: MariadbServer) -> None:
    ((position,),) = primary.execute("SELECT @@gtid_binlog_pos")
    ((missed,),) = replica.execute(f"SELECT MASTER_GTID_WAIT('{position}', 60)")
    assert missed == 0


def test_a_restored_dump_is_noticed(opened: Opens) -> None:
    """The rows are in other tables: under another name, or in place of the old ones."""
    with MariadbServer() as server:
        database, other = server.create_database(), server.create_database()
        authority = opened(server, database)
        token_of(authority)
        _copy(server, database, other)
        lost = max(token_of(authority) for _ in range(3))
        for table in TABLES:
            server.execute(f"DROP TABLE `{database}`.fenced_{table}")
        time.sleep(1.1)  # the server keeps when a table was made in whole seconds
        _copy(server, other, database)
        for restored in (opened(server, other), opened(server, database)):
            with pytest.raises(Misconfigured, match="authority raise"):
                step(restored.ask(asking(RUNTIME, "orders")))
            step(restored.raise_floor(lost))
            assert token_of(restored) > lost


def _copy(server: MariadbServer, source: str, target: str) -> None:
    time.sleep(1.1)
    for table in TABLES:
        server.execute(f"CREATE TABLE `{target}`.fenced_{table} LIKE `{source}`.fenced_{table}")
        server.execute(f"INSERT INTO `{target}`.fenced_{table} SELECT * FROM `{source}`.fenced_{table}")


# proves authority mariadb: reset-unnoticed
def test_files_put_back_in_place_repeat_tokens_and_guards_notice(opened: Opens, tmp_path: Path) -> None:
    """As rsync restores a folder. Without `raise` the guard refuses whoever carries a token of the other history."""
    guard = fenced.Values(f"sqlite:///{tmp_path / 'guarded.db'}")
    with MariadbServer() as server:
        with fenced.Client(server.url()) as client:
            client.acquire("warm-up").release()
        server.stop()
        shutil.copytree(server.data, tmp_path / "backup")
        server.start()
        with fenced.Client(server.url()) as client:
            for _ in range(10):
                with client.hold("orders") as lease:
                    guard.write(lease, "orders", b"of the lost history")
            highest = lease.token
        server.stop()
        _put_back(tmp_path / "backup", server.data)
        server.start()
        with fenced.Client(server.url()) as client:
            refused = 0
            while (lease := client.acquire("orders")).token <= highest:
                with pytest.raises((StaleToken, ReusedToken)):
                    guard.write(lease, "orders", b"of the wrong history")
                refused += 1
                lease.release()
            lease.release()
            assert refused, "the old files cannot be told from the new ones"
        step(opened(server).raise_floor(highest + 1000))
        with fenced.Client(server.url()) as client, client.hold("orders") as lease:
            assert lease.token > highest + 1000
            guard.write(lease, "orders", b"after the floor was raised")


def _put_back(backup: Path, data: Path) -> None:
    """Write what has changed into the files that are there, and delete what is new."""
    known = _files(backup)
    for place, path in _files(data).items():
        if place not in known:
            path.unlink()
    for place, path in known.items():
        target = data / place
        if not target.exists() or target.read_bytes() != path.read_bytes():
            with target.open("r+b" if target.exists() else "wb") as out:
                out.truncate(0)
                out.write(path.read_bytes())


def _files(folder: Path) -> Mapping[Path, Path]:
    return {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
