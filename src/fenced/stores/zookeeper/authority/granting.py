"""Granting an attempt that is first in all its queues, and taking over one of another client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fenced.leases.rules import tokens_used_up
from fenced.stores.zookeeper.authority.attempt import NodeRecord, ZooKeeperAttempt, ZooKeeperPhase
from fenced.stores.zookeeper.authority.attempts import OwnAttempts
from fenced.stores.zookeeper.authority.nodes import LockDelays, Nodes
from fenced.stores.zookeeper.authority.session import SessionCall
from fenced.stores.zookeeper.authority.tree import QueueLook
from fenced.stores.zookeeper.wire import jute
from fenced.values.contracts import Runtime
from fenced.values.model import TOKEN_MAX, Ended, Gone, Granted, Kept, RenewAnswer, Waiting

VERSIONS = 64
"""A client that takes over another client's attempt writes its node until it has the next version, from 2 to this."""


@dataclass(frozen=True)
class Granting:
    """Makes a holder of an attempt that is first in all its queues."""

    nodes: Nodes
    own: OwnAttempts
    delays: LockDelays
    runtime: Runtime

    async def grant(
        self, call: SessionCall, mine: ZooKeeperAttempt, look: QueueLook, start: float
    ) -> Granted | None:
        """Grant: we are first in every queue. None: it is over, or read the queues again."""
        home = call.session
        if not mine.granted:
            if look.too_old(mine.zxid):
                # The floor was raised, or the name was taken by force, while we were in the queue.
                await self._mint(call, mine)
                return None
            if mine.lock_delay and not mine.delaying and not await self.delays.announce(call, mine):
                return None
            token = look.space.token(mine.zxid)
            mine.token = token if token < TOKEN_MAX else await self._last_token(call, mine)
            if home.confirmed + home.ttl <= self.runtime.now():
                # The leader may be about to end the session, and the lease would be over at once; but our places live.
                # The session sends the next look on a new connection, of which the leader hears.
                return None
            # Our places exist as long as the session that we looked in. If that has ended since, it carries us no more.
            if home.attempts.get(mine.public) is mine and mine.advance(ZooKeeperPhase.GRANTED):
                mine.watched = False
                home.carry(mine, home.confirmed + home.ttl)
        if not mine.granted or mine.expires <= self.runtime.now():
            self.own.drop(mine, ZooKeeperPhase.EXPIRED)
            return None
        return Granted(mine.token, min(home.ttl, mine.expires - start), home.ttl)

    async def _mint(self, call: SessionCall, mine: ZooKeeperAttempt) -> None:
        """Take a newer number, and write it to the names: waiters behind us must not be granted below it."""
        paths = self.nodes.paths
        writes = [jute.set_data(paths.attempt(mine.public), mine.text(call.session.ttl), mine.version)]
        writes += [jute.set_data(paths.name(name), b"") for name in mine.names]
        done = await self.nodes.write(call, writes, jute.NO_NODE, jute.BAD_VERSION)
        if done.failed is not None:
            await self.own.revoked(call, mine)
        elif (stat := done.results[0].stat) is not None:
            mine.zxid, mine.version = stat.mzxid, stat.version

    async def _last_token(self, call: SessionCall, mine: ZooKeeperAttempt) -> int:
        """All numbers but the last are used up: one single attempt gets the last."""
        spent, public = self.nodes.paths.spent, mine.public.encode()
        made, read = await call.exchange(jute.create(spent, public, self.nodes.acl), jute.get_data(spent))
        if made.error != jute.NODE_EXISTS:
            self.nodes.check(made)
        self.nodes.check(read)
        if jute.data_of(read.body)[0] != public:
            self.own.drop(mine, ZooKeeperPhase.WITHDRAWN)
            self.own.forget(mine)
            await call.exchange()  # which deletes its nodes
            raise tokens_used_up()
        return TOKEN_MAX


def next_version(version: int) -> int:
    """After a take-over. A client that has lost the attempt must not meet the version that it knew."""
    return version + 1 if 2 <= version < VERSIONS else 2


