"""EtcdGuard: the caller's own transaction behind the fence, on our wire and on other clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Iterator

import aetcd  # type: ignore[import-untyped]
import etcd3gw
import pytest

import fenced
from fenced.drills.relay import Proxy
from fenced.drills.relay.proxy import http2_reply
from fenced.errors import (
    Conflict,
    Indeterminate,
    InvalidStamp,
    LeaseLost,
    Misconfigured,
    Misuse,
    StaleToken,
    Unavailable,
    Unsupported,
)
from fenced.etcd import AsyncEtcdClient, AsyncEtcdGuard, EtcdClient, EtcdGuard
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.etcd.claimkeys import ClaimKeys
from fenced.stores.etcd.guard import values
from fenced.stores.etcd.guard.values import EtcdValues, EtcdWrites
from fenced.stores.etcd.wire import messages
from fenced.stores.etcd.wire.cluster import EtcdWire, NoSpace
from fenced.stores.etcd.wire.messages import delete, txn
from fenced.testing.kit import NAME, by, stamp
from fenced.values import timing
from fenced.values.contracts import MANY_NAMES
from fenced_testkit.servers import EtcdServer
from tests.bound import Bound
from tests.entering import is_entered_once, is_entered_once_by_tasks
from tests.guard_outage_harness import is_used_after_a_fork


@pytest.fixture
def prefix() -> str:
    return secrets.token_hex(8)


@pytest.fixture
def guard(etcd_url: str, prefix: str) -> Iterator[Bound]:
    guard = Bound(EtcdGuard(prefix=prefix), EtcdClient(etcd_url))
    yield guard
    guard.client.close()


def test_compares_puts_and_the_fence_are_one_transaction(guard: Bound, prefix: str) -> None:
    """Several names at once; a stale holder's block changes nothing, and a conflict is not taken for it."""
    stock, log = f"{prefix}/stock".encode(), f"{prefix}/log".encode()
    with guard.transaction(stamp(5, 1, "a", "b")) as tx:
        assert tx.get(stock) == (None, 0)
        tx.expect(stock, 0)
        tx.put(stock, b"10")
        tx.put(log, b"first")
    guard.announce(stamp(6, 0, "b"), "b")
    with pytest.raises(StaleToken), guard.transaction(stamp(5, 2, "a", "b")) as tx:
        tx.put(stock, b"zombie")
    with guard.transaction(stamp(6, 1, "a", "b")) as tx:
        found = tx.get(stock)
        tx.expect(stock, found.revision)
        tx.delete(log)
    with pytest.raises(Conflict), guard.transaction(stamp(6, 2, "a", "b")) as tx:
        tx.expect(log, found.revision)
        tx.put(stock, b"lost")
    with guard.transaction(stamp(6, 3, "a", "b")) as tx:
        assert (tx.get(stock).value, tx.get(log).value) == (b"10", None)


def test_a_body_that_raises_sends_nothing(guard: Bound, prefix: str) -> None:
    key = f"{prefix}/stock".encode()
    with pytest.raises(ZeroDivisionError), guard.transaction(stamp(5)) as tx:
        tx.put(key, b"10")
        raise ZeroDivisionError
    with guard.transaction(stamp(5)) as tx:
        assert tx.get(key).value is None
        for wrong in ("stock", b"", b"fenced-guard/default"):
            with pytest.raises(Misuse):
                tx.put(wrong, b"")


def test_marks_that_were_announced_let_nobody_else_in(guard: Bound, prefix: str) -> None:
    """A further transaction makes no credential. A lease that was released, and a stamp without names, are refused."""
    with fenced.Client("memory:") as leases:
        lease = leases.acquire("a", ttl=600)
        with guard.transaction(lease) as tx:
            tx.put(f"{prefix}/stock".encode(), b"10")
        lease.release()
    with pytest.raises(Misuse, match="released"), guard.transaction(lease):
        raise AssertionError
    empty = stamp(7)._replace(realm=lease.realm, names=())
    with pytest.raises(InvalidStamp), guard.transaction(empty) as tx:
        tx.put(f"{prefix}/stock".encode(), b"zombie")


