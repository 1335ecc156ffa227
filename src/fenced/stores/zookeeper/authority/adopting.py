"""Taking over attempts that another client's session carries, at the same places in their queues.

The attempt's own node then has another version, so nothing that the other client still sends changes it. That client
finds out with its next request about the attempt, and then answers as for one that it has never seen.
"""

from __future__ import annotations

from fenced.errors import FencedError
from fenced.stores.zookeeper.authority.errors import refused
from fenced.stores.zookeeper.authority.operating import Operating
from fenced.stores.zookeeper.authority.session import ZooKeeperSession
from fenced.stores.zookeeper.authority.tree import NodeRecord, ZooKeeperAttempt, record_text
from fenced.stores.zookeeper.wire import jute
from fenced.values.model import Ended, Gone, Kept, RenewAnswer, Waiting

VERSIONS = 64
"""A client that takes over another client's attempt writes its node until it has the next version, from 2 to this."""


def next_version(version: int) -> int:
    """After a take-over. A client that has lost the attempt must not meet the version that it knew."""
    return version + 1 if 2 <= version < VERSIONS else 2


class Adopting(Operating):
    async def _adopt(self, public: str, until: float) -> RenewAnswer:
        """Renew an attempt that another client's session carries: take it over into ours, at the same places."""
        session = self._any_session()
        record = await session.request(lambda: self._stored(session, public, until), until)
        if record is None:
            return Gone()
        if record.owner == 0:
            return Ended("withdrawn")
        own = self._session(record.asked)
        return await own.request(lambda: self._take_over(own, public, record, until), until)

    async def _lives_elsewhere(self, mine: ZooKeeperAttempt, until: float) -> bool:
        """Whether another client carries it, so that we have forgotten it. It may only seem to have expired here."""
        if mine.taken or mine.state != "expired":
            return mine.taken
        session = self._any_session()
        try:
            record = await session.request(lambda: self._stored(session, mine.public, until), until)
        except FencedError:  # then it is what it seems to be
            return False
        elsewhere = record is not None and record.owner != 0 and not self._ours(mine, record)
        if elsewhere:
            self._forget(mine)
            mine.taken = True
        return elsewhere

    async def _take_over(
        self, home: ZooKeeperSession, public: str, record: NodeRecord, until: float
    ) -> RenewAnswer:
        """Gone: it has lost a place, or something has changed meanwhile."""
        mine = ZooKeeperAttempt(
            public, record.names, record.asked, record.lock_delay, record.holder, zxid=record.zxid
        )
        mine.version = record.version
        queues, space = await self._look(home, mine.names, until, newest=True)
        mine.places = self._places(mine, queues)
        if len(mine.places) < len(mine.names):
            return Gone()
        first = not any(queue.publics.index(mine.public) for queue in queues.values())
        delay = await self._delayed(home, mine.public, queues, until)
        granted = first and not delay
        sent = self._runtime.now()
        moves, version = self._moves(mine, home.ttl)
        (reply,) = await home.exchange(jute.multi(moves), until=until)
        if jute.failure(self._results(reply)) is not None:
            return Gone()
        mine.version = version
        mine.queued = not first
        mine.delaying = bool(mine.lock_delay) and granted
        home.expect(mine, sent + (home.renewed(sent) if granted else home.place_seconds))
        self._remember(mine)
        if not granted:
            return Waiting(delay or home.ttl)  # the next renewal watches what is ahead
        if self._too_old(mine.zxid, queues, space):
            # It was not granted before a newer number was, or else its holder has a smaller one, which does no harm.
            await self._mint(home, mine, until)
            if mine.over or mine.taken:
                return Gone()
        mine.state, mine.token = "granted", space.token(mine.zxid)
        return Kept(home.renewed(sent))

    def _moves(self, mine: ZooKeeperAttempt, ttl: float) -> tuple[list[bytes], int]:
        """The operations that delete all its nodes and make them again under the same paths, in our session; and the
        resulting version of its own node, which differs from the one that the other client knows.

        The server carries all of them out or none, so its places are never free.
        """
        version = next_version(mine.version)
        attempt, text = self._paths.attempt(mine.public), record_text(mine, ttl)
        moves = [jute.delete(attempt, mine.version), jute.create(attempt, text, self._acl, jute.EPHEMERAL)]
        # The last of these writes restores its text.
        moves += [jute.set_data(attempt, text if last == version else b"") for last in range(1, version + 1)]
        for path in mine.places.values():
            moves += (jute.delete(path), jute.create(path, b"", self._acl, jute.EPHEMERAL))
        return moves, version

    async def _mint(self, session: ZooKeeperSession, mine: ZooKeeperAttempt, until: float) -> None:
        """Take a newer number, and write it to the names: waiters behind us must not be granted below it."""
        mine.zxid = 0
        text = record_text(mine, session.ttl)
        writes = [jute.set_data(self._paths.attempt(mine.public), text, mine.version)]
        writes += [jute.set_data(self._paths.name(name), b"") for name in mine.names]
        (reply,) = await session.exchange(jute.multi(writes), until=until)
        results = self._results(reply)
        failed = jute.failure(results)
        if failed is not None:
            if failed[1] not in (jute.NO_NODE, jute.BAD_VERSION):
                raise refused(failed[1], self.url)
            await self._revoked(session, mine, until)
        elif (stat := results[0].stat) is not None:
            mine.zxid = stat.mzxid
            mine.version = stat.version
