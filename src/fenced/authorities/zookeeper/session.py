"""One ZooKeeper session after another, for all attempts of one ttl: the server deletes its nodes when it ends.

How long a holder may believe that it holds. The server counts a session's time from the last sign of life that reached
the *leader*. A follower receives a client's requests at once, but reports signs of life to the leader only twice a
tick. A session lasts at least two ticks, so the leader may count from up to a quarter of the session's time earlier.
Therefore a session is requested a third longer than the lease, and only requests that the leader itself answers count
as signs of life. A session that was silent for more than that quarter is confirmed by a new connection: the member
asks the leader before it accepts one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain
from typing import ClassVar, TypeVar

from fenced import timing
from fenced.authorities.zookeeper.tree import NamespaceView, ZooKeeperAttempt
from fenced.contracts import Runtime
from fenced.errors import FencedError, Indeterminate, Unavailable
from fenced.wire import jute
from fenced.wire.pool import ConnectionBroken
from fenced.wire.zookeeper.address import ZooKeeperAddress
from fenced.wire.zookeeper.connection import Hub, OneConnects, ZooKeeperWire, any_member, dial

T = TypeVar("T")

LEASE_SHARE = 0.75
"""The part of a session's time that its leases get."""
SILENCE_SHARE = 0.2575
"""After this part of its time without a sign of life, a session is confirmed by a new connection. This, the lease's
part and the holder's margin for clock drift (1 %) make up the whole session."""

_NOBODY = b"\0" * 16


class Over(Exception):
    """The session that the work was for has ended, and the server deletes all nodes that it had created."""


