"""One world: the servers, the resource with its guard, the judge, and the clients that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

from fenced.core.acquiring import LeaseEngine, LeaseRequest
from fenced.core.holding import GrantState, State
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
from fenced.stores.memory.guard import MemoryValues
from fenced.testing.lives import Deviation, Promises
from fenced.testing.trace import Trace
from fenced.values import timing
from fenced.values.contracts import Authority, Versioned
from fenced.values.decision import Rule
from fenced.values.model import Credential, Holder, Stamp
from fenced_testkit.runtime.network import SimulatedNetwork
from fenced_testkit.runtime.simulated import SimulatedRuntime, SimulatedTask
from fenced_testkit.runtime.world import Process, World
from fenced_testkit.worlds.backend import AuthorityBackend, WatchedAuthority
from fenced_testkit.worlds.faults import NEVER, Faults, MessageNetwork, MessageServer
from fenced_testkit.worlds.judge import Judge, PromiseBroken
from fenced_testkit.worlds.memory import MemoryBackend
from fenced_testkit.worlds.observed import DRIFT

T = TypeVar("T")


class Interrupted(BaseException):
    """As KeyboardInterrupt, in a program that goes on."""


INTERRUPTS: tuple[type[BaseException], ...] = (asyncio.CancelledError, Interrupted)
HEALED_AT = 8.0
"""When the faults of a world end. From then on every client must make progress (L2)."""
DRIFT_MAX = 0.004
LONG_TTL = 600.0


class Site:
    """One world. A subclass chooses another authority, or plants a bug in one of the parts."""

    backend_type: type[AuthorityBackend] = MemoryBackend
    guard_type: type[MemoryValues] = MemoryValues
    engine_type: type[LeaseEngine] = LeaseEngine
    announces = True
    waits: ClassVar[tuple[float | None, ...]] = (None, None, 0.0, 1.0, 4.0)
    """How long clients wait for a grant; they draw one of these each time."""

    def __init__(self, seed: int | str, *, keep_log: bool = False) -> None:
        self.world = World(seed)
        rng = self.world.rng
        self.faults = self.draw_faults()
        self.network = MessageNetwork(self.world, self.faults)
        self.streams = SimulatedNetwork(self.world)
        self.streams.delay = lambda source, target: self.network.delay()
        self.rule: Rule = rng.choice(("retry", "retry", "sequenced"))
        self.ttl = rng.choice(self.backend_type.ttls)
        if self.faults.stop_nobody:
            # Then no lease has to expire: clients release all they give up, so a long ttl must not delay any client.
            self.ttl = rng.choice((self.ttl, LONG_TTL, LONG_TTL))
        self.pace = min(self.ttl, 2.0)
        self.jump = 0.0 if self.faults.jump_at == NEVER else timing.remember_for(self.ttl) + self.ttl + 2.0
        """How long everything stands still in the middle of this world; long enough for a store to forget."""
        self.healed_at = HEALED_AT + self.jump
        self.resource_names = [f"name/{i}" for i in range(rng.choice((1, 1, 2)))]
        self.judge = Judge(self.world, self.rule, keep_log=keep_log)
        self.judge.tokens_per_name = self.backend_type.tokens_per_name
        self.judge.fifo, self.judge.keep_lateness = self.backend_type.fifo, self.backend_type.keep_lateness
        self.judge.delay_noticed = self.backend_type.delay_noticed
        self.resource = MessageServer(self.world, self.network, "resource")
        self.guard = self.guard_type(rule=self.rule, clock=lambda: self.world.now)
        self.backend = self.backend_type(self)
        self.trace = Trace(Promises.of(self.backend_type.traits))
        """What the clients saw. It is checked at the end."""
        self.judge.holds, self.judge.place_seconds = self.backend.holds, self.backend.place_seconds
        # By then servers have come back, late messages have arrived, and what crashed clients left has expired.
        settled = max(2 * self.pace, self.faults.delay_max + self.pace)
        self.judge.prompt_from = self.healed_at + settled + self.backend.lateness + 1.0
        self.progress_within = 2 * self.pace + self.backend.lateness + 5.0
        """Once healed, no client is without progress for so many seconds (L2)."""
        self.ends_at = max(self.healed_at + 1.0 + self.progress_within, self.judge.prompt_from + 2.5)
        """No later than L2 and L6 need: the healed part of a world is the expensive one, and finds the least."""
        self._written: dict[str, bytes] = {}
        self._items = itertools.count(1)
        self._operations = itertools.count(1)
        self._clients = 0
        self.processes: list[Process] = []

    def draw_faults(self) -> Faults:
        return Faults.drawn(self.world)

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
        self.check_traces()
        return self.judge

    def check_traces(self) -> None:
        """T: what the clients saw, and what the store decided, are answers of an authority with these traits."""
        for trace in filter(None, (self.backend.decisions, self.trace)):
            try:
                self.judge.counts["answers"] = self.judge.counts.get("answers", 0) + trace.check()
            except Deviation as deviation:
                self.judge.broken("T", str(deviation), deviation)

    def _run(self) -> None:
        for _ in range(self.world.rng.choice((2, 3, 4))):
            self.start_client()
        self._plan(self.faults.server_fault_every, self._break_a_server)
        if self.backend.processes():
            self._plan(self.faults.stream_fault_every, self._break_a_stream)
        if self.jump:
            self.world.at(self.faults.jump_at, self._jump)
        self.world.at(self.healed_at, self._heal)
        self.world.run(self.ends_at)
        self._conclude()

    def _plan(self, every: float, fault: Callable[[], None]) -> None:
        """Let a fault happen now and then, until the world heals."""
        when = self.world.now + self.world.rng.expovariate(1 / every)
        if when < self.healed_at:
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
        """Cut, stall or block a stream between a client and a server, in the middle of a frame or of a request.

        Or let go of the client: its connection is reset, and what it has sent arrives later.
        """
        rng, streams = self.world.rng, self.streams
        clients = [process for process in self.processes if process.alive]
        if not clients or not self.backend.processes():
            return
        one, other = rng.choice(clients), rng.choice(self.backend.processes())
        seconds = rng.uniform(0.1, 2 * self.pace)
        match rng.choice(("cut", "cut next", "cut next", "stall", "block", "let go", "let go next")):
            case "cut":
                streams.cut(one, other)
            case "cut next":
                streams.cut_next(*rng.sample((one, other), 2))
            case "let go":
                streams.let_go(one, other, seconds)
            case "let go next":
                streams.let_go_next(one, other, seconds)
            case "stall":
                streams.stall(one, other, seconds)
            case "block":
                source, target = rng.sample((one, other), 2)
                streams.block(source, target)
                self.world.after(seconds, lambda: streams.unblock(source, target))
        self.judge.say(f"a stream between {one.name} and {other.name} breaks")

    def cut_off(self, client: Process) -> None:
        """Nothing passes between a client and the authority's servers for a while, in either direction."""
        self.judge.say(f"{client.name} is cut off")
        seconds = self.world.rng.uniform(0.5, 2.0) * self.pace
        for server in self.backend.processes():
            self.streams.stall(client, server, seconds)

    def _jump(self) -> None:
        """No message or connection lasts so long: a request that came after it would be older than any promise."""
        self.judge.say(f"everything stands still for {self.jump:.0f} s")
        self.network.drop_all()
        self.streams.reset_all()
        self.world.jump(self.jump)
        self.judge.jumped()
        for process in self.processes:
            process.pause(0.0)  # so that the judge knows
        self.backend.jumped()

    def _heal(self) -> None:
        self.network.healed = True
        self.streams.cut_no_more()
        self.backend.heal()
        self.judge.say("all faults end")

    def _conclude(self) -> None:
        """L2: every client made progress. L4: the next token is admitted. L5: no call hangs. I5: nothing is lost."""
        for call in list(self.judge.under_way):
            self.judge.ended(call)
        self.judge.observed.judge_left(self.healed_at)
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
        self._tasks: list[SimulatedTask] = []
        self._called: dict[str, bool] = {}
        """By worker: whether it is in a call of the engine."""
        self._interrupted: dict[str, float] = {}

    def start(self) -> None:
        for worker in self.workers:
            self.site.judge.progressed(worker, self.process)
            self._tasks.append(self.runtime.spawn(partial(self._work, worker), worker))
        self.site._plan(self.site.faults.interrupt_every, self._interrupt)
        self.site._plan(self.site.faults.pause_every, self._pause)
        self.site._plan(self.site.faults.crash_every, self._crash)

    def _pause(self) -> None:
        seconds = self.site.world.rng.uniform(0.2, 3.0) * self.site.pace
        self.site.judge.say(f"{self.process.name} stands still for {seconds:.2f} s")
        self.process.pause(seconds)

    def _interrupt(self) -> None:
        task = self.site.world.rng.choice(self._tasks)
        error = self.site.world.rng.choice(INTERRUPTS)
        if self.process.alive and not self.process.paused:
            self.site.judge.say(task.name, "is interrupted by", error.__name__)
            self._interrupted[task.name] = self.site.world.now if self._called.get(task.name) else math.inf
            task.throw(error())

    def _crash(self) -> None:
        if self.process.alive:
            self.site.judge.say(f"{self.process.name} crashes")
            self.process.crash()
            self.site.backend.left(self.authority)
            for worker in self.workers:
                del self.site.judge.progress[worker]
            self.site.world.after(self.site.world.rng.uniform(0.1, 1.0), self.site.start_client)

    async def _work(self, worker: str) -> None:
        rng, judge = self.site.world.rng, self.site.judge
        while True:
            count = min(len(self.site.resource_names), rng.choice((1, 1, 2)))
            names = rng.sample(self.site.resource_names, count)
            try:
                await self._section(worker, names)
                judge.progressed(worker, self.process)
                await self._sleep(rng.uniform(*self._idle()))
                continue
            except NotGranted:  # an answer, too: only a client that waits without limit may expect a grant
                judge.count("not granted")
                judge.progressed(worker, self.process)
            except (LeaseLost, StaleToken):
                judge.count("overtaken")
                judge.progressed(worker, self.process)
            except (Unavailable, Indeterminate):
                judge.count("unavailable")
            except Misconfigured:  # the judge has allowed it
                judge.count("misconfigured")
            except INTERRUPTS:
                judge.count("interrupted")
                since = self._interrupted[worker]
                if not self.process.paused_since(since):
                    judge.waited(worker, self.site.world.now - since)
            with contextlib.suppress(*INTERRUPTS):
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
        late = self.site.world.now < self.site.healed_at + self.site.faults.delay_max
        return (0.4, 1.2) if late else (1.5, 3.0)

    async def _sleep(self, seconds: float) -> None:
        await self.runtime.wait(self.runtime.wakeup(), self.runtime.now() + seconds)

    def _request(self, names: Sequence[str]) -> LeaseRequest:
        rng, pace = self.site.world.rng, self.site.pace
        # Not longer, so that a fair queue serves all clients within the bound of L2.
        keep = (0.0, 0.0, 0.2) if self.site.healed else (0.0, 0.0, 0.2, 0.5 * pace)
        return LeaseRequest.checked(
            names,
            ttl=self.site.ttl,
            wait=rng.choice(self.site.waits),
            max_hold=rng.choice((None, None, None, 0.5 * pace, 1.5 * pace)),
            lock_delay=rng.choice((0.0, 0.0, 0.5, 0.75 * pace)),
            at_least_for=rng.choice(keep),
        )

    async def _section(self, worker: str, names: Sequence[str]) -> None:
        rng, judge = self.site.world.rng, self.site.judge
        returned = judge.returned(names)
        request = self._request(names)
        hold = await self._acquire(worker, request)
        judge.acquired(hold, self.process, returned)
        judge.progressed(worker, self.process)
        if request.max_hold is not None:
            judge.observed[hold.grant].renew_until = self.process.world_time(hold.acquired + request.max_hold)
        self._watch(hold)
        try:
            writes = rng.choice((1, 2)) if self.site.rule == "sequenced" else 1
            for _ in range(writes):
                await self._update(hold, rng.choice(names))
        except (FencedError, asyncio.CancelledError, Interrupted):
            await self.engine.release_at_exit(hold, raised=True)
            raise
        judge.believes(hold)
        if hold.state is not State.LOST and request.at_least_for:
            taken = self.process.world_time(hold.acquired + request.at_least_for)
            judge.observed[hold.grant].at_least_until = taken - DRIFT * request.at_least_for
        self._called[worker] = True
        try:
            await self.engine.release_at_exit(hold, raised=False)
        finally:
            self._called[worker] = False

    async def _acquire(self, worker: str, request: LeaseRequest) -> GrantState:
        """L5: an acquire ends soon after its `wait`."""
        began, local = self.site.world.now, self.runtime.now()
        error: FencedError | None = None
        self._called[worker] = True
        try:
            hold = await self.engine.acquire(request)
        except FencedError as caught:
            error = caught
        finally:
            self._called[worker] = False
        if request.wait is not None and not self.process.paused_since(began):
            self.site.judge.waited(self.process.name, self.runtime.now() - local - request.wait)
        if error is not None:
            raise error
        return hold

    def _watch(self, hold: GrantState) -> None:
        """Ask the judge just before each local deadline, when the belief is most likely to be wrong."""
        self.site.judge.believes(hold)
        if not self.process.alive:
            return
        if hold.remaining() > 0.002:
            last = self.process.world_time(hold.deadline - 0.001)
            self.site.world.at(last, lambda: self.process.deliver(lambda: self._watch(hold)))
        elif hold.remaining():
            over = self.process.world_time(hold.deadline + 0.001)
            self.site.world.at(over, lambda: self.process.deliver(lambda: self._look_back(hold)))

    def _look_back(self, hold: GrantState) -> None:
        self.site.judge.believes(hold)
        if hold.lost_reason == "expired":
            deadline = self.process.world_time(hold.deadline)
            self.site.judge.observed.lost(hold.grant, self.process, deadline)

    async def _update(self, hold: GrantState, name: str) -> None:
        """Read, think, write back with one more item."""
        site = self.site
        announcement = hold.announcement()
        found = await self._reach(lambda: site.read(announcement, name))
        if not site.healed and site.world.rng.random() < site.faults.pause_aimed:
            self._pause()
        if not site.healed and site.world.rng.random() < site.faults.cut_off_aimed:
            site.cut_off(self.process)
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
