"""A client of a world: what it does under its leases, and what goes wrong with it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from fenced.core.acquiring import LeaseRequest
from fenced.core.holding import GrantState, State
from fenced.core.renewing import Renewer
from fenced.errors import (
    AlreadyApplied,
    FencedError,
    Indeterminate,
    LeaseLost,
    Misconfigured,
    NotGranted,
    StaleToken,
    Unavailable,
)
from fenced.values.contracts import Authority
from fenced.values.model import Holder
from fenced_testkit.runtime.simulated import SimulatedRuntime, SimulatedTask
from fenced_testkit.runtime.world import Process
from fenced_testkit.worlds.backend import WatchedAuthority
from fenced_testkit.worlds.observed import DRIFT

if TYPE_CHECKING:
    from fenced_testkit.worlds.site import Site

T = TypeVar("T")

LONG_TTL = 600.0


class Interrupted(BaseException):
    """As KeyboardInterrupt, in a program that goes on."""


INTERRUPTS: tuple[type[BaseException], ...] = (asyncio.CancelledError, Interrupted)


class SimulatedClient:
    """A process with a worker or two that read, think and write under a lease.

    `keeper` is where its renewals run: the same, or the thread beside an event loop, which `process` then stands for.
    """

    def __init__(self, site: Site, process: Process, keeper: Process) -> None:
        self.site = site
        self.process = process
        self.keeper = keeper
        self.runtime = SimulatedRuntime(process, site.streams)
        self.authority = site.backend.authority(process, self.runtime)
        watched = cast("Authority", WatchedAuthority(self.authority, site, process, self.runtime))
        holder = Holder(self.runtime.secret(), process.name, "host", 1)
        self.engine = site.engine_type(
            watched, self.runtime, holder, guarantee=site.backend.guarantee, renewer=self._renewer()
        )
        self.workers = [f"{process.name}.{number}" for number in range(1, site.backend.workers + 1)]
        self._tasks: list[SimulatedTask] = []
        self._called: dict[str, bool] = {}
        """By worker: whether it is in a call of the engine."""
        self._interrupted: dict[str, float] = {}

    def _renewer(self) -> Renewer | None:
        """As an AsyncClient makes it."""
        if self.keeper is self.process:
            return None
        runtime = SimulatedRuntime(self.keeper, self.site.streams)
        renews = self.site.backend.renewer(self.authority, self.keeper, runtime)
        watched = WatchedAuthority(renews, self.site, self.keeper, runtime)
        shared = renews is self.authority
        return Renewer(cast("Authority", watched), runtime, self.runtime, shared=shared)

    def start(self) -> None:
        for worker in self.workers:
            self.site.judge.progressed(worker, self.process)
            self._tasks.append(self.runtime.spawn(partial(self._work, worker), worker))
        self.site._plan(self.site.faults.interrupt_every, self._interrupt)
        self.site._plan(self.site.faults.pause_every, self._pause)
        self.site._plan(self.site.faults.block_every, self._block)
        self.site._plan(self.site.faults.crash_every, self._crash)

    def _pause(self) -> None:
        seconds = self.site.world.rng.uniform(0.2, 3.0) * self.site.pace
        self.site.judge.say(f"{self.process.name} stands still for {seconds:.2f} s")
        self.process.pause(seconds)
        self.keeper.pause(seconds)

    def _block(self) -> None:
        """Its event loop runs nothing but one call for a while."""
        if self.keeper is not self.process:
            seconds = self.site.world.rng.uniform(0.2, 3.0) * self.site.pace
            self.site.judge.say(f"{self.process.name} blocks its event loop for {seconds:.2f} s")
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
            self.keeper.crash()
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
            self.site.world.at(last, lambda: self.keeper.deliver(lambda: self._watch(hold)))
        elif hold.remaining():
            over = self.process.world_time(hold.deadline + 0.001)
            self.site.world.at(over, lambda: self.keeper.deliver(lambda: self._look_back(hold)))

    def _look_back(self, hold: GrantState) -> None:
        self.site.judge.believes(hold)
        if hold.lost_reason == "expired":
            deadline = self.process.world_time(hold.deadline)
            self.site.judge.observed.lost(hold.grant, self.keeper, deadline)

    async def _update(self, hold: GrantState, name: str) -> None:
        """Read, think, write back with one more item."""
        site = self.site
        announcement = hold.announcement()
        found = await self._reach(lambda: site.read(announcement, name))
        if not site.healed and site.world.rng.random() < site.faults.pause_aimed:
            site.world.rng.choice((self._pause, self._block))()
        if not site.healed and site.world.rng.random() < site.faults.cut_off_aimed:
            site.cut_off(self)
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
