"""ZooKeeperGuard: transactions of a kazoo client behind the fence."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
from kazoo.client import KazooClient  # type: ignore[import-untyped]

import fenced
from fenced.drills.relay import Fault, Proxy
from fenced.errors import (
    AlreadyApplied,
    Conflict,
    Indeterminate,
    Misconfigured,
    Misuse,
    StaleToken,
    Unsupported,
)
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.zookeeper.guard.values import ZooKeeperValues
from fenced.testing.kit import NAME, by, stamp
from fenced.values import timing
from fenced.zookeeper import ZooKeeperGuard
from fenced_testkit.servers import ZooKeeperServer
from tests.guard_outage_harness import is_used_after_a_fork


@pytest.fixture
def kazoo(zookeeper_server: ZooKeeperServer) -> Iterator[Any]:
    """A client with a chroot of its own, and a node in it."""
    chroot = f"/{secrets.token_hex(8)}"
    maker = _client(zookeeper_server.host, zookeeper_server.port, "")
    maker.create(chroot)
    _end(maker)
    client = _client(zookeeper_server.host, zookeeper_server.port, chroot)
    client.create("/stock", b"10")
    yield client
    _end(client)


def _client(host: str, port: int, chroot: str) -> Any:
    client = KazooClient(f"{host}:{port}{chroot}", timeout=30)
    client.start(timeout=30)
    return client


def _end(client: Any) -> None:
    client.stop()
    client.close()


# proves guard zookeeper: one-multi
def test_the_fence_and_the_callers_operations_are_one_multi(kazoo: Any, zookeeper_url: str) -> None:
    """A stale holder changes nothing; a failed operation of the caller is a conflict, and leaves nothing either."""
    guard = ZooKeeperGuard()
    with guard.transaction(kazoo, stamp(5, 1, "a", "b")) as tx:
        _, stat = kazoo.get("/stock")
        tx.set_data("/stock", b"9", version=stat.version)
        tx.create("/log", b"first")
    assert tx.results[1] == "/log"
    for wrong in (tx.commit, tx.commit_async):
        with pytest.raises(Misuse):
            wrong()
    with pytest.raises(Conflict) as conflict, guard.transaction(kazoo, stamp(5, 2, "a", "b")) as tx:
        tx.delete("/log")
        tx.set_data("/stock", b"8", version=stat.version)
    assert "operation 1 of the transaction (SetData of " in str(conflict.value)
    other = ZooKeeperValues.at(f"{zookeeper_url}{kazoo.chroot}", BlockingRuntime())
    step(other.open())
    step(other.announce(by(6, 0, "b")))
    with pytest.raises(StaleToken), guard.transaction(kazoo, stamp(5, 3, "a", "b")) as tx:
        tx.set_data("/stock", b"zombie")
    with pytest.raises(StaleToken):
        guard.announce(kazoo, stamp(5, 0, "b"), "b")
    step(other.set_mode("observe"))
    with guard.transaction(kazoo, stamp(5, 4, "a", "b")) as tx:
        tx.set_data("/stock", b"7")
    step(other.set_mode("enforce"))
    with pytest.raises(StaleToken), guard.transaction(kazoo, stamp(5, 5, "a", "b")) as tx:
        tx.set_data("/stock", b"zombie")
    assert (kazoo.get("/stock")[0], kazoo.get("/log")[0]) == (b"7", b"first")
    with pytest.raises(Unsupported, match="megabyte"), guard.transaction(kazoo, stamp(6)) as tx:
        tx.set_data("/stock", b"x" * 1_100_000)
    step(other.close())


# proves guard zookeeper: never-delete
def test_a_deleted_mark_counts_again_from_zero(kazoo: Any) -> None:
    """So an older check passes, if the new node has as many changes: a mark is never deleted."""
    older, newer = ZooKeeperGuard(), ZooKeeperGuard()
    older.announce(kazoo, stamp(5))
    kazoo.delete(f"/fenced-guard/n/{NAME.replace('/', '%2F')}")
    newer.announce(kazoo, stamp(6))
    with older.transaction(kazoo, stamp(5)) as tx:
        tx.set_data("/stock", b"admitted")
    assert kazoo.get("/stock")[0] == b"admitted"


def test_a_lost_reply_is_unknown_or_settled(kazoo: Any, zookeeper_server: ZooKeeperServer) -> None:
    """Under `sequenced` the mark shows whether it happened. Under `retry` it is unknown, and may be repeated."""
    with Proxy(zookeeper_server.host, zookeeper_server.port) as proxy:
        for rule, outcome in (("sequenced", nullcontext()), ("retry", pytest.raises(Indeterminate))):
            kazoo.create(f"/{rule}")
            client = _client(proxy.host, proxy.port, f"{kazoo.chroot}/{rule}")
            client.ensure_path("/log")
            guard = ZooKeeperGuard(rule=rule)  # type: ignore[arg-type]
            guard.announce(client, stamp(5, 0))
            trigger = proxy.on(b"entry-", Fault.LOSE_REPLY)
            with outcome, guard.transaction(client, stamp(5, 1)) as tx:
                tx.create("/log/entry-", b"", sequence=True)
            trigger.wait()
            assert len(client.get_children("/log")) == 1
            assert tx.results is None, "they were in the reply"
            if rule == "sequenced":
                with pytest.raises(AlreadyApplied), guard.transaction(client, stamp(5, 1)) as tx:
                    tx.create("/log/entry-", b"", sequence=True)
            _end(client)


async def test_a_thousand_late_writes(zookeeper_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued by a holder that was overtaken, and sent at once on one connection: none is admitted."""
    monkeypatch.setattr(timing, "CALL_SECONDS", 300.0)  # the last of them waits for all the others
    url = f"{zookeeper_url}/{secrets.token_hex(8)}"
    async with fenced.AsyncValues(url) as guard, fenced.AsyncValues(url) as newer:
        await guard.write(stamp(5), NAME, b"old")
        await newer.write(stamp(6), NAME, b"new")
        late = [guard.write(stamp(5), NAME, b"late") for _ in range(1000)]
        found = await asyncio.gather(*late, return_exceptions=True)
        assert {type(each) for each in found} == {StaleToken}
        assert (await newer.peek(NAME)).value == b"new"


