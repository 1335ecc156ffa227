"""Renewing: one request keeps all leases of a session."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from fenced.errors import FencedError
from fenced.stores.zookeeper.authority.attempt import ZooKeeperAttempt
from fenced.stores.zookeeper.authority.attempts import OwnAttempts
from fenced.stores.zookeeper.authority.granting import TakeOver
from fenced.stores.zookeeper.authority.nodes import LockDelays, Nodes
from fenced.stores.zookeeper.authority.session import SessionCall, ZooKeeperSession
from fenced.stores.zookeeper.authority.watching import PlaceWatch
from fenced.stores.zookeeper.wire import jute
from fenced.values.contracts import Runtime
from fenced.values.model import Ended, Gone, Kept, RenewAnswer, Unknown, Waiting


@dataclass(frozen=True)
class ZooKeeperRenewing:
    """Answers renewals, of holders and of waiters."""

    nodes: Nodes
    own: OwnAttempts
    delays: LockDelays
    watching: PlaceWatch
    take_over: TakeOver
    runtime: Runtime

    async def renew(self, publics: Sequence[str], until: float) -> list[RenewAnswer]:
        answers: dict[str, RenewAnswer] = {}
        batches: dict[ZooKeeperSession, list[ZooKeeperAttempt]] = {}
        failures: list[FencedError] = []
        for public in publics:
            mine = self.own.get(public)
            if mine is None or await self.own.lives_elsewhere(mine, until):
                answers[public] = await self.take_over.renew(public, until)
            else:
                batches.setdefault(self.own.session(mine.ttl), []).append(mine)
        for session, batch in batches.items():
            try:
                answers |= await session.request(functools.partial(self.keep, batch=batch), until)
            except FencedError as error:
                failures.append(error)
                answers |= {mine.public: Unknown(str(error)) for mine in batch}
            for mine in batch:
                if await self.own.lives_elsewhere(mine, until):
                    answers[mine.public] = await self.take_over.renew(mine.public, until)
        if failures and all(isinstance(answer, Unknown) for answer in answers.values()):
            raise failures[0]
        return [answers[public] for public in publics]

    async def keep(self, call: SessionCall, batch: list[ZooKeeperAttempt]) -> dict[str, RenewAnswer]:
        """Renew these, which are all of one session."""
        live = [mine for mine in batch if not mine.over and mine.places]
        kept = await self._keep(call, live) if live else {}
        ended = {mine.public: Ended(mine.phase.value) for mine in batch if mine.over}
        return {mine.public: Gone() for mine in batch} | kept | ended

    async def _keep(self, call: SessionCall, live: list[ZooKeeperAttempt]) -> dict[str, RenewAnswer]:
        # From its first renewal on, the places of a lease are watched: only after an event we read them again.
        new = [mine for mine in live if mine.granted and not mine.watched]
        sent = self.runtime.now()
        watched = [(mine, list(mine.places.values())) for mine in new]
        (kept,) = await self.watching.watch(call, watched, [jute.sync(self.nodes.paths.keep)])
        self.nodes.check(kept)
        for mine in new:
            if not mine.watched and not mine.over and await self.own.standing(call, mine) is None:
                await self.own.revoked(call, mine)
        # What another caller has ended meanwhile is not kept.
        return {mine.public: await self._kept(call, mine, sent) for mine in live if not mine.over}

    async def _kept(self, call: SessionCall, mine: ZooKeeperAttempt, sent: float) -> RenewAnswer:
        if mine.granted:
            kept_for = call.session.renewed(sent)
            mine.expires = max(mine.expires, sent + kept_for)  # another call may have granted it since
            return Kept(kept_for)
        mine.expires = sent + call.session.place_seconds
        while not mine.watched:
            look = await self.own.standing(call, mine)
            if look is None:
                return await self.own.revoked(call, mine)
            delay = await self.delays.left(call, look.queues, mine.public)
            if not delay and not look.ahead(mine.public):
                return Waiting(0.0)
            waiting = await self.watching.stand(call, mine, look, delay)
            if waiting is not None:
                return Waiting(waiting.check_in)
        return Waiting(call.session.ttl)
