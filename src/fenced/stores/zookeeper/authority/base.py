"""Shared by all operations: the sessions, the attempts that this client remembers, and reading queues."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Sequence
from typing import ClassVar

from fenced.errors import FencedError
from fenced.stores.zookeeper.address import ZooKeeperAddress
from fenced.stores.zookeeper.authority.errors import refused
from fenced.stores.zookeeper.authority.session import ZooKeeperSession
from fenced.stores.zookeeper.authority.tree import (
    NamespaceView,
    NodeRecord,
    Paths,
    Queue,
    ZooKeeperAttempt,
    delay_of,
    delay_text,
    queue_of,
    record_of,
    space_of,
)
from fenced.stores.zookeeper.wire import jute
from fenced.stores.zookeeper.wire.connection import Hub
from fenced.values import timing
from fenced.values.contracts import Runtime
from fenced.values.model import Ended, HeldBy, check_name

REMEMBERED_MAX = 16_384
"""How many attempts are remembered at most. Only its own client can answer a repeated ask for an ended attempt."""
KNOWN_MAX = 10_000
USUAL_TTL = timing.TTL_DEFAULT
_inherited: list[object] = []
"""The parent's connections in a forked child. Kept referenced, so that no finalizer touches the shared sockets."""


class Base:
    """One client of one namespace."""

    session_type: ClassVar[type[ZooKeeperSession]] = ZooKeeperSession

    def __init__(self, address: ZooKeeperAddress, runtime: Runtime, namespace: str = "default") -> None:
        self.url = address.url
        self._address = address
        self._runtime = runtime
        self._namespace = check_name(namespace)
        self._paths = Paths(address.chroot, self._namespace)
        # Only we may access the nodes, if the server knows who we are. ZooKeeper inherits no ACL from parent nodes.
        self._acl = jute.acl([("auth", "") if address.authenticated else ("world", "anyone")])
        self._begin()

    def _begin(self) -> None:
        self._hub = Hub(self._runtime)
        self._sessions: dict[float, ZooKeeperSession] = {}
        self._memory: dict[str, ZooKeeperAttempt] = {}
        self._known: dict[str, None] = {}
        self._woken: dict[str, None] = {}
        self._wakeup = self._runtime.wakeup()
        self._interrupted = False

    # Sessions.

    def _session(self, ttl: float) -> ZooKeeperSession:
        """The session for attempts of this ttl: it carries their places while they wait and while they hold."""
        session = self._sessions.get(ttl)
        if session is None:
            session = self.session_type(
                self._address,
                self._runtime,
                self._hub,
                ttl,
                root=self._paths.root,
                notify=self._wake,
                known=self._memory.get,
            )
            session = self._sessions.setdefault(ttl, session)
        return session

    def _ours(self, mine: ZooKeeperAttempt, record: NodeRecord) -> bool:
        """Whether the session of this client has made its nodes. False: another client has."""
        session = self._sessions.get(mine.ttl)
        return session is not None and session.id != 0 and session.id == record.owner

    def _any_session(self) -> ZooKeeperSession:
        """For requests that no lease depends on."""
        return next(reversed(self._sessions.values()), None) or self._session(USUAL_TTL)

    def _wake(self, public: str) -> None:
        # A `next_wakeups` that waits for others to read is woken by this. One that reads for all callers sees it after
        # each event that it has read; whoever calls this for another reason wakes the hub, too.
        self._woken[public] = None
        self._wakeup.set()

    def _live(self, public: str) -> ZooKeeperAttempt | None:
        """An attempt of this client that has not ended."""
        mine = self._memory.get(public)
        return mine if mine is not None and not mine.over else None

    # What we remember.

    def _remember(self, attempt: ZooKeeperAttempt) -> None:
        self._memory[attempt.public] = attempt
        if len(self._memory) > REMEMBERED_MAX:
            for public, old in list(self._memory.items())[: REMEMBERED_MAX // 8]:
                if old.over or not old.places:
                    self._memory.pop(public, None)

    def _forget_old(self, now: float) -> int:
        old = [public for public, attempt in list(self._memory.items()) if attempt.forget <= now]
        for public in old:
            self._memory.pop(public, None)
        return len(old)

    def _forget(self, mine: ZooKeeperAttempt) -> None:
        """Forget it, as if it had never been asked for."""
        self._stop_carrying(mine)
        self._memory.pop(mine.public, None)

    def _stop_carrying(self, mine: ZooKeeperAttempt) -> None:
        if (session := self._sessions.get(mine.ttl)) is not None:
            session.attempts.pop(mine.public, None)

    def _know(self, names: Iterable[str]) -> None:
        """Remember names whose nodes most likely exist."""
        if len(self._known) > KNOWN_MAX:
            self._known.clear()
        self._known.update(dict.fromkeys(names))

    async def _settle(self, now: float, until: float) -> None:
        """End attempts that nobody renewed in time, although the session that carries them goes on."""
        until = now + (until - now) / 4
        for session in list(self._sessions.values()):
            work = functools.partial(self._expire, session, now, until)
            if session.due <= now or session.leftovers:
                with contextlib.suppress(FencedError):  # retried later, or they end with the session
                    await session.request(work, until)

    async def _expire(self, session: ZooKeeperSession, now: float, until: float) -> None:
        for mine in list(session.attempts.values()):
            if mine.expires <= now and mine.places:
                self._drop(mine, "expired")
        for mine in list(session.attempts.values()):
            # Whether its ask was carried out is unknown: read it. An ask that is under way, or that began meanwhile,
            # may still send a request that this answer does not show: its own caller, or the next, decides.
            if mine.expires <= now and not mine.asking:
                asks = mine.asks
                await self._standing(session, mine, until)
                if mine.asks == asks:
                    self._drop(mine, "expired")
        session.due = min((mine.expires for mine in list(session.attempts.values())), default=math.inf)
        if session.leftovers:
            await session.exchange(until=until)

    async def _standing(
        self, session: ZooKeeperSession, mine: ZooKeeperAttempt, until: float
    ) -> tuple[dict[str, Queue], NamespaceView] | None:
        """Its places and the queues, by the newest state. None: it has no nodes, or another client made them.

        `session` is the one that sends all requests of this attempt. The server answers a session in order, so it
        answers when it is decided whether an earlier request, whose reply was lost, is carried out.
        """
        while True:
            changes, looking = session.changes, self._looking(session, mine.names)
            ahead, read, *replies = await session.exchange(
                jute.sync(self._paths.root) if mine.places else self._barrier(),
                jute.get_data(self._paths.attempt(mine.public)),
                *looking,
                until=until,
            )
            if ahead.error:
                raise refused(ahead.error, self.url)
            record = self._record(read)
            if record is None or not self._ours(mine, record):
                return None
            queues, space = self._looked(session, mine.names, replies, changes)
            if space is not None:
                self._found(session, mine, record, queues)
                return queues, space

    def _barrier(self) -> bytes:
        """A request that is answered after all earlier ones of its session have been carried out, or never will be.

        A sync is not: if the session has moved to the leader, the leader answers it at once, although an earlier
        request, which came through a follower, is still waiting for a majority. A write is ordered behind that one.
        """
        return jute.set_data(self._paths.clock, b"")

    def _found(
        self, session: ZooKeeperSession, mine: ZooKeeperAttempt, record: NodeRecord, queues: dict[str, Queue]
    ) -> None:
        """Its nodes exist, and this session has made them."""
        mine.places = self._places(mine, queues)
        mine.zxid, mine.version = record.zxid, record.version
        if not mine.over:
            session.carry(mine)

    def _drop(self, mine: ZooKeeperAttempt, state: str, *, done: bool = False) -> None:
        """It has ended: delete its nodes with the next request, unless that is done already."""
        mine.end(state, self._runtime.now())
        self._stop_carrying(mine)
        if not done and mine.places:
            self._session(mine.ttl).leftovers.append(jute.multi(self._deletions(mine)))

    def _deletions(self, mine: ZooKeeperAttempt) -> list[bytes]:
        """Operations that delete all its nodes, if it is still ours. An expiry keeps its lock_delay nodes."""
        paths = list(mine.places.values())
        if mine.delaying and mine.state != "expired":
            paths += [self._paths.delay(name, mine.public) for name in mine.names]
        own = jute.delete(self._paths.attempt(mine.public), mine.version)
        return [own, *(jute.delete(path) for path in paths)]

    async def _revoked(self, session: ZooKeeperSession, mine: ZooKeeperAttempt, until: float) -> Ended:
        """A place of ours is gone: force-released, deleted by hand, or another client took the attempt over.

        In the last case the caller answers as for an attempt that this client has never seen (`taken`).
        """
        record = await self._stored(session, mine.public, until)
        if record is not None and self._ours(mine, record):
            rest = [self._paths.attempt(mine.public), *mine.places.values()]
            session.leftovers.extend(jute.delete(path) for path in rest)
        elif record is not None:
            self._forget(mine)
            mine.taken = True
            return Ended("revoked")
        self._drop(mine, "revoked", done=True)
        return Ended(mine.state)

    # Looking.

    def _looking(self, session: ZooKeeperSession, names: Sequence[str]) -> list[bytes]:
        lists = [jute.get_children(self._paths.name(name)) for name in names]
        return lists if session.space is not None else [*lists, jute.get_data(self._paths.root, watch=True)]

    def _looked(
        self, session: ZooKeeperSession, names: Sequence[str], replies: Sequence[jute.Reply], changes: int
    ) -> tuple[dict[str, Queue], NamespaceView | None]:
        """Parse the replies to `_looking`; None: the namespace has changed meanwhile, read again."""
        queues = {name: self._queue(reply) for name, reply in zip(names, replies, strict=False)}
        if len(replies) > len(names):
            if replies[-1].error:
                raise refused(replies[-1].error, self.url)
            space = space_of(*jute.data_of(replies[-1].body), self.url)
            session.keep_space(space, changes)
            return queues, space
        return queues, session.space

    def _queue(self, reply: jute.Reply) -> Queue:
        if reply.error == jute.NO_NODE:
            return Queue([], [], [], 0)
        if reply.error:
            raise refused(reply.error, self.url)
        return queue_of(*jute.children_of(reply.body))

    async def _look(
        self, session: ZooKeeperSession, names: Sequence[str], until: float, *, newest: bool = False
    ) -> tuple[dict[str, Queue], NamespaceView]:
        """The queues, and the namespace at that time. `newest`: including all that was done before this call."""
        while True:
            ahead = [jute.sync(self._paths.root)] if newest else []
            changes, looking = session.changes, self._looking(session, names)
            replies = await session.exchange(*ahead, *looking, until=until)
            queues, space = self._looked(session, names, replies[len(ahead) :], changes)
            if space is not None:
                return queues, space

    def _places(self, mine: ZooKeeperAttempt, queues: dict[str, Queue]) -> dict[str, str]:
        return {
            name: self._paths.place(name, queue.children[queue.publics.index(mine.public)])
            for name, queue in queues.items()
            if mine.public in queue.publics
        }

    def _record(self, reply: jute.Reply) -> NodeRecord | None:
        if reply.error == jute.NO_NODE:
            return None
        if reply.error:
            raise refused(reply.error, self.url)
        return record_of(*jute.data_of(reply.body))

    async def _stored(self, session: ZooKeeperSession, public: str, until: float) -> NodeRecord | None:
        """The attempt's record, including what any client has done before this call."""
        _, reply = await session.exchange(
            jute.sync(self._paths.root), jute.get_data(self._paths.attempt(public)), until=until
        )
        return self._record(reply)

    def _results(self, reply: jute.Reply) -> list[jute.Done]:
        if reply.error:
            raise refused(reply.error, self.url)
        return jute.results_of(reply.body)

    def _too_old(self, zxid: int, queues: dict[str, Queue], space: NamespaceView) -> bool:
        """Whether this number is below a token that may have been granted: only a newer one may be granted."""
        forced = max(queue.changed for queue in queues.values())
        return zxid < max(forced, space.changed if space.version else 0)

    def _held_by(
        self, public: str, record: NodeRecord | None, space: NamespaceView, now: float
    ) -> HeldBy | None:
        """The first in a queue holds the name. Only its own client knows for how long."""
        if (mine := self._live(public)) is not None:
            if mine.state != "granted":
                return None
            return HeldBy(mine.holder, mine.token, public, max(0.0, mine.expires - now))
        if record is None or record.owner == 0:
            return None
        return HeldBy(record.holder, space.token(record.zxid), public, record.ttl)

    # Watching.

    async def _watch_and(
        self,
        session: ZooKeeperSession,
        watched: Iterable[tuple[ZooKeeperAttempt, Sequence[str]]],
        requests: Sequence[bytes],
        until: float,
    ) -> list[jute.Reply]:
        """Watch these nodes for these attempts, and exchange requests. Afterwards an attempt is not `watched` if one of
        the nodes does not exist, or is the attempt's own and in another client's session."""
        sets = []
        for mine, paths in watched:
            session.watch(mine, paths)
            sets += [(mine, path) for path in paths]
        # Unlike `exists`, this leaves no watch on the server if the node is missing.
        gets = [jute.get_data(path, watch=True) for _, path in sets]
        try:
            replies = await session.exchange(*gets, *requests, until=until)
        except BaseException:
            # Perhaps the server has set none of these watches: attempts that rely on them must read again.
            for _, path in sets:
                session.changed(path)
            self._hub.wake()
            raise
        for (mine, path), reply in zip(sets, replies, strict=False):
            if reply.error:
                session.changed(path)
                self._hub.wake()
            elif path in (self._paths.attempt(mine.public), *mine.places.values()):
                mine.watched &= jute.data_of(reply.body)[1].ephemeral_owner == session.id
        return replies[len(sets) :]

    # Delays.

    async def _endings(
        self, session: ZooKeeperSession, mine: ZooKeeperAttempt, keep: float, until: float
    ) -> list[bytes]:
        """Operations that release it. With `keep` they make lock_delay nodes that end so many seconds from now."""
        if not keep or mine.state != "granted":
            return self._deletions(mine)
        (clock,) = await session.exchange(jute.set_data(self._paths.clock, b""), until=until)
        if clock.error:
            raise refused(clock.error, self.url)
        text = delay_text(keep, jute.stat_of(clock.body).mtime / 1000 + keep)
        steps = [jute.delete(self._paths.attempt(mine.public), mine.version)]
        for name, path in mine.places.items():
            delay = self._paths.delay(name, mine.public)
            steps.append(jute.delete(path))
            steps.append(jute.set_data(delay, text) if mine.delaying else jute.create(delay, text, self._acl))
        return steps

    async def _delayed(
        self, session: ZooKeeperSession, mine: str, queues: dict[str, Queue], until: float
    ) -> float:
        """How long a lock_delay of an expired attempt still blocks one of these names; 0: not at all."""
        paths = [
            (public, self._paths.delay(name, public))
            for name, queue in queues.items()
            for public in queue.orphans(mine)
        ]
        if not paths:
            return 0.0
        reads = [jute.get_data(path) for _, path in paths]
        here = (
            self._runtime.now()
        )  # before the server's clock is read: a slow reply must not shorten the delay
        *replies, clock = await session.exchange(*reads, jute.set_data(self._paths.clock, b""), until=until)
        if clock.error:
            raise refused(clock.error, self.url)
        there = jute.stat_of(clock.body).mtime / 1000
        remaining, writes = 0.0, []
        for (public, path), reply in zip(paths, replies, strict=True):
            if reply.error:
                continue
            delay = delay_of(*jute.data_of(reply.body))
            ends = delay.until
            if ends is None:
                known = self._memory.get(public)
                began = known.expires if known is not None and known.state == "expired" else here
                ends = there - (here - began) + delay.seconds
                writes.append(jute.set_data(path, delay_text(delay.seconds, ends), delay.version))
            if ends <= there:
                writes.append(jute.delete(path))
            remaining = max(remaining, ends - there)
        if writes:
            await session.exchange(*writes, until=until)
        return remaining