def test_one_retry_loop_loses_nothing(kazoo: Any, zookeeper_server: ZooKeeperServer) -> None:
    """Eight holders with ever newer tokens count up one node: each admitted change is there, tokens never fall."""
    tokens, admitted = itertools.count(1), []
    kazoo.set("/stock", b"0 0")

    def work(client: Any) -> None:
        guard = ZooKeeperGuard()
        for _ in range(15):
            token = next(tokens)
            try:
                with guard.transaction(client, stamp(token)) as tx:
                    data, stat = client.get("/stock")
                    count = int(data.split()[0]) + 1
                    tx.set_data("/stock", f"{count} {token}".encode(), version=stat.version)
            except StaleToken:
                continue
            admitted.append((count, token))

    clients = [_client(zookeeper_server.host, zookeeper_server.port, kazoo.chroot) for _ in range(8)]
    with ThreadPoolExecutor(8) as holders:
        list(holders.map(work, clients))
    for client in clients:
        _end(client)
    admitted.sort()
    assert [count for count, _ in admitted] == list(range(1, len(admitted) + 1))
    assert [token for _, token in admitted] == sorted(token for _, token in admitted)
    assert kazoo.get("/stock")[0] == f"{admitted[-1][0]} {admitted[-1][1]}".encode()


def test_a_fork(zookeeper_url: str) -> None:
    is_used_after_a_fork(f"{zookeeper_url}/{secrets.token_hex(8)}")


def test_a_lease_is_announced_at_its_grant(kazoo: Any) -> None:
    guard = ZooKeeperGuard()
    with fenced.Client("memory:") as client:
        lease = client.acquire("a")
        older, stale = lease.next_stamp(), pytest.raises(StaleToken)
        lease.release()
        with client.hold("a", guards=[guard.on(kazoo)]), stale, guard.transaction(kazoo, older):
            pass
        with pytest.raises(Misuse, match=r"guard\.on\(client\)"), client.hold("a", guards=[guard]):  # type: ignore[list-item]
            pass


def test_not_a_kazoo_client() -> None:
    with pytest.raises(Misuse, match="kazoo client"):
        ZooKeeperGuard().announce("zookeeper://host", stamp(5))
    with pytest.raises(Misuse, match="root"):
        ZooKeeperGuard(root="fenced-guard")


def test_a_rule_that_is_not_installed(kazoo: Any) -> None:
    ZooKeeperGuard().announce(kazoo, stamp(5))
    wrong = ZooKeeperGuard(rule="once")
    with pytest.raises(Misconfigured, match=r"rule retry.*says once"), wrong.transaction(kazoo, stamp(5)):
        raise AssertionError
