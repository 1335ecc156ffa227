"""The etcd authority passes the kit, on one member and on three, with and without TLS and users."""

import secrets
from collections.abc import Iterator
from typing import cast

import pytest

from fenced.client.registry import BUILT_IN
from fenced.stores.etcd.authority.authority import EtcdAuthority
from fenced.testing import AUTHORITY_CHECKS, COLOURS, AuthorityHarness, Check, Colour, run
from fenced.values import timing
from fenced.values.contracts import Authority, Runtime
from fenced_testkit.servers import EtcdCluster, EtcdServer
from tests.colours import CHANNEL_CHECKS, alternating
from tests.etcd.aging import SCALE, Scaled, Time
from tests.shifted import Shifted

BACKEND = "etcd"
TLS_BACKEND = "etcds"


class Harness:
    """A random prefix of its own stands before the kit's namespaces."""

    def __init__(self, runtime: Runtime, server: EtcdServer | EtcdCluster) -> None:
        self.runtime = Shifted(runtime)
        self._server = server
        self._prefix = secrets.token_hex(8)
        self._time = Time(server.url(), self.runtime)
        self._opened: list[EtcdAuthority] = []

    async def authority(self, namespace: str = "default") -> Authority:
        authority = EtcdAuthority.at(self._server.url(), self.runtime, f"{self._prefix}/{namespace}")
        self._opened.append(self._time.bind(authority, self.runtime))
        await authority.open()
        scaled: Authority = cast(Authority, Scaled(authority))
        return scaled

    async def pass_time(self, seconds: float) -> None:
        self._time.pass_by(seconds * SCALE)

    async def restart(self) -> None:
        await self._close()
        if isinstance(self._server, EtcdCluster):
            for member in self._server.members:
                member.kill()
            self._server.start()
        else:
            self._server.restart()

    async def _close(self) -> None:
        while self._opened:
            await self._opened.pop().close()

    async def close(self) -> None:
        await self._close()
        self._time.pass_by(1e9)  # nothing ends by itself while another check looks at revisions


@pytest.fixture(autouse=True)
def longer_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What bounds a waiter's silence counts the kit's seconds too."""
    monkeypatch.setattr(timing, "WAITER_TTL_MAX", timing.WAITER_TTL_MAX * SCALE)


@pytest.fixture(scope="module")
def tls_server() -> Iterator[EtcdServer]:
    with EtcdServer(tls=True, password="a password with / and @") as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[EtcdCluster]:
    """Its leader may be silent for seconds, since the machine may be busy. etcd makes every lease 1.5 times as long."""
    patient = {"heartbeat-interval": "100", "election-timeout": "2500"}
    with EtcdCluster(patient, cuttable=False) as cluster:
        yield cluster


# proves authority etcd: namespace-order
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", AUTHORITY_CHECKS, ids=lambda check: check.name)
def test_etcd(check: Check[AuthorityHarness], colour: Colour, etcd_server: EtcdServer) -> None:
    run(check, lambda runtime: Harness(runtime, etcd_server), colour)


@pytest.mark.xdist_group("etcd-cluster")
@pytest.mark.parametrize(("check", "colour"), alternating(AUTHORITY_CHECKS))
def test_etcd_cluster(check: Check[AuthorityHarness], colour: Colour, cluster: EtcdCluster) -> None:
    run(check, lambda runtime: Harness(runtime, cluster), colour)


@pytest.mark.xdist_group("etcd-cluster")  # one worker starts this server, too
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.name)
def test_etcds(check: Check[AuthorityHarness], colour: Colour, tls_server: EtcdServer) -> None:
    run(check, lambda runtime: Harness(runtime, tls_server), colour)


def test_etcds_is_the_same_authority_over_tls() -> None:
    """What is shown of the one is shown of the other: they differ in the channel only."""
    table = BUILT_IN["fenced.authorities"]
    assert table[TLS_BACKEND] == table[BACKEND]
