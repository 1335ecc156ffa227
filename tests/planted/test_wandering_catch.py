"""The checks of wandering attempts can fail: what a client of etcd or ZooKeeper must not do is caught."""

from typing import Any

import pytest

from fenced.stores.etcd.authority.carrying import Carrying
from fenced.stores.etcd.authority.looking import QueueReader
from fenced.stores.etcd.authority.renewing import EtcdRenewal
from fenced.stores.zookeeper.authority.authority import ZooKeeperAuthority
from fenced.testing import wandering
from fenced.values import timing
from fenced.values.model import Ended, Gone, Waiting
from fenced_testkit.servers import EtcdServer, ZooKeeperServer
from tests.conformance.authorities import test_etcd, test_zookeeper
from tests.etcd.aging import SCALE
from tests.planted.test_kits_catch import is_caught

CHECKS = {check.name: check for check in wandering.CHECKS}


def answering(value: Any) -> Any:
    async def planted(*_: Any, **__: Any) -> Any:
        return value

    return planted


@pytest.mark.parametrize(
    ("name", "where", "method", "planted"),
    [
        pytest.param(
            "leases_of_one_holder_are_independent",
            Carrying,
            "take_over",
            answering(True),
            id="kept alive for all",
        ),
        pytest.param(
            "a_waiter_is_granted_elsewhere",
            EtcdRenewal,
            "_again",
            answering(Waiting(0.0)),
            id="still in the queue",
        ),
        pytest.param(
            "a_lease_is_renewed_by_turns",
            EtcdRenewal,
            "_again",
            answering(Ended("revoked")),
            id="not looked for",
        ),
        pytest.param(
            "a_lease_is_renewed_by_turns",
            QueueReader,
            "_records",
            answering({}),
            id="the revision of a claim",
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
    ("name", "method", "planted"),
    [
        pytest.param(
            "a_waiter_that_wandered_is_granted_above_every_token",
            "_too_old",
            lambda *_: False,
            id="tokens fall",
        ),
        pytest.param(
            "a_waiter_is_granted_elsewhere",
            "_ours",
            lambda *_: True,
            id="believed to be ours",
        ),
        pytest.param("a_waiter_is_granted_elsewhere", "_adopt", answering(Gone()), id="not taken over"),
    ],
)
def test_a_bug_in_zookeeper_is_caught(
    name: str, method: str, planted: Any, zookeeper_server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ZooKeeperAuthority, method, planted)
    assert is_caught(CHECKS[name], lambda runtime: test_zookeeper.Harness(runtime, zookeeper_server))
