"""The outage kit for guards, on MariaDB."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fenced.stores.mariadb.guard.values import MariadbValues
from fenced.testing import COLOURS, Check, Colour
from fenced.values.contracts import NamedValues, Runtime
from fenced.values.decision import Rule
from fenced_testkit import GUARD_OUTAGE_CHECKS, GuardOutageHarness
from fenced_testkit.servers import MariadbServer, mariadb_or_mysql
from fenced_testkit.servers.base import Endpoint
from tests.guard_outage_harness import GuardedHarness, every_guard_outage, is_used_after_a_fork, run_outage

pytestmark = pytest.mark.xdist_group("mariadb")


@pytest.fixture(scope="module")
def server() -> Iterator[MariadbServer]:
    """One of this module's own, which it breaks."""
    with mariadb_or_mysql() as started:
        yield started


class Harness(GuardedHarness):
    word = b"CALL fenced_guard."

    def __init__(self, runtime: Runtime, server: MariadbServer) -> None:
        super().__init__(runtime, server)
        self._own = server
        self._made: set[str] = set()

    def _at(self, where: Endpoint, place: str, rule: Rule) -> NamedValues:
        if place not in self._made:
            self._own.create_database(place)
            self._made.add(place)
        return MariadbValues(f"mariadb://root@{where.host}:{where.port}/{place}", self.runtime, rule=rule)


class CommitHarness(Harness):
    """The fault hits the statement that commits."""

    word = b"CALL fenced_guard.leave"


@every_guard_outage
def test_outages(check: Check[GuardOutageHarness], colour: Colour, server: MariadbServer) -> None:
    run_outage(check, lambda runtime: Harness(runtime, server), colour)


@pytest.mark.parametrize("colour", COLOURS)
def test_a_commit_whose_reply_is_lost(colour: Colour, server: MariadbServer) -> None:
    (check,) = (each for each in GUARD_OUTAGE_CHECKS if each.name.startswith("a_lost_reply_is_settled"))
    run_outage(check, lambda runtime: CommitHarness(runtime, server), colour)


def test_a_fork(server: MariadbServer) -> None:
    is_used_after_a_fork(server.url(server.create_database()))
