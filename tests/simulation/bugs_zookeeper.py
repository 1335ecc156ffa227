"""Bugs in the shipped ZooKeeper client that a world must find."""

from __future__ import annotations

from typing import Any

from fenced.stores.zookeeper.authority.attempt import ZooKeeperAttempt, ZooKeeperPhase
from fenced.stores.zookeeper.authority.attempts import OwnAttempts
from fenced.stores.zookeeper.authority.authority import ZooKeeperAuthority
from fenced.stores.zookeeper.authority.renewing import ZooKeeperRenewing
from fenced.stores.zookeeper.authority.session import SessionCall, ZooKeeperSession
from fenced.stores.zookeeper.authority.tree import Queue, QueueLook
from fenced.stores.zookeeper.wire import jute
from fenced.stores.zookeeper.wire.connection import ZooKeeperWire
from fenced.values.model import Kept, RenewAnswer
from fenced_testkit.worlds.faults import NEVER
from fenced_testkit.worlds.site import Site
from fenced_testkit.worlds.zookeeper import ZooKeeperBackend
from tests.simulation.planting import with_authority


class Isolating(ZooKeeperBackend):
    """Clients often reach one member alone, and that member has often lost its leader without noticing."""

    sizes = (3,)
    ttls = (0.5,)
    sync_limits = (12,)
    isolates_every = (0.7,)
    breaks_every = (NEVER,)


def made_with(part: str, bug: type) -> type[ZooKeeperAuthority]:
    """The authority with this part of it replaced."""
    return type(bug.__name__, (ZooKeeperAuthority,), {f"{part}_type": bug, "__doc__": bug.__doc__})


def with_part(part: str, bug: type, backend: type[ZooKeeperBackend] = ZooKeeperBackend) -> type[Site]:
    return with_authority(made_with(part, bug), backend)


def with_wire(bug: type[ZooKeeperWire]) -> type[Site]:
    session = type(bug.__name__, (ZooKeeperSession,), {"wire_type": bug, "__doc__": bug.__doc__})
    return with_part("session", session)


class WatchesAreLostAtReconnect(ZooKeeperSession):
    """When its connection ends, nobody tells the waiters that nothing is watched any more."""

    def _on_event(self, event: jute.WatchEvent | None) -> None:
        if event is not None:
            super()._on_event(event)


class OpenConnectionsAreBelieved(ZooKeeperRenewing):
    """While its connection is open, a session is taken for alive, and its leases are renewed without a request."""

    async def keep(self, call: SessionCall, batch: list[ZooKeeperAttempt]) -> dict[str, RenewAnswer]:
        wire = call.session._wire
        if wire is None or wire.closed or not all(mine.granted for mine in batch):
            return await super().keep(call, batch)
        for mine in batch:
            mine.expires = self.runtime.now() + call.session.ttl
        return {mine.public: Kept(call.session.ttl) for mine in batch}


class AnyMemberConfirms(ZooKeeperSession):
    """A session is kept alive by reads, which a member that has lost its leader answers, too."""

    async def exchange(self, *requests: bytes, until: float) -> list[jute.Reply]:
        sent = self._runtime.now()
        read = jute.get_data("/")
        asked = [request if request[:4] != jute.sync("")[:4] else read for request in requests]
        replies = await super().exchange(*asked, until=until)
        if self._wire is not None:
            self._confirm(self._wire, sent)
        return replies


class EventsAreBelieved(OwnAttempts):
    """A waiter that learns that the place ahead is gone takes itself for first, and does not read the queue."""

    async def standing(self, call: SessionCall, mine: ZooKeeperAttempt) -> QueueLook | None:
        told = mine.phase is ZooKeeperPhase.WAITING and not mine.watched
        look = await super().standing(call, mine)
        if look is None or not told:
            return look
        return look._replace(queues={name: Queue([mine.public], [""], [], 0) for name in mine.names})


class RepliesAreNotMatched(ZooKeeperWire):
    """A caller that got no reply in time keeps the connection, and its late reply is taken for the next caller's."""

    def _call_of(self, xid: int) -> Any:
        return self._pending.popleft()[1] if self._pending else super()._call_of(xid)

    def close(self, why: str = "closed") -> None:
        if why == "no answer in time":
            self._pending.clear()
        else:
            super().close(why)


PLANTED = [
    with_part("session", WatchesAreLostAtReconnect),
    with_part("renewing", OpenConnectionsAreBelieved),
    with_part("session", AnyMemberConfirms, Isolating),
    with_wire(RepliesAreNotMatched),
    with_part("attempts", EventsAreBelieved),
]
