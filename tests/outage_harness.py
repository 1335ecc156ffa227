"""What the bindings of the outage kit share: one server, a proxy in front of it, and authorities on both ways."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from fenced.contracts import Authority, Runtime
from fenced.registry import authority
from fenced.testing.faults import Proxy
from fenced.testing.servers.base import Server


class ProxiedHarness:
    """`words` are what tells an ask, a renewal and a release on the wire."""

    def __init__(
        self,
        runtime: Runtime,
        server: Server,
        address: Callable[[str, int], str],
        words: Mapping[str, bytes],
        proxy: Proxy | None = None,
    ) -> None:
        self.runtime = runtime
        self.server = server
        self.proxy = proxy or Proxy(server.host, server.port)
        self.words = dict(words)
        self._address = address
        self._namespace = secrets.token_hex(8)
        self._opened: list[Authority] = []

    async def authority(self) -> Authority:
        return await self._open(self.proxy.host, self.proxy.port)

    async def direct(self) -> Authority:
        return await self._open(self.server.host, self.server.port)

    async def _open(self, host: str, port: int) -> Authority:
        opened = authority(self._address(host, port), self.runtime, self._namespace)
        self._opened.append(opened)
        await opened.open()
        return opened

    async def close(self) -> None:
        for opened in self._opened:
            await opened.close()
        self.proxy.stop()
