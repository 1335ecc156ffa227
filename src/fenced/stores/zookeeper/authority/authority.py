"""Leases in ZooKeeper: ephemeral nodes in queues, one session for all leases and places of one ttl."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar

from fenced.errors import FencedError, Indeterminate, Misconfigured, Misuse, Unavailable
from fenced.leases.rules import QUEUE_MAX, reused_attempt, tokens_used_up
from fenced.net.pool import ConnectionBroken
from fenced.stores.zookeeper.address import ZooKeeperAddress
from fenced.stores.zookeeper.authority.entering import Entering
from fenced.stores.zookeeper.authority.errors import refused
from fenced.stores.zookeeper.authority.session import ZooKeeperSession
from fenced.stores.zookeeper.authority.tree import (
    NamespaceView,
    Queue,
    ZooKeeperAttempt,
    delay_text,
    tomb_text,
)
from fenced.stores.zookeeper.wire import jute
from fenced.values import timing
from fenced.values.contracts import Runtime, Trait
from fenced.values.model import (
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
            "Places in queues end with that session, too: a dead waiter holds others up as long as a dead holder.",
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
            if mine.places and isinstance(error, Unavailable):
                # It has entered its queues, and a later request of the same ask could not be sent.
                raise Indeterminate(str(error)) from error
            if not mine.places:
                # An earlier ask whose outcome is unknown may have made its places: then `_expire` looks for them.
                if mine.asks == 1 and isinstance(error, Unavailable | Misconfigured | Misuse):
                    self._forget(mine)
                elif mine.over:
                    # Another caller has ended it, and could not see the request that we sent after that: let `_expire`
                    # find and delete what that request makes.
                    home.carry(mine)
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
        found = None
        if not mine.over and not mine.places:
            entered = await self._enter(home, mine, wait, until)
            if isinstance(entered, AskAnswer):
                return entered
            found = entered
        while not mine.over and not mine.taken:
            stands = found or await self._standing(home, mine, until)
            found = None
            if stands is None:
                return await self._revoked(home, mine, until)
            queues, space = stands
            if space is None:
                continue
            if any(mine.public not in queue.publics for queue in queues.values()):
                return await self._revoked(home, mine, until)
            ahead = max(queue.publics.index(mine.public) for queue in queues.values())
            delay = await self._delayed(home, mine.public, queues, until)
            if not ahead and not delay:
                answer = await self._grant(home, mine, queues, space, start, until)
                if answer is not None:
                    return answer
            elif not mine.queued and (ahead > QUEUE_MAX or not wait):
                return await self._turn_away(home, mine, queues, space, until)
            else:
                mine.queued = True
                mine.expires = self._runtime.now() + home.place_seconds
                waiting = await self._stand(home, mine, queues, space, delay, until)
                if waiting is not None:
                    return waiting
        return Ended(mine.state)

    async def _grant(
        self,
        home: ZooKeeperSession,
        mine: ZooKeeperAttempt,
        queues: dict[str, Queue],
        space: NamespaceView,
        start: float,
        until: float,
    ) -> AskAnswer | None:
        """Grant: we are first in every queue. None: read the queues again."""
        if mine.state == "waiting":
            if self._too_old(mine.zxid, queues, space):
                # The floor was raised, or the name was taken by force, while we were in the queue.
                await self._mint(home, mine, until)
                return None
            if mine.lock_delay and not mine.delaying:
                await self._announce_delay(home, mine, until)
            token = space.token(mine.zxid)
            mine.token = token if token < TOKEN_MAX else await self._last_token(home, mine, until)
            if home.confirmed + home.ttl <= self._runtime.now():
                return None  # the leader may be about to end the session: the next request is sent on a new connection
            if home.attempts.get(mine.public) is mine:  # otherwise the session has ended meanwhile
                mine.state, mine.watched = "granted", False
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
        held_by, ahead, _ = await self._whom(home, mine, queues, space, [], until)
        # All of its nodes are deleted, or it has none in our session any more.
        await home.exchange(jute.multi(self._deletions(mine)), until=until)
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
        """Watch the places directly ahead, and our own node. None: one of them is gone, read the queues again."""
        watches = [self._paths.attempt(mine.public)]  # another client may take the attempt over
        for name, queue in queues.items():
            if at := queue.publics.index(mine.public):
                watches.append(self._paths.place(name, queue.children[at - 1]))
        held_by, ahead, check_in = await self._whom(home, mine, queues, space, watches, until)
        # Nobody can take a place between us and the one directly ahead. So while that exists we are not first; and when
        # it is deleted, the event comes, because existence was read and the watch set in one request.
        if not mine.watched:
            return None
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
                batches.setdefault(self._session(mine.ttl), []).append(mine)
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
        if failures and all(isinstance(answer, Unknown) for answer in answers.values()):
            raise failures[0]
        return [answers[public] for public in publics]

    async def _keep(
        self, session: ZooKeeperSession, batch: list[ZooKeeperAttempt], until: float
    ) -> dict[str, RenewAnswer]:
        live = [mine for mine in batch if not mine.over and mine.places]
        answers: dict[str, RenewAnswer] = {mine.public: Gone() for mine in batch if not mine.places}
        if not live:
            return answers | {mine.public: Ended(mine.state) for mine in batch if mine.over}
        new = [mine for mine in live if mine.state == "granted" and not mine.watched]
        watched = [(mine, list(mine.places.values())) for mine in new]
        sent = self._runtime.now()
        (kept,) = await self._watch_and(session, watched, [jute.sync(self._paths.keep)], until)
        if kept.error:
            raise refused(kept.error, self.url)
        lost = {mine.public for mine in new if not mine.watched}
        for mine in live:
            if mine.public in lost and not mine.over and not await self._is_placed(session, mine, until):
                answers[mine.public] = await self._revoked(session, mine, until)
            elif mine.state == "granted":
                kept_for = session.renewed(sent)
                mine.expires = max(mine.expires, sent + kept_for)  # another call may have granted it since
                answers[mine.public] = Kept(kept_for)
            elif mine.state == "waiting":
                mine.expires = sent + session.place_seconds
                answers[mine.public] = await self._waits(session, mine, until)
        return answers | {mine.public: Ended(mine.state) for mine in batch if mine.over}

    async def _is_placed(self, session: ZooKeeperSession, mine: ZooKeeperAttempt, until: float) -> bool:
        """Whether it has all its places, in our session."""
        return await self._standing(session, mine, until) is not None and len(mine.places) == len(mine.names)

    async def _waits(self, home: ZooKeeperSession, mine: ZooKeeperAttempt, until: float) -> RenewAnswer:
        while not mine.watched:
            stands = await self._standing(home, mine, until)
            if stands is None or len(mine.places) < len(mine.names):
                return await self._revoked(home, mine, until)
            queues, space = stands
            delay = await self._delayed(home, mine.public, queues, until)
            if not delay and not any(queue.publics.index(mine.public) for queue in queues.values()):
                return Waiting(0.0)
            waiting = await self._stand(home, mine, queues, space, delay, until)
            if waiting is not None:
                return Waiting(waiting.check_in)
        return Waiting(home.ttl)

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
        if not mine.over and not mine.places and await self._standing(home, mine, until) is None:
            self._drop(mine, state)
            return Released()
        while not mine.over:
            doubted, mine.doubted = mine.doubted, True
            ends = await self._endings(home, mine, keep, until)
            (reply,) = await home.exchange(jute.multi(ends), until=until)
            failed = jute.failure(self._results(reply))
            if failed is None or (doubted and failed == (0, jute.NO_NODE)):
                self._drop(mine, state, done=True)
                return Released()
            if failed[1] not in (jute.NO_NODE, jute.BAD_VERSION):
                raise refused(failed[1], self.url)
            version = mine.version
            if await self._standing(home, mine, until) is None or mine.version == version:
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
