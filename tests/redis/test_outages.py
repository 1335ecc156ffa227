"""The outage kit on Redis."""

import pytest

from fenced.stores.redis.authority.scripts import RedisScript
from fenced.testing import Check, run
from fenced.values.contracts import Colour, Runtime
from fenced_testkit import OutageHarness
from fenced_testkit.servers import RedisServer
from tests.outage_harness import (
    ProxiedHarness,
    a_stream_that_died_silently_is_opened_again,
    every_outage,
    own_server,
)
from tests.shifted import Shifted

pytestmark = pytest.mark.xdist_group("redis")
server = own_server(RedisServer)


class Harness(ProxiedHarness):
    def __init__(self, runtime: Runtime, server: RedisServer) -> None:
        words = {name: RedisScript(name, "any").sha.encode() for name in ("ask", "renew", "release")}
        words["withdraw"] = words["release"]  # one script for both
        super().__init__(runtime, server, "redis://{}:{}/0".format, words)


@every_outage
def test_outages(check: Check[OutageHarness], colour: Colour, server: RedisServer) -> None:
    run(check, lambda runtime: Harness(runtime, server), colour)


async def test_a_stream_that_died_silently_is_opened_again(runtime: Runtime, server: RedisServer) -> None:
    shifted = Shifted(runtime)
    await a_stream_that_died_silently_is_opened_again(Harness(shifted, server), shifted)
