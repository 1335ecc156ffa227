"""Redis that crashes, fails over, is restored or runs as a cluster: what is noticed, and what is only best-effort."""

import contextlib
import itertools
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from fenced.drills.relay import Proxy
from fenced.drills.relay.ports import free_port
from fenced.errors import Indeterminate, Misconfigured, Unavailable
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.redis.authority.authority import RedisAuthority
from fenced.testing.kit import asking, granted
from fenced.values.model import Granted, Kept, Released
from fenced_testkit.servers import RedisServer

pytestmark = pytest.mark.xdist_group("redis")
RUNTIME = BlockingRuntime()


@contextmanager
def opened(server: RedisServer, namespace: str = "default") -> Iterator[RedisAuthority]:
    authority = RedisAuthority.at(server.url(), RUNTIME, namespace)
    try:
        step(authority.open())
        yield authority
    finally:
        step(authority.close())


def token_of(authority: RedisAuthority, name: str = "orders") -> int:
    ask = asking(RUNTIME, name)
    token = step(granted(authority, ask)).token
    assert step(authority.release(ask.secret)) == Released()
    return token


# proves authority redis: synced-grants
def test_a_killed_server_has_every_token_it_handed_out() -> None:
    """SIGKILL right after a reply. What a power cut takes besides is shown by `make evidence`."""
    with RedisServer() as server:
        tokens = []
        for _ in range(5):
            with opened(server) as authority:
                assert step(authority.open()).doubts == ()
                held = asking(RUNTIME, secrets.token_hex(4))
                tokens += [token_of(authority) for _ in range(20)]
                tokens.append(step(granted(authority, held)).token)
                server.kill()
            server.start()
            with opened(server) as authority:
                assert step(authority.renew([held.secret])) == [Kept(10.0)]
        assert all(a < b for a, b in itertools.pairwise(tokens)), tokens


# proves authority redis: promotion-noticed
def test_a_promoted_replica_grants_nothing_until_the_floor_is_raised() -> None:
    with RedisServer() as primary, primary.replica() as replica:
        with opened(primary) as before:
            held = asking(RUNTIME, "held")
            token = step(granted(before, held)).token
            last = token_of(before)
        replica.caught_up_with(primary)
        with pytest.raises(Unavailable, match="replica"), opened(replica):
            pass
        primary.kill()
        replica.promote()
        with opened(replica) as after:
            lineage = replica.execute("HGET", "fenced:{default}:meta", "lineage").decode().lstrip("!")
            with pytest.raises(Misconfigured, match=f"{lineage}.*fenced authority raise --above"):
                token_of(after)
            assert step(after.renew([held.secret])) == [Kept(10.0)], "holders go on"
            assert isinstance(step(after.ask(held)), Granted), "and hear of their own grant again"
            with pytest.raises(Misconfigured):
                step(after.force_release("held", token))
        replica.restart()  # which draws a new id and forgets the former one: the mark stays
        with opened(replica) as after:
            with pytest.raises(Misconfigured):
                token_of(after)
            assert step(after.raise_floor(1000)) == 1000
            assert token < last < 1000 < token_of(after)
            assert step(after.release(held.secret)) == Released()


def test_a_primary_that_was_a_replica_for_a_while_is_another_history() -> None:
    """There and back again, under a connection that stays open: its data were replaced meanwhile."""
    with RedisServer() as primary, primary.replica() as replica, opened(primary) as authority:
        token_of(authority)
        replica.promote()
        primary.execute("REPLICAOF", replica.host, replica.port)
        primary.wait_until(lambda: primary._replication()["master_link_status"] == "up", "it follows")
        primary.execute("REPLICAOF", "NO", "ONE")
        with pytest.raises(Misconfigured, match="replication id"):
            token_of(authority)


def test_ids_that_change_without_a_promotion_are_the_same_history() -> None:
    """A restart, a first replica and the end of the last one's backlog each draw a new replication id."""
    with RedisServer({"repl-backlog-ttl": "1"}) as server:
        ids = [server._replication()["master_replid"]]
        with opened(server) as authority:
            tokens = [token_of(authority)]
            server.restart()
            ids.append(server._replication()["master_replid"])
            tokens.append(token_of(authority))
            with server.replica():
                ids.append(server._replication()["master_replid"])
                tokens.append(token_of(authority))
            server.wait_until(
                lambda: server._replication()["master_replid"] not in ids, "its backlog is dropped"
            )
            tokens.append(token_of(authority))
        assert tokens == sorted(set(tokens))
        assert len(set(ids)) == 3


