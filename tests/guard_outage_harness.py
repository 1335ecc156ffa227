"""What the bindings of the outage kit for guards over cells share: one server, a proxy, and guards on both ways."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from fenced.contracts import NamedValues, Runtime
from fenced.decision import Rule
from fenced.registry import guard
from fenced.testing.faults import Proxy
from fenced.testing.servers import Server


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
