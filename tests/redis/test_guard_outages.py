"""The outage kit for guards, on Redis."""

from __future__ import annotations

import secrets

import pytest

from fenced.stores.redis.guard.scripts import COMMANDS
from fenced.testing import Check, Colour
from fenced.values.decision import Rule
from fenced_testkit import GuardOutageHarness
from fenced_testkit.servers import RedisServer
from tests.guard_outage_harness import GuardedHarness, every_guard_outage, is_used_after_a_fork, run_outage
from tests.outage_harness import own_server

pytestmark = pytest.mark.xdist_group("redis")
server = own_server(RedisServer)


class Harness(GuardedHarness):
    word = COMMANDS.sha.encode()

    def _url(self, where: str, place: str, rule: Rule) -> str:
        return f"redis://{where}?tag={place}&rule={rule}"


@every_guard_outage
def test_outages(check: Check[GuardOutageHarness], colour: Colour, server: RedisServer) -> None:
    run_outage(check, lambda runtime: Harness(runtime, server), colour)


def test_forks(server: RedisServer) -> None:
    is_used_after_a_fork(f"{server.url()}?tag={secrets.token_hex(8)}")
