"""What clients were told about their attempts, and the promises that follow from that on every store.

A request was handled at some moment between its sending and its answer. So a place in a queue, a lease, and the time
for which a released name stays taken last at least as long as if that moment was the sending.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fenced.core.settling import OWNER_TRY_SECONDS
from fenced.values import timing
from fenced.values.model import (
    Ask,
    AskAnswer,
    Busy,
    Ended,
    Granted,
    Kept,
    ReleaseAnswer,
    Released,
    RenewAnswer,
    Waiting,
    grant_id,
)

if TYPE_CHECKING:
    from fenced_testkit.runtime.world import Process
    from fenced_testkit.worlds.judge import Judge

DRIFT = 0.01
"""How much of a duration a drifting clock may take away from it. More than any clock of a world drifts."""

RENEWING = ("open", "renew")
"""The calls of a keeper. It makes one after the other."""

ANSWERS_AGAIN = 4.0
"""So many seconds after the faults have ended, every server has answered every client."""


@dataclass(eq=False, slots=True)
class ObservedAttempt:
    """One attempt as its client sees it. All times are the world's."""

    public: str
    names: tuple[str, ...]
    ttl: float
    lock_delay: float
    asked: float
    """When its first ask was sent."""
    owner: object
    """The task that asks."""
    process: Process
    queued: float = math.inf
    """When the first answer came that it waits."""
    place_until: float = -math.inf
    granted: float = math.inf
    """When the first answer came that it is granted."""
    token: int = 0
    held_until: float = -math.inf
    is_open: bool = False
    """Whether the authority may have it, as far as its client can know."""
    leaves: bool = False
    """Whether its client has sent a release or a withdrawal."""
    at_least_until: float = -math.inf
    """If it is released: when its names may be granted again, by its at_least_for."""
    kept_until: float = -math.inf
    """It was released: until then its names stay taken."""
    renew_until: float = math.inf
    """When its max_hold ends."""
    failed: float = math.inf
    """When the first renewal failed since one has succeeded."""
    kept: float = -math.inf
    """When the last renewal was answered that succeeded. After the holder's deadline that does not help any more."""
    tries: int = 0
    """Renewals since one has succeeded."""

    def taken_until(self) -> float:
        """Until when nobody else may be granted its names."""
        if self.leaves or self.granted == math.inf:
            return self.kept_until
        return self.held_until + self.lock_delay * (1 - DRIFT)

    def waits(self) -> bool:
        return not self.leaves and self.queued < math.inf and self.granted == math.inf

    def matters(self, now: float) -> bool:
        """Whether it may still forbid a grant to somebody else."""
        return max(self.place_until, self.taken_until()) > now


