"""Seeded worlds: the real client core, keeper, memory authority and guard under every fault at once.

Messages are lost, late, doubled and overtaken; processes pause, crash and drift; the servers restart.
Each world comes from one seed, and a judge that sees everything watches the promises:

    python -m fenced.testing.simulation 0-999        # many worlds
    python -m fenced.testing.simulation 4711 --log   # one world, told
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

from fenced.authorities.memory import MemoryStore
from fenced.contracts import Trait, Versioned
from fenced.core.acquiring import LeaseEngine, LeaseRequest
from fenced.core.holding import GrantState
from fenced.decision import Rule
from fenced.errors import (
    AlreadyApplied,
    FencedError,
    Indeterminate,
    LeaseLost,
    NotGranted,
    Refused,
    StaleToken,
    Unavailable,
)
from fenced.guards.memory import MemoryGuard
from fenced.model import (
    Ask,
    AskAnswer,
    Holder,
    NameView,
    ReleaseAnswer,
    RenewAnswer,
    Stamp,
    Standing,
)
from fenced.runtime.simulated import Process, SimulatedRuntime, World
from fenced.testing.judging import REALM, Judge, PromiseBroken

T = TypeVar("T")

SECONDS = 30.0
"""How long a world lasts; its faults stop at the half, and then everybody must get on (L2)."""
DRIFT_MAX = 0.004
LONG_TTL = 600.0


@dataclass
class Faults:
    """The mix of one world: each seed draws its own."""

    loss: float
    double: float
    delay_max: float
    pause_every: float
    pause_aimed: float  # the chance of a pause between a read and its write
    crash_every: float
    server_restart_every: float

    @classmethod
    def drawn(cls, world: World) -> Faults:
        rng = world.rng
        return cls(
            loss=rng.choice((0.0, 0.02, 0.15)),
            double=rng.choice((0.0, 0.05, 0.2)),
            delay_max=rng.choice((0.002, 0.05, 0.6, 4.0)),
            pause_every=rng.choice((1.5, 4.0, 1e9)),
            pause_aimed=rng.choice((0.0, 0.1, 0.4)),
            crash_every=rng.choice((6.0, 1e9)),
            server_restart_every=rng.choice((8.0, 1e9)),
        )

    @property
    def stop_nobody(self) -> bool:
        """Whether no client crashes or pauses. Servers may, and messages may be lost."""
        return self.pause_every > SECONDS and self.crash_every > SECONDS and not self.pause_aimed


class Network:
    """Messages between processes: lost, late, doubled, overtaken."""

    def __init__(self, world: World, faults: Faults) -> None:
        self._world = world
        self._faults = faults
        self.healed = False

    def send(self, to: Process, deliver: Callable[[], None]) -> None:
        rng, faults = self._world.rng, self._faults
        copies = 1
        if not self.healed:
            if rng.random() < faults.loss:
                return
            copies = 2 if rng.random() < faults.double else 1
        for _ in range(copies):
            delay_max = 0.002 if self.healed else faults.delay_max
            delay = 0.0005 + rng.random() ** 3 * delay_max
            self._world.after(delay, lambda: to.deliver(deliver))

    def lossy(self) -> bool:
        return not self.healed


class SimulatedServer:
    """A process that answers requests; its state is on a disk that survives a crash."""

    def __init__(self, world: World, network: Network, name: str) -> None:
        self.world = world
        self.network = network
        self.name = name
        self.process = Process(world, name)

    def restart(self, down: float) -> None:
        """Crash, and come back after a while with what was on the disk."""
        self.process.crash()
        self.world.after(down, self._start)

    def _start(self) -> None:
        self.process = Process(self.world, self.name)

    async def ask(
        self, client: Process, runtime: SimulatedRuntime, handle: Callable[[], T], until: float
    ) -> T:
        """A request and its reply; Indeterminate when none comes in time."""
        if not self.process.alive and self.network.lossy():
            raise Unavailable(f"{self.name} is down")
        answered = runtime.wakeup()
        box: list[Any] = []

        def serve() -> None:
            try:
                result: Any = handle()
            except FencedError as error:
                result = error
            self.network.send(client, lambda: receive(result))

        def receive(result: Any) -> None:
            if not box:
                box.append(result)
                answered.set()

        self.network.send(self.process, serve)
        if not await runtime.wait(answered, until):
            raise Indeterminate(f"{self.name} did not answer")
        if isinstance(box[0], FencedError):
            raise box[0]
        result: T = box[0]
        return result


class SimulatedAuthority:
    """A client's door to the authority, over the network."""

    traits: ClassVar[tuple[Trait, ...]] = ()
    url = "simulated:"

    def __init__(self, site: Site, process: Process, runtime: SimulatedRuntime) -> None:
        self._site = site
        self._process = process
        self._runtime = runtime
        self._heard: dict[str, None] = {}
        self._wakeup = runtime.wakeup()
        site.listeners.append(self)

    def wake(self, public: str) -> None:
        def next_wakeups() -> None:
            self._heard[public] = None
            self._wakeup.set()

        self._site.network.send(self._process, next_wakeups)

    async def _call(self, handle: Callable[[], T], until: float | None = None) -> T:
        latest = self._runtime.now() + 1.0
        until = latest if until is None else min(until, latest)
        return await self._site.authority.ask(self._process, self._runtime, handle, until)

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        return Standing(REALM, 0)

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        return await self._call(partial(self._site.ask, ask), until)

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        return await self._call(partial(self._site.renew, tuple(secrets)), until)

    async def release(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        return await self._call(partial(self._site.release, secret), until)

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        return await self._call(partial(self._site.withdraw, secret), until)

    async def next_wakeups(self, until: float) -> list[str]:
        if not self._heard:
            await self._runtime.wait(self._wakeup, until)
        self._wakeup.clear()
        heard, self._heard = list(self._heard), {}
        return heard

    def interrupt(self) -> None:
        self._wakeup.set()

    async def survey(self, *, after: str = "", limit: int = 1000) -> list[NameView]:
        return await self._call(partial(self._site.store.survey, after, limit))

    async def observe(self, name: str) -> NameView:
        return await self._call(partial(self._site.store.observe, name))

    async def force_release(self, name: str) -> int | None:
        return await self._call(partial(self._site.store.force_release, name))

    async def raise_floor(self, above: int) -> int:
        return await self._call(partial(self._site.store.raise_floor, above))

    async def tidy(self) -> int:
        return await self._call(self._site.store.tidy)

    async def close(self) -> None:
        return

    def abandon(self) -> None:
        return

    def before_fork(self) -> None:
        return

    def forked(self) -> None:
        return


class Site:
    """One world: the servers, their stores, the judge, and the clients that come and go."""

    store_type: type[MemoryStore] = MemoryStore
    guard_type: type[MemoryGuard] = MemoryGuard
    desk_type: type[LeaseEngine] = LeaseEngine
    announces = True

    def __init__(self, seed: int | str, *, tell: bool = False) -> None:
        self.world = World(seed)
        rng = self.world.rng
        self.faults = Faults.drawn(self.world)
        self.network = Network(self.world, self.faults)
        self.rule: Rule = rng.choice(("retry", "retry", "sequenced"))
        self.ttl = rng.choice((0.5, 1.0, 2.0))
        if self.faults.stop_nobody:
            # Then no lease has to expire: clients release whatever they give up, so a long ttl must delay nobody.
            self.ttl = rng.choice((self.ttl, LONG_TTL))
        self.pace = min(self.ttl, 2.0)
        self.resource_names = [f"name/{i}" for i in range(rng.choice((1, 2)))]
        self.judge = Judge(self.world, self.rule, tell=tell)
        self.authority = SimulatedServer(self.world, self.network, "authority")
        self.resource = SimulatedServer(self.world, self.network, "resource")
        self.listeners: list[SimulatedAuthority] = []
        self.store = self.store_type(lambda: self.world.now, realm=REALM)
        self.store.listeners.append(self._woken)
        self.guard = self.guard_type(rule=self.rule, clock=lambda: self.world.now)
        self.guard.realm = REALM
        self._items = itertools.count(1)
        self._operations = itertools.count(1)
        self._clients = 0

    def _woken(self, public: str) -> None:
        for listener in self.listeners:
            listener.wake(public)

    # The authority's side, watched.

    def ask(self, ask: Ask) -> AskAnswer:
        answer = self.store.ask(ask)
        self.judge.asked(ask, answer, self.world.now)
        return answer

    def renew(self, secrets: Sequence[str]) -> list[RenewAnswer]:
        answers = self.store.renew(secrets)
        for secret, answer in zip(secrets, answers, strict=True):
            self.judge.renewed(secret, answer, self.world.now)
        return answers

    def release(self, secret: str) -> ReleaseAnswer:
        answer = self.store.release(secret)
        self.judge.finished(secret, answer)
        return answer

    def withdraw(self, secret: str) -> ReleaseAnswer:
        answer = self.store.withdraw(secret)
        self.judge.finished(secret, answer)
        return answer

    # The resource's side, watched.

    def read(self, stamp: Stamp, name: str) -> Versioned:
        if self.announces:
            self._decide(stamp, name, None)
        return _now(self.guard.peek(name))

    def write(self, stamp: Stamp, name: str, value: str) -> bool:
        self._decide(stamp, name, value)
        return True

    def _decide(self, stamp: Stamp, name: str, value: str | None) -> None:
        operation = str(next(self._operations))
        before = _now(self.guard.peek(name))
        announce = value is None
        try:
            if value is None:
                _now(self.guard.announce(stamp, name))
            else:
                _now(self.guard.write(stamp, name, value))
        except AlreadyApplied:
            self.judge.decided(stamp, name, announce, True, True, operation)
            raise
        except Refused:
            if _now(self.guard.peek(name)) != before:
                self.judge.broken("I6", f"{name}: a refused write left a trace")
            self.judge.decided(stamp, name, announce, False, False, operation)
            raise
        self.judge.decided(stamp, name, announce, True, False, operation)

    # The clients.

    def start_client(self) -> None:
        self._clients += 1
        rng = self.world.rng
        process = Process(
            self.world,
            f"client-{self._clients}",
            rate=1.0 + rng.uniform(-DRIFT_MAX, DRIFT_MAX),
            offset=rng.uniform(0, 1000),
        )
        SimulatedClient(self, process).start()

    def run(self) -> Judge:
        for _ in range(self.world.rng.choice((2, 3, 4))):
            self.start_client()
        self._plan(self.faults.server_restart_every, self._restart_a_server)
        self.world.at(SECONDS / 2, self._heal)
        self.world.run(SECONDS)
        self._conclude()
        return self.judge

    def _plan(self, every: float, fault: Callable[[], None]) -> None:
        """Let a fault happen now and then, until the world heals."""
        when = self.world.now + self.world.rng.expovariate(1 / every)
        if when < SECONDS / 2:
            self.world.at(when, lambda: self._fault(every, fault))

    def _fault(self, every: float, fault: Callable[[], None]) -> None:
        fault()
        self._plan(every, fault)

    def _restart_a_server(self) -> None:
        server = self.world.rng.choice((self.authority, self.resource))
        if server.process.alive:
            self.judge.say(f"{server.name} restarts")
            server.restart(self.world.rng.uniform(0.05, 2 * self.pace))

    def _heal(self) -> None:
        self.network.healed = True
        self.judge.say("all faults end")

    def _conclude(self) -> None:
        """L2: everybody got on after the faults. L4: the next token is admitted. I5: nothing is lost."""
        for client, when in self.judge.progress.items():
            if when < SECONDS - (2 * self.pace + 5.0):
                self.judge.broken("L2", f"{client} got nowhere since {when:.2f}")
        self.judge.settle({name: _now(self.guard.peek(name)) for name in self.resource_names})
        for name in self.resource_names:
            token = self.store.raise_floor(0) + 1
            probe = Stamp(REALM, (name,), token, 1, f"{token:032x}")
            for seq in (1, 2):
                if _outcome(self.guard.write(probe._replace(seq=seq), name, "probe")) is not None:
                    self.judge.broken("L4", f"{name} is wedged: token {token} is refused")


class SimulatedClient:
    """A process with a worker or two that read, think and write under a lease."""

    def __init__(self, site: Site, process: Process) -> None:
        self.site = site
        self.process = process
        self.runtime = SimulatedRuntime(process)
        self.authority = SimulatedAuthority(site, process, self.runtime)
        holder = Holder(self.runtime.secret(), process.name, "host", 1)
        self.desk = site.desk_type(self.authority, self.runtime, holder)
        site.judge.progress[process.name] = site.world.now

    def start(self) -> None:
        self.runtime.spawn(self._work, f"{self.process.name}-worker")
        self.site._plan(self.site.faults.pause_every, self._pause)
        self.site._plan(self.site.faults.crash_every, self._crash)

    def _pause(self) -> None:
        seconds = self.site.world.rng.uniform(0.2, 3.0) * self.site.pace
        self.site.judge.say(f"{self.process.name} stands still for {seconds:.2f} s")
        self.process.pause(seconds)

    def _crash(self) -> None:
        if self.process.alive:
            self.site.judge.say(f"{self.process.name} crashes")
            self.process.crash()
            self.site.listeners.remove(self.authority)
            del self.site.judge.progress[self.process.name]
            self.site.world.after(self.site.world.rng.uniform(0.1, 1.0), self.site.start_client)

    async def _work(self) -> None:
        rng = self.site.world.rng
        while True:
            count = min(len(self.site.resource_names), rng.choice((1, 1, 2)))
            names = rng.sample(self.site.resource_names, count)
            try:
                await self._section(names)
                self.site.judge.progress[self.process.name] = self.site.world.now
            except NotGranted:  # an answer, too: only who waits without limit may expect a grant
                self.site.judge.count("not granted")
                self.site.judge.progress[self.process.name] = self.site.world.now
            except (LeaseLost, StaleToken):
                self.site.judge.count("overtaken")
                self.site.judge.progress[self.process.name] = self.site.world.now
            except (Unavailable, Indeterminate):
                self.site.judge.count("unavailable")
            await self._sleep(rng.uniform(0.0, 0.3))

    async def _sleep(self, seconds: float) -> None:
        await self.runtime.wait(self.runtime.wakeup(), self.runtime.now() + seconds)

    async def _section(self, names: Sequence[str]) -> None:
        rng, judge = self.site.world.rng, self.site.judge
        invoked_max = judge.returned_max
        wait = rng.choice((None, None, 0.0, 1.0, 4.0))
        wish = LeaseRequest.of(names, ttl=self.site.ttl, wait=wait, lock_delay=rng.choice((0.0, 0.0, 0.5)))
        began, local = self.site.world.now, self.runtime.now()
        error: FencedError | None = None
        try:
            hold = await self.desk.acquire(wish)
        except FencedError as caught:
            error = caught
        if wait is not None and not self.process.paused_since(began):
            judge.waited(self.process.name, self.runtime.now() - local - wait)
        if error is not None:
            raise error
        judge.acquired(hold, invoked_max)
        judge.progress[self.process.name] = self.site.world.now
        self._watch(hold)
        try:
            writes = rng.choice((1, 2)) if self.site.rule == "sequenced" else 1
            for _ in range(writes):
                await self._update(hold, rng.choice(names))
        except FencedError:
            await self.desk.leave(hold, raised=True)
            raise
        judge.believes(hold)
        await self.desk.leave(hold, raised=False)

    def _watch(self, hold: GrantState) -> None:
        """Ask the judge just before each local deadline, when belief is weakest."""
        self.site.judge.believes(hold)
        if hold.remaining() > 0.002 and self.process.alive:
            last = self.process.world_time(hold.deadline - 0.001)
            self.site.world.at(last, lambda: self.process.deliver(lambda: self._watch(hold)))

    async def _update(self, hold: GrantState, name: str) -> None:
        """Read, think, write back with one item more."""
        site = self.site
        announcement = hold.announcement()
        found = await self._reach(lambda: site.read(announcement, name))
        if not site.network.healed and site.world.rng.random() < site.faults.pause_aimed:
            self._pause()
        # Once healed, work is short, so that a fair queue of all clients is through within the bound of L2.
        longest = 0.2 if site.network.healed else 1.2
        await self._sleep(site.world.rng.random() ** 2 * longest * site.pace)
        site.judge.believes(hold)
        item = f"{self.process.name.removeprefix('client-')}.{next(site._items)}"
        value = ",".join(filter(None, (found.value, item)))
        stamp = hold.next_stamp()
        try:
            await self._reach(lambda: site.write(stamp, name, value))
        except AlreadyApplied:
            site.judge.count("applied already")
        site.judge.acknowledge(name, item)

    async def _reach(self, handle: Callable[[], T]) -> T:
        """Ask the resource, a few times with the very same stamp."""
        for attempt in itertools.count(1):
            try:
                return await self.site.resource.ask(
                    self.process, self.runtime, handle, self.runtime.now() + 0.5
                )
            except (Indeterminate, Unavailable):
                if attempt == 4:
                    raise
                await self._sleep(0.1)
        raise AssertionError


def _now(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine of the memory guard, which never waits."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("the memory guard does not wait")


def _outcome(work: Awaitable[object]) -> FencedError | None:
    assert isinstance(work, Coroutine)
    try:
        _now(work)
    except FencedError as error:
        return error
    return None


def simulate(seed: int | str, site_type: type[Site] = Site, *, tell: bool = False) -> Judge:
    """Run one world; raises Broken when a promise was not kept."""
    site = site_type(seed, tell=tell)
    try:
        return site.run()
    except PromiseBroken as error:
        error.add_note(f"replay: make simulate SEEDS={seed}")
        if tell:
            error.add_note("\n".join(site.judge.log[-200:]))
        raise


def seeds_of(text: str) -> list[int]:
    """`7`, `0-99`, or several of them with commas."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds.extend(range(int(first), int(last or first) + 1))
    return seeds


def main(arguments: Sequence[str]) -> int:
    tell = "--log" in arguments
    seeds = seeds_of(",".join(a for a in arguments if a != "--log") or "0-999")
    counts: dict[str, int] = {}
    for seed in seeds:
        try:
            judge = simulate(seed, tell=tell)
        except PromiseBroken as error:
            sys.stderr.write(f"seed {seed}: {error}\n" + "\n".join(error.__notes__) + "\n")
            return 1
        if tell:
            sys.stdout.write("\n".join(judge.log) + "\n")
        for what, count in judge.counts.items():
            counts[what] = counts.get(what, 0) + count
    said = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    sys.stdout.write(f"{len(seeds)} worlds, no promise broken: {said}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
