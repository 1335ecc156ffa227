"""Leases in ZooKeeper: ephemeral nodes in queues, one session for all leases of one ttl."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import ClassVar

from fenced import timing
from fenced.authorities.shared.rules import QUEUE_MAX, reused_attempt, tokens_used_up
from fenced.authorities.zookeeper.base import STALE_SECONDS
from fenced.authorities.zookeeper.entering import Entering
from fenced.authorities.zookeeper.errors import refused
from fenced.authorities.zookeeper.session import ZooKeeperSession
from fenced.authorities.zookeeper.tree import (
    NamespaceView,
    Queue,
    ZooKeeperAttempt,
    delay_text,
    owner_of,
    tomb_text,
)
from fenced.contracts import Runtime, Trait
from fenced.errors import FencedError, Indeterminate, Misconfigured, Misuse, Unavailable
from fenced.model import (
    TOKEN_MAX,
    Ask,
    AskAnswer,
    Busy,
    Ended,
    Gone,
    Granted,
    Kept,
    ReleaseAnswer,
    Released,
    RenewAnswer,
    Unknown,
    Waiting,
    grant_id,
)
from fenced.wire import jute
from fenced.wire.pool import ConnectionBroken
from fenced.wire.zookeeper.address import ZooKeeperAddress


class ZooKeeperAuthority(Entering):
    """One client's access to one namespace of an ensemble."""

    traits: ClassVar[tuple[Trait, ...]] = (
        Trait(
            "per-name-order",
            "A token is minted when the attempt is queued: a waiter's token may be smaller than one that was granted "
            "meanwhile under another name. Tokens of one name rise from grant to grant.",
        ),
        Trait(
            "majority",
            "A token is handed out when a majority has its transaction on disk: a killed leader takes none with it.",
        ),
        Trait(
            "transaction-numbers",
            "A token is the number of a transaction (zxid). An election skips 2**32 of them: there is room for 2**21.",
        ),
        Trait(
            "sessions",
            "Leases of one ttl share a session that lasts a third longer: the server frees a crashed client's then.",
        ),
        Trait(
            "places",
            "Places in queues end with a session of 8 s, whatever the ttl: a dead waiter is gone a tick later at most.",
        ),
        Trait(
            "server-ttl",
            "The server bounds the time of sessions, 2 to 20 ticks by default; a grant has the ttl that resulted.",
        ),
        Trait(
            "leader-confirmed",
            "Only replies of the leader prolong a lease: a follower that is cut off cannot.",
        ),
        Trait("pushed", "A release or an expiry wakes the head of the queue; idle waiters send no requests."),
        Trait(
            "revoked", "A lease whose nodes are deleted by force is lost as `revoked`, with the next renewal."
        ),
        Trait(
            "own-memory",
            "A client can take an attempt over from another; but only the client that ended it remembers its end.",
        ),
        Trait(
            "delay-noticed",
            "A lock_delay counts from when its own client, or else the next client that asks, detects the expiry.",
        ),
        Trait("idle-names", "Names that nobody uses are removed by the server itself; tokens continue."),
        Trait(
            "own-nodes",
            "With credentials the nodes can be read and written by them alone; without, by everybody.",
        ),
        Trait(
            "settings-unseen",
            "No client can ask whether the members really sync (`forceSync`): it is assumed.",
        ),
        Trait(
            "restore-unnoticed",
            "There is no cluster id: only clients that have seen more detect a restored ensemble. Raise the floor.",
        ),
    )

    @classmethod
    def at(cls, url: str, runtime: Runtime, namespace: str) -> ZooKeeperAuthority:
        return cls(ZooKeeperAddress(url), runtime, namespace)

    # Asking.

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        start = self._runtime.now()
        until = timing.call_until(start, until)
        await self._settle(start, until)
        public = grant_id(ask.secret)
        mine = self._memory.get(public)
        if mine is None:
            mine = ZooKeeperAttempt(public, ask.names, ask.ttl, ask.lock_delay, ask.holder)
            self._remember(mine)
        elif mine.names and (mine.names, mine.ttl) != (ask.names, ask.ttl):
            raise reused_attempt()
        elif await self._lives_elsewhere(mine, until):
            return await self.ask(ask, until)
        home = self._session(ask.ttl)
        mine.asks, mine.asking = mine.asks + 1, mine.asking + 1
        try:
            answer = await home.request(lambda: self._asked(home, mine, ask.wait, start, until), until)
        except BaseException as error:
            if not mine.places:
                if isinstance(error, Unavailable | Misconfigured | Misuse):
                    self._forget(mine)
                elif (
                    mine.over
                ):  # another caller has ended it, and could not see the request that we sent after that
                    self._check_again(mine)
            raise
        finally:
            mine.asking -= 1
        if not await self._lives_elsewhere(mine, until):
            return answer
        if self._runtime.now() >= until:
            raise Indeterminate(f"{self.url}: other clients take this attempt over again and again")
        return await self.ask(ask, until)

    async def _asked(
        self, home: ZooKeeperSession, mine: ZooKeeperAttempt, wait: bool, start: float, until: float
    ) -> AskAnswer:
        """One try. It finds the nodes that an earlier, broken try has made."""
        await self._await_hand_over(mine, until)
        found, newest = None, True  # an ask that is repeated must see what was done before, on any member
        if not mine.over and not mine.places:
            entered = await self._enter(home, mine, wait, until)
            if isinstance(entered, AskAnswer):
                return entered
            found = entered
        elif self._may_be_elsewhere(mine) and not await self._placed(mine, until):
            return await self._revoked(home, mine, until)
        elif (space := self._first_by_now(home, mine)) is not None:
            answer = await self._grant(home, mine, space, start, until)
            if answer is not None:
                return answer
        while not mine.over and not mine.taken:
            # Only a read of the newest state shows this session what another session of ours has just done.
            queues, space = found or await self._look(home, mine.names, until, newest=newest or mine.away)
            found, newest = None, False
            if space is None:
                continue
            if any(mine.public not in queue.publics for queue in queues.values()):
                return await self._revoked(home, mine, until)
            ahead = max(queue.publics.index(mine.public) for queue in queues.values())
            delay = await self._delayed(home, mine.public, queues, until)
            if not ahead and not delay:
                mine.forced = max(queue.changed for queue in queues.values())
                answer = await self._grant(home, mine, space, start, until)
                if answer is not None:
                    return answer
            elif not mine.queued and ahead > QUEUE_MAX:
                return await self._turn_away(home, mine, queues, space, until)
            else:
                mine.queued = True
                mine.expires = self._runtime.now() + home.place_seconds
                waiting = await self._stand(home, mine, queues, space, delay, until)
                if waiting is not None:
                    return waiting
        return Ended(mine.state)

    def _may_be_elsewhere(self, mine: ZooKeeperAttempt) -> bool:
        """Whether another client may have taken it over, and no watch or move of ours would show that.

        A hand-over is trusted for a moment only: no session that carries the attempt by now ends so soon.
        """
        handed = mine.handed and self._runtime.now() - mine.handed_at > STALE_SECONDS
        return mine.state == "granted" or mine.vanished or handed

    def _first_by_now(self, home: ZooKeeperSession, mine: ZooKeeperAttempt) -> NamespaceView | None:
        """If watch events or a hand-over already proved that we are first, the cached namespace; else None."""
        if mine.state != "waiting" or mine.vanished:
            return None
        proven = mine.handed or (mine.queued and mine.watched and not mine.behind)
        # An attempt still in the session for places needs no fresh confirmation: the move itself confirms the session.
        return home.space if proven and (mine.away or not self._stale(home)) else None

    async def _grant(
        self,
        home: ZooKeeperSession,
        mine: ZooKeeperAttempt,
        space: NamespaceView | None,
        start: float,
        until: float,
    ) -> AskAnswer | None:
        """Grant: we are first in every queue. None: read the queues again."""
        if mine.away:
            if not await self._move(home, mine, until):
                return await self._revoked(home, mine, until)
            space = home.space
        if space is None:
            return None
        if mine.state == "waiting":
            if mine.zxid < max(mine.forced, space.changed if space.version else 0):
                # The floor was raised, or the name was taken by force, while we were in the queue.
                await self._mint(home, mine, until)
                return None
            if mine.lock_delay and not mine.delaying:
                await self._announce_delay(home, mine, until)
            token = space.token(mine.zxid)
            mine.token = token if token < TOKEN_MAX else await self._last_token(home, mine, until)
            if home.attempts.get(mine.public) is mine:  # otherwise the session has ended meanwhile
                mine.state = "granted"
                home.expect(mine, home.confirmed + home.ttl)
        if mine.state != "granted" or mine.expires <= self._runtime.now():
            self._drop(mine, "expired")
            return None
        return Granted(mine.token, min(home.ttl, mine.expires - start), home.ttl)

    async def _announce_delay(self, session: ZooKeeperSession, mine: ZooKeeperAttempt, until: float) -> None:
        text = delay_text(mine.lock_delay)
        nodes = [jute.create(self._paths.delay(name, mine.public), text, self._acl) for name in mine.names]
        (reply,) = await session.exchange(jute.multi(nodes), until=until)
        failed = jute.failure(self._results(reply))
        if failed is not None and failed[1] != jute.NODE_EXISTS:  # it exists if an earlier reply was lost
            raise refused(failed[1], self.url)
        mine.delaying = True

    async def _last_token(self, session: ZooKeeperSession, mine: ZooKeeperAttempt, until: float) -> int:
        """All numbers but the last are used up: one single attempt gets the last."""
        made, read = await session.exchange(
            jute.create(self._paths.spent, mine.public.encode(), self._acl),
            jute.get_data(self._paths.spent),
            until=until,
        )
        if made.error not in (jute.OK, jute.NODE_EXISTS) or read.error:
            raise refused(made.error or read.error, self.url)
        if jute.data_of(read.body)[0] != mine.public.encode():
            self._drop(mine, "withdrawn")
            self._forget(mine)
            await session.exchange(until=until)
            raise tokens_used_up()
        return TOKEN_MAX

    async def _turn_away(
        self,
        home: ZooKeeperSession,
        mine: ZooKeeperAttempt,
        queues: dict[str, Queue],
        space: NamespaceView,
        until: float,
    ) -> Busy:
        session = self._carrier(mine)
        self._wake_follower(mine)
        session.leftovers.append(jute.multi(self._deletions(mine)))
        mine.places = {}  # if this try breaks, the next one starts from the beginning
        held_by, ahead, _ = await self._whom(home, mine, queues, space, [], until)
        if session.leftovers:
            await session.exchange(until=until)
        self._forget(mine)
        return Busy(ahead, held_by)

    async def _stand(
        self,
        home: ZooKeeperSession,
        mine: ZooKeeperAttempt,
        queues: dict[str, Queue],
        space: NamespaceView,
        delay: float,
        until: float,
    ) -> Waiting | None:
        """Watch the places directly ahead, and our own. None: one of them is gone, read the queues again."""
        mine.watched, mine.behind, mine.trusted = True, {}, set()
        mine.forced = max(queue.changed for queue in queues.values())
        # Own places in the session for places need no watch: the move fails if one of them is gone.
        paths = [] if mine.away else list(mine.places.values())
        for name, queue in queues.items():
            at = queue.publics.index(mine.public)
            if at:
                path = self._paths.place(name, queue.children[at - 1])
                mine.behind[name] = (path, at == 1)
                # A waiter of the same client needs no watch: its places end with the same session as ours, and this
                # client wakes us when it ends or moves that waiter (`_wake_follower`).
                if (other := self._live(queue.publics[at - 1])) is not None and other.away and mine.away:
                    mine.trusted.add(path)
                else:
                    paths.append(path)
        watches = home.watch(mine, paths)
        held_by, ahead, check_in = await self._whom(home, mine, queues, space, watches, until)
        if not mine.watched or mine.handed or not (mine.behind or delay):
            return None
        self._followers.update((path, mine) for path, _ in mine.behind.values())
        # We register as follower first and then check the attempts ahead. A call that ends or moves one of them does
        # the reverse: it changes the attempt first and then looks for followers. So one of the two sees the other.
        if any((other := self._live(owner_of(path)[0])) is None or not other.away for path in mine.trusted):
            mine.watched = False
            return None
        mine.moves = self._moves(mine, home.ttl, mine.behind) if mine.away else []
        if delay:
            mine.watched = False  # no event comes when the delay ends
        return Waiting(max(check_in, delay) or home.ttl, ahead, held_by)

    # Renewing.

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        now = self._runtime.now()
        until = timing.call_until(now, until)
        await self._settle(now, until)
        publics = [grant_id(secret) for secret in secrets]
        answers: dict[str, RenewAnswer] = {}
        batches: dict[ZooKeeperSession, list[ZooKeeperAttempt]] = {}
        failures: list[FencedError] = []
        for public in publics:
            mine = self._memory.get(public)
            if mine is None or await self._lives_elsewhere(mine, until):
                answers[public] = await self._adopt(public, until)
            elif mine.over:
                answers[public] = Ended(mine.state)
            else:
                batches.setdefault(self._carrier(mine), []).append(mine)
        for session, batch in batches.items():
            try:
                kept = await session.request(functools.partial(self._keep, session, batch, until), until)
            except FencedError as error:
                failures.append(error)
                kept = {mine.public: Unknown(str(error)) for mine in batch}
            answers |= kept
            for mine in batch:
                if await self._lives_elsewhere(mine, until):
                    answers[mine.public] = await self._adopt(mine.public, until)
        await self._confirm_homes(batches, until)
        if failures and all(isinstance(answer, Unknown) for answer in answers.values()):
            raise failures[0]
        return [answers[public] for public in publics]

    async def _confirm_homes(
        self, batches: dict[ZooKeeperSession, list[ZooKeeperAttempt]], until: float
    ) -> None:
        """Confirm the lease sessions that our waiters will move into: a silent one could not grant at once."""
        homes = dict.fromkeys(
            self._session(mine.ttl) for batch in batches.values() for mine in batch if mine.away
        )
        for home in homes:
            if home not in batches and home.needs_confirming:
                limit = self._runtime.now() + (until - self._runtime.now()) / 4
                work = functools.partial(home.exchange, jute.sync(self._paths.keep), until=limit)
                with contextlib.suppress(FencedError):  # if this fails, it is confirmed when it grants
                    await home.request(work, limit)

    async def _keep(
        self, session: ZooKeeperSession, batch: list[ZooKeeperAttempt], until: float
    ) -> dict[str, RenewAnswer]:
        live = [mine for mine in batch if not mine.over and mine.places]
        answers: dict[str, RenewAnswer] = {mine.public: Gone() for mine in batch if not mine.places}
        if not live:
            return answers | {mine.public: Ended(mine.state) for mine in batch if mine.over}
        new = [mine for mine in live if mine.state == "granted" and not mine.watched]
        watches = []
        for mine in new:
            mine.watched = True
            watches += session.watch(mine, mine.places.values())
        sent = self._runtime.now()
        keep = [jute.sync(self._paths.keep)]
        waiting = [mine for mine in live if mine.state == "waiting"]
        reads = [jute.get_data(self._paths.attempt(mine.public)) for mine in waiting]
        kept, *found = await self._watch_and(session, new, watches, [*keep, *reads], until)
        if kept.error:
            raise refused(kept.error, self.url)
        for mine, record in zip(waiting, map(self._record, found), strict=True):
            # No watch shows that another client has ended a waiter or has taken it over.
            if record is None or self._owner(mine, record) is None:
                mine.vanished = True
        for mine in live:
            if mine.over:
                answers[mine.public] = Ended(mine.state)
            elif mine.vanished:
                answers[mine.public] = await self._revoked(session, mine, until)
            elif self._carrier(mine) is not session:  # granted, or about to be, meanwhile
                answers[mine.public] = Waiting(0.0)
            elif mine.state == "granted":
                mine.expires = sent + session.ttl
                answers[mine.public] = Kept(session.ttl)
            else:
                mine.expires = sent + self._session(mine.ttl).place_seconds
                answers[mine.public] = await self._waits(mine, until)
        return answers | {mine.public: Ended(mine.state) for mine in batch if mine.over}

    async def _waits(self, mine: ZooKeeperAttempt, until: float) -> RenewAnswer:
        home = self._session(mine.ttl)
        while not mine.watched:
            queues, space = await self._look(home, mine.names, until, newest=mine.away)
            if any(mine.public not in queue.publics for queue in queues.values()):
                return await self._revoked(home, mine, until)
            delay = await self._delayed(home, mine.public, queues, until)
            if not delay and not any(queue.publics.index(mine.public) for queue in queues.values()):
                return Waiting(0.0)
            waiting = await self._stand(home, mine, queues, space, delay, until)
            if waiting is not None:
                return Waiting(waiting.check_in)
        return Waiting(home.ttl if mine.behind else 0.0)

    # Ending.

    async def release(self, secret: str, until: float | None = None, *, keep: float = 0.0) -> ReleaseAnswer:
        return await self._finish(secret, "released", until, keep)

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        return await self._finish(secret, "withdrawn", until)

    async def _finish(self, secret: str, state: str, until: float | None, keep: float = 0.0) -> ReleaseAnswer:
        now = self._runtime.now()
        until = timing.call_until(now, until)
        await self._settle(now, until)
        public = grant_id(secret)
        mine = self._memory.get(public)
        if mine is None or await self._lives_elsewhere(mine, until):
            session = self._any_session()
            return await session.request(lambda: self._end_unknown(session, public, state, until), until)
        home = self._session(mine.ttl)
        answer = await home.request(lambda: self._end(home, mine, state, keep, until), until)
        if not await self._lives_elsewhere(mine, until):
            return answer
        return await home.request(lambda: self._end_unknown(home, public, state, until), until)

    async def _end(
        self, home: ZooKeeperSession, mine: ZooKeeperAttempt, state: str, keep: float, until: float
    ) -> ReleaseAnswer:
        if not mine.over and not mine.places and not await self._placed(mine, until):
            self._drop(mine, state)
            return Released()
        while not mine.over:
            doubted, mine.doubted = mine.doubted, True
            # Sent in the session that carries it, so after all earlier requests of that session.
            following = None if mine.away or keep else self._follower(home, mine)
            if following is not None:
                failed = await self._hand_over(home, mine, following, until)
            else:
                session = self._carrier(mine)
                ends = await self._endings(session, mine, keep, until)
                (reply,) = await session.exchange(jute.multi(ends), until=until)
                failed = jute.failure(self._results(reply))
            if failed is None or (doubted and failed == (0, jute.NO_NODE)):
                self._drop(mine, state, done=True)
                return Released()
            if failed[1] not in (jute.NO_NODE, jute.BAD_VERSION):
                raise refused(failed[1], self.url)
            version = mine.version
            if not await self._placed(mine, until) or mine.version == version:
                return await self._revoked(home, mine, until)
        return Released() if mine.state in ("released", "withdrawn") else Ended(mine.state)

    async def _end_unknown(
        self, session: ZooKeeperSession, public: str, state: str, until: float
    ) -> ReleaseAnswer:
        """End an attempt that we did not make. Withdrawn before its ask arrives, it leaves a tombstone."""
        attempt, tomb = self._paths.attempt(public), self._paths.tomb(public)
        text = tomb_text(timing.remember_for(0.0))
        bury = [jute.create(attempt, b"", self._acl), jute.create(tomb, text, self._acl)]
        while True:
            record = await self._stored(session, public, until)
            if record is not None and record.owner == 0:
                return Released()
            if record is None and state == "released":
                return Gone()
            steps = bury
            if record is not None:
                mine = ZooKeeperAttempt(public, record.names, record.asked, record.lock_delay)
                queues, _ = await self._look(session, mine.names, until)
                mine.places = self._places(mine, queues)
                mine.delaying = any(public in queue.delays for queue in queues.values())
                steps = self._deletions(mine) + (bury if state == "withdrawn" else [])
            (reply,) = await session.exchange(jute.multi(steps), until=until)
            failed = jute.failure(self._results(reply))
            if failed is None:
                if record is not None:
                    mine.end(state, self._runtime.now())
                    self._remember(mine)
                return Released()
            if failed[1] not in (jute.NO_NODE, jute.NODE_EXISTS):
                raise refused(failed[1], self.url)

    # Waiting.

    async def next_wakeups(self, until: float) -> list[str]:
        try:
            await self._hub.wait(lambda: bool(self._woken) or self._interrupted, self._wakeup, until)
        except ConnectionBroken:
            return []
        self._interrupted = False
        woken, self._woken = self._woken, {}
        return list(woken)

    def interrupt(self) -> None:
        self._interrupted = True
        self._wakeup.set()
        self._hub.wake()