class Observed:
    """The attempts of a world."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._world = judge.world
        self._all: dict[str, ObservedAttempt] = {}
        self._live: dict[str, ObservedAttempt] = {}
        self._last: dict[str, ObservedAttempt] = {}
        """By name: the last attempt that was granted."""
        self._opened: dict[Process, float] = {}
        """When a client, or its keeper, began to open its authority last."""
        self._newest: dict[object, ObservedAttempt] = {}
        """By task: its last attempt."""

    def __getitem__(self, public: str) -> ObservedAttempt:
        return self._all[public]

    def asks(self, ask: Ask, owner: object, process: Process) -> ObservedAttempt:
        public = grant_id(ask.secret)
        found = self._all.get(public)
        if found is None:
            now = self._world.now
            found = ObservedAttempt(public, ask.names, ask.ttl, ask.lock_delay, now, owner, process)
            self._all[public] = self._live[public] = self._newest[owner] = found
        return found

    def doubted(self, mine: ObservedAttempt) -> None:
        """Its client got no answer, or did not wait for it."""
        mine.is_open = True

    def judge_left(self, healed_at: float) -> None:
        """L9: an attempt that its task has given up for another one was released or withdrawn.

        Those that were begun before the faults ended, but not so long before that the settler may have forgotten them
        when servers answered again: they had expired. Nor those whose settler could not even open its authority.
        """
        opened = {process.name.removesuffix("/keeper"): at for process, at in self._opened.items()}
        for mine in self._all.values():
            given_up = mine.process.alive and self._newest[mine.owner] is not mine
            given_up &= opened.get(mine.process.name, -math.inf) <= mine.asked
            if given_up and mine.is_open and not mine.leaves and mine.asked < healed_at:
                remembered = mine.asked + OWNER_TRY_SECONDS + timing.repeat_for(mine.ttl)
                if remembered > healed_at + ANSWERS_AGAIN and not mine.process.paused_since(mine.asked):
                    self._judge.broken("L9", f"{mine.public[:6]} was given up, but not withdrawn")

    def answered(self, mine: ObservedAttempt, answer: AskAnswer, sent: float) -> None:
        now = self._world.now
        if isinstance(answer, Busy):
            if not mine.is_open:
                self._judge.over.add(mine.public)  # no copy of it is on its way, so nothing of it is left
            return
        mine.is_open = not isinstance(answer, Ended)
        if isinstance(answer, Waiting) and mine.queued == math.inf:
            mine.queued = now
            mine.place_until = sent + self._judge.place_seconds(mine.ttl)
        elif isinstance(answer, Granted):
            mine.held_until = max(mine.held_until, sent + answer.remaining)
            if mine.granted == math.inf:
                mine.granted, mine.token = now, answer.token
                self._judge_grant(mine)
                self._last |= dict.fromkeys(mine.names, mine)

    def _others(self, mine: ObservedAttempt) -> Iterator[ObservedAttempt]:
        now = self._world.now
        for public, other in list(self._live.items()):
            if not other.matters(now) and other is not mine:
                del self._live[public]
            elif other is not mine and not set(other.names).isdisjoint(mine.names):
                yield other

    def _judge_grant(self, mine: ObservedAttempt) -> None:
        for other in self._others(mine):
            if other.token < mine.token and other.taken_until() > self._world.now:
                self._early(mine, other)
            if (
                self._judge.fifo
                and other.waits()
                and other.queued < mine.asked
                and other.place_until > self._world.now
            ):
                self._judge.broken(
                    "I14", f"{mine.public[:6]} was granted {mine.names} ahead of {other.public[:6]}"
                )

    def _early(self, mine: ObservedAttempt, other: ObservedAttempt) -> None:
        self._judge.broken(
            "I13",
            f"{mine.public[:6]} got {mine.names} at {mine.granted:.4f}, "
            f"but {other.public[:6]} keeps them until {other.taken_until():.4f}",
        )

    def renewed(self, secret: str, answer: RenewAnswer | None, sent: float) -> None:
        """The answer to a renewal; None: there was none."""
        mine = self._all[grant_id(secret)]
        if isinstance(answer, Kept):
            mine.held_until = max(mine.held_until, sent + answer.remaining)
            mine.failed, mine.tries, mine.kept = math.inf, 0, self._world.now
        elif isinstance(answer, Waiting):
            mine.place_until = max(mine.place_until, sent + self._judge.place_seconds(mine.ttl))
        else:
            mine.failed = min(mine.failed, self._world.now)

    def renews(self, secret: str) -> None:
        """L7: a lease is not renewed after its max_hold."""
        mine = self._all[grant_id(secret)]
        mine.tries += 1
        if self._world.now > mine.renew_until:
            self._judge.broken("L7", f"{mine.public[:6]} is renewed after its max_hold")

    def leaves(self, secret: str) -> ObservedAttempt:
        mine = self._all[grant_id(secret)]
        mine.leaves = True
        return mine

    def left(self, mine: ObservedAttempt, answer: ReleaseAnswer) -> None:
        """I13, too: somebody may have been granted a name before the answer to its release has arrived."""
        if not isinstance(answer, Released):
            return
        mine.kept_until = mine.at_least_until
        for name in mine.names:
            last = self._last.get(name)
            if last is not None and last.token > mine.token and last.granted < mine.kept_until:
                self._early(last, mine)

    def opens(self, process: Process) -> None:
        self._opened[process] = self._world.now

    def lost(self, public: str, keeper: Process, deadline: float) -> None:
        """L8: a lease expired for its holder. A renewal was tried, and another one if the first had failed in time."""
        mine = self._all[public]
        if keeper.paused_since(mine.granted) or self._opened.get(keeper, -math.inf) >= mine.granted:
            return
        if self._judge.is_in_a_call(keeper, RENEWING, mine.granted):
            return  # it had begun to open its authority, or to renew others, and has got no answer since
        if mine.tries == 0 and mine.kept < deadline:
            self._judge.broken("L8", f"{public[:6]} expired, and nobody had tried to renew it")
        soon = mine.failed + 2 * timing.retry_after(mine.ttl)
        if mine.tries == 1 and soon < deadline:
            self._judge.broken("L8", f"{public[:6]} expired after one failed renewal at {mine.failed:.4f}")

    def jumped(self) -> None:
        """Every attempt has expired by now, so its client need not end it; asked again, it gets a new place."""
        for mine in self._all.values():
            mine.is_open = False
            mine.queued, mine.place_until = math.inf, -math.inf

    def forgive(self) -> None:
        """A promotion has lost what the replica lacked: nothing from before it forbids a grant."""
        self._live.clear()
        for mine in self._all.values():
            mine.at_least_until = -math.inf