@dataclass(frozen=True)
class TakeOver:
    """Moves attempts that another client's session carries into ours, at the same places in their queues.

    The attempt's own node then has another version, so nothing that the other client still sends changes it. That
    client finds out with its next request about the attempt, and then answers as for one that it has never seen.
    """

    nodes: Nodes
    own: OwnAttempts
    delays: LockDelays
    granting: Granting
    runtime: Runtime

    async def renew(self, public: str, until: float) -> RenewAnswer:
        """Renew an attempt that this client does not know: take it over if there is one."""
        record = await self.own.request(lambda call: self.nodes.stored(call, public), until)
        if record is None:
            return Gone()
        if record.owner == 0:
            return Ended("withdrawn")
        own = self.own.session(record.asked)
        return await own.request(lambda call: self._renewed(call, public, record), until)

    async def _renewed(self, call: SessionCall, public: str, record: NodeRecord) -> RenewAnswer:
        start = self.runtime.now()
        mine = self.own.begin(public, record.names, record.asked, record.lock_delay, record.holder)
        look: QueueLook | None = await self.move(call, mine, record)
        # Whoever was first when it was moved still is: nobody can take a place ahead.
        while look is not None and not mine.over:
            delay = await self.delays.left(call, look.queues, public)
            if delay or look.ahead(public):
                return Waiting(delay or call.session.ttl)  # the next renewal watches what is ahead
            # If its number is too old, it was not granted before a newer one was; or its holder has a smaller token
            # than we say from now on, which does no harm.
            granted = await self.granting.grant(call, mine, look, start)
            if granted is not None:
                return Kept(granted.remaining)
            look = await self.own.standing(call, mine) if not mine.over else None
        return Gone()

    async def move(self, call: SessionCall, mine: ZooKeeperAttempt, record: NodeRecord) -> QueueLook | None:
        """Move it into our session, as `mine`. None: it has lost a place, or something has changed meanwhile."""
        look = await self.nodes.look(call, mine.names)
        places = self.nodes.places(mine, look)
        if len(places) < len(mine.names):
            return None
        # Carried before the request is sent: if its reply is lost, its nodes may be in our session. We know no places
        # of it until then, so `end_overdue` looks for them, as for those of an ask without a reply.
        sent = self.runtime.now()
        mine.zxid, mine.version = record.zxid, next_version(record.version)
        mine.advance(ZooKeeperPhase.SENT)
        call.session.carry(mine, sent + call.session.place_seconds)
        moves = self._moves(mine, places, record.version, call.session.ttl)
        done = await self.nodes.write(call, moves, jute.NO_NODE, jute.BAD_VERSION, jute.NODE_EXISTS)
        if done.failed is not None:
            found = await self.nodes.stored(call, mine.public)
            if found is None or not self.own.carries(mine, found):
                self.own.forget(mine)
                return None
            mine.version = found.version  # an earlier try of ours was carried out
        mine.places = places
        mine.delaying = all(mine.public in queue.delays for queue in look.queues.values())
        # One that is first may be turned away by an ask that does not wait; one that is not was told to wait before.
        mine.advance(ZooKeeperPhase.WAITING if look.ahead(mine.public) else ZooKeeperPhase.PLACED)
        self.own.remember(mine)
        return look

    def _moves(
        self, mine: ZooKeeperAttempt, places: Mapping[str, str], known: int, ttl: float
    ) -> list[bytes]:
        """The operations that delete all its nodes and make them again under the same paths, in our session; its own
        node gets a version that differs from the one that the other client knows.

        The server carries all of them out or none, so its places are never free.
        """
        acl, attempt, text = self.nodes.acl, self.nodes.paths.attempt(mine.public), mine.text(ttl, mine.zxid)
        moves = [jute.delete(attempt, known), jute.create(attempt, text, acl, jute.EPHEMERAL)]
        # The last of these writes restores its text.
        versions = range(1, mine.version + 1)
        moves += [jute.set_data(attempt, text if last == mine.version else b"") for last in versions]
        for path in places.values():
            moves += (jute.delete(path), jute.create(path, b"", acl, jute.EPHEMERAL))
        return moves
