"""The protocol as a model that is searched completely: authority, clients, guard, and a network that may do anything.

A lease may end at any moment, so there is no clock, and what holds here holds for every clock. A message that was sent
may arrive at any later time, again and again, and its reply may be lost: so loss, delay, doubling, reordering, pauses
and crashes need no rules of their own. The guard is not modelled: it is `judge`, which is proven beside it.

The search goes breadth first. The first violation it meets is one with the fewest steps, and is told in words.
"""

from __future__ import annotations

import gc
import itertools
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from fenced.values.decision import Mark, Mode, ModeName, Rule, Ruling, Verdict, judge, rule_on
from fenced.values.model import Stamp
from tests.proofs.modelled import (
    ENFORCING,
    FORGOTTEN,
    HELD,
    NEW,
    OVER,
    TAKEN,
    Attempt,
    GuardMark,
    Setting,
    World,
)


class Broken(Exception):
    """A promise was broken in a step."""


class Step(NamedTuple):
    words: str
    world: World


class Found(NamedTuple):
    """How a search ended: the number of states, and the shortest story of a violation."""

    states: int
    story: tuple[str, ...] = ()

    @property
    def broken(self) -> str:
        return self.story[-1] if self.story else ""


@lru_cache(maxsize=100_000)
def guarded(
    mark: GuardMark | None,
    token: int,
    grant: int,
    seq: int,
    realms: tuple[int, int],
    rule: Rule,
    announce: bool,
) -> tuple[Verdict, GuardMark | None]:
    """The verdict of the guard that ships, and the mark afterwards. Each arrival of a message is a new operation."""
    known = None if mark is None else Mark(mark[0], str(mark[2]), mark[1])
    stamp = Stamp(str(realms[0]), ("n",), token, seq, str(grant))
    operation = None if announce else "this one"
    judged = judge(
        known, stamp, name="n", rule=rule, realm=str(realms[1]), announce=announce, operation=operation
    )
    new = judged.mark
    return judged.verdict, None if new is None else (new.token, new.seq, int(new.grant))


@lru_cache(maxsize=1000)
def ruled(verdict: Verdict, mode: ModeName) -> Ruling:
    return rule_on(verdict, Mode(mode, 100.0), "n")


