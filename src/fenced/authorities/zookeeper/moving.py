"""Moving an attempt from the session for places in queues into the session of its lease.

The server deletes a node when the session that made it ends. A waiter's nodes are made in a short session. When the
waiter is granted, the session of its lease deletes them and makes them again under the same paths, in one
transaction: the place is never free, and exactly one of the two sessions has it. The attempt's own node then has
another version. So a late request that expects the old version changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from fenced.authorities.zookeeper.base import Base
from fenced.authorities.zookeeper.errors import refused
from fenced.authorities.zookeeper.session import ZooKeeperSession
from fenced.authorities.zookeeper.tree import ZooKeeperAttempt, record_text
from fenced.wire import jute

MOVED = 0
"""The version of an attempt's own node after the client that made it has moved it; before that it is 1."""
VERSIONS = 64
"""A client that takes over another client's attempt writes its node until it has the next version, from 2 to this."""


def next_version(version: int) -> int:
    """After a take-over, or a move of one that was taken over. A client that has lost it must not meet its old one."""
    return version + 1 if 2 <= version < VERSIONS else 2


class Moving(Base):
    def _moves(self, mine: ZooKeeperAttempt, ttl: float, behind: Collection[str] = ()) -> list[bytes]:
        """The operations that delete all its nodes and make them again.

        A write to each place notifies the waiter behind that this is not the end of the attempt. At the names in
        `behind`, where the same request deletes the place ahead of it, no write is needed: nobody has seen it first
        there, so the waiter behind reads the queue anyway.
        """
        attempt, text = self._paths.attempt(mine.public), record_text(mine, ttl)
        moves = [jute.delete(attempt, mine.version), jute.create(attempt, text, self._acl, jute.EPHEMERAL)]
        moves += self._until_version(mine, text, self._version_moved(mine))
        for name, path in mine.places.items():
            if name not in behind:
                moves.append(jute.set_data(path, b""))
            moves += (jute.delete(path), jute.create(path, b"", self._acl, jute.EPHEMERAL))
        return moves

    def _takeover_moves(self, mine: ZooKeeperAttempt, ttl: float) -> tuple[list[bytes], int]:
        """The same for an attempt of another client, and the resulting version of its own node, which differs.

        The other client may have taken a newer number. The writes to the places make those behind take newer ones, too.
        """
        version = next_version(mine.version)
        attempt, text = self._paths.attempt(mine.public), record_text(mine, ttl)
        moves = [jute.delete(attempt, mine.version), jute.create(attempt, text, self._acl, jute.EPHEMERAL)]
        moves += self._until_version(mine, text, version)
        for path in mine.places.values():
            moves += (jute.set_data(path, b""), jute.delete(path))
            moves += (jute.create(path, b"", self._acl, jute.EPHEMERAL), jute.set_data(path, b""))
        return moves, version

    def _version_moved(self, mine: ZooKeeperAttempt) -> int:
        return MOVED if mine.version <= 1 else next_version(mine.version)

    def _until_version(self, mine: ZooKeeperAttempt, text: bytes, version: int) -> list[bytes]:
        """Writes to its new node, until it has this version. The last one restores its text."""
        attempt = self._paths.attempt(mine.public)
        return [jute.set_data(attempt, text if last == version else b"") for last in range(1, version + 1)]

    def _about_to_move(self, home: ZooKeeperSession, mine: ZooKeeperAttempt) -> None:
        """If the reply is lost, either session may have the attempt: register it with both, so that each one checks."""
        mine.moving = True
        home.carry(mine)

    def _moved(self, home: ZooKeeperSession, mine: ZooKeeperAttempt) -> None:
        self._stop_carrying(mine)
        mine.away = mine.moving = mine.watched = False
        mine.version = self._version_moved(mine)
        for path in mine.places.values():
            if (following := self._followers.get(path)) is not None:
                # It relied on us while we waited. Now others may delete our place: its next renewal sets a watch.
                following.watched = False
        if mine.over:  # given up while the request was under way
            home.leftovers.append(jute.multi(self._deletions(mine)))
        else:
            home.carry(mine)

    async def _move(self, home: ZooKeeperSession, mine: ZooKeeperAttempt, until: float) -> bool:
        """Move it into the session of its lease. False: it has lost a place, or another client has taken it over."""
        while True:
            self._about_to_move(home, mine)
            (reply,) = await home.exchange(jute.multi(self._moves(mine, home.ttl)), until=until)
            failed = jute.failure(self._results(reply))
            if failed is None:
                self._moved(home, mine)
                return True
            if failed[1] not in (jute.NO_NODE, jute.BAD_VERSION):
                raise refused(failed[1], self.url)
            if not await self._placed(mine, until) or len(mine.places) < len(mine.names):
                return False
            if not mine.away:  # an earlier try was carried out, but its reply was lost
                return True

    # Handing over.

    def _follower(self, home: ZooKeeperSession, mine: ZooKeeperAttempt) -> ZooKeeperAttempt | None:
        """An attempt of this client that is first in all its queues as soon as this holder's places are deleted.

        We know which places are directly ahead of it. Nobody can enter a queue in between, so old knowledge is safe.
        """
        if mine.state != "granted" or mine.lock_delay:
            return None
        mine_all = dict.fromkeys(mine.places.values())
        for path in mine_all:
            following = self._followers.get(path)
            if (
                following is not None
                and following.away
                and following.state == "waiting"
                and not (following.moving or following.vanished)
                and self._session(following.ttl) is home
                and all(ahead in mine_all for ahead, _ in following.behind.values())
            ):
                return following
        return None

    async def _hand_over(
        self, home: ZooKeeperSession, mine: ZooKeeperAttempt, following: ZooKeeperAttempt, until: float
    ) -> tuple[int, int] | None:
        """End one attempt and move the next into the session of its lease, in one transaction.

        Returns what failed of ending the first. So a hand-over within a client is one request.
        """
        ends = self._deletions(mine)
        self._about_to_move(home, following)
        following.handing = turn = self._runtime.wakeup()
        moves = following.moves or self._moves(following, home.ttl, following.behind)
        session = home.id

        failed: list[tuple[int, int] | None] = []

        def handed(reply: jute.Reply) -> None:
            """Runs as soon as the reply is read: the next attempt is notified before any other caller continues."""
            failed.append(jute.failure(self._results(reply)) if not reply.error else (0, reply.error))
            if failed == [None] and home.id == session:
                following.forced = max(following.forced, mine.forced)
                self._moved(home, following)
                following.handed, following.handing = True, None
                following.handed_at = self._runtime.now()
                if following.behind:  # otherwise the watch event came first and has already woken it
                    following.behind.clear()
                    self._wake(following.public)
                turn.set()

        try:
            await home.exchange(jute.multi([*ends, *moves]), until=until, then=handed)
            if failed[0] is not None:
                following.moving = False
                home.attempts.pop(following.public, None)
                if failed[0][0] >= len(ends):
                    (reply,) = await home.exchange(jute.multi(ends), until=until)
                    return jute.failure(self._results(reply))
            return failed[0]
        finally:
            if not following.handed:
                following.handing, following.watched = None, False
                turn.set()
                self._wake(following.public)
                self._hub.wake()  # a `next_wakeups` that waits only for the server's events must wake up, too

    async def _await_hand_over(self, mine: ZooKeeperAttempt, until: float) -> None:
        """If a release that hands its names over to this attempt is running, wait for its reply."""
        turn = mine.handing
        if turn is not None:
            await self._hub.wait(lambda: mine.handing is not turn, turn, until)
