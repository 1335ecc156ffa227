"""The authority kit, wandering part: the requests of one attempt reach one client and then another, and clients die.

That is what happens behind a service with several instances. A client that dies is abandoned: it sends nothing more.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fenced.testing.kit import AuthorityHarness, Checks, asking, ensure, granted
from fenced.values.contracts import Authority
from fenced.values.model import Ask, AskAnswer, Busy, Ended, Gone, Granted, Kept, Released, Waiting

check: Checks[AuthorityHarness] = Checks()
CHECKS = check

TTL = 30.0
SILENCE = 3.0
"""Shorter than the life of a place in a queue that nobody renews."""


def _remembers(authority: Authority) -> bool:
    """Whether every client knows of an attempt that has ended at another one."""
    return all(trait.key != "own-memory" for trait in authority.traits)


async def _kept(authority: Authority, ask: Ask, where: str) -> None:
    (answer,) = await authority.renew([ask.secret])
    ensure(isinstance(answer, Kept), f"renewed at {where}: kept, not {answer}")


async def _waits(authority: Authority, ask: Ask) -> None:
    answer = await authority.ask(ask)
    ensure(isinstance(answer, Waiting), f"it waits, not {answer}")


@check()
async def a_lease_is_renewed_by_turns(h: AuthorityHarness) -> None:
    """Asked for at one client, asked for again at another, renewed at all of them in turn: one lease with one token."""
    clients = a, b, c = [await h.authority() for _ in range(3)]
    for names in (("orders",), ("one", "two")):
        ask = asking(h.runtime, *names, ttl=TTL, lock_delay=0.0 if len(names) == 1 else 5.0)
        token = (await granted(a, ask)).token
        again = await granted(b, ask)
        ensure(again.token == token, "the same grant")
        for turn in range(2):
            for place, client in enumerate(clients):
                await _kept(client, ask, f"client {place}, turn {turn}")
                ensure(isinstance(await client.ask(asking(h.runtime, names[0])), Busy), "nobody else gets it")
        for client in clients:
            ensure((await granted(client, ask)).token == token, "still the same grant at every client")
        view = await a.observe(names[0])
        ensure(view.held_by is not None and view.held_by.token == token, f"operators see its token: {view}")
        ensure(await c.release(ask.secret) == Released(), "released where it was renewed last")
        ensure((await granted(b, asking(h.runtime, *names, ttl=TTL))).token > token, "and the names are free")


@check()
async def a_waiter_is_granted_elsewhere(h: AuthorityHarness) -> None:
    """Waiting at one client, granted at another, renewed at the first: kept. Also when it wandered while it waited."""
    a, b = await h.authority(), await h.authority()
    last = 0
    for wanders in (False, True):
        holder, waiter = asking(h.runtime, "orders", ttl=TTL), asking(h.runtime, "orders", ttl=TTL, wait=True)
        behind = asking(h.runtime, "orders", ttl=TTL, wait=True)
        last = max(last, (await granted(a, holder)).token)
        await _waits(b, waiter)
        await _waits(a, behind)
        if wanders:
            for client in (a, b, a):
                (answer,) = await client.renew([waiter.secret])
                ensure(isinstance(answer, Waiting) and answer.check_in > 0, f"it keeps its place: {answer}")
        ensure(await b.release(holder.secret) == Released(), "the holder releases, elsewhere too")
        token = (await granted(a, waiter)).token
        ensure(token > last, f"tokens rise: {token} after {last}")
        await _kept(b, waiter, "the client where it waited")
        await _kept(a, waiter, "the client that granted it")
        ensure((await granted(b, waiter)).token == token, "the same grant at both")
        await _waits(b, behind)
        ensure(await a.release(waiter.secret) == Released(), "released")
        last = (await granted(b, behind)).token
        ensure(last > token, f"the next waiter, which wandered, is granted with a greater token: {last}")
        ensure(await b.release(behind.secret) == Released(), "released")


@check()
async def a_client_dies_and_its_attempts_wander_on(h: AuthorityHarness) -> None:
    """The client of a lease or of a place dies: another one renews and grants, and nothing is lost."""
    a, b, c = [await h.authority() for _ in range(3)]
    lease, waiter = asking(h.runtime, "orders", ttl=TTL), asking(h.runtime, "orders", ttl=TTL, wait=True)
    token = (await granted(a, lease)).token
    await _waits(a, waiter)
    a.abandon()
    await _kept(b, lease, "another client")
    (place,) = await b.renew([waiter.secret])
    ensure(isinstance(place, Waiting), f"the place, too: {place}")
    b.abandon()
    await _kept(c, lease, "a third one")
    await _waits(c, waiter)
    ensure(isinstance(await c.ask(asking(h.runtime, "orders")), Busy), "nobody else got it")
    ensure(await c.release(lease.secret) == Released(), "released by the one that lives")
    ensure((await granted(c, waiter)).token > token, "and the waiter is next")
    await _kept(c, waiter, "the client that granted it")


@check()
async def a_waiter_that_wandered_is_granted_above_every_token(h: AuthorityHarness) -> None:
    """An operator has taken the name by force, or raised the floor, while it waited; its client may be dead by then."""
    for what in ("force", "raise"):
        a, b, c = [await h.authority() for _ in range(3)]
        name = f"orders/{what}"
        holder, first, second = (asking(h.runtime, name, ttl=TTL, wait=True) for _ in range(3))
        token = (await granted(a, holder)).token
        await _waits(a, first)
        await _waits(b, second)
        if what == "force":
            minted = await c.force_release(name, token) or 0
        else:
            minted = await c.raise_floor(token + 1000)
            ensure(await c.release(holder.secret) == Released(), "released elsewhere")
        ensure(minted > token, f"{minted} is above {token}")
        a.abandon()
        await c.renew([first.secret])
        tokens = [minted, (await granted(c, first)).token]
        await _kept(b, first, "another client")
        ensure(await c.release(first.secret) == Released(), "released")
        await c.renew([second.secret])
        tokens.append((await granted(c, second)).token)
        ensure(tokens == sorted(set(tokens)), f"tokens rise: {tokens}")


@check()
async def leases_of_one_holder_are_independent(h: AuthorityHarness) -> None:
    """One holder's leases, of one ttl: one is renewed elsewhere, or its client is dead. The others end by their ttl."""
    for dies in (False, True):
        a, b = await h.authority(), await h.authority()
        kept, silent, other = (asking(h.runtime, name, ttl=10.0) for name in ("kept", "silent", "other"))
        queue = asking(h.runtime, "queue", ttl=60.0)
        gone = asking(h.runtime, "queue", ttl=10.0, wait=True)
        mine = [ask._replace(holder=kept.holder) for ask in (kept, silent, other, gone)]
        kept, silent, other, gone = mine
        await granted(b, queue)
        for client, ask in ((a, kept), (a, silent), (b, other)):
            await granted(client, ask)
        await _waits(a, gone)
        for turn in range(3):
            if turn == 1 and dies:
                a.abandon()
            await h.pass_time(4.0)
            await _kept(b, kept, "the other client")
            await b.renew([queue.secret])
        for ask in (silent, other):
            await granted(b, asking(h.runtime, *ask.names))
        ensure(await b.release(queue.secret) == Released(), "the queue moves on")
        await granted(b, asking(h.runtime, "queue"))
        for ask in (silent, gone):
            answer = await b.ask(ask._replace(wait=False))
            ensure(isinstance(answer, Ended | Busy), f"it has ended, and is not granted: {answer}")
        for name in ("kept", "silent", "other", "queue"):
            held_by = (await b.observe(name)).held_by
            if held_by is not None:
                await b.force_release(name, held_by.token)