def put(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


class Protocol:
    """The steps that are possible in a world of this setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.programs = [setting.program(attempt) for attempt in range(len(setting.leases))]
        pairs = itertools.combinations(enumerate(setting.leases), 2)
        self.rivals = [(one, other) for (one, x), (other, y) in pairs if not set(x).isdisjoint(y)]

    def first(self) -> World:
        nothing = (0,) * len(self.setting.names)
        attempt = Attempt(seen=nothing, versions=nothing)
        return World((attempt,) * len(self.setting.leases), nothing, nothing, (None,) * len(nothing), nothing)

    def may(self, what: str) -> bool:
        return what in self.setting.may

    def wrong(self, mistake: str) -> bool:
        return mistake in self.setting.mistakes

    def steps(self, w: World) -> Iterator[Step]:
        for number, it in enumerate(w.attempts):
            yield from self._asks(w, number, it)
            yield from self._arrives(w, number, it)
            yield from self._ends(w, number, it)
        yield from self._operated(w)
        if self.may("unstamped"):
            yield from self._unstamped(w)

    def become(self, w: World, number: int, it: Attempt) -> World:
        return w._replace(attempts=(*w.attempts[:number], it, *w.attempts[number + 1 :]))

    def _shares(self, one: int, other: int) -> bool:
        mine = self.setting.leases[one]
        if self.wrong("the first name is enough"):
            mine = mine[0]
        return not set(mine).isdisjoint(self.setting.leases[other])

    # The authority.

    def _asks(self, w: World, number: int, it: Attempt) -> Iterator[Step]:
        who, leases = "ABCD"[number], self.setting.leases
        if not it.asked:
            # Of attempts that are alike it does not matter which comes first.
            before = [w.attempts[n] for n in range(number) if leases[n] == leases[number]]
            if all(other.asked for other in before):
                yield Step(f"{who} asks", self.become(w, number, it._replace(asked=True)))
            return
        again = it.state in (TAKEN, OVER) and self.wrong("no tombstone")
        again = again or (it.state == FORGOTTEN and self.wrong("settled asks are new"))
        if (it.state == NEW or again) and not w.doubted:
            others = [n for n in range(len(leases)) if n != number and self._shares(number, n)]
            if not any(self._blocks(w.attempts[n], w) for n in others):
                yield self._granted(w, number, it)
        if it.state == NEW and not it.stopped:
            yield Step(
                f"{who} withdraws its ask", self.become(w, number, it._replace(state=OVER, stopped=True))
            )

    def _blocks(self, other: Attempt, w: World) -> bool:
        return other.state in (HELD, TAKEN) and other.realm == w.serving

    def _granted(self, w: World, number: int, it: Attempt) -> Step:
        who, token = "ABCD"[number], w.counters[w.serving] + 1
        if it.token:
            raise Broken(f"{who} is granted once more: one attempt, two tokens")
        mine = set(self.setting.leases[number])
        for other, that in enumerate(w.attempts):
            if other == number or that.realm != w.serving or mine.isdisjoint(self.setting.leases[other]):
                continue
            if that.delays:
                raise Broken(f"{who} is granted a name that lock_delay or keep still blocks")
        if not w.restored and token <= w.top[w.serving]:
            raise Broken(f"{who} is granted token {token} after {w.top[w.serving]}")
        new = w._replace(
            counters=put(w.counters, w.serving, token),
            top=put(w.top, w.serving, max(token, w.top[w.serving])),
        )
        held = it._replace(state=HELD, token=token, realm=w.serving)
        return Step(f"{who} is granted token {token}", self.become(new, number, held))

    def _ends(self, w: World, number: int, it: Attempt) -> Iterator[Step]:
        who = "ABCD"[number]
        if it.state == HELD:
            yield Step(f"{who}'s lease ends", self.become(w, number, it._replace(state=OVER)))
            if self.may("delay"):
                taken = it._replace(state=TAKEN, delays=True)
                yield Step(f"{who}'s lease ends, and its name stays taken", self.become(w, number, taken))
            if self.may("force"):
                forced = self.become(w, number, it._replace(state=OVER))
                token = w.counters[it.realm] + 1
                yield Step(
                    f"an operator forces {who} out",
                    forced._replace(
                        counters=put(w.counters, it.realm, token),
                        top=put(w.top, it.realm, max(token, w.top[it.realm])),
                    ),
                )
        if it.delays:
            state = OVER if it.state == TAKEN else it.state
            over = it._replace(state=state, delays=False)
            yield Step(f"{who}'s name is free again", self.become(w, number, over))
        forgets = it.state == OVER or (it.state == TAKEN and self.wrong("settled frees the name"))
        if forgets and it.token and self.may("delay"):
            yield Step(f"{who} is settled", self.become(w, number, it._replace(state=FORGOTTEN)))
        if it.state == OVER and it.token and self.wrong("a renewal revives"):
            yield Step(f"{who}'s renewal arrives", self.become(w, number, it._replace(state=HELD)))

    # The guard.

    def _arrives(self, w: World, number: int, it: Attempt) -> Iterator[Step]:
        """A message of a holder, or a copy of one that it has sent before."""
        program = self.programs[number]
        if not it.token:
            return
        for index in range(it.sent):
            if program[index][0] != "read" and (index != it.at or it.stopped):
                yield from self._copied(w, number, it, index)
        if it.stopped or it.at == len(program):
            return
        what, name, _ = program[it.at]
        it = it._replace(sent=it.at + 1)
        if what != "read":
            yield from self._answered(w, number, it)
            return
        seen, versions = put(it.seen, name, w.values[name]), put(it.versions, name, w.versions[name])
        read = it._replace(at=it.at + 1, seen=seen, versions=versions)
        yield Step(f"{'ABCD'[number]} reads", self.become(w, number, read))

    def _copied(self, w: World, number: int, it: Attempt, index: int) -> Iterator[Step]:
        outcome, _, new = self._judged(w, number, it, index)
        if new != w:
            yield Step(f"a copy of {self._words(number, index)} arrives: {outcome}", new)

    def _answered(self, w: World, number: int, it: Attempt) -> Iterator[Step]:
        """The message for whose reply a client waits."""
        outcome, verdict, new = self._judged(w, number, it, it.at)
        words = f"{self._words(number, it.at)} arrives: {outcome}"
        if outcome == "refused":
            yield Step(words, self.become(new, number, it._replace(stopped=True)))
            return
        yield Step(words, self._acknowledged(new, number, it, verdict))
        if self.programs[number][it.at][0] == "write":
            # Of an announcement it makes no difference: its client may be slow to go on, too.
            yield Step(f"{words}; its reply is lost", self.become(new, number, it))

    def _judged(self, w: World, number: int, it: Attempt, index: int) -> tuple[str, Verdict, World]:
        what, name, seq = self.programs[number][index]
        verdict, mark = self._verdict(w, number, name, seq)
        if ruled(verdict, self.setting.modes[w.mode]) is Ruling.REFUSE:
            repeated = verdict in (Verdict.DUPLICATE, Verdict.OUT_OF_ORDER)
            held = it.state == HELD and it.realm == w.serving == w.guard_realm
            if held and not repeated and self.setting.holder_is_admitted:
                raise Broken(f"{'ABCD'[number]} holds the lease, and is refused")
            return "refused", verdict, w
        if verdict is Verdict.APPLIED:
            return "applied before", verdict, w
        if what == "write" and self.may("expect") and w.versions[name] != it.versions[name] + seq - 1:
            return "refused", verdict, w
        if mark != w.marks[name]:
            w = w._replace(marks=(*w.marks[:name], mark, *w.marks[name + 1 :]))
        if what == "write":
            w = self._written(w, number, it, name, seq)
        return "admitted" if verdict is Verdict.ADMIT else "let through", verdict, w

    def _verdict(self, w: World, number: int, name: int, seq: int) -> tuple[Verdict, GuardMark | None]:
        it, mark = w.attempts[number], w.marks[name]
        realms = (it.realm, it.realm if self.wrong("the realm is not compared") else w.guard_realm)
        grant = number
        if mark is not None and mark[0] == it.token and self.wrong("reused is admitted"):
            grant = mark[2]
        verdict, new = guarded(mark, it.token, grant, seq, realms, self.setting.rule, seq == 0)
        return verdict, mark if seq == 0 and self.wrong("announcing changes no mark") else new

    def _update(self, number: int, seq: int) -> int:
        """The bit of the update that a write with this seq adds."""
        return 1 << (number * self.setting.writes + seq - 1)

    def _written(self, w: World, number: int, it: Attempt, name: int, seq: int) -> World:
        mine = sum(self._update(number, each) for each in range(1, seq + 1))
        versions = put(w.versions, name, w.versions[name] + 1) if self.may("expect") else w.versions
        return w._replace(values=put(w.values, name, it.seen[name] | mine), versions=versions)

    def _acknowledged(self, w: World, number: int, it: Attempt, verdict: Verdict) -> World:
        what, name, seq = self.programs[number][it.at]
        enforced = self.setting.modes[w.mode] in ENFORCING and verdict in (Verdict.ADMIT, Verdict.APPLIED)
        if what == "write" and (enforced or self.setting.counts_observed):
            kept = w.acknowledged[name] | self._update(number, seq)
            w = w._replace(acknowledged=put(w.acknowledged, name, kept))
        return self.become(w, number, it._replace(at=it.at + 1))

    def _words(self, number: int, index: int) -> str:
        what, name, seq = self.programs[number][index]
        which = f" {seq}" if self.setting.writes > 1 and seq else ""
        where = f" of {self.setting.names[name]}" if len(self.setting.names) > 1 else ""
        return f"{'ABCD'[number]}'s {'announcement' if what == 'announce' else 'write'}{which}{where}"

    # What operators do, and programs that know nothing of leases.

    def _operated(self, w: World) -> Iterator[Step]:
        if self.may("restore"):
            yield from self._restored(w)
        if self.may("move") and w.serving == 0:
            floor = 0 if self.wrong("no floor") else w.top[0] + len(w.attempts) + 1
            yield Step(
                "the leases move to another authority",
                w._replace(serving=1, counters=put(w.counters, 1, floor), top=put(w.top, 1, floor)),
            )
        elif self.may("move") and w.guard_realm == 0:
            yield Step("the guard adopts the new authority", w._replace(guard_realm=1))
        for mode in (w.mode - 1, w.mode + 1):
            if 0 <= mode < len(self.setting.modes):
                name = self.setting.modes[mode]
                # What was promised in a mode that refuses is promised while it lasts.
                stays = name in ENFORCING or self.setting.counts_observed
                kept = w.acknowledged if stays else (0,) * len(w.acknowledged)
                yield Step(f"the mode becomes {name}", w._replace(mode=mode, acknowledged=kept))

    def _restored(self, w: World) -> Iterator[Step]:
        if w.backup < 0:
            yield Step("the authority is backed up", w._replace(backup=w.counters[0]))
        elif w.counters[0] > w.backup and not w.restored:
            ended = tuple(
                it._replace(state=OVER) if it.state == HELD and it.realm == 0 else it for it in w.attempts
            )
            new = w._replace(counters=put(w.counters, 0, w.backup), restored=True, attempts=ended)
            yield Step("the authority is restored", new._replace(doubted=self.may("notice")))
        if w.doubted:
            raised = put(w.counters, 0, w.top[0])
            yield Step("its floor is raised", w._replace(counters=raised, doubted=False, restored=False))

    def _unstamped(self, w: World) -> Iterator[Step]:
        if w.outsider is None:
            yield Step("a program without a lease reads", w._replace(outsider=w.values))
        elif ruled(Verdict.MISSING, self.setting.modes[w.mode]) is not Ruling.REFUSE:
            yield Step("it writes back what it read", w._replace(values=w.outsider))

    # The promises.

    def check(self, before: World, w: World) -> None:
        for old, new in zip(before.marks, w.marks, strict=True):
            if old is not None and (new is None or new[:2] < old[:2]):
                raise Broken("a mark falls")
        if any(acknowledged & ~value for acknowledged, value in zip(w.acknowledged, w.values, strict=True)):
            raise Broken("an acknowledged update is lost")
        for one, other in self.rivals:
            if self._holds(w, w.attempts[one]) and self._holds(w, w.attempts[other]):
                raise Broken("two hold the same name")

    def _holds(self, w: World, it: Attempt) -> bool:
        return it.state == HELD and it.realm == w.serving


def search(setting: Setting) -> Found:
    """Every world that can be reached; ends at the first violation."""
    collects = gc.isenabled()
    gc.disable()  # it would look at millions of tuples again and again, and nothing here refers to itself
    try:
        return _search(Protocol(setting))
    finally:
        if collects:
            gc.enable()


def _search(protocol: Protocol) -> Found:
    first = protocol.first()
    came: dict[World, tuple[World, str] | None] = {first: None}
    todo = deque([first])
    while todo:
        world = todo.popleft()
        try:
            for words, new in protocol.steps(world):
                if new not in came:
                    came[new] = (world, words)
                    try:
                        protocol.check(world, new)
                    except Broken:
                        world = new
                        raise
                    todo.append(new)
        except Broken as broken:
            return Found(len(came), (*_told(came, world), str(broken)))
    return Found(len(came))


def _told(came: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    """The steps to a world, from the beginning."""
    story: list[str] = []
    while (link := came[world]) is not None:
        world, words = link
        story.insert(0, words)
    return story
