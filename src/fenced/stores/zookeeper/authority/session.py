"""One ZooKeeper session after another, for all attempts of one ttl: the server deletes its nodes when it ends.

How long a holder may believe that it holds. The leader counts a session's time from the last sign of life that it has
*heard*. It hears of a new connection at once: the member asks it before it accepts one. Of requests it does not: it
answers writes and syncs, but the member reports whose requests it has received only with its replies to the leader's
pings, twice a tick. So an answer shows that the leader has heard of those requests of the same connection that were
answered half a tick before this one was sent, and a session is believed for its time from the latest of them. It is
requested a third longer than the lease, so that regular renewals prolong a lease by its whole ttl.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import ClassVar, NamedTuple, TypeVar

from fenced.errors import FencedError, Indeterminate, Unavailable
from fenced.net.pool import ConnectionBroken
from fenced.stores.zookeeper.address import ZooKeeperAddress
from fenced.stores.zookeeper.authority.attempt import ZooKeeperAttempt, ZooKeeperPhase
from fenced.stores.zookeeper.wire import jute
from fenced.stores.zookeeper.wire.connection import Hub, OneConnects, ZooKeeperWire, any_member, dial
from fenced.stores.zookeeper.wire.sides import Sides
from fenced.values import timing

T = TypeVar("T")

LEASE_SHARE = 0.75
"""The part of a session's time that its leases get."""
REPORT_SHARE = 0.2
"""Half a tick is at most this part of a session's time, if that is 2.5 ticks or more: less than from one renewal to the
next (at least 0.85 of a third of the lease)."""
REPORT_SHARE_SHORTEST = 0.25
"""The same for a session that the server has made longer, to its minimum: two ticks."""
SILENCE_SHARE = 0.2575
"""After this part of its time without an answer of the leader, a session gets a new connection: a lease that is granted
then has its whole ttl."""
UNHEARD_SHARE = 0.55
"""The same if the leader may not have heard of it for this part, for example because the member took long to accept the
connection. Two renewals, the longest that a session with answers goes unheard, are half of its time apart."""

FORMER_MAX = 16
"""How many ended sessions are remembered. Nodes of one may live on for a session's time, so this is plenty."""

_NOBODY = b"\0" * 16


class Over(Exception):
    """The session that the work was for has ended, and the server deletes all nodes that it had created."""


class SessionCall(NamedTuple):
    """One call of the program: the session that its requests are sent in, and when it ends."""

    session: ZooKeeperSession
    until: float

    async def exchange(self, *requests: bytes) -> list[jute.Reply]:
        return await self.session.exchange(*requests, until=self.until)