# proves authority redis: replicas
def test_a_grant_that_no_replica_confirms_is_unknown() -> None:
    """And stays so when it is repeated, over another connection and without anything to do."""
    with (
        RedisServer() as primary,
        Proxy(primary.host, primary.port) as proxy,
        primary.replica(through=proxy) as replica,
        opened(primary) as authority,
        opened(primary) as other,
    ):
        assert any("replicas" in doubt for doubt in step(authority.open()).doubts)
        step(granted(other, asking(RUNTIME, "another")))
        proxy.black_hole()
        ask = asking(RUNTIME, "orders")
        for each in (authority, other):  # the other one's own last write is on the replica
            with pytest.raises(Indeterminate, match="no replica confirmed"):
                step(each.ask(ask))
        proxy.heal()
        grant = step(granted(authority, ask))
        replica.execute("REPLICAOF", "NO", "ONE")
        known = replica.execute("HGET", "fenced:{default}:meta", "token")
        assert int(known) == grant.token, "what was told is on the replica"


# proves authority redis: restore-unnoticed
def test_restored_files_repeat_tokens_unless_the_floor_is_raised(tmp_path: Path) -> None:
    with RedisServer() as server, opened(server) as authority:
        token_of(authority)
        server.backup(tmp_path / "backup")
        seen = token_of(authority)
    with RedisServer.restored(tmp_path / "backup") as server, opened(server) as authority:
        assert token_of(authority) == seen, "nothing tells it from a restart"
    with RedisServer.restored(tmp_path / "backup") as server, opened(server) as authority:
        step(authority.raise_floor(seen))
        assert token_of(authority) > seen


# proves authority redis: one-slot
def test_every_operation_works_on_a_node_of_a_cluster() -> None:
    """A cluster of one node that has half the slots: what needed another slot would be told MOVED."""
    settings = {"cluster-enabled": "yes", "cluster-require-full-coverage": "no"}
    with RedisServer({**settings, "cluster-port": str(free_port())}) as server:
        namespace = next(
            name
            for name in (f"}}{number}{{" for number in range(100))
            if server.execute("CLUSTER", "KEYSLOT", f"fenced:{{{_tag(name)}}}:meta") < 8192
        )
        server.execute("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
        server.wait_until(lambda: b"cluster_state:ok" in _raw(server, "CLUSTER", "INFO"), "it is up")
        with opened(server, namespace) as authority:
            assert any("cluster" in doubt for doubt in step(authority.open()).doubts)
            holder, waiter = asking(RUNTIME, "{a}", "{b}"), asking(RUNTIME, "{a}", wait=True)
            step(granted(authority, holder))
            step(authority.ask(waiter))
            step(authority.renew([holder.secret, waiter.secret]))
            assert len(step(authority.survey())) == 2
            assert step(authority.observe("{a}")).waiters
            step(authority.release(holder.secret))
            assert step(authority.next_wakeups(RUNTIME.now() + 5))
            token = step(granted(authority, waiter)).token
            assert step(authority.force_release("{a}", token)) is not None
            step(authority.raise_floor(1000))
            step(authority.tidy())
        other = next(
            name
            for name in (f"team/{number}" for number in range(100))
            if server.execute("CLUSTER", "KEYSLOT", f"fenced:{{{name}}}:meta") > 8191
        )
        with pytest.raises(Unavailable, match="cluster"), opened(server, other):
            pass


def _tag(namespace: str) -> str:
    from fenced.stores.redis.authority.scripts import tag

    return tag(namespace)


def _raw(server: RedisServer, *command: str) -> bytes:
    told = server.execute(*command)
    return told if isinstance(told, bytes) else "\n".join(f"{k}:{v}" for k, v in told.items()).encode()


def test_a_snapshot_that_lost_the_counter_is_a_new_realm() -> None:
    """Without persistence a crash deletes everything: a running client is not fooled by what comes after."""
    with RedisServer({"appendonly": "no"}) as server, opened(server) as authority:
        realm = step(authority.open()).realm
        token_of(authority)
        server.kill()
        server.start()
        with pytest.raises(Misconfigured, match="deleted or replaced"):
            token_of(authority)
        with opened(server) as other:
            assert step(other.open()).realm != realm
            token_of(other)
        with pytest.raises(Misconfigured, match="deleted or replaced"):
            token_of(authority)


def test_a_busy_or_full_server_says_so() -> None:
    with RedisServer({"busy-reply-threshold": "1"}) as server, opened(server) as authority:
        for setting, value in (("maxmemory", "1"), ("min-replicas-to-write", "1")):
            server.execute("CONFIG", "SET", setting, value)
            with pytest.raises(Unavailable, match=setting):
                token_of(authority)
            server.execute("CONFIG", "SET", setting, "0")
        busy = threading.Thread(target=_keep_busy, args=(server,))
        busy.start()
        server.wait_until(lambda: _is_busy(authority), "it is busy")
        server.execute("SCRIPT", "KILL")
        busy.join()
        token_of(authority)


def _keep_busy(server: RedisServer) -> None:
    with contextlib.suppress(redis.ResponseError):
        server.execute("EVAL", "while true do end", 0)


def _is_busy(authority: RedisAuthority) -> bool:
    try:
        token_of(authority, secrets.token_hex(4))
    except Unavailable as error:
        return "SCRIPT KILL" in str(error)
    return False
