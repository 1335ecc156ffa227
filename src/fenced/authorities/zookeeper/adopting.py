"""Taking over attempts that another client's session carries, at the same places in their queues.

The attempt's own node then has another version, so nothing that the other client still sends changes it. That client
finds out with its next request about the attempt, and then answers as for one that it has never seen.
"""

from __future__ import annotations

from fenced.authorities.zookeeper.errors import refused
from fenced.authorities.zookeeper.operating import Operating
from fenced.authorities.zookeeper.session import ZooKeeperSession
from fenced.authorities.zookeeper.tree import NodeRecord, ZooKeeperAttempt, record_text
from fenced.errors import FencedError
from fenced.model import Ended, Gone, Kept, RenewAnswer, Waiting
from fenced.wire import jute


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
        elsewhere = record is not None and record.owner != 0 and self._owner(mine, record) is None
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
        session = home if first else self._queueing(home)
        sent = self._runtime.now()
        moves, version = self._takeover_moves(mine, home.ttl)
        (reply,) = await session.exchange(jute.multi(moves), until=until)
        if jute.failure(self._results(reply)) is not None:
            return Gone()
        mine.version = version
        mine.away = session is not home
        mine.queued = not first
        mine.delaying = bool(mine.lock_delay) and granted
        session.expect(mine, sent + (home.ttl if granted else home.place_seconds))
        self._remember(mine)
        if not granted:
            return Waiting(delay or home.ttl)  # the next renewal watches what is ahead
        if self._too_old(mine.zxid, queues, space):
            # It was not granted before a newer number was, or else its holder has a smaller one, which does no harm.
            await self._mint(home, mine, until)
            if mine.over or mine.taken:
                return Gone()
        mine.state, mine.token = "granted", space.token(mine.zxid)
        return Kept(home.ttl)

    async def _mint(self, session: ZooKeeperSession, mine: ZooKeeperAttempt, until: float) -> None:
        """Take a newer number, and write it to the names: waiters behind us must not be granted below it."""
        mine.zxid = 0
        text = record_text(mine, session.ttl)
        writes = [jute.set_data(self._paths.attempt(mine.public), text, mine.version)]
        writes += [jute.set_data(self._paths.name(name), b"") for name in mine.names]
        writes += [jute.set_data(path, b"") for path in mine.places.values()]  # notifies the waiters behind
        (reply,) = await session.exchange(jute.multi(writes), until=until)
        results = self._results(reply)
        failed = jute.failure(results)
        if failed is not None:
            if failed[1] not in (jute.NO_NODE, jute.BAD_VERSION):
                raise refused(failed[1], self.url)
            await self._revoked(session, mine, until)
        elif (stat := results[0].stat) is not None:
            mine.zxid = mine.forced = stat.mzxid
            mine.version = stat.version