class ZooKeeperSession:
    """The session that now serves leases of one ttl, and the attempts that it carries."""

    wire_type: ClassVar[type[ZooKeeperWire]] = ZooKeeperWire

    def __init__(
        self,
        address: ZooKeeperAddress,
        runtime: Sides,
        hub: Hub,
        ttl: float,
        notify: Callable[[str], None],
    ) -> None:
        self.asked = ttl
        self.ttl = ttl
        self.seconds = 0.0
        self.id = 0
        self.former: deque[int] = deque(maxlen=FORMER_MAX)
        """Sessions of which the server said that they are over."""
        self.confirmed = -math.inf
        """Leases of this session may be believed for their ttl from this time."""
        self._signs: deque[tuple[float, float]] = deque()
        """When requests that the leader has answered on this connection were sent, and answered. It has heard of the
        first one (before any other: the connection itself)."""
        self._report = 0.0
        self.attempts: dict[str, ZooKeeperAttempt] = {}
        self.due = math.inf
        """No attempt expires before this time."""
        self.leftovers: list[bytes] = []
        """Pending deletions, sent before the next requests; any reply to one completes it."""
        self._watched: dict[str, dict[str, ZooKeeperAttempt]] = {}
        """By path, the attempts to notify when this node changes."""
        self._address = address
        self._runtime = runtime
        self._hub = hub
        self._notify = notify
        self._password = _NOBODY
        self._wire: ZooKeeperWire | None = None
        self._lock = runtime.lock()
        self._connecting = OneConnects(runtime, address.url)

    # Working.

    async def request(
        self, work: Callable[[SessionCall], Awaitable[T]], until: float, *, repeatable: bool = True
    ) -> T:
        """Run `work`, which exchanges requests. Once a try has broken, every later error becomes Indeterminate."""
        doubt: ConnectionBroken | None = None
        while True:
            try:
                return await work(SessionCall(self, until))
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
            self._confirm(wire, sent)
        return replies[len(ahead) :]

    def _confirm(self, wire: ZooKeeperWire, sent: float) -> None:
        """The leader has answered a request that was sent then."""
        with self._lock:  # callers in several threads confirm at once
            if wire is not self._wire:
                return  # it tells nothing about what the leader has heard on the connection that came after it
            now, signs = self._runtime.now(), self._signs
            if len(signs) > 2 and now - signs[-2][1] < self.seconds / 64:
                signs.pop()  # so few are kept, however many requests there are
            signs.append((sent, now))
            while signs[1][1] <= sent - self._report:
                signs.popleft()
            heard = signs[0][0]
            self.confirmed = max(self.confirmed, min(sent, heard + self.seconds - self.ttl))

    def renewed(self, sent: float) -> float:
        """For how long, from `sent`, a lease lasts that a request sent then has renewed."""
        return self.ttl - max(0.0, sent - self.confirmed)

    def carry(self, mine: ZooKeeperAttempt, expires: float) -> None:
        """Register an attempt that this session carries, or may carry while a reply is outstanding. It expires then,
        unless it is renewed."""
        mine.expires = expires
        self.attempts[mine.public] = mine
        self.due = min(self.due, expires)

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
        now = self._runtime.now()
        with self._lock:
            if not self._signs:
                return True
            first, *later = self._signs
            heard = max([first[0], *(sent for sent, came in later if came <= now - self._report)])
            unanswered = now - self._signs[-1][0]
        return unanswered > self.seconds * SILENCE_SHARE or now - heard > self.seconds * UNHEARD_SHARE

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
        raised = session.timeout > asked
        self._report = self.seconds * (REPORT_SHARE_SHORTEST if raised else REPORT_SHARE)
        where = f"{member[0]}:{member[1]}"
        wire = self.wire_type(link, self._hub, self._runtime, where, self._on_event)
        with self._lock:
            self._wire, self._signs, self.confirmed = wire, deque([(sent, sent)]), sent
        return wire

    # Watch events. They only wake: whoever is woken reads the newest state, so an event need not say what changed.

    def watch(self, mine: ZooKeeperAttempt, paths: Iterable[str]) -> None:
        """Wake this attempt when one of these nodes changes. Called before the request that sets the watches is sent:
        their events may arrive before its replies."""
        mine.watched = True
        for path in paths:
            self._watched.setdefault(path, {})[mine.public] = mine

    def changed(self, path: str) -> None:
        """A watched node has changed, or perhaps it is not watched after all: wake the attempts that rely on it."""
        self._wake(self._watched.pop(path, {}))

    def _on_event(self, event: jute.WatchEvent | None) -> None:
        if event is not None:
            self.changed(event.path)
        else:  # the connection is gone, and all its watches with it
            watched, self._watched = self._watched, {}
            for attempts in list(watched.values()):
                self._wake(attempts)

    def _wake(self, attempts: dict[str, ZooKeeperAttempt]) -> None:
        for mine in list(attempts.values()):
            if not mine.over:
                mine.watched = False
                self._notify(mine.public)

    def _end(self) -> None:
        """The session has ended, and so have all attempts that it carried. The next request starts a new session."""
        self.former.append(self.id)
        # First: what is confirmed from here on belongs to the next session, and no attempt is granted by this one.
        self.id, self._password, self.confirmed = 0, _NOBODY, -math.inf
        self.leftovers.clear()  # the nodes have gone with the session
        attempts, self.attempts = self.attempts, {}
        for attempt in attempts.values():
            if attempt.places:  # without places its ask may not have been sent: the ask is retried
                attempt.end(ZooKeeperPhase.EXPIRED, self._runtime.now())
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
