"""One world: the servers, the resource with its guard, the judge, and the clients that come and go."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ClassVar, TypeVar

from fenced.core.acquiring import LeaseEngine
from fenced.errors import (
    AlreadyApplied,
    FencedError,
    Refused,
)
from fenced.stores.memory.guard import MemoryValues
from fenced.testing.lives import Deviation, Promises
from fenced.testing.trace import Trace
from fenced.values import timing
from fenced.values.contracts import Versioned
from fenced.values.decision import Rule
from fenced.values.model import Credential, Stamp
from fenced_testkit.runtime.network import SimulatedNetwork
from fenced_testkit.runtime.world import Process, World
from fenced_testkit.worlds.backend import AuthorityBackend
from fenced_testkit.worlds.client import LONG_TTL, SimulatedClient
from fenced_testkit.worlds.faults import NEVER, Faults, MessageNetwork, MessageServer
from fenced_testkit.worlds.judge import Judge, PromiseBroken
from fenced_testkit.worlds.memory import MemoryBackend

T = TypeVar("T")


HEALED_AT = 8.0
"""When the faults of a world end. From then on every client must make progress (L2)."""
DRIFT_MAX = 0.004


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
        self.trace = Trace(Promises.of(self.backend_type.traits, copies=True))
        """What the clients saw. It is checked at the end. Messages are doubled, and clients repeat what was cut."""
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
        rng, name = self.world.rng, f"client-{self._clients}"
        rate, offset = 1.0 + rng.uniform(-DRIFT_MAX, DRIFT_MAX), rng.uniform(0, 1000)
        process = Process(self.world, name, rate=rate, offset=offset)
        # Half of the clients are of asyncio: their keepers run beside their event loops, with links of their own.
        beside = rng.random() < 0.5
        keeper = Process(self.world, f"{name}/keeper", rate=rate, offset=offset) if beside else process
        self.processes += dict.fromkeys((process, keeper))
        self.client(process, keeper).start()

    def client(self, process: Process, keeper: Process) -> SimulatedClient:
        return SimulatedClient(self, process, keeper)

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

    def cut_off(self, client: SimulatedClient) -> None:
        """Nothing passes between a client and the authority's servers for a while, in either direction.

        If it has two links, only one of them may be cut: it can ask and not renew, or the other way round.
        """
        rng = self.world.rng
        seconds = rng.uniform(0.5, 2.0) * self.pace
        both = (client.process, client.keeper)
        for process in dict.fromkeys(rng.choice((both, both[:1], both[1:]))):
            self.judge.say(f"{process.name} is cut off")
            self.backend.cut_off(process, seconds)
            for server in self.backend.processes():
                self.streams.stall(process, server, seconds)

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
