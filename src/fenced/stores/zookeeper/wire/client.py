"""A client without leases: requests to any member, on one connection that all callers share.

It has no ephemeral nodes, so its session means nothing: each new connection begins another one, and nobody renews it.
"""

from __future__ import annotations

from fenced.errors import Indeterminate, Unavailable
from fenced.net.pool import ConnectionBroken
from fenced.runtime import forking
from fenced.stores.zookeeper.address import ZooKeeperAddress
from fenced.stores.zookeeper.wire import jute
from fenced.stores.zookeeper.wire.connection import Hub, OneConnects, ZooKeeperWire, any_member, dial
from fenced.stores.zookeeper.wire.sides import Sides
from fenced.values import timing
from fenced.values.contracts import Runtime

SESSION_SECONDS = 40.0
"""What is asked for; an idle connection is closed by the server after that, or earlier by its settings."""
_inherited: list[object] = []
"""The parent's connections in a forked child. Kept referenced, so that no finalizer touches the shared sockets."""
_NEW = jute.Connected(int(SESSION_SECONDS * 1000), 0, b"\0" * 16)


class ZooKeeperClient:
    """Reads and writes. Unavailable: nothing happened. Indeterminate: a write may have happened."""

    def __init__(self, address: ZooKeeperAddress, runtime: Runtime) -> None:
        self.url = address.url
        self._address = address
        self._runtime = Sides(runtime)
        self._begin()
        forking.register(self)

    def _begin(self) -> None:
        self._hub = Hub(self._runtime)
        self._wire: ZooKeeperWire | None = None
        self._connecting = OneConnects(self._runtime, self.url)

    def _before_fork(self) -> None:
        return

    def _forked(self) -> None:
        _inherited.append((self._hub, self._wire))
        self._begin()

    async def read(self, path: str, *requests: bytes) -> list[jute.Reply]:
        """The replies. The member first catches up with the leader, so older states are not read.

        Repeated once, on another connection, if the first one breaks.
        """
        until = self._runtime.now() + timing.CALL_SECONDS
        try:
            return (await self._exchange((jute.sync(path), *requests), until))[1:]
        except ConnectionBroken:
            try:
                return (await self._exchange((jute.sync(path), *requests), until))[1:]
            except ConnectionBroken as error:
                raise Unavailable(f"{self.url}: {error}") from error

    async def write(self, request: bytes) -> jute.Reply:
        """The reply. It is never repeated: after its own success it would fail."""
        try:
            return (await self._exchange((request,), self._runtime.now() + timing.CALL_SECONDS))[0]
        except ConnectionBroken as error:
            raise Indeterminate(f"{self.url}: {error}") from error

    async def _exchange(self, requests: tuple[bytes, ...], until: float) -> list[jute.Reply]:
        """SESSION_EXPIRED: the server did nothing, because it had forgotten the connection's session: try a new one."""
        while True:
            wire = await self._connected(until)
            replies = await wire.exchange(requests, until)
            self._hub.seen = max(self._hub.seen, wire.zxid)
            if all(reply.error != jute.SESSION_EXPIRED for reply in replies):
                return replies
            wire.close("the session has ended")

    async def _connected(self, until: float) -> ZooKeeperWire:
        while True:
            wire = await self._connecting.wire(self._usable, self._connect, until)
            wire.receive()  # an idle connection may have been closed by the server: then nothing is sent on it
            if not wire.closed:
                return wire

    def _usable(self) -> ZooKeeperWire | None:
        return self._wire if self._wire is not None and not self._wire.closed else None

    async def _connect(self, until: float) -> ZooKeeperWire:
        self._wire = wire = await any_member(self._address, self._runtime, until, self._join)
        return wire

    async def _join(self, member: tuple[str, int], until: float) -> ZooKeeperWire:
        link, session = await dial(self._address, member, self._runtime, _NEW, self._hub.seen, until)
        where = f"{member[0]}:{member[1]}"
        if session.timeout <= 0:
            link.close()
            raise Unavailable(f"{where}: the server gave no session")
        return ZooKeeperWire(link, self._hub, self._runtime, where, lambda event: None)

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None and not wire.closed:
            wire.farewell()
        self._hub.close()
