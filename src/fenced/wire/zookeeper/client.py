"""A client without leases: requests to any member, on one connection that all callers share.

It has no ephemeral nodes, so its session means nothing: each new connection begins another one, and nobody renews it.
"""

from __future__ import annotations

from fenced import timing
from fenced.contracts import Runtime, Wakeup
from fenced.errors import FencedError, Indeterminate, Misconfigured, Unavailable
from fenced.runtime import forking
from fenced.wire import jute
from fenced.wire.pool import ConnectionBroken
from fenced.wire.zookeeper.address import ZooKeeperAddress
from fenced.wire.zookeeper.connection import Hub, ZooKeeperWire, dial

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
        self._runtime = runtime
        self._begin()
        forking.register(self)

    def _begin(self) -> None:
        self._hub = Hub(self._runtime)
        self._wire: ZooKeeperWire | None = None
        self._lock = self._runtime.lock()
        self._connecting = False
        self._waiting: list[Wakeup] = []

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
        """The connection. The first caller that finds none connects, and the others wait for it."""
        while True:
            with self._lock:
                # Decided and recorded under one lock: either we connect, or the caller that connects finds our
                # wake-up in `_waiting` when it is done.
                if (wire := self._wire) is None or wire.closed:
                    wire = None
                    turn = self._runtime.wakeup() if self._connecting else None
                    if turn is not None:
                        self._waiting.append(turn)
                    self._connecting = True
            if wire is not None:
                wire.receive()  # an idle connection may have been closed by the server: then nothing is sent on it
                if not wire.closed:
                    return wire
                continue
            if turn is not None:
                if not await self._runtime.wait(turn, until):
                    raise Unavailable(f"{self.url}: no connection in time")
                continue
            try:
                self._wire = await self._connect(until)
            finally:
                with self._lock:
                    self._connecting = False
                    waiting, self._waiting = self._waiting, []
                for turn in waiting:
                    turn.set()

    async def _connect(self, until: float) -> ZooKeeperWire:
        """Connect to one of the members, tried in a new random order; each gets a share of the time."""
        members = sorted(self._address.members, key=lambda _: self._runtime.random())
        failures: list[FencedError] = []
        while members:
            member = members.pop()
            share = (until - self._runtime.now()) / (len(members) + 1)
            try:
                link, session = await dial(
                    self._address, member, self._runtime, _NEW, self._hub.seen, self._runtime.now() + share
                )
            except (Unavailable, Misconfigured) as error:
                failures.append(error)
                continue
            if session.timeout > 0:
                where = f"{member[0]}:{member[1]}"
                return ZooKeeperWire(link, self._hub, self._runtime, where, lambda event: None)
            link.close()
            failures.append(Unavailable(f"{member[0]}:{member[1]}: the server gave no session"))
        wrong = next((error for error in failures if isinstance(error, Misconfigured)), None)
        raise wrong or Unavailable(f"{self.url}: {'; '.join(map(str, failures))}")

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None and not wire.closed:
            wire.farewell()
        self._hub.close()
