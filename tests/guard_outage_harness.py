"""What the bindings of the outage kit for guards share: one server, a proxy, and guards on both ways."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from fenced.contracts import NamedValues, Runtime
from fenced.decision import Rule
from fenced.errors import AlreadyApplied, Indeterminate, StaleToken, Unavailable
from fenced.registry import guard
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.testing.faults import Proxy
from fenced.testing.kit import NAME, by
from fenced.testing.servers import Server

T = TypeVar("T")


class CellOutageHarness:
    """`address`: of a guard, for a host, a port, a random word and a rule."""

    word = b"e]\n"
    """How the header of a cell ends: in every request that writes one, and in none that reads."""

    def __init__(
        self, runtime: Runtime, server: Server, proxy: Proxy, address: Callable[[str, int, str, Rule], str]
    ) -> None:
        self.runtime = runtime
        self.server = server
        self.proxy = proxy
        self._address = address
        self._place = secrets.token_hex(8)
        self._opened: list[NamedValues] = []

    async def guard(self, rule: Rule = "retry") -> NamedValues:
        return await self._open(self.proxy.host, self.proxy.port, rule)

    async def direct(self, rule: Rule = "retry") -> NamedValues:
        return await self._open(self.server.host, self.server.port, rule)

    async def _open(self, host: str, port: int, rule: Rule) -> NamedValues:
        opened = guard(self._address(host, port, self._place + rule, rule), self.runtime)
        self._opened.append(opened)
        await opened.open()
        return opened

    async def close(self) -> None:
        for opened in self._opened:
            await opened.close()
        self.proxy.stop()


def loses_its_leader(url: str, leader: Server) -> None:
    """The leader is killed under a writer: what was acknowledged happened once, and a stale holder stays refused."""
    runtime = BlockingRuntime()
    one, other = guard(url, runtime), guard(url, runtime)
    step(one.open())
    step(other.open())
    version = step(one.write(by(5, 1), NAME, b"first"))
    leader.kill()
    with contextlib.suppress(AlreadyApplied):
        _patient(lambda: one.write(by(5, 2), NAME, b"second"))
    _patient(lambda: other.announce(by(6, 0)))
    with pytest.raises(StaleToken):
        _patient(lambda: one.write(by(5, 3), NAME, b"late"))
    found = _patient(lambda: other.read(by(6, 0), NAME))
    assert (found.value, found.version) == (b"second", version + 1)
    for opened in (one, other):
        step(opened.close())


def _patient(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Repeat the same operation until its outcome is known, as a program does under rule `sequenced`."""
    limit = time.monotonic() + 30
    while True:
        try:
            return step(work())
        except (Unavailable, Indeterminate):
            assert time.monotonic() < limit
            time.sleep(0.02)


def is_used_after_a_fork(url: str) -> None:
    """A child uses the guard that it inherited, on connections of its own, while its parent goes on."""
    opened = guard(url, BlockingRuntime())
    step(opened.open())
    step(opened.write(by(5), NAME, b"parent"))
    child = os.fork()
    if child == 0:
        try:
            done = step(opened.write(by(6), NAME, b"child")) == 2
        finally:
            os._exit(0 if done else 1)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(StaleToken):
        step(opened.write(by(5), NAME, b"late"))
    assert step(opened.write(by(6), NAME, b"parent again")) == 3
    step(opened.close())
