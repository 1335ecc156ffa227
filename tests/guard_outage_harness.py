"""What the bindings of the outage kit for guards share: one server, a proxy, and guards on both ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fenced.client.registry import guard
from fenced.errors import StaleToken
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.testing import COLOURS, Check, Colour, run
from fenced.testing.kit import NAME, by
from fenced.values import timing
from fenced.values.contracts import NamedValues, Runtime
from fenced.values.decision import Rule
from fenced_testkit import GUARD_OUTAGE_CHECKS, GuardOutageHarness
from fenced_testkit.servers.base import Endpoint, Server
from tests.forking import said_by_child
from tests.outage_harness import Opening, ServerAndProxy

every_guard_outage = pytest.mark.parametrize(
    ("check", "colour"),
    [
        pytest.param(check, colour, id=f"{check.name}-{colour}")
        for check in GUARD_OUTAGE_CHECKS
        for colour in COLOURS
    ],
)


class GuardedHarness(ServerAndProxy):
    """A binding says at which address a guard is."""

    word = b"e]\n"
    """How the header of a cell ends: in every request that writes one, and in none that reads."""

    async def guard(self, rule: Rule = "retry") -> NamedValues:
        return await self._open(self._at(self.proxy, self._place + rule, rule))

    async def direct(self, rule: Rule = "retry") -> NamedValues:
        return await self._open(self._at(self.server, self._place + rule, rule))

    def _at(self, where: Endpoint, place: str, rule: Rule) -> NamedValues:
        return guard(self._url(f"{where.host}:{where.port}", place, rule), self.runtime)

    def _url(self, where: str, place: str, rule: Rule) -> str:
        raise NotImplementedError


def run_outage(
    check: Check[GuardOutageHarness], make: Callable[[Runtime], GuardOutageHarness], colour: Colour
) -> None:
    """Run one check. While a server is frozen, and only then, guards wait one second for an answer."""
    freeze, thaw, patience = Server.freeze, Server.thaw, timing.CALL_SECONDS

    def freeze_and_hurry(server: Server) -> None:
        freeze(server)
        patch.setattr(timing, "CALL_SECONDS", 1.0)

    def thaw_and_wait(server: Server) -> None:
        thaw(server)
        patch.setattr(timing, "CALL_SECONDS", patience)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "freeze", freeze_and_hurry)
        patch.setattr(Server, "thaw", thaw_and_wait)
        run(check, make, colour)


class FailoverHarness(Opening):
    """`lose` kills the server that guards at `url` use, a guard's address with the rule `sequenced`."""

    def __init__(self, runtime: Runtime, url: str, lose: Callable[[], object]) -> None:
        super().__init__(runtime)
        self._url = url
        self._lose = lose

    async def guard(self) -> NamedValues:
        return await self._open(guard(self._url, self.runtime))

    async def fail_over(self) -> None:
        await self.runtime.call(self._lose)


def is_used_after_a_fork(url: str) -> None:
    """A child uses the guard that it inherited, on connections of its own, while its parent goes on."""
    opened = guard(url, BlockingRuntime())
    step(opened.open())
    step(opened.write(by(5), NAME, b"parent"))
    assert said_by_child(lambda: step(opened.write(by(6), NAME, b"child"))) == 2
    with pytest.raises(StaleToken):
        step(opened.write(by(5), NAME, b"late"))
    assert step(opened.write(by(6), NAME, b"parent again")) == 3
    step(opened.close())