@pytest.mark.parametrize("rule", ["sequenced", "once"])
def test_rules_that_count_writes(etcd_url: str, prefix: str, rule: str) -> None:
    guard = Bound(EtcdGuard(prefix=prefix, rule=rule), EtcdClient(etcd_url))  # type: ignore[arg-type]
    key = f"{prefix}/stock".encode()
    with guard.transaction(stamp(5, 1)) as tx:
        tx.put(key, b"1")
    for _ in range(2):  # an announcement may be repeated; that does not admit the write again
        guard.announce(stamp(5, 0))
    with pytest.raises(fenced.FencedError) as refused, guard.transaction(stamp(5, 1)) as tx:
        tx.put(key, b"again")
    assert type(refused.value).__name__ == {"sequenced": "AlreadyApplied", "once": "DuplicateStamp"}[rule]
    with pytest.raises(Unsupported, match="transaction"):
        guard.compares(stamp(5, 2))
    guard.client.close()


# proves guard etcd: one-transaction
def test_a_further_transaction_is_one_round_trip(
    etcd_server: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the same holder, however often; so are a refusal and a mode that another process has set."""
    with Proxy(etcd_server.host, etcd_server.port, http2_reply) as proxy:
        guard = Bound(EtcdGuard(prefix=prefix), EtcdClient(f"etcd://{proxy.host}:{proxy.port}"))
        key = f"{prefix}/stock".encode()

        def one(token: int) -> int:
            before = proxy.requests
            with guard.transaction(stamp(token)) as tx:
                tx.put(key, b"v")
            return proxy.requests - before

        one(5)
        assert [one(5), one(5)] == [1, 1]
        other = EtcdValues.at(f"{etcd_server.url()}?prefix={prefix}", BlockingRuntime())
        step(other.open())
        step(other.announce(by(6, 0)))
        monkeypatch.setattr("fenced.guards.remembered.EVERY_SECONDS", 1e9)
        with pytest.raises(StaleToken):
            one(5)  # the first one is also written down
        before = proxy.requests
        with pytest.raises(StaleToken):
            one(5)
        assert proxy.requests - before == 1, "stale is told by the reply to the refused transaction"
        step(other.set_mode("observe"))
        one(5)
        step(other.set_mode("enforce"))
        with pytest.raises(StaleToken):
            one(5)
        step(other.close())
        guard.client.close()
    assert MANY_NAMES in guard.guard.traits


def test_compares_for_other_clients(guard: Bound, etcd_server: EtcdServer, prefix: str) -> None:
    """In etcd3gw's JSON and as gRPC messages: they hold until a newer token is announced, or a mode changes."""
    key = etcd3gw.utils._encode(f"{prefix}/stock")
    gateway = etcd3gw.client(host=etcd_server.host, port=etcd_server.port, api_path="/v3/")

    def write(compares: list[dict[str, object]]) -> bool:
        put = {"request_put": {"key": key, "value": etcd3gw.utils._encode("v")}}
        done = gateway.transaction({"compare": compares, "success": [put], "failure": []})
        return bool(done.get("succeeded", False))

    fence = guard.compares(stamp(5))
    assert write(fence.json()) and write(guard.compares(stamp(5)).json())
    messages = [aetcd.rpc.Compare.FromString(raw) for raw in fence.messages()]
    assert [(each.key, each.mod_revision) for each in messages] == [(c[0], c[3]) for c in fence.compares]
    guard.announce(stamp(6))
    assert not write(fence.json())
    with pytest.raises(StaleToken):
        guard.compares(stamp(5))
    newer = guard.compares(stamp(6))
    step(guard._of().set_mode("observe"))
    assert not write(newer.json()), "the modes are compared, too"
    assert write(guard.compares(stamp(5)).json()), "in observe the older one passes"
    gateway.session.close()


def test_still_held(etcd_url: str, prefix: str) -> None:
    """The authority is on the same etcd: a lease that is over is refused, although nobody has announced since."""
    guard = Bound(EtcdGuard(prefix=prefix, namespace=prefix), EtcdClient(etcd_url))
    key = f"{prefix}/stock".encode()
    with fenced.Client(etcd_url, namespace=prefix, guarantee="best-effort") as client:
        with client.hold(NAME) as lease:
            with guard.transaction(lease, still_held=True) as tx:
                tx.put(key, b"held")
            late = lease.next_stamp()
        with guard.transaction(late) as tx:
            tx.put(key, b"over, but nobody came after it")
        for _ in range(2):
            with pytest.raises(LeaseLost), guard.transaction(late, still_held=True) as tx:
                tx.put(key, b"refused")
        with client.hold(NAME) as lease, guard.transaction(lease, still_held=True) as tx:
            assert tx.get(key).value == b"over, but nobody came after it"
            tx.put(key, b"next")
        never_granted = late._replace(token=late.token + 100, grant="f" * 32)
        with pytest.raises(LeaseLost), guard.transaction(never_granted, still_held=True) as tx:
            tx.put(key, b"refused")
    guard.client.close()


def test_still_held_compares_every_name(etcd_url: str, prefix: str) -> None:
    """A name of the lease whose claim is gone, whichever it is: LeaseLost, and nothing is written."""
    key, claims = f"{prefix}/stock".encode(), ClaimKeys(prefix)
    with (
        EtcdClient(etcd_url) as etcd,
        fenced.Client(etcd_url, namespace=prefix, guarantee="best-effort") as client,
    ):
        guard = Bound(EtcdGuard(prefix=prefix, namespace=prefix), etcd)
        for gone in ("a", "b"):
            with contextlib.suppress(LeaseLost), client.hold_all(["a", "b"]) as lease:
                with guard.transaction(lease, still_held=True) as tx:
                    tx.put(key, b"held")
                request = txn((), [delete(claims.claim(gone))])
                step(guard._of().cells.wire.call(messages.TXN, request, BlockingRuntime().now() + 5))
                with pytest.raises(LeaseLost), guard.transaction(lease, still_held=True) as tx:
                    tx.put(key, b"refused")
        assert step(guard._of().look(key)).value == b"held"


def test_a_first_name_that_speaks_for_all_is_noticed(
    etcd_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = EtcdWrites.claim
    monkeypatch.setattr(EtcdWrites, "claim", lambda writes, claims, grant: claim(writes, claims[:1], grant))
    with pytest.raises(pytest.fail.Exception):
        test_still_held_compares_every_name(etcd_url, prefix)


@pytest.mark.parametrize("carried_out", [True, False])
def test_no_space_may_have_happened(
    guard: Bound, prefix: str, monkeypatch: pytest.MonkeyPatch, carried_out: bool
) -> None:
    """A member with less space than the others may refuse what was carried out: never "nothing happened"."""
    key, call = f"{prefix}/stock".encode(), EtcdWire.call

    async def full(
        wire: EtcdWire, path: str, request: bytes, until: float, *, repeatable: bool = True
    ) -> bytes:
        if not repeatable and carried_out:
            await call(wire, path, request, until, repeatable=False)
        if not repeatable:
            raise NoSpace("etcdserver: mvcc: database space exceeded")
        return await call(wire, path, request, until)

    guard.announce(stamp(5))
    with monkeypatch.context() as patch:
        patch.setattr(EtcdWire, "call", full)
        with pytest.raises(Indeterminate), guard.transaction(stamp(5)) as tx:
            tx.put(key, b"10")
    with guard.transaction(stamp(5)) as tx:
        assert tx.get(key).value == (b"10" if carried_out else None)


def test_no_space_that_counts_as_nothing_happened_is_noticed(
    guard: Bound, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "NoSpace", ZeroDivisionError)  # so it is not caught, and is Unavailable
    with pytest.raises(Unavailable):
        test_no_space_may_have_happened(guard, prefix, monkeypatch, True)


def test_names_that_are_none(guard: Bound, prefix: str) -> None:
    for name in ("a//b", ["a"], None):
        with pytest.raises(Misuse), guard.transaction(stamp(5, 1), name) as tx:
            tx.put(f"{prefix}/stock".encode(), b"1")


async def test_asyncio(etcd_url: str, prefix: str) -> None:
    guard = Bound(AsyncEtcdGuard(prefix=prefix), AsyncEtcdClient(etcd_url))
    key = f"{prefix}/stock".encode()
    async with guard.transaction(stamp(5)) as tx:
        assert (await tx.get(key)).value is None
        tx.put(key, b"1")
    await guard.announce(stamp(6))
    with pytest.raises(StaleToken):
        async with guard.transaction(stamp(5)) as tx:
            tx.put(key, b"zombie")
    assert len((await guard.compares(stamp(6))).compares) == 2
    await guard.client.close()


async def test_a_thousand_late_writes(etcd_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued by a holder that was overtaken, and sent at once on several connections: none is admitted."""
    monkeypatch.setattr(timing, "CALL_SECONDS", 300.0)  # the last of them waits for all the others
    guard, newer = (
        Bound(AsyncEtcdGuard(prefix=prefix), AsyncEtcdClient(etcd_url)),
        Bound(AsyncEtcdGuard(prefix=prefix), AsyncEtcdClient(etcd_url)),
    )
    key = f"{prefix}/stock".encode()
    async with guard.transaction(stamp(5)) as tx:
        tx.put(key, b"10")
    await newer.announce(stamp(6))

    async def late() -> None:
        with pytest.raises(StaleToken):
            async with guard.transaction(stamp(5)) as tx:
                tx.put(key, b"late")

    await asyncio.gather(*(late() for _ in range(1000)))
    async with newer.transaction(stamp(6)) as tx:
        assert (await tx.get(key)).value == b"10"
    await guard.client.close()
    await newer.client.close()


async def test_eight_holders(etcd_url: str, prefix: str) -> None:
    """With ever newer tokens on one name: each admitted change is there, and the admitted tokens never fall."""
    key, tokens = f"{prefix}/stock".encode(), iter(range(1, 10_000))
    admitted: list[tuple[int, int]] = []

    async def work() -> None:
        guard = Bound(AsyncEtcdGuard(prefix=prefix), AsyncEtcdClient(etcd_url))
        for _ in range(15):
            token = next(tokens)
            try:
                async with guard.transaction(stamp(token)) as tx:
                    found = await tx.get(key)
                    count = int(found.value or b"0") + 1
                    tx.expect(key, found.revision)
                    tx.put(key, b"%d" % count)
            except StaleToken:
                continue
            admitted.append((count, token))
        await guard.client.close()

    await asyncio.gather(*(work() for _ in range(8)))
    admitted.sort()
    assert [count for count, _ in admitted] == list(range(1, len(admitted) + 1))
    assert [token for _, token in admitted] == sorted(token for _, token in admitted)


def test_a_fork(etcd_url: str, prefix: str) -> None:
    is_used_after_a_fork(f"{etcd_url}?prefix={prefix}")


def test_a_rule_that_is_not_installed(etcd_url: str, prefix: str, guard: Bound) -> None:
    guard.announce(stamp(5))
    wrong = Bound(EtcdGuard(prefix=prefix, rule="once"), EtcdClient(etcd_url))
    with pytest.raises(Misconfigured, match=r"rule retry.*says once"), wrong.transaction(stamp(5)):
        raise AssertionError
    wrong.client.close()


async def test_a_transaction_is_entered_once(guard: Bound, etcd_url: str, prefix: str) -> None:
    keys = (f"{prefix}/{number}".encode() for number in itertools.count())
    is_entered_once(lambda: guard.transaction(stamp(5)), lambda tx: tx.put(next(keys), b""))
    suspending = Bound(AsyncEtcdGuard(prefix=prefix), AsyncEtcdClient(etcd_url))
    await is_entered_once_by_tasks(
        lambda: suspending.transaction(stamp(5)), lambda tx: tx.put(next(keys), b"")
    )
    await suspending.client.close()
    with guard.transaction(stamp(5)) as tx:
        there = [tx.get(f"{prefix}/{number}".encode()).value for number in range(4)]
    assert there == [None, b"", None, b""]


@pytest.mark.parametrize(
    ("puts", "error"),
    [
        ([(f"{number}", b"", 0) for number in range(129)], Unsupported),
        ([("large", b"x" * 1_600_000, 0)], Unsupported),
        ([("larger", b"x" * 3_000_000, 0)], Unsupported),
        ([("twice", b"", 0)] * 2, Misuse),
        ([("lease", b"", 12_345)], Conflict),
    ],
    ids=["operations", "bytes", "more bytes", "one key twice", "a lease that does not exist"],
)
def test_a_transaction_beyond_the_limits_is_unsupported(
    guard: Bound, prefix: str, puts: list[tuple[str, bytes, int]], error: type[fenced.FencedError]
) -> None:
    """The limits of a transaction are Unsupported; nothing is written, and the guard goes on."""
    with pytest.raises(error), guard.transaction(stamp(5)) as tx:
        for key, value, lease in puts:
            tx.put(f"{prefix}/{key}".encode(), value, lease)
    with guard.transaction(stamp(5)) as tx:
        assert tx.get(f"{prefix}/{puts[0][0]}".encode()).value is None
        tx.put(f"{prefix}/after".encode(), b"")
