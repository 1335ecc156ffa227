"""The outage kit on MariaDB."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from fenced.drills.relay import Proxy
from fenced.errors import FencedError, Indeterminate, Unavailable
from fenced.net.pool import Pool
from fenced.testing import Check, CheckFailed, run
from fenced.values.contracts import Colour, Runtime
from fenced_testkit import OUTAGE_CHECKS, OutageHarness
from fenced_testkit.servers import MariadbServer, mariadb_or_mysql
from tests.outage_harness import ProxiedHarness, every_outage

pytestmark = pytest.mark.xdist_group("mariadb")


@pytest.fixture(scope="module")
def server() -> Iterator[MariadbServer]:
    with mariadb_or_mysql() as server:
        yield server


# Of the request that commits: what comes before it changes nothing.
WORDS = {
    "ask": b"held = TRUE",
    "renew": b"SET state = 'granted', expires",
    "release": b"'released'",
    "withdraw": b"'withdrawn'",
}


MORE_RESULTS = 8


def is_whole_reply(chunk: bytes) -> bool:
    """Whether a chunk ends with the end of the last statement's result, or with a refusal."""
    at, last = 0, b""
    while at + 4 < len(chunk):
        end = at + 4 + int.from_bytes(chunk[at : at + 3], "little")
        at, last = end, chunk[at + 4 : end]
    if at != len(chunk):
        return False
    if len(last) == 5 and last[0] == 0xFE:  # the end of rows
        return not last[3] & MORE_RESULTS
    if (
        len(last) >= 7 and last[0] == 0
    ):  # one row or none was changed, or numbered; the numbers have various lengths
        changed = last[1 + 1 :]
        numbered = changed[1 + {0xFC: 2, 0xFD: 3, 0xFE: 8}.get(changed[0], 0) :]
        return not numbered[0] & MORE_RESULTS
    return last[:1] == b"\xff"


def harness(runtime: Runtime, server: MariadbServer) -> ProxiedHarness:
    proxy = Proxy(server.host, server.port, is_whole_reply)
    return ProxiedHarness(
        runtime, server, lambda host, port: f"mariadb://root@{host}:{port}/mysql", WORDS, proxy
    )


class NothingIsRepeated(Pool[Any]):
    """A connection that broke while it was idle fails its next request."""

    async def request(self, work: Any, until: float, *, repeatable: bool = True) -> Any:
        return await super().request(work, until, repeatable=False)


class UnknownIsNo(Pool[Any]):
    """A request without a reply is told as one that did not happen."""

    async def request(self, work: Any, until: float, *, repeatable: bool = True) -> Any:
        try:
            return await super().request(work, until, repeatable=repeatable)
        except Indeterminate as error:
            raise Unavailable(str(error)) from error


class ConnectionsAreKept(Pool[Any]):
    """Who gives up waiting puts the connection back, with a reply still under way."""

    def drop(self, connection: Any) -> None:
        self.give(connection)

    def close_idle(self) -> None:
        return


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of connections that a planted bug forgets
@pytest.mark.parametrize("planted", [NothingIsRepeated, UnknownIsNo, ConnectionsAreKept])
def test_the_kit_can_fail(
    planted: type[Pool[Any]], server: MariadbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fenced.stores.mariadb.authority.authority.Pool", planted)
    quick = [
        check for check in OUTAGE_CHECKS if check.name.startswith(("a_cut", "an_unknown", "a_late_reply"))
    ]
    with pytest.raises((CheckFailed, FencedError, TimeoutError)):
        for check in quick:
            run(check, lambda runtime: harness(runtime, server), "blocking")
    gc.collect()


@every_outage
def test_outages(check: Check[OutageHarness], colour: Colour, server: MariadbServer) -> None:
    run(check, lambda runtime: harness(runtime, server), colour)
