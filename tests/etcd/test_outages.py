"""The outage kit on etcd."""

import pytest

from fenced.drills.relay import Proxy, http2_reply
from fenced.testing import Check, run
from fenced.values.contracts import Colour, Runtime
from fenced_testkit import OutageHarness
from fenced_testkit.servers import EtcdServer
from tests.outage_harness import (
    ProxiedHarness,
    a_stream_that_died_silently_is_opened_again,
    every_outage,
    own_server,
)
from tests.shifted import Shifted

pytestmark = pytest.mark.xdist_group("etcd")
server = own_server(EtcdServer)

KEEP_ALIVE = b"\0\0\0\0\x0a\x08"
"""A message of gRPC's with ten bytes, of which a number takes nine: a lease of ours and nothing else."""


WORDS = {
    "ask": b'"state":"granted"',
    "renew": KEEP_ALIVE,
    "release": b'"state":"released"',
    "withdraw": b'"state":"withdrawn"',
}


class Harness(ProxiedHarness):
    def __init__(self, runtime: Runtime, server: EtcdServer) -> None:
        proxy = Proxy(server.host, server.port, http2_reply)
        super().__init__(runtime, server, "etcd://{}:{}".format, WORDS, proxy)


@every_outage
def test_outages(check: Check[OutageHarness], colour: Colour, server: EtcdServer) -> None:
    run(check, lambda runtime: Harness(runtime, server), colour)


async def test_a_stream_that_died_silently_is_opened_again(runtime: Runtime, server: EtcdServer) -> None:
    shifted = Shifted(runtime)
    await a_stream_that_died_silently_is_opened_again(Harness(shifted, server), shifted)