@check()
async def an_attempt_that_ended_elsewhere(h: AuthorityHarness) -> None:
    """Released or withdrawn at one client: over at every client, also for an ask that is delayed until then.

    With `own-memory` other clients do not know of the end: they answer `Gone`, and never say that a lease is held.
    """
    a, b = await h.authority(), await h.authority()
    remembers = _remembers(a)
    ended: list[Ask] = []
    for wait in (False, True):
        for end in ("released", "withdrawn"):
            holder = asking(h.runtime, "orders", ttl=TTL)
            ask = asking(h.runtime, "orders", ttl=TTL, wait=wait)
            if wait:
                await granted(a, holder)
                await _waits(a, ask)
            else:
                await granted(a, ask)
            finish: Callable[[str], Awaitable[object]] = b.release if end == "released" else b.withdraw
            ensure(await finish(ask.secret) == Released(), f"{end} elsewhere")
            (renewed,) = await a.renew([ask.secret])
            ensure(isinstance(renewed, Ended | Gone), f"it is over where it began: {renewed}")
            again = await (a.release if end == "released" else a.withdraw)(ask.secret)
            if remembers:
                ensure(renewed == Ended(end), f"{end}: {renewed}")
                ensure(again == Released(), f"repeated where it began: {again}")
                for client in (a, b):
                    ensure(await client.ask(ask) == Ended(end), "a delayed ask is not granted again")
            else:
                ensure(isinstance(again, Released | Ended | Gone), f"repeated where it began: {again}")
            if wait:
                ensure(await a.release(holder.secret) == Released(), "the holder was not disturbed")
            ended.append(ask)
            new = asking(h.runtime, "orders", ttl=TTL)
            await granted(b, new)
            ensure(await b.release(new.secret) == Released(), "the name is free")
    unknown = asking(h.runtime, "orders", ttl=TTL, wait=True)
    ensure(await a.withdraw(unknown.secret) == Released(), "withdrawn before it arrives")
    ensure(await b.ask(unknown) == Ended("withdrawn"), "at another client")


# At random.


@dataclass
class Wanderer:
    """One program: its attempt, and the token that it holds."""

    ask: Ask
    token: int = 0


