"""The outage kit on PostgreSQL."""

import gc
from typing import Any

import pytest

from fenced.drills.relay import Fault, Proxy
from fenced.errors import FencedError, Indeterminate, Unavailable
from fenced.net.pool import Pool
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.postgresql.authority.authority import PostgresqlAuthority
from fenced.testing import Check, CheckFailed, run
from fenced.testing.kit import asking, granted
from fenced.values.contracts import Colour, Runtime
from fenced_testkit import OUTAGE_CHECKS, OutageHarness, outages
from fenced_testkit.servers import PostgresqlServer
from tests.outage_harness import ProxiedHarness, every_outage, own_server

pytestmark = pytest.mark.xdist_group("postgresql")
server = own_server(PostgresqlServer)


# One database for all checks, and a namespace for each: a server that is killed recovers the quicker the less it has.
WORDS = {"ask": b"fenced_ask", "renew": b"fenced_renew", "release": b"fenced_release"}


def harness(runtime: Runtime, server: PostgresqlServer) -> ProxiedHarness:
    return ProxiedHarness(
        runtime, server, lambda host, port: f"postgresql://postgres@{host}:{port}/postgres", WORDS
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


@pytest.mark.parametrize("planted", [NothingIsRepeated, UnknownIsNo, ConnectionsAreKept])
def test_the_kit_can_fail(
    planted: type[Pool[Any]], server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fenced.stores.postgresql.authority.authority.Pool", planted)
    quick = [
        check for check in OUTAGE_CHECKS if check.name.startswith(("a_cut", "an_unknown", "a_late_reply"))
    ]
    with pytest.raises((CheckFailed, FencedError, TimeoutError)):
        for check in quick:
            run(check, lambda runtime: harness(runtime, server), "blocking")


@every_outage
def test_outages(check: Check[OutageHarness], colour: Colour, server: PostgresqlServer) -> None:
    run(check, lambda runtime: harness(runtime, server), colour)


def test_an_installation_whose_reply_is_lost_is_found(server: PostgresqlServer) -> None:
    """The repeated installation meets the first: "another session has upgraded ..." is no doubt about a lease."""
    database = server.create_database()
    runtime = BlockingRuntime()
    ready = b"Z\0\0\0\x05I"  # the server's last message to a script: notices come before
    with Proxy(server.host, server.port, lambda chunk: ready in chunk) as proxy:
        url = f"postgresql://postgres@{proxy.host}:{proxy.port}/{database}"
        lost = proxy.on(b"UPDATE fenced.schema SET version", Fault.LOSE_REPLY)
        authority = PostgresqlAuthority(url, runtime)
        step(authority.open())
        assert lost.fired == 1
        step(granted(authority, asking(runtime, "orders")))
        step(authority.close())
    server.discard_database(database)


def test_a_forgotten_listener_is_caught(server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropped client goes on listening."""
    abandon = PostgresqlAuthority.abandon

    def forgetful(authority: PostgresqlAuthority) -> None:
        listeners, authority._listeners, listener = authority._listeners, set(), authority._listener
        abandon(authority)
        authority._listeners, authority._listener = listeners, listener

    monkeypatch.setattr(outages, "SOON", 2.0)
    monkeypatch.setattr(PostgresqlAuthority, "abandon", forgetful)
    (check,) = (each for each in OUTAGE_CHECKS if each.name.startswith("abandoning"))
    with pytest.raises(CheckFailed, match="no connection is left"):
        run(check, lambda runtime: harness(runtime, server), "blocking")
    gc.collect()  # which closes it after all
