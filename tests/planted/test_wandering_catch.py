"""The checks of wandering attempts can fail: what a client of etcd or ZooKeeper must not do is caught."""

from typing import Any

import pytest

from fenced.stores.etcd.authority.leases import HoldLeases, LeasePool
from fenced.stores.etcd.authority.renewing import Renewing
from fenced.stores.zookeeper.authority.attempts import OwnAttempts
from fenced.stores.zookeeper.authority.granting import TakeOver
from fenced.stores.zookeeper.authority.tree import QueueLook
from fenced.testing import wandering
from fenced.values import timing
from fenced.values.model import Gone, Waiting
from fenced_testkit.servers import EtcdServer, ZooKeeperServer
from tests.conformance.authorities import test_etcd, test_zookeeper
from tests.etcd.aging import SCALE
from tests.planted.test_kits_catch import is_caught

CHECKS = {check.name: check for check in wandering.CHECKS}


def answering(value: Any) -> Any:
    async def planted(*_: Any, **__: Any) -> Any:
        return value

    return planted


take = LeasePool.take


async def shared(pool: LeasePool, ttl: float, until: float, delay: float = 0.0) -> HoldLeases:
    leases = await take(pool, ttl, until, delay)
    pool.give(leases)
    return leases


@pytest.mark.parametrize(
    ("name", "where", "method", "planted"),
    [
        pytest.param(
            "leases_of_one_holder_are_independent",
            LeasePool,
            "take",
            shared,
            id="one etcd lease for all",
        ),
        pytest.param(
            "a_waiter_is_granted_elsewhere",
            Renewing,
            "_queued",
            answering(Waiting(0.0)),
            id="still in the queue",
        ),
        pytest.param(
            "a_lease_is_renewed_by_turns",
            Renewing,
            "_held",
            answering(None),
            id="its claims are not looked for",
        ),
    ],
)
def test_a_bug_in_etcd_is_caught(
    name: str,
    where: type,
    method: str,
    planted: Any,
    etcd_server: EtcdServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "WAITER_TTL_MAX", timing.WAITER_TTL_MAX * SCALE)
    monkeypatch.setattr(where, method, planted)
    assert is_caught(CHECKS[name], lambda runtime: test_etcd.Harness(runtime, etcd_server))


@pytest.mark.parametrize(
    ("name", "where", "method", "planted"),
    [
        pytest.param(
            "a_waiter_that_wandered_is_granted_above_every_token",
            QueueLook,
            "too_old",
            lambda *_: False,
            id="tokens fall",
        ),
        pytest.param(
            "a_waiter_is_granted_elsewhere",
            OwnAttempts,
            "carries",
            lambda *_: True,
            id="believed to be ours",
        ),
        pytest.param(
            "a_waiter_is_granted_elsewhere", TakeOver, "renew", answering(Gone()), id="not taken over"
        ),
    ],
)
def test_a_bug_in_zookeeper_is_caught(
    name: str,
    where: type,
    method: str,
    planted: Any,
    zookeeper_server: ZooKeeperServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(where, method, planted)
    assert is_caught(CHECKS[name], lambda runtime: test_zookeeper.Harness(runtime, zookeeper_server))
