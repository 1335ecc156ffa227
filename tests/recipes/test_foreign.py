"""Tokens of other locks: kazoo and Curator on ZooKeeper, etcd's own lock, and a table that refuses a stopped holder."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import fenced
import fenced.sql
from fenced.values.foreign import SOURCES, foreign_realm

HERE = Path(__file__).parent
JARS = "/usr/share/java/*:/usr/share/zookeeper/lib/*:/usr/share/java/zookeeper.jar"
KAZOO_HOLDER = """
import sys
from kazoo.client import KazooClient
hosts, path = sys.argv[1:]
zk = KazooClient(hosts, timeout=1.0)
zk.start(timeout=60)
lock = zk.Lock(path, "me")
lock.acquire()
node = f"{path}/{lock.node}"
print(zk.exists(node).czxid, f"{zk.client_id[0]:x}", node, flush=True)
sys.stdin.readline()
"""
ETCD_HOLDER = """
number=$(etcdctl get "$ETCD_LOCK_KEY" --write-out=fields | sed -n 's/^"CreateRevision" : //p')
echo "$number mutex $ETCD_LOCK_KEY"
while kill -0 $PPID; do sleep 0.1; done
"""
"""What `etcdctl lock` runs while it holds the lock, which is the `concurrency.Mutex` of etcd's Go client."""


@pytest.fixture(scope="module")
def curator(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of a holder on Curator, without its arguments."""
    folder = tmp_path_factory.mktemp("curator")
    subprocess.run(["javac", "-cp", JARS, "-d", folder, HERE / "CuratorHolder.java"], check=True)
    options = ["-Xmx96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    return ["java", *options, "-cp", f"{folder}:{JARS}", "CuratorHolder"]


@contextlib.contextmanager
def holder(
    source: str, command: list[str], told: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[str], fenced.Stamp]]:
    """A process that has a lock, and the stamp of that lock."""
    with subprocess.Popen(
        command,
        env={**os.environ, **told},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            number, session, node = process.stdout.readline().split()
            yield (
                process,
                fenced.Stamp.foreign(source, "test", "orders/42", int(number), f"{session}:{node}:{number}"),
            )
        finally:
            process.kill()


@pytest.mark.parametrize("kind", ["kazoo", "curator", "etcd"])
def test_the_table_refuses_a_stopped_holder_of_another_lock(
    kind: str, request: pytest.FixtureRequest
) -> None:
    path, told = f"/foreign-{secrets.token_hex(4)}", dict[str, str]()
    if kind == "etcd":
        source, port = "etcd-revision", request.getfixturevalue("etcd_server").port
        told = {"ETCDCTL_API": "3", "ETCDCTL_ENDPOINTS": f"127.0.0.1:{port}"}
        command = ["etcdctl", "lock", "--ttl=1", "--", path, "sh", "-c", ETCD_HOLDER]
    else:
        source, port = "zookeeper-czxid", request.getfixturevalue("zookeeper_server").port
        program = (
            [sys.executable, "-c", KAZOO_HOLDER] if kind == "kazoo" else request.getfixturevalue("curator")
        )
        command = [*program, f"127.0.0.1:{port}", path]
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, qty INTEGER)")
    db.execute("INSERT INTO orders VALUES (42, 10)")
    orders = fenced.sql.Guard(table="orders", name="orders/{id}")
    orders.install(db, mode="require")
    with holder(source, command, told) as (stopped, old):
        with orders.transaction(db, old) as tx:
            tx.execute("UPDATE orders SET qty = 9")
        stopped.send_signal(signal.SIGSTOP)
        with holder(source, command, told) as (_, new):  # its session has ended: the lock goes on
            assert stopped.poll() is None and new.token > old.token
            with orders.transaction(db, new) as tx:
                tx.execute("UPDATE orders SET qty = 8")
            with pytest.raises(fenced.StaleToken), orders.transaction(db, old) as tx:
                tx.execute("UPDATE orders SET qty = 7")
    assert db.execute("SELECT qty FROM orders").fetchone() == (8,)
    db.close()


def test_a_foreign_stamp_is_like_any_other() -> None:
    stamp = fenced.Stamp.foreign("etcd-revision", "main", ["b", "a"], 7, "lease/key", seq=3)
    assert fenced.Stamp.parse(str(stamp)) == stamp
    assert (stamp.token, stamp.names, stamp.seq) == (7, ("a", "b"), 3)
    assert stamp.realm == foreign_realm("etcd-revision", "main") != foreign_realm("zookeeper-czxid", "main")


def test_the_number_of_a_sequential_node_is_refused_under_strict() -> None:
    with pytest.raises(fenced.Misconfigured, match="starts again at 0"):
        fenced.Stamp.foreign("zookeeper-sequence", "main", "a", 0, "x")
    accepted = fenced.Stamp.foreign("zookeeper-sequence", "main", "a", 0, "x", guarantee="best-effort")
    assert accepted.token == 1


def test_every_source_says_when_its_numbers_could_repeat() -> None:
    assert all(source.doubts for source in SOURCES.values())


@pytest.mark.parametrize(
    ("source", "number", "holder", "guarantee"),
    [
        ("redis", 1, "x", "strict"),
        ("etcd-revision", 0, "x", "strict"),
        ("etcd-revision", 2**53, "x", "strict"),
        ("etcd-revision", True, "x", "strict"),
        ("etcd-revision", 1, "", "strict"),
        ("etcd-revision", 1, "x", "maybe"),
        ("zookeeper-sequence", 2**31, "x", "best-effort"),
    ],
)
def test_a_number_that_makes_no_stamp_is_misuse(
    source: str, number: int, holder: str, guarantee: str
) -> None:
    with pytest.raises(fenced.Misuse):
        fenced.Stamp.foreign(source, "main", "a", number, holder, guarantee=guarantee)
