"""Who is ahead of an attempt, and the watches that tell when one of them leaves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fenced.stores.zookeeper.authority.attempt import NodeRecord, ZooKeeperAttempt
from fenced.stores.zookeeper.authority.attempts import OwnAttempts
from fenced.stores.zookeeper.authority.nodes import AT_ONCE, LockDelays, Nodes
from fenced.stores.zookeeper.authority.session import SessionCall
from fenced.stores.zookeeper.authority.tree import NamespaceView, QueueLook, chunks
from fenced.stores.zookeeper.wire import jute
from fenced.stores.zookeeper.wire.connection import Hub
from fenced.values.contracts import Runtime
from fenced.values.model import HeldBy, NameView, Waiter, Waiting


class Ahead(NamedTuple):
    """Who holds, how many wait ahead, and after how long to ask again if no event comes."""

    held_by: HeldBy | None
    waiters: int
    check_in: float


@dataclass(frozen=True)
class PlaceWatch:
    """Sets watches, and says whom an attempt waits for."""

    nodes: Nodes
    own: OwnAttempts
    delays: LockDelays
    hub: Hub
    runtime: Runtime

    async def stand(
        self, call: SessionCall, mine: ZooKeeperAttempt, look: QueueLook, delay: float
    ) -> Waiting | None:
        """Watch the places directly ahead, and our own node. None: one of them is gone, read the queues again."""
        paths = self.nodes.paths
        watches = [paths.attempt(mine.public)]  # another client may take the attempt over
        for name, queue in look.queues.items():
            if at := queue.publics.index(mine.public):
                watches.append(paths.place(name, queue.children[at - 1]))
        ahead = await self.ahead(call, mine, look, watches)
        # Nobody can take a place between us and the one directly ahead. So while that exists we are not first; and when
        # it is deleted, the event comes, because existence was read and the watch set in one request.
        if not mine.watched:
            return None
        if delay:
            mine.watched = False  # no event comes when the delay ends
        return Waiting(max(ahead.check_in, delay) or call.session.ttl, ahead.waiters, ahead.held_by)

    async def ahead(
        self, call: SessionCall, mine: ZooKeeperAttempt, look: QueueLook, watches: Sequence[str] = ()
    ) -> Ahead:
        """Set these watches, and read who is ahead: only the heads of the queues are another client's to tell."""
        now = self.runtime.now()
        queues = [before for queue in look.queues.values() if (before := queue.before(mine.public))]
        heads = [head for head in dict.fromkeys(before[0] for before in queues) if not self.own.live(head)]
        reads = [jute.get_data(self.nodes.paths.attempt(head)) for head in heads]
        replies = await self.watch(call, [(mine, watches)] if watches else [], reads)
        records = dict(zip(heads, map(self.nodes.record, replies), strict=True))
        held_by, waiters, check_in = None, 0, 0.0
        for before in queues:
            head = self.own.live(before[0])
            # Whoever is first holds the name, unless it is one of ours that was not granted it yet.
            waiters = max(waiters, len(before) - (head is None or head.granted))
            held_by = held_by or self.held_by(before[0], records.get(before[0]), look.space, now)
            check_in = max(check_in, *(self._lasts(public, records.get(public), now) for public in before))
        return Ahead(held_by, waiters, check_in)

    def held_by(
        self, public: str, record: NodeRecord | None, space: NamespaceView, now: float
    ) -> HeldBy | None:
        """The first in a queue holds the name. Only its own client knows for how long."""
        if (mine := self.own.live(public)) is not None:
            left = max(0.0, mine.expires - now)
            return HeldBy(mine.holder, mine.token, public, left) if mine.granted else None
        if record is None or record.owner == 0:
            return None
        return HeldBy(record.holder, space.token(record.zxid), public, record.ttl)

    def _lasts(self, public: str, record: NodeRecord | None, now: float) -> float:
        if (other := self.own.live(public)) is not None:
            return other.expires - now
        return record.ttl if record is not None else 0.0

    async def watch(
        self,
        call: SessionCall,
        watched: Iterable[tuple[ZooKeeperAttempt, Sequence[str]]],
        requests: Sequence[bytes],
    ) -> list[jute.Reply]:
        """Watch these nodes for these attempts, and exchange requests. Afterwards an attempt is not `watched` if one of
        the nodes does not exist, or is the attempt's own and in another client's session."""
        session, sets = call.session, []
        for mine, paths in watched:
            session.watch(mine, paths)  # before the request is sent: the event may arrive before our reply
            sets += [(mine, path) for path in paths]
        if not sets and not requests:
            return []
        # Unlike `exists`, this leaves no watch on the server if the node is missing.
        gets = [jute.get_data(path, watch=True) for _, path in sets]
        try:
            replies = await call.exchange(*gets, *requests)
        except BaseException:
            # Perhaps the server has set none of these watches: attempts that rely on them must read again.
            for _, path in sets:
                session.changed(path)
            self.hub.wake()
            raise
        for (mine, path), reply in zip(sets, replies, strict=False):
            if reply.error:
                session.changed(path)
                self.hub.wake()
            elif path in (self.nodes.paths.attempt(mine.public), *mine.places.values()):
                mine.watched &= jute.data_of(reply.body)[1].ephemeral_owner == session.id
        return replies[len(sets) :]

    # For operators.

    async def views(self, call: SessionCall, names: Sequence[str]) -> list[NameView]:
        look = await self.nodes.look(call, names)
        records: dict[str, NodeRecord] = {}
        publics = dict.fromkeys(public for queue in look.queues.values() for public in queue.publics)
        for some in chunks(list(publics), AT_ONCE):
            replies = await call.exchange(
                *(jute.get_data(self.nodes.paths.attempt(public)) for public in some)
            )
            found = zip(some, map(self.nodes.record, replies), strict=True)
            records |= {public: record for public, record in found if record is not None}
        return [await self._view(call, name, look, records) for name in names]

    async def _view(
        self, call: SessionCall, name: str, look: QueueLook, records: dict[str, NodeRecord]
    ) -> NameView:
        now, queue = self.runtime.now(), look.queues[name]
        waiting = [public for public in queue.publics if public in records]
        held_by = self.held_by(waiting[0], records[waiting[0]], look.space, now) if waiting else None
        holder = records[waiting.pop(0)] if held_by is not None else None
        waiters = []
        for public in waiting:
            record, mine = records[public], self.own.live(public)
            left = record.ttl if mine is None else max(0.0, mine.expires - now)
            waiters.append(Waiter(record.holder, record.names, left))
        if held_by is None or holder is None:
            free_in = await self.delays.left(call, {name: queue})
            return NameView(name, None, (), None, free_in, tuple(waiters))
        free_in = held_by.remaining + holder.lock_delay
        return NameView(name, held_by, holder.names, holder.ttl, free_in, tuple(waiters))
