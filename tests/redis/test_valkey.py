"""The guard on Valkey, which speaks the protocol of Redis: the kit, every verdict, and the program's own Lua."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import redis

from fenced.testing import GUARD_CHECKS, Check, Colour, GuardHarness, run
from fenced_testkit.servers import ValkeyServer
from tests.colours import alternating
from tests.conformance.guards.test_redis import Harness
from tests.redis import test_guard, test_guard_scripts

pytestmark = pytest.mark.xdist_group("valkey")


@pytest.fixture(scope="module")
def valkey_server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.mark.parametrize(("check", "colour"), alternating(GUARD_CHECKS))
def test_valkey(check: Check[GuardHarness], colour: Colour, valkey_server: ValkeyServer) -> None:
    run(check, lambda runtime: Harness(runtime, valkey_server), colour)


def test_valkey_passes_the_tests_of_the_redis_guard(valkey_server: ValkeyServer) -> None:
    url, tag = valkey_server.url(), secrets.token_hex(8)
    with redis.Redis.from_url(url) as client:
        assert client.info("server")["server_name"] == "valkey"
        test_guard.test_any_commands_and_reads_in_one_step(url, tag, 3)
        test_guard.test_every_verdict_is_that_of_the_vectors(client, tag + "1")
        test_guard.test_a_stale_holder_changes_nothing(client, tag + "2")
        test_guard_scripts.test_own_scripts(client, tag + "3")
        test_guard_scripts.test_own_functions(client, url, tag + "4")


def test_a_library_by_the_other_name(valkey_server: ValkeyServer) -> None:
    """Valkey calls its interface `server`, too: what is registered by it has the check as well."""
    stock = test_guard_scripts.STOCK.replace("redis.", "server.")
    with redis.Redis.from_url(valkey_server.url()) as client:
        test_guard_scripts.runs_behind_the_check(client, valkey_server.url(), secrets.token_hex(8), stock)
