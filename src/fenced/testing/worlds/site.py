"""One world: the servers, the resource with its guard, the judge, and the clients that come and go."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from fenced.contracts import Authority, Versioned
from fenced.core.acquiring import LeaseEngine, LeaseRequest
from fenced.core.holding import GrantState
from fenced.decision import Rule
from fenced.errors import (
    AlreadyApplied,
    FencedError,
    Indeterminate,
    LeaseLost,
    Misconfigured,
    NotGranted,
    Refused,
    StaleToken,
    Unavailable,
)
from fenced.guards.memory import MemoryGuard
from fenced.model import Credential, Holder, Stamp
from fenced.runtime.network import SimulatedNetwork
from fenced.runtime.simulated import SimulatedRuntime
from fenced.runtime.world import Process, World
from fenced.testing.worlds.backend import AuthorityBackend, WatchedAuthority
from fenced.testing.worlds.faults import Faults, MessageNetwork, MessageServer
from fenced.testing.worlds.judge import Judge, PromiseBroken
from fenced.testing.worlds.memory import MemoryBackend

T = TypeVar("T")

HEALED_AT = 8.0
"""When the faults of a world end. From then on every client must make progress (L2)."""
DRIFT_MAX = 0.004
LONG_TTL = 600.0


class Site:
    """One world. A subclass chooses another authority, or plants a bug in one of the parts."""

    backend_type: type[AuthorityBackend] = MemoryBackend
    guard_type: type[MemoryGuard] = MemoryGuard
    engine_type: type[LeaseEngine] = LeaseEngine
    announces = True

    def __init__(self, seed: int | str, *, keep_log: bool = False) -> None:
        self.world = World(seed)
        rng = self.world.rng
        self.faults = Faults.drawn(self.world)
        self.network = MessageNetwork(self.world, self.faults)
        self.streams = SimulatedNetwork(self.world)
        self.streams.delay = lambda source, target: self.network.delay()
        self.rule: Rule = rng.choice(("retry", "retry", "sequenced"))
        self.ttl = rng.choice(self.backend_type.ttls)
        if self.faults.stop_nobody:
            # Then no lease has to expire: clients release all they give up, so a long ttl must not delay any client.
            self.ttl = rng.choice((self.ttl, LONG_TTL, LONG_TTL))
        self.pace = min(self.ttl, 2.0)
        self.resource_names = [f"name/{i}" for i in range(rng.choice((1, 1, 2)))]
        self.judge = Judge(self.world, self.rule, keep_log=keep_log)
        self.judge.tokens_per_name = self.backend_type.tokens_per_name
        self.resource = MessageServer(self.world, self.network, "resource")
        self.guard = self.guard_type(rule=self.rule, clock=lambda: self.world.now)
        self.backend = self.backend_type(self)
        self.judge.holds = self.backend.holds
        # By then servers have come back, late messages have arrived, and what crashed clients left has expired.
        settled = max(2 * self.pace, self.faults.delay_max + self.pace)
        self.judge.prompt_from = HEALED_AT + settled + self.backend.lateness + 1.0
        self.progress_within = 2 * self.pace + self.backend.lateness + 5.0
        """Once healed, no client is without progress for so many seconds (L2)."""
        self.ends_at = max(HEALED_AT + 1.0 + self.progress_within, self.judge.prompt_from + 2.5)
        """No later than L2 and L6 need: the healed part of a world is the expensive one, and finds the least."""
        self._written: dict[str, bytes] = {}
        self._items = itertools.count(1)
        self._operations = itertools.count(1)
        self._clients = 0
        self.processes: list[Process] = []

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
        announce = value is None
        try:
            if value is None:
                _now(self.guard.announce(Credential((stamp,), (name,))))
            else:
                _now(self.guard.write(Credential((stamp,)), name, value.encode()))
                self._written[name] = value.encode()
        except AlreadyApplied:
            self.judge.decided(stamp, name, announce, True, True, operation)
            raise
        except Refused:
            if _now(self.guard.peek(name)).value != self._written.get(name):
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
        self.processes.append(process)
        SimulatedClient(self, process).start()

    def run(self) -> Judge:
        try:
            self._run()
        except PromiseBroken:
            raise
        except Exception as error:  # noqa: BLE001 (whatever it is, the world is over)
            # It came out of a task of a client, or of a server that nobody asked to fail.
            self.judge.broken("I12", f"nobody caught {error!r}", error)
        return self.judge

    def _run(self) -> None:
        for _ in range(self.world.rng.choice((2, 3, 4))):
            self.start_client()
        self._plan(self.faults.server_fault_every, self._break_a_server)
        if self.backend.processes():
            self._plan(self.faults.stream_fault_every, self._break_a_stream)
        self.world.at(HEALED_AT, self._heal)
        self.world.run(self.ends_at)
        self._conclude()

    def _plan(self, every: float, fault: Callable[[], None]) -> None:
        """Let a fault happen now and then, until the world heals."""
        when = self.world.now + self.world.rng.expovariate(1 / every)
        if when < HEALED_AT:
            self.world.at(when, lambda: self._fault(every, fault))

    def _fault(self, every: float, fault: Callable[[], None]) -> None:
        fault()
        self._plan(every, fault)

    def _break_a_server(self) -> None:
        self.world.rng.choice((self._restart_the_resource, *self.backend.faults()))()

    def _restart_the_resource(self) -> None:
        if self.resource.process.alive:
            self.judge.say("the resource restarts")
            self.resource.restart(self.world.rng.uniform(0.05, 2 * self.pace))

    @property
    def healed(self) -> bool:
        return self.network.healed

    def _break_a_stream(self) -> None:
        """Cut, stall or block a stream between a client and a server, in the middle of a frame or of a request."""
        rng, streams = self.world.rng, self.streams
        clients = [process for process in self.processes if process.alive]
        if not clients or not self.backend.processes():
            return
        one, other = rng.choice(clients), rng.choice(self.backend.processes())
        seconds = rng.uniform(0.1, 2 * self.pace)
        match rng.choice(("cut", "cut next", "cut next", "stall", "block")):
            case "cut":
                streams.cut(one, other)
            case "cut next":
                streams.cut_next(*rng.sample((one, other), 2))
            case "stall":
                streams.stall(one, other, seconds)
            case "block":
                source, target = rng.sample((one, other), 2)
                streams.block(source, target)
                self.world.after(seconds, lambda: streams.unblock(source, target))
        self.judge.say(f"a stream between {one.name} and {other.name} breaks")

    def _heal(self) -> None:
        self.network.healed = True
        self.streams.cut_no_more()
        self.backend.heal()
        self.judge.say("all faults end")

    def _conclude(self) -> None:
        """L2: every client made progress. L4: the next token is admitted. L5: no call hangs. I5: nothing is lost."""
        for call in list(self.judge.under_way):
            self.judge.ended(call)
        self.judge.judge_progress(self.ends_at - self.progress_within)
        self.judge.settle({name: _now(self.guard.peek(name)) for name in self.resource_names})
        token = self.judge.highest + 1
        for name in self.resource_names:
            probe = Stamp(self.judge.realm, (name,), token, 1, f"{token:032x}")
            for seq in (1, 2):
                if (
                    _outcome(self.guard.write(Credential((probe._replace(seq=seq),)), name, b"probe"))
                    is not None
                ):
                    self.judge.broken("L4", f"{name} is wedged: token {token} is refused")


class SimulatedClient:
    """A process with a worker or two that read, think and write under a lease."""

    def __init__(self, site: Site, process: Process) -> None:
        self.site = site
        self.process = process
        self.runtime = SimulatedRuntime(process, site.streams)
        self.authority = site.backend.authority(process, self.runtime)
        watched = cast("Authority", WatchedAuthority(self.authority, site, process, self.runtime))
        holder = Holder(self.runtime.secret(), process.name, "host", 1)
        self.engine = site.engine_type(watched, self.runtime, holder, guarantee=site.backend.guarantee)
        self.workers = [f"{process.name}.{number}" for number in range(1, site.backend.workers + 1)]

    def start(self) -> None:
        for worker in self.workers:
            self.site.judge.progressed(worker, self.process)
            self.runtime.spawn(partial(self._work, worker), worker)
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
            self.site.backend.left(self.authority)
            for worker in self.workers:
                del self.site.judge.progress[worker]
            self.site.world.after(self.site.world.rng.uniform(0.1, 1.0), self.site.start_client)

    async def _work(self, worker: str) -> None:
        rng = self.site.world.rng
        while True:
            count = min(len(self.site.resource_names), rng.choice((1, 1, 2)))
            names = rng.sample(self.site.resource_names, count)
            try:
                await self._section(worker, names)
                self.site.judge.progressed(worker, self.process)
            except NotGranted:  # an answer, too: only a client that waits without limit may expect a grant
                self.site.judge.count("not granted")
                self.site.judge.progressed(worker, self.process)
            except (LeaseLost, StaleToken):
                self.site.judge.count("overtaken")
                self.site.judge.progressed(worker, self.process)
            except (Unavailable, Indeterminate):
                self.site.judge.count("unavailable")
            except Misconfigured:  # the judge has allowed it
                self.site.judge.count("misconfigured")
            await self._sleep(rng.uniform(*self._idle()))

    def _idle(self) -> tuple[float, float]:
        """The shortest and the longest time between two sections.

        Once healed, and once late messages have arrived, the clients need only show that they make progress; more
        sections would prove nothing new. But leases that never expire show lost wake-ups (L6), if clients wait for
        each other often.
        """
        if not self.site.healed:
            return 0.0, 0.3
        if self.site.ttl == LONG_TTL:
            return 0.05, 0.6
        late = self.site.world.now < HEALED_AT + self.site.faults.delay_max
        return (0.4, 1.2) if late else (1.5, 3.0)

    async def _sleep(self, seconds: float) -> None:
        await self.runtime.wait(self.runtime.wakeup(), self.runtime.now() + seconds)

    async def _section(self, worker: str, names: Sequence[str]) -> None:
        rng, judge = self.site.world.rng, self.site.judge
        returned = judge.returned(names)
        wait = rng.choice((None, None, 0.0, 1.0, 4.0))
        request = LeaseRequest.checked(
            names, ttl=self.site.ttl, wait=wait, lock_delay=rng.choice((0.0, 0.0, 0.5))
        )
        began, local = self.site.world.now, self.runtime.now()
        error: FencedError | None = None
        try:
            hold = await self.engine.acquire(request)
        except FencedError as caught:
            error = caught
        if wait is not None and not self.process.paused_since(began):
            judge.waited(self.process.name, self.runtime.now() - local - wait)
        if error is not None:
            raise error
        judge.acquired(hold, self.process, returned)
        judge.progressed(worker, self.process)
        self._watch(hold)
        try:
            writes = rng.choice((1, 2)) if self.site.rule == "sequenced" else 1
            for _ in range(writes):
                await self._update(hold, rng.choice(names))
        except FencedError:
            await self.engine.release_at_exit(hold, raised=True)
            raise
        judge.believes(hold)
        await self.engine.release_at_exit(hold, raised=False)

    def _watch(self, hold: GrantState) -> None:
        """Ask the judge just before each local deadline, when the belief is most likely to be wrong."""
        self.site.judge.believes(hold)
        if hold.remaining() > 0.002 and self.process.alive:
            last = self.process.world_time(hold.deadline - 0.001)
            self.site.world.at(last, lambda: self.process.deliver(lambda: self._watch(hold)))

    async def _update(self, hold: GrantState, name: str) -> None:
        """Read, think, write back with one more item."""
        site = self.site
        announcement = hold.announcement()
        found = await self._reach(lambda: site.read(announcement, name))
        if not site.healed and site.world.rng.random() < site.faults.pause_aimed:
            self._pause()
        # Once healed, work is short, so that a fair queue serves all clients within the bound of L2.
        longest = 0.4 if site.healed else 1.2
        await self._sleep(site.world.rng.random() ** 2 * longest * site.pace)
        site.judge.believes(hold)
        item = f"{self.process.name.removeprefix('client-')}.{next(site._items)}"
        value = ",".join(filter(None, ((found.value or b"").decode(), item)))
        stamp = hold.next_stamp()
        try:
            await self._reach(lambda: site.write(stamp, name, value))
        except AlreadyApplied:
            site.judge.count("applied already")
        site.judge.acknowledge(name, item)

    async def _reach(self, handle: Callable[[], T]) -> T:
        """Ask the resource, with a few retries under the same stamp."""
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