class ZooKeeperSession:
    """The session that now serves leases of one ttl, and the attempts that it carries."""

    wire_type: ClassVar[type[ZooKeeperWire]] = ZooKeeperWire

    def __init__(
        self,
        address: ZooKeeperAddress,
        runtime: Runtime,
        hub: Hub,
        ttl: float,
        *,
        root: str,
        notify: Callable[[str], None],
        known: Callable[[str], ZooKeeperAttempt | None],
    ) -> None:
        self.asked = ttl
        self.ttl = ttl
        self.seconds = 0.0
        self.id = 0
        self.confirmed = -math.inf
        """When the last request that the leader has answered was sent."""
        self.attempts: dict[str, ZooKeeperAttempt] = {}
        self.due = math.inf
        """No attempt expires before this time."""
        self.leftovers: list[bytes] = []
        """Pending deletions, sent before the next requests; any reply to one completes it."""
        self._watched: dict[str, dict[str, None]] = {}
        """By path, the attempts to notify when this node changes."""
        self._address = address
        self._runtime = runtime
        self._hub = hub
        self._root = root
        self._notify = notify
        self._known = known
        self._space: NamespaceView | None = None
        self._changes = 0
        self._password = _NOBODY
        self._wire: ZooKeeperWire | None = None
        self._lock = runtime.lock()
        self._connecting = OneConnects(runtime, address.url)

    # Working.

    async def request(self, work: Callable[[], Awaitable[T]], until: float, *, repeatable: bool = True) -> T:
        """Run `work`, which exchanges requests. Once a try has broken, every later error becomes Indeterminate."""
        doubt: ConnectionBroken | None = None
        while True:
            try:
                return await work()
            except Over:
                doubt = None  # resolved: the nodes that it may have made are gone with the session
                if self._runtime.now() >= until:
                    raise Unavailable(f"{self._address.url}: the session has ended") from None
            except FencedError as error:
                raise _doubted(error, doubt) from error
            except ConnectionBroken as error:
                if doubt is not None or not repeatable or self._runtime.now() >= until:
                    raise Indeterminate(str(error)) from error
                doubt = error

    async def exchange(self, *requests: bytes, until: float) -> list[jute.Reply]:
        """Exchange requests on this session's connection. If the leader answers one, the session is confirmed."""
        # One try takes at most CALL_SECONDS: another member may reply.
        until = min(until, self._runtime.now() + timing.CALL_SECONDS)
        wire = await self._connected(until)
        # Leftovers stay in the list until they are answered, even if we are interrupted. Sending one twice is harmless.
        ahead = list(self.leftovers)
        sent, session = self._runtime.now(), self.id
        replies = await wire.exchange([*ahead, *requests], until)
        for request in ahead:
            with contextlib.suppress(ValueError):  # another caller sent it, too, and has removed it
                self.leftovers.remove(request)
        if any(reply.error == jute.SESSION_EXPIRED for reply in replies) and session == self.id:
            self._end()
        if session != self.id:  # the session has ended meanwhile, and the results of our requests with it
            raise Over
        self._hub.seen = max(self._hub.seen, wire.zxid)
        if any(map(jute.by_leader, (*ahead, *requests))):
            self.confirmed = max(self.confirmed, sent)
        return replies[len(ahead) :]

    def expect(self, mine: ZooKeeperAttempt, expires: float) -> None:
        """Carry this attempt until `expires`, unless it is renewed."""
        mine.expires = expires
        self.attempts[mine.public] = mine
        self.due = min(self.due, expires)

    def carry(self, mine: ZooKeeperAttempt) -> None:
        """Register an attempt that this session carries, or may carry while a reply is outstanding."""
        self.expect(mine, mine.expires)

    @property
    def place_seconds(self) -> float:
        """How long a place that nobody renews is kept while its session lives."""
        return timing.waiter_ttl(self.ttl)

    # Connecting.

    async def _connected(self, until: float) -> ZooKeeperWire:
        return await self._connecting.wire(self._usable, self._connect, until)

    def _usable(self) -> ZooKeeperWire | None:
        wire = self._wire
        return wire if wire is not None and not wire.closed and not self._silent() else None

    def _silent(self) -> bool:
        return self._runtime.now() - self.confirmed > self.seconds * SILENCE_SHARE

    async def _connect(self, until: float) -> ZooKeeperWire:
        if self._wire is not None:
            self._wire.close("replaced by a new connection")
            self._wire = None
        return await any_member(self._address, self._runtime, until, self._join)

    async def _join(self, member: tuple[str, int], until: float) -> ZooKeeperWire:
        asked = math.ceil(self.asked / LEASE_SHARE * 1000)
        hello = jute.Connected(asked, self.id, self._password)
        sent = self._runtime.now()
        link, session = await dial(self._address, member, self._runtime, hello, self._hub.seen, until)
        if session.timeout <= 0:
            link.close()
            self._end()
            raise Over
        self.id, self._password = session.session, session.password
        self.seconds = session.timeout / 1000
        self.ttl = self.asked if session.timeout == asked else self.seconds * LEASE_SHARE
        self.confirmed = sent
        where = f"{member[0]}:{member[1]}"
        self._wire = wire = self.wire_type(link, self._hub, self._runtime, where, self._on_event)
        return wire

    # The cached namespace, under a watch.

    @property
    def space(self) -> NamespaceView | None:
        """The root's data; None if it may have changed. The server sends its event before any later reply."""
        return self._space

    @property
    def changes(self) -> int:
        """How often it may have changed."""
        return self._changes

    def keep_space(self, space: NamespaceView, changes: int) -> None:
        """Cache what was read under a watch, unless an event has arrived since `changes` was read."""
        with self._lock:
            if self._changes == changes:
                self._space = space

    def _forget_space(self) -> None:
        with self._lock:
            self._changes += 1
            self._space = None

    # Watch events. They only wake: whoever is woken reads the newest state, so an event need not say what changed.

    def watch(self, mine: ZooKeeperAttempt, paths: Iterable[str]) -> None:
        """Wake this attempt when one of these nodes changes. Called before the request that sets the watches is sent:
        their events may arrive before its replies."""
        mine.watched = True
        for path in paths:
            self._watched.setdefault(path, {})[mine.public] = None

    def changed(self, path: str) -> None:
        """A watched node has changed, or perhaps it is not watched after all: wake the attempts that rely on it."""
        for public in self._watched.pop(path, ()):
            self._look_again(public)

    def _on_event(self, event: jute.WatchEvent | None) -> None:
        if event is None:  # the connection is gone, and all its watches with it
            self._forget_space()
            watched, self._watched = self._watched, {}
            for public in dict.fromkeys(chain.from_iterable(list(watched.values()))):
                self._look_again(public)
        elif event.path == self._root:
            self._forget_space()
        else:
            self.changed(event.path)

    def _look_again(self, public: str) -> None:
        mine = self._known(public)
        if mine is not None and not mine.over:
            mine.watched = False
            self._notify(public)

    def _end(self) -> None:
        """The session has ended, and so have all attempts that it carried. The next request starts a new session."""
        self.id, self._password, self.confirmed = 0, _NOBODY, -math.inf
        self.leftovers.clear()
        attempts, self.attempts = self.attempts, {}
        for attempt in attempts.values():
            if attempt.places:  # without places its ask may not have been sent: the ask is retried
                attempt.end("expired", self._runtime.now())
            self._notify(attempt.public)
        if (wire := self._wire) is not None:
            wire.close("the session is over")
        self._hub.wake()

    def farewell(self) -> None:
        """Close. A session without leases is ended at once; otherwise the leases expire with it."""
        wire = self._wire
        if wire is not None and not wire.closed and all(mine.over for mine in list(self.attempts.values())):
            wire.farewell()

    def close(self) -> None:
        """Close the connection and send nothing."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        self.confirmed = -math.inf


def _doubted(error: FencedError, doubt: ConnectionBroken | None) -> FencedError:
    return error if doubt is None else Indeterminate(f"{doubt}; then: {error}")
