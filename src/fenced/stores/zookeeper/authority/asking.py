"""Asking: taking places in queues, and waiting there until the attempt is first."""

from __future__ import annotations

from dataclasses import dataclass, field

from fenced.errors import Indeterminate, Misconfigured, Misuse, Unavailable
from fenced.leases.rules import QUEUE_MAX, reused_attempt
from fenced.stores.zookeeper.authority.attempt import ZooKeeperAttempt, ZooKeeperPhase
from fenced.stores.zookeeper.authority.attempts import OwnAttempts
from fenced.stores.zookeeper.authority.granting import Granting, TakeOver
from fenced.stores.zookeeper.authority.nodes import LockDelays, Nodes
from fenced.stores.zookeeper.authority.session import SessionCall, ZooKeeperSession
from fenced.stores.zookeeper.authority.tree import QueueLook
from fenced.stores.zookeeper.authority.watching import PlaceWatch
from fenced.stores.zookeeper.wire import jute
from fenced.values.contracts import Runtime
from fenced.values.model import Ask, AskAnswer, Busy, Ended, Waiting, grant_id

KNOWN_MAX = 10_000


@dataclass(frozen=True)
class ZooKeeperAsking:
    """Answers asks. An ask is one transaction; after that it only reads, until it is granted or ends."""

    nodes: Nodes
    own: OwnAttempts
    delays: LockDelays
    watching: PlaceWatch
    granting: Granting
    take_over: TakeOver
    runtime: Runtime
    known: dict[str, None] = field(default_factory=dict)
    """Names whose nodes most likely exist."""

    async def ask(self, ask: Ask, start: float, until: float) -> AskAnswer:
        while True:
            mine = self._attempt(ask)
            if await self.own.lives_elsewhere(mine, until):
                continue  # with an attempt that we know nothing about: the server says where its places are
            answer = await self._tries(mine, ask.wait, start, until)
            if not await self.own.lives_elsewhere(mine, until):
                return answer
            if self.runtime.now() >= until:
                raise Indeterminate(f"{self.nodes.url}: other clients take this attempt over again and again")

    def _attempt(self, ask: Ask) -> ZooKeeperAttempt:
        public = grant_id(ask.secret)
        mine = self.own.get(public)
        if mine is None:
            mine = self.own.begin(public, ask.names, ask.ttl, ask.lock_delay, ask.holder)
            self.own.remember(mine)
        elif mine.names and (mine.names, mine.ttl) != (ask.names, ask.ttl):
            raise reused_attempt()
        return mine

    async def _tries(self, mine: ZooKeeperAttempt, wait: bool, start: float, until: float) -> AskAnswer:
        home = self.own.session(mine.ttl)
        mine.asks, mine.asking = mine.asks + 1, mine.asking + 1
        try:
            return await home.request(lambda call: self._try(call, mine, wait, start), until)
        except BaseException as error:
            if not mine.places:
                self._failed(home, mine, error)
            elif isinstance(error, Unavailable):
                # It has entered its queues, and a later request of the same ask could not be sent.
                raise Indeterminate(str(error)) from error
            raise
        finally:
            mine.asking -= 1

    def _failed(self, home: ZooKeeperSession, mine: ZooKeeperAttempt, error: BaseException) -> None:
        """As far as we know it has no places."""
        if mine.asks == 1 and isinstance(error, Unavailable | Misconfigured | Misuse):
            self.own.forget(mine)  # nothing was carried out, and there was no earlier ask that may have been
        else:
            # Its request may have been carried out: in a session that began after it was first carried, or after
            # another caller has ended it without seeing that request. Let `end_overdue` find and delete what it makes.
            home.carry(mine, min(mine.expires, self.runtime.now() + home.place_seconds))

    async def _try(self, call: SessionCall, mine: ZooKeeperAttempt, wait: bool, start: float) -> AskAnswer:
        """One try. It finds the nodes that an earlier, broken try has made."""
        look: QueueLook | None = None
        if not mine.over and not mine.places:
            entered = await self._enter(call, mine, wait)
            if not isinstance(entered, QueueLook):
                return entered
            look = entered
        while not mine.over:
            look = look or await self.own.standing(call, mine)
            if look is None or len(self.nodes.places(mine, look)) < len(mine.names):
                return await self.own.revoked(call, mine)
            answer = await self._answer(call, mine, look, wait, start)
            if answer is not None:
                return answer
            look = None
        return Ended(mine.phase.value)

    async def _answer(
        self, call: SessionCall, mine: ZooKeeperAttempt, look: QueueLook, wait: bool, start: float
    ) -> AskAnswer | None:
        """By what was read, and by nothing else. None: that has changed meanwhile, read again."""
        ahead, delay = look.ahead(mine.public), await self.delays.left(call, look.queues, mine.public)
        if not ahead and not delay:
            return await self.granting.grant(call, mine, look, start)
        if mine.phase is ZooKeeperPhase.PLACED and (ahead > QUEUE_MAX or not wait):
            whom = await self.watching.ahead(call, mine, look)
            # All of its nodes are deleted, or it has none in our session any more.
            await call.exchange(jute.multi(self.nodes.deletions(mine)))
            self.own.forget(mine)
            return Busy(whom.waiters, whom.held_by)
        mine.advance(ZooKeeperPhase.WAITING)
        mine.expires = self.runtime.now() + call.session.place_seconds
        waiting = await self.watching.stand(call, mine, look, delay)
        return None if mine.over else waiting  # another caller has noticed meanwhile that it expired

    # Entering.

    async def _enter(self, call: SessionCall, mine: ZooKeeperAttempt, wait: bool) -> AskAnswer | QueueLook:
        """Take a place in every queue. Without `wait` the queues are read before: usually Busy has written nothing."""
        home = call.session
        if not home.id:
            await call.exchange()  # connects: the server decides the session's ttl
        # If a request may have been sent, only a further write shows whether it is carried out.
        if not wait and mine.phase is ZooKeeperPhase.NEW:
            answer = await self._busy(call, mine)
            if answer is not None:
                return answer
        home.carry(mine, self.runtime.now() + home.place_seconds)
        mine.advance(ZooKeeperPhase.SENT)
        return await self._write_places(call, mine) or await self._recognise(call, mine, wait)

    async def _busy(self, call: SessionCall, mine: ZooKeeperAttempt) -> AskAnswer | QueueLook | None:
        """The answer to one that does not wait, if somebody has a place. None: it can be tried."""
        look = await self.nodes.look(call, mine.names)
        if any(mine.public in queue.publics for queue in look.queues.values()):
            return None  # another client has made its places
        taken = any(queue.publics for queue in look.queues.values())
        if not taken and not await self.delays.left(call, look.queues, mine.public):
            return None
        (reply,) = await call.exchange(jute.get_data(self.nodes.paths.attempt(mine.public)))
        if self.nodes.record(reply) is not None:  # withdrawn before it arrived
            return await self._recognise(call, mine, wait=False)
        whom = await self.watching.ahead(call, mine, look)
        self.own.forget(mine)
        return Busy(whom.waiters, whom.held_by)

    async def _write_places(self, call: SessionCall, mine: ZooKeeperAttempt) -> QueueLook | None:
        """Make the attempt and its places, in one transaction, and read the queues. None: it exists already."""
        paths, acl, attempt = self.nodes.paths, self.nodes.acl, self.nodes.paths.attempt(mine.public)
        # In a multi, only the reply to set_data contains the transaction's number.
        steps = [jute.create(attempt, b"", acl, jute.EPHEMERAL)]
        steps.append(jute.set_data(attempt, mine.text(call.session.ttl)))
        for name in mine.names:
            place = paths.new_place(name, mine.public)
            steps.append(jute.create(place, b"", acl, jute.EPHEMERAL_SEQUENTIAL))
        while True:
            # The server carries the requests of a session out in order: the names exist when the places are made, and
            # the queues are read after that.
            made = [
                jute.create_container(paths.name(name), acl) for name in mine.names if name not in self.known
            ]
            requests = [*made, jute.multi(steps), *self.nodes.looking(mine.names)]
            done, *replies = (await call.exchange(*requests))[len(made) :]
            results, failed = self.nodes.written(done, jute.NODE_EXISTS, jute.NO_NODE)
            if failed == (0, jute.NODE_EXISTS):
                return None
            if failed is None:
                break
            for name in mine.names:  # the server removes the nodes of names that nobody uses
                self.known.pop(name, None)
        if len(self.known) > KNOWN_MAX:
            self.known.clear()
        self.known.update(dict.fromkeys(mine.names))
        assert results[1].stat is not None
        mine.zxid, mine.version = results[1].stat.mzxid, results[1].stat.version
        mine.places = {name: each.path for name, each in zip(mine.names, results[2:], strict=True)}
        # Since it was carried first, another caller may have found the session expired, which removed this attempt from
        # it; the request was then carried out in the next session. So register the attempt again.
        call.session.carry(mine, mine.expires)
        mine.advance(ZooKeeperPhase.PLACED)
        if mine.over:  # withdrawn while it was under way
            call.session.leftovers.append(jute.multi(self.nodes.deletions(mine)))
        return self.nodes.looked(mine.names, replies)

    async def _recognise(
        self, call: SessionCall, mine: ZooKeeperAttempt, wait: bool
    ) -> AskAnswer | QueueLook:
        """The attempt's node exists already: ours (the reply was lost), another client's, or a tombstone."""
        (reply,) = await call.exchange(jute.get_data(self.nodes.paths.attempt(mine.public)))
        record = self.nodes.record(reply)
        if record is None:
            return await self._enter(call, mine, wait)
        if record.owner == 0:
            self.own.forget(mine)
            mine.end(ZooKeeperPhase.WITHDRAWN, self.runtime.now())
            mine.names = ()
            self.own.remember(mine)
            return Ended("withdrawn")
        if (record.names, record.asked) != (mine.names, mine.ttl):
            self.own.forget(mine)
            raise reused_attempt()
        look = await self.nodes.look(call, mine.names)
        if self.own.carries(mine, record):
            self.own.found(call.session, mine, record, look)
            call.session.carry(mine, call.session.confirmed + call.session.place_seconds)
            return look
        if len(self.nodes.places(mine, look)) < len(mine.names):
            self.own.forget(mine)
            return Ended("revoked")
        self.own.lose(mine)  # the caller asks again: for the attempt that we carry then
        again = self.own.begin(mine.public, record.names, record.asked, record.lock_delay, record.holder)
        await self.take_over.move(call, again, record)
        return Waiting(0.0)
