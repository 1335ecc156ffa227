"""The attempts of this client, and the sessions that carry them: one for each ttl."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from fenced.errors import FencedError
from fenced.leases.rules import NOBODY
from fenced.stores.zookeeper.address import ZooKeeperAddress
from fenced.stores.zookeeper.authority.attempt import NodeRecord, ZooKeeperAttempt, ZooKeeperPhase
from fenced.stores.zookeeper.authority.nodes import Nodes
from fenced.stores.zookeeper.authority.session import SessionCall, ZooKeeperSession
from fenced.stores.zookeeper.authority.tree import QueueLook
from fenced.stores.zookeeper.wire import jute
from fenced.stores.zookeeper.wire.connection import Hub
from fenced.stores.zookeeper.wire.sides import Sides
from fenced.values import timing
from fenced.values.model import Ended, Holder

T = TypeVar("T")

REMEMBERED_MAX = 16_384
"""How many attempts are remembered at most. Only its own client can answer a repeated ask for an ended attempt."""


class OwnAttempts:
    """What this client remembers. No request of another part changes an attempt's nodes without it."""

    def __init__(
        self,
        address: ZooKeeperAddress,
        runtime: Sides,
        nodes: Nodes,
        hub: Hub,
        notify: Callable[[str], None],
        session_type: type[ZooKeeperSession],
    ) -> None:
        self._runtime = runtime
        self._nodes = nodes
        self._make = functools.partial(session_type, address, runtime, hub, notify=notify)
        self.sessions: dict[float, ZooKeeperSession] = {}
        self._memory: dict[str, ZooKeeperAttempt] = {}

    # Sessions.

    def session(self, ttl: float) -> ZooKeeperSession:
        """The session for attempts of this ttl: it carries their places while they wait and while they hold."""
        session = self.sessions.get(ttl)
        # Two threads may make one each. `setdefault` keeps the first, and the other was never connected.
        return session if session is not None else self.sessions.setdefault(ttl, self._make(ttl))

    async def request(
        self, work: Callable[[SessionCall], Awaitable[T]], until: float, *, repeatable: bool = True
    ) -> T:
        """Do what no lease depends on, in any session."""
        session = next(reversed(self.sessions.values()), None) or self.session(timing.TTL_DEFAULT)
        return await session.request(work, until, repeatable=repeatable)

    def carries(self, mine: ZooKeeperAttempt, record: NodeRecord) -> bool:
        """Whether the session of this client has made its nodes. False: another client has."""
        session = self.sessions.get(mine.ttl)
        return session is not None and session.id != 0 and session.id == record.owner

    # What is remembered.

    def begin(
        self,
        public: str,
        names: tuple[str, ...],
        ttl: float,
        lock_delay: float = 0.0,
        holder: Holder = NOBODY,
    ) -> ZooKeeperAttempt:
        """A new attempt, or another client's. It is not remembered yet."""
        return ZooKeeperAttempt(public, names, ttl, lock_delay, holder, self._runtime.lock())

    def get(self, public: str) -> ZooKeeperAttempt | None:
        return self._memory.get(public)

    def live(self, public: str) -> ZooKeeperAttempt | None:
        """An attempt of this client that has not ended."""
        mine = self._memory.get(public)
        return mine if mine is not None and not mine.over else None

    def remember(self, mine: ZooKeeperAttempt) -> None:
        self._memory[mine.public] = mine
        if len(self._memory) > REMEMBERED_MAX:
            self._forget_all(
                old
                for old in list(self._memory.values())[: REMEMBERED_MAX // 8]
                if old.over or not old.places
            )

    def forget(self, mine: ZooKeeperAttempt) -> None:
        """Forget it, as if it had never been asked for."""
        self._stop_carrying(mine)
        self._forget_all([mine])

    def forget_old(self, now: float) -> int:
        return self._forget_all(old for old in list(self._memory.values()) if old.forget <= now)

    def _forget_all(self, attempts: Iterable[ZooKeeperAttempt]) -> int:
        # After a take-over another object stands for the same attempt: that one stays.
        gone = [old for old in attempts if self._memory.get(old.public) is old]
        for old in gone:
            self._memory.pop(old.public, None)
        return len(gone)

    def _stop_carrying(self, mine: ZooKeeperAttempt) -> None:
        session = self.sessions.get(mine.ttl)
        if session is not None and session.attempts.get(mine.public) is mine:
            session.attempts.pop(mine.public, None)

    # Ends.

    def drop(self, mine: ZooKeeperAttempt, how: ZooKeeperPhase, *, done: bool = False) -> None:
        """It has ended: delete its nodes with the next request, unless that is done already."""
        mine.end(how, self._runtime.now())
        self._stop_carrying(mine)
        if not done and mine.places:
            self.session(mine.ttl).leftovers.append(jute.multi(self._nodes.deletions(mine)))

    def lose(self, mine: ZooKeeperAttempt) -> None:
        """Another client carries it: from now on we know as little about it as if we had never seen it."""
        self.forget(mine)
        mine.advance(ZooKeeperPhase.ELSEWHERE)

    async def lives_elsewhere(self, mine: ZooKeeperAttempt, until: float) -> bool:
        """Whether another client carries it, so that we have forgotten it. It may only seem to have expired here."""
        if mine.phase is not ZooKeeperPhase.EXPIRED:
            return mine.phase is ZooKeeperPhase.ELSEWHERE
        try:
            record = await self.request(lambda call: self._nodes.stored(call, mine.public), until)
        except FencedError:  # then it is what it seems to be
            return False
        if record is None or record.owner == 0 or self.carries(mine, record):
            return False
        # A leader that expires a session says so before a majority knows. If it fails then, the next one lets the
        # session live on for its time. Its client has been told "expired", and that stays true.
        if record.owner in self.session(mine.ttl).former:
            return False
        self.forget(mine)
        mine.phase = ZooKeeperPhase.ELSEWHERE  # the one way from an end to another: the expiry was none
        return True

    async def end_overdue(self, now: float, until: float) -> None:
        """End attempts that nobody renewed in time, although the session that carries them goes on."""
        until = now + (until - now) / 4
        for session in list(self.sessions.values()):
            if session.due <= now or session.leftovers:
                with contextlib.suppress(FencedError):  # retried later, or they end with the session
                    await session.request(lambda call: self._end_overdue(call, now), until)

    async def _end_overdue(self, call: SessionCall, now: float) -> None:
        session = call.session
        overdue = [mine for mine in list(session.attempts.values()) if mine.expires <= now]
        for mine in overdue:
            if mine.places:
                self.drop(mine, ZooKeeperPhase.EXPIRED)
            elif not mine.asking:
                # Whether its ask was carried out is unknown: read it. An ask that is under way, or that began
                # meanwhile, may still send a request that this answer does not show: its own caller, or the next,
                # decides.
                asks = mine.asks
                await self.standing(call, mine)
                if mine.asks == asks:
                    self.drop(mine, ZooKeeperPhase.EXPIRED)
        session.due = min((mine.expires for mine in list(session.attempts.values())), default=math.inf)
        if session.leftovers:
            await call.exchange()

    async def standing(self, call: SessionCall, mine: ZooKeeperAttempt) -> QueueLook | None:
        """Its queues, by the newest state. None: it has not all its places, or another client made them.

        The call is in the session that sends all requests of this attempt. The server answers a session in order, so
        it answers when it is decided whether an earlier request, whose reply was lost, is carried out.
        """
        ahead, read, *replies = await call.exchange(
            jute.sync(self._nodes.paths.root) if mine.places and not mine.announcing else self._nodes.tick(),
            jute.get_data(self._nodes.paths.attempt(mine.public)),
            *self._nodes.looking(mine.names),
        )
        self._nodes.check(ahead)
        record = self._nodes.record(read)
        if record is None or not self.carries(mine, record):
            return None
        look = self._nodes.looked(mine.names, replies)
        return look if self.found(call.session, mine, record, look) else None

    def found(
        self, session: ZooKeeperSession, mine: ZooKeeperAttempt, record: NodeRecord, look: QueueLook
    ) -> bool:
        """Its nodes exist, and this session has made them. False: somebody deleted places of it."""
        mine.places = self._nodes.places(mine, look)
        mine.zxid, mine.version = record.zxid, record.version
        if mine.announcing:
            mine.announcing = False
            mine.delaying = any(mine.public in queue.delays for queue in look.queues.values())
        mine.advance(ZooKeeperPhase.PLACED)
        if not mine.over:
            session.carry(mine, mine.expires)
        return len(mine.places) == len(mine.names)

    async def revoked(self, call: SessionCall, mine: ZooKeeperAttempt) -> Ended:
        """A place of ours is gone: force-released, deleted by hand, or another client took the attempt over.

        In the last case the caller answers as for an attempt that this client has never seen.
        """
        record = await self._nodes.stored(call, mine.public)
        if record is not None and not self.carries(mine, record):
            self.lose(mine)
            return Ended("revoked")
        if record is not None:
            rest = [self._nodes.paths.attempt(mine.public), *mine.places.values()]
            call.session.leftovers.extend(jute.delete(path) for path in rest)
        self.drop(mine, ZooKeeperPhase.REVOKED, done=True)
        return Ended(mine.phase.value)
