"""Elections in seeded worlds: messages are lost, late and doubled, candidates pause, crash and drift, the authority and
the followers restart. What runs is the candidate that both colours share, and the follower that ships.

Checked besides the promises of the leases: a term has one leader (E1), no follower obeys an earlier term after a later
one (E2), and once the faults have ended somebody leads (E3).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

from fenced.client.guarding import Fence
from fenced.core.holding import GrantState
from fenced.errors import FencedError, Indeterminate, LeaseLost, Refused, Unavailable
from fenced.recipes.candidates import Candidate
from fenced.recipes.election import Follower
from fenced.runtime.blocking import step
from fenced.stores.memory.guard import MemoryValues
from fenced.values.model import Credential, Stamp
from fenced_testkit.runtime.world import Process
from fenced_testkit.simulation import simulate
from fenced_testkit.worlds.client import INTERRUPTS, LONG_TTL, SimulatedClient
from fenced_testkit.worlds.faults import MessageServer
from fenced_testkit.worlds.judge import PromiseBroken
from fenced_testkit.worlds.site import Site

WORLDS = 1_000
SEAT = "seat"
FOLLOWERS = 3
ENDINGS: tuple[type[BaseException], ...] = (FencedError, *INTERRUPTS)


class Disk:
    """The marks of a follower: what survives its restart."""

    def __init__(self) -> None:
        self._guard = MemoryValues()

    def announce(self, fence: Fence, name: str) -> None:
        assert isinstance(fence, Stamp)
        step(self._guard.announce(Credential((fence,), (name,))))


class FollowerServer:
    """A follower in a process that crashes."""

    def __init__(self, site: ElectionSite, number: int) -> None:
        self.site, self.name = site, f"follower {number}"
        self.server = MessageServer(site.world, site.network, self.name)
        self._disk = Disk()
        self._highest, self._of = 0, dict[int, str]()
        self._follower = self._fresh()

    def _fresh(self) -> Follower:
        marks: Any = self._disk if self.site.durable else None
        return Follower(SEAT, marks)

    def restart(self) -> None:
        if self.server.process.alive:
            self.server.restart(self.site.world.rng.uniform(0.05, 1.0))
            self._follower = self._fresh()

    def obey(self, stamp: Stamp, term: int, grant: str) -> None:
        judge = self.site.judge
        if self.site.followers_check:
            self._follower.accept(stamp)
        if term < self._highest:
            judge.broken("E2", f"{self.name} obeyed term {term} after {self._highest}")
        self._highest = term
        if self._of.setdefault(term, grant) != grant:
            judge.broken("E1", f"{self.name}: two leaders of term {term}")
        judge.count("obeyed")


class CandidateClient(SimulatedClient):
    """A process with one candidate, which leads for a while, and hands over or resigns."""

    site: ElectionSite

    def __init__(self, site: Site, process: Process, keeper: Process) -> None:
        super().__init__(site, process, keeper)
        let_expire = self.engine.let_expire

        def watched(lease: GrantState, reason: str = "abandoned") -> None:
            site.judge.observed.leaves(lease.secret)  # a wish: it is left to expire, not forgotten
            let_expire(lease, reason)

        self.engine.let_expire = watched  # type: ignore[method-assign]

    async def _work(self, worker: str) -> None:
        rng, judge = self.site.world.rng, self.site.judge
        priority = rng.choice((0, 0, 0, 3))
        candidate = Candidate(lambda: self.engine, SEAT, self.process.name, priority, self.site.ttl)
        while True:
            try:
                await self._lead(candidate)
            except LeaseLost:
                judge.count("lost")
            except FencedError:
                judge.count("errors")
            except INTERRUPTS:
                judge.count("interrupted")
            judge.progressed(worker, self.process)
            with contextlib.suppress(*INTERRUPTS):
                await self._sleep(rng.uniform(0, 0.2))

    async def _lead(self, candidate: Candidate) -> None:
        rng, judge = self.site.world.rng, self.site.judge
        seat = await candidate.campaign()
        try:
            self.site.begins(seat)
            for _ in range(rng.choice((1, 2, 4))):
                await self._command(seat)
                if seat.lost_reason is not None:
                    break
            if rng.random() < 0.3:
                judge.count("wishes")
                others = [process.name for process in self.site.processes if "/" not in process.name]
                await candidate.wish(rng.choice(others), 1.0)
                await candidate.resign()
        except ENDINGS:
            await candidate.leave(seat, raised=True)
            raise
        await candidate.leave(seat, raised=False)

    async def _command(self, seat: GrantState) -> None:
        rng, judge = self.site.world.rng, self.site.judge
        stamp = seat.next_stamp()
        if not self.site.healed and rng.random() < self.site.faults.pause_aimed:
            self._pause()
            await self._sleep(0.01)
        for follower in rng.sample(self.site.followers, 2):
            obey = partial(follower.obey, stamp, self.site.term_of(seat), seat.grant)
            try:
                await follower.server.ask(self.process, self.runtime, obey, self.runtime.now() + 0.4)
            except Refused:
                judge.count("refused by a follower")
            except (Unavailable, Indeterminate):
                judge.count("no answer of a follower")
        await self._sleep(rng.random() * 0.5 * self.site.pace)


class ElectionSite(Site):
    """One world. A subclass plants a mistake."""

    durable = True
    followers_check = True

    def __init__(self, seed: int | str, *, keep_log: bool = False) -> None:
        super().__init__(seed, keep_log=keep_log)
        self.ttl = min(self.ttl, 2.0) if self.ttl == LONG_TTL else self.ttl
        self.progress_within = float("inf")  # a candidate of low priority may wait for ever
        self._led_at = 0.0
        self._leaders = dict[int, str]()
        self.followers = [FollowerServer(self, number) for number in range(FOLLOWERS)]
        for follower in self.followers:
            self._plan(3.0, follower.restart)

    def client(self, process: Process, keeper: Process) -> SimulatedClient:
        return CandidateClient(self, process, keeper)

    def term_of(self, seat: GrantState) -> int:
        return seat.token

    def begins(self, seat: GrantState) -> None:
        term = self.term_of(seat)
        if self._leaders.setdefault(term, seat.grant) != seat.grant:
            self.judge.broken("E1", f"two leaders of term {term}")
        self.judge.count("terms")
        self._led_at = self.world.now

    def _conclude(self) -> None:
        super()._conclude()
        if self._led_at < self.ends_at - 3 * self.pace - 2.0:
            self.judge.broken("E3", f"nobody began to lead since {self._led_at:.2f}")


class FollowersForget(ElectionSite):
    """Followers that remember in memory alone, and restart."""

    durable = False


class FollowersDoNotCheck(ElectionSite):
    """Followers that obey whoever commands them."""

    followers_check = False


class LocalTerms(ElectionSite):
    """Each candidate counts its terms itself."""

    def __init__(self, seed: int | str, *, keep_log: bool = False) -> None:
        self._counted: dict[str, int] = {}
        self._counts = Counter[str]()
        super().__init__(seed, keep_log=keep_log)

    def term_of(self, seat: GrantState) -> int:
        if seat.grant not in self._counted:
            who = seat.names[-1]
            self._counts[who] += 1
            self._counted[seat.grant] = self._counts[who]
        return self._counted[seat.grant]


MISTAKES = (FollowersForget, FollowersDoNotCheck, LocalTerms)


def run(
    seeds: Iterable[int], site_type: type[ElectionSite] = ElectionSite
) -> tuple[Counter[str], dict[str, str]]:
    """What happened, and by seed what promise was broken."""
    counts, broken = Counter[str](), dict[str, str]()
    for seed in seeds:
        try:
            counts.update(simulate(seed, site_type).counts)
        except PromiseBroken as error:
            broken[str(seed)] = str(error)
    return counts, broken


def evidence(worlds: int = WORLDS) -> dict[str, Any]:
    counts, broken = run(range(worlds))
    return {"seeds": f"0-{worlds - 1}", "broken": broken, "counts": dict(counts.most_common())}
