"""From the session for places in queues into that of the lease.

A node goes with the session that made it. So a waiter's nodes, made in a short session, are deleted and made again
when it is granted, by the session of the whole ttl and in one transaction: its place is never free, it
stands where it stood, and either session has it or the other. Its own node has another version then. So a request
that knows it as it was changes nothing, however late it arrives.
"""

from __future__ import annotations

from collections.abc import Collection

from fenced.authorities.zookeeper import jute
from fenced.authorities.zookeeper.base import Base
from fenced.authorities.zookeeper.errors import refused
from fenced.authorities.zookeeper.session import Session
from fenced.authorities.zookeeper.tree import Attempt, record_text

MOVED = 0
"""The version of an attempt's own node when its own client has moved it; it was made with 1."""
VERSIONS = 16
"""Who takes another's attempt over makes the next version, by as many writes; after so many it begins anew."""


class Moving(Base):
    def _moves(self, mine: Attempt, ttl: float, behind: Collection[str] = ()) -> list[bytes]:
        """What makes all its nodes anew. Its own one has the version MOVED then.

        Who waits behind is told by a write to the place that this is no ordinary end. At names where it stands `behind`
        what is deleted with the same request, that is not needed: nobody has seen it first there, so everybody looks.
        """
        attempt, text = self._paths.attempt(mine.public), record_text(mine, ttl)
        moves = [jute.delete(attempt, mine.version), jute.create(attempt, text, self._acl, jute.EPHEMERAL)]
        for name, path in mine.places.items():
            if name not in behind:
                moves.append(jute.set_data(path, b""))
            moves += (jute.delete(path), jute.create(path, b"", self._acl, jute.EPHEMERAL))
        return moves

    def _takes(self, mine: Attempt, ttl: float) -> tuple[list[bytes], int]:
        """The same for an attempt of another client, and the version of its own node then: one that none had before.

        It may have taken a newer number: by the writes those behind it take newer ones, too.
        """
        version = mine.version % VERSIONS + 1
        text = jute.set_data(self._paths.attempt(mine.public), record_text(mine, ttl))
        marks = [jute.set_data(path, b"") for path in mine.places.values()]
        return [*self._moves(mine, ttl), *[text] * version, *marks], version

    def _about_to_move(self, home: Session, mine: Attempt) -> None:
        """Should the answer be lost, each of the two sessions may have it, and looks."""
        mine.moving = True
        home.carry(mine)

    def _moved(self, home: Session, mine: Attempt) -> None:
        self._carry_no_more(mine)
        mine.away = mine.moving = mine.watched = False
        mine.version = MOVED
        for path in mine.places.values():
            if (following := self._followers.get(path)) is not None:
                following.watched = (
                    False  # from its next renewal on it is told also what others do to the holder
                )
        if mine.over:  # given up while it was under way
            home.leftovers.append(jute.multi(self._deletions(mine)))
        else:
            home.carry(mine)

    async def _move(self, home: Session, mine: Attempt, until: float) -> bool:
        """Into the session of its ttl. False: it has lost a place, or is not ours any more."""
        while True:
            self._about_to_move(home, mine)
            (reply,) = await home.exchange(jute.multi(self._moves(mine, home.ttl)), until=until)
            failed = jute.failure(self._results(reply))
            if failed is None:
                self._moved(home, mine)
                return True
            if failed[1] not in (jute.NO_NODE, jute.BAD_VERSION):
                raise refused(failed[1], self.url)
            if not await self._placed(home, mine, until) or len(mine.places) < len(mine.names):
                return False
            if not mine.away:  # an earlier try was carried out, and its reply lost
                return True

    # Handing over.

    def _follower(self, home: Session, mine: Attempt) -> Attempt | None:
        """An attempt of ours that is first everywhere as soon as this one, which holds its names, has gone.

        What stands directly ahead of it is known. Nobody comes between, so it is sound however old that knowledge is.
        """
        if mine.state != "granted" or mine.lock_delay:
            return None
        mine_all = set(mine.places.values())
        for path in mine_all:
            following = self._followers.get(path)
            if (
                following is not None
                and following.away
                and following.state == "waiting"
                and not (following.moving or following.vanished)
                and self._session(following.ttl) is home
                and {ahead for ahead, _ in following.behind.values()} <= mine_all
            ):
                return following
        return None

    async def _hand_over(
        self, home: Session, mine: Attempt, following: Attempt, until: float
    ) -> tuple[int, int] | None:
        """End one and move the next into the session of the lease, in one transaction; what failed of the first.

        So a hand-over within a client is still one request.
        """
        ends = self._deletions(mine)
        self._about_to_move(home, following)
        following.handing = turn = self._runtime.wakeup()
        moves = following.moves or self._moves(following, home.ttl, following.behind)
        session = home.id

        failed: list[tuple[int, int] | None] = []

        def handed(reply: jute.Reply) -> None:
            """Tell the next one at once, before anybody else goes on."""
            failed.append(jute.failure(self._results(reply)) if not reply.error else (0, reply.error))
            if failed == [None] and home.id == session:
                following.forced = max(following.forced, mine.forced)
                self._moved(home, following)
                following.handed, following.handing = True, None
                if following.behind:  # else the news has come first, and it is on its way
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
                self._hub.ring()  # whoever hears may be waiting for the server's news only

    async def _is_handed(self, mine: Attempt, until: float) -> None:
        """The one ahead is gone, and whether the names are ours is about to be answered to whoever released it."""
        turn = mine.handing
        if turn is not None:
            await self._hub.wait(lambda: mine.handing is not turn, turn, until)