@dataclass
class Wandering:
    """A seeded history: programs whose requests reach clients at random, and clients that die."""

    harness: AuthorityHarness
    seed: int
    names: tuple[str, ...] = ("a", "b")

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.holder = asking(self.harness.runtime).holder
        """Many attempts are this holder's."""
        self.clients: list[Authority] = []
        self.programs: list[Wanderer] = []
        self.highest: dict[str, int] = dict.fromkeys(self.names, 0)
        self.grants = 0

    async def run(self, steps: int, programs: int = 4, clients: int = 3) -> None:
        self.clients = [await self.harness.authority() for _ in range(clients)]
        self.programs = [self._new() for _ in range(programs)]
        for _ in range(steps):
            await self._step()
        for _ in range(int(TTL * 1.5 / SILENCE) + 1):  # programs that have died do not block anything
            await self._pass_time()
        for program in self.programs:
            await self.random.choice(self.clients).withdraw(program.ask.secret)
            program.token = 0
        for name in self.names:
            last = Wanderer(asking(self.harness.runtime, name, ttl=TTL))
            self.programs.append(last)
            answer = await self.random.choice(self.clients).ask(last.ask)
            ensure(isinstance(answer, Granted), self._said(f"{name} is free in the end", answer))
            assert isinstance(answer, Granted)
            self._granted(last, answer)

    def _new(self) -> Wanderer:
        names = self.random.choice([(name,) for name in self.names] + [self.names])
        ask = asking(self.harness.runtime, *names, ttl=TTL, wait=self.random.random() < 0.8)
        return Wanderer(ask._replace(holder=self.holder) if self.random.random() < 0.7 else ask)

    async def _pass_time(self) -> None:
        """Everybody renews, at any client, and then nobody does for a while."""
        for program in self.programs:
            client = self.random.choice(self.clients)
            (answer,) = await client.renew([program.ask.secret])
            if program.token:
                ensure(isinstance(answer, Kept), self._said("kept before time passes", answer))
        await self.harness.pass_time(SILENCE)

    async def _step(self) -> None:
        chance = self.random.random()
        if chance < 0.05:
            dead = self.random.randrange(len(self.clients))
            self.clients[dead].abandon()
            self.clients[dead] = await self.harness.authority()
        elif chance < 0.1:
            await self._pass_time()
        elif chance < 0.12:  # a program dies, and its lease or place ends by its ttl
            self.programs[self.random.randrange(len(self.programs))] = self._new()
        client, program = self.random.choice(self.clients), self.random.choice(self.programs)
        if program.token:
            await self._hold(client, program)
        else:
            await self._acquire(client, program)

    async def _acquire(self, client: Authority, program: Wanderer) -> None:
        chance = self.random.random()
        if chance < 0.1:
            await client.withdraw(program.ask.secret)
            await self._over(program)
        elif chance < 0.4:
            (place,) = await client.renew([program.ask.secret])
            ensure(isinstance(place, Waiting | Kept | Gone), self._said("a place is kept", place))
        else:
            answer = await client.ask(program.ask)
            if isinstance(answer, Granted):
                self._granted(program, answer)
            elif isinstance(answer, Busy):
                await self._over(program)
            else:
                ensure(isinstance(answer, Waiting), self._said("granted, busy or waiting", answer))

    def _granted(self, program: Wanderer, answer: Granted) -> None:
        program.token = answer.token
        self.grants += 1
        for name in program.ask.names:
            ensure(answer.token > self.highest[name], self._said(f"above {self.highest[name]}", answer))
            self.highest[name] = answer.token
            others = [each for each in self.programs if each.token and name in each.ask.names]
            ensure(others == [program], self._said(f"{name} has one holder", answer))

    async def _hold(self, client: Authority, program: Wanderer) -> None:
        chance = self.random.random()
        if chance < 0.5:
            (answer,) = await client.renew([program.ask.secret])
            ensure(isinstance(answer, Kept), self._said("a lease that is renewed in time is kept", answer))
        elif chance < 0.7:
            again: AskAnswer = await client.ask(program.ask)
            ensure(isinstance(again, Granted), self._said("the same grant", again))
            assert isinstance(again, Granted)
            ensure(again.token == program.token, self._said(f"the token {program.token}", again))
        else:
            answered = await client.release(program.ask.secret)
            ensure(answered == Released(), self._said("released", answered))
            await self._over(program)

    async def _over(self, program: Wanderer) -> None:
        """Another program begins; sometimes an ask of the old one still arrives, anywhere."""
        self.programs[self.programs.index(program)] = self._new()
        client = self.random.choice(self.clients)
        if self.random.random() < 0.3 and _remembers(client) and program.token:
            late = await client.ask(program.ask)
            ensure(isinstance(late, Ended), self._said("an ask after the release is not granted", late))

    def _said(self, expected: str, answer: object) -> str:
        return f"seed {self.seed}: {expected}, not {answer}"


@check()
async def attempts_wander_at_random(h: AuthorityHarness) -> None:
    """Tokens of a name never fall, one holder at a time, no lease that is renewed in time is lost, no ghost."""
    wandering = Wandering(h, seed=1)
    await wandering.run(60)
    ensure(wandering.grants >= 3, f"something was granted: {wandering.grants}")
