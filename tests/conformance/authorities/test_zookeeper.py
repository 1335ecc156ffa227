"""The ZooKeeper authority passes the kit, on a single server and on an ensemble of three."""

import secrets
from collections.abc import Iterator

import pytest

from fenced.client.registry import BUILT_IN
from fenced.stores.zookeeper.address import ZooKeeperAddress
from fenced.stores.zookeeper.authority.authority import ZooKeeperAuthority
from fenced.testing import AUTHORITY_CHECKS, COLOURS, AuthorityHarness, Check, Colour, run
from fenced.values.contracts import Authority, Runtime
from fenced_testkit.servers import ZooKeeperEnsemble, ZooKeeperServer
from tests.colours import alternating
from tests.shifted import Shifted
from tests.zookeeper.shifting import Mortal, pass_time

BACKEND = "zookeeper"
TLS_BACKEND = "zookeepers"


class Harness:
    """A random prefix of its own stands before the kit's namespaces."""

    def __init__(self, runtime: Runtime, server: ZooKeeperServer | ZooKeeperEnsemble) -> None:
        self.runtime = Shifted(runtime)
        self._server = server
        self._prefix = secrets.token_hex(8)
        self._opened: list[ZooKeeperAuthority] = []

    async def authority(self, namespace: str = "default") -> Authority:
        authority = Mortal.at(self._server.url(), self.runtime, f"{self._prefix}/{namespace}")
        self._opened.append(authority)
        await authority.open()
        return authority

    async def pass_time(self, seconds: float) -> None:
        pass_time(seconds, self.runtime, self._opened, self._server.url())

    async def restart(self) -> None:
        await self.close()
        self._server.restart()

    async def close(self) -> None:
        while self._opened:
            await self._opened.pop().close()


# proves authority zookeeper: per-name-order
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", AUTHORITY_CHECKS, ids=lambda check: check.name)
def test_zookeeper(
    check: Check[AuthorityHarness],
    colour: Colour,
    zookeeper_server: ZooKeeperServer,
) -> None:
    run(check, lambda runtime: Harness(runtime, zookeeper_server), colour)


@pytest.fixture(scope="module")
def ensemble() -> Iterator[ZooKeeperEnsemble]:
    """A leader gives a follower up after 30 s of silence: the kit freezes nobody, but the machine may be busy."""
    with ZooKeeperEnsemble(settings={"syncLimit": "300"}, cuttable=False) as ensemble:
        yield ensemble


@pytest.mark.xdist_group("zookeeper-ensemble")
@pytest.mark.parametrize(("check", "colour"), alternating(AUTHORITY_CHECKS))
def test_zookeeper_ensemble(
    check: Check[AuthorityHarness], colour: Colour, ensemble: ZooKeeperEnsemble
) -> None:
    run(check, lambda runtime: Harness(runtime, ensemble), colour)


def test_zookeepers_is_the_same_authority_over_tls() -> None:
    """That a lease is granted over TLS: tests/zookeeper/test_authority.py."""
    table = BUILT_IN["fenced.authorities"]
    assert table[TLS_BACKEND] == table[BACKEND]
    plain, tls = ZooKeeperAddress("zookeeper://host"), ZooKeeperAddress("zookeepers://host")
    assert plain.context is None
    assert tls.context is not None and tls.context.check_hostname
