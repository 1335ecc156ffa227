"""Ending attempts: released or withdrawn by who has the secret, or taken from their holder by an operator."""

from __future__ import annotations

from dataclasses import dataclass

from fenced.errors import Indeterminate
from fenced.leases.rules import NOBODY, tokens_used_up
from fenced.stores.zookeeper.authority.attempt import NodeRecord, ZooKeeperAttempt, ZooKeeperPhase
from fenced.stores.zookeeper.authority.attempts import OwnAttempts
from fenced.stores.zookeeper.authority.nodes import AT_ONCE, LockDelays, Nodes
from fenced.stores.zookeeper.authority.session import SessionCall
from fenced.stores.zookeeper.authority.tree import chunks, tomb_seconds, tomb_text
from fenced.stores.zookeeper.authority.watching import PlaceWatch
from fenced.stores.zookeeper.wire import jute
from fenced.values import timing
from fenced.values.contracts import Runtime
from fenced.values.model import TOKEN_MAX, Ended, Gone, ReleaseAnswer, Released


@dataclass(frozen=True)
class ZooKeeperEnding:
    """Deletes the nodes of attempts."""

    nodes: Nodes
    own: OwnAttempts
    delays: LockDelays
    watching: PlaceWatch
    runtime: Runtime

    async def finish(self, public: str, how: ZooKeeperPhase, keep: float, until: float) -> ReleaseAnswer:
        mine = self.own.get(public)
        if mine is not None and not await self.own.lives_elsewhere(mine, until):
            home = self.own.session(mine.ttl)
            answer = await home.request(lambda call: self._end(call, mine, how, keep), until)
            if not await self.own.lives_elsewhere(mine, until):
                return answer
        return await self.own.request(lambda call: self._end_unknown(call, public, how), until)

    async def _end(
        self, call: SessionCall, mine: ZooKeeperAttempt, how: ZooKeeperPhase, keep: float
    ) -> ReleaseAnswer:
        if not mine.over and not mine.places and await self.own.standing(call, mine) is None:
            self.own.drop(mine, how)
            return Released()
        if mine.announcing and not mine.over and await self.own.standing(call, mine) is None:
            return await self.own.revoked(call, mine)
        while not mine.over:
            # If an earlier request to end it was carried out and its reply was lost, its own node is gone.
            doubted, mine.ending = mine.ending, True
            steps = await self.delays.endings(call, mine, keep)
            _, failed = await self.nodes.write(call, steps, jute.NO_NODE, jute.BAD_VERSION)
            if failed is None or (doubted and failed == (0, jute.NO_NODE)):
                self.own.drop(mine, how, done=True)
                return Released()
            version = mine.version
            if await self.own.standing(call, mine) is None or mine.version == version:
                return await self.own.revoked(call, mine)
        ended_so = mine.phase in (ZooKeeperPhase.RELEASED, ZooKeeperPhase.WITHDRAWN)
        return Released() if ended_so else Ended(mine.phase.value)

    async def _end_unknown(self, call: SessionCall, public: str, how: ZooKeeperPhase) -> ReleaseAnswer:
        """End an attempt that we did not make. Withdrawn before its ask arrives, it leaves a tombstone."""
        attempt, tomb = self.nodes.paths.attempt(public), self.nodes.paths.tomb(public)
        text = tomb_text(timing.remember_for(0.0))
        bury = [jute.create(attempt, b"", self.nodes.acl), jute.create(tomb, text, self.nodes.acl)]
        while True:
            record = await self.nodes.stored(call, public)
            if record is not None and record.owner == 0:
                return Released()
            if record is None and how is ZooKeeperPhase.RELEASED:
                return Gone()
            steps = bury if how is ZooKeeperPhase.WITHDRAWN else []
            mine = await self._of_another(call, public, record) if record is not None else None
            if mine is not None:
                steps = self.nodes.deletions(mine) + steps
            done = await self.nodes.write(call, steps, jute.NO_NODE, jute.NODE_EXISTS)
            if done.failed is None:
                if mine is not None:
                    mine.end(how, self.runtime.now())
                    self.own.remember(mine)
                return Released()

    async def _of_another(self, call: SessionCall, public: str, record: NodeRecord) -> ZooKeeperAttempt:
        """Another client's attempt, with the nodes that it has now, to be ended."""
        mine = self.own.begin(public, record.names, record.asked, record.lock_delay, record.holder)
        look = await self.nodes.look(call, mine.names)
        mine.places = self.nodes.places(mine, look)
        mine.delaying = any(public in queue.delays for queue in look.queues.values())
        return mine

    # By an operator.

    async def force(self, call: SessionCall, name: str, token: int) -> int | None:
        while self.runtime.now() < call.until:
            look = await self.nodes.look(call, (name,))
            public = next(iter(look.queues[name].publics), None)
            mine = self.own.live(public) if public is not None else None
            if public is None or (mine is not None and not mine.granted):
                return None
            (reply,) = await call.exchange(jute.get_data(self.nodes.paths.attempt(public)))
            record = self.nodes.record(reply)
            held_by = self.watching.held_by(public, record, look.space, self.runtime.now())
            # If somebody deleted the attempt's node, nobody can see its token: any token takes the name.
            if record is not None and (held_by is None or held_by.token != token):
                return None
            if reply.zxid + look.space.added(reply.zxid) >= TOKEN_MAX - 1:
                raise tokens_used_up()
            taken = await self._take(call, public, name, record)
            if taken is not None:
                if mine is not None:
                    self.own.drop(mine, ZooKeeperPhase.REVOKED, done=True)
                return taken
        raise Indeterminate(f"{self.nodes.url}: {name} changes hands too quickly")

    async def _take(self, call: SessionCall, public: str, name: str, record: NodeRecord | None) -> int | None:
        """Delete its nodes. The token that lies between its own and those to come; None: it has changed meanwhile."""
        known = record or NodeRecord((name,), 0.0, 0.0, 0.0, NOBODY, 0, 0, 0)
        forced = await self._of_another(call, public, known)
        # A write to the names records that they were taken: the waiters behind need a newer number.
        marks = [jute.set_data(self.nodes.paths.name(each), b"") for each in forced.names]
        ends = self.nodes.deletions(forced)[record is None :]
        done, after = await call.exchange(jute.multi([*marks, *ends]), jute.get_data(self.nodes.paths.root))
        results, failed = self.nodes.written(done, jute.NO_NODE)
        if failed is not None or results[0].stat is None:
            return None
        zxid = results[0].stat.mzxid
        return zxid + self.nodes.space(after).added(zxid)

    async def tidy_tombs(self, call: SessionCall) -> int:
        clock, tombs = await call.exchange(self.nodes.tick(), jute.get_children(self.nodes.paths.tombs))
        self.nodes.check(clock, tombs)
        now, paths, forgotten = self.nodes.time(clock), self.nodes.paths, 0
        for some in chunks(jute.children_of(tombs.body)[0], AT_ONCE):
            replies = await call.exchange(*(jute.get_data(paths.tomb(public)) for public in some))
            found = [
                (public, *jute.data_of(each.body))
                for public, each in zip(some, replies, strict=True)
                if not each.error
            ]
            old = [public for public, data, stat in found if stat.ctime / 1000 + tomb_seconds(data) <= now]
            if old:
                ends = (
                    [jute.delete(paths.attempt(public)), jute.delete(paths.tomb(public))] for public in old
                )
                await call.exchange(*map(jute.multi, ends))
            forgotten += len(old)
        return forgotten
