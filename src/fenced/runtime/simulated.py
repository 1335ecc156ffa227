"""The simulated runtime: virtual time, a seeded scheduler, and processes that pause, crash and drift.

Leaves yield to the scheduler, so the code that ships runs unchanged in thousands of worlds, and one seed
always makes the same world.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from fenced.contracts import Colour, Readable, Task, Wakeup
from fenced.errors import InvariantBroken

T = TypeVar("T")


class World:
    """One simulated run: its time, its events, its randomness."""

    def __init__(self, seed: int | str) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Do something at a time; things due together happen in the order they were asked for."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), call))

    def after(self, delay: float, call: Callable[[], None]) -> None:
        self.at(self.now + delay, call)

    def run(self, until: float) -> None:
        """Let events happen until that time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            call()
        self.now = max(self.now, until)


class Process:
    """A process in a world: it has a clock of its own speed, and may stand still or die."""

    def __init__(self, world: World, name: str, *, rate: float = 1.0, offset: float = 0.0) -> None:
        self.world = world
        self.name = name
        self.rate = rate
        self.offset = offset
        self.alive = True
        self._paused_until = 0.0
        self._held_back: list[Callable[[], None]] = []

    def now(self) -> float:
        return self.world.now * self.rate + self.offset

    def world_time(self, local: float) -> float:
        """When this process's clock has surely reached `local`."""
        return (local - self.offset) / self.rate + 1e-9

    @property
    def paused(self) -> bool:
        return self.world.now < self._paused_until

    def paused_since(self, when: float) -> bool:
        """Whether the process was paused at any time since `when`."""
        return self._paused_until > when

    def pause(self, seconds: float) -> None:
        """Stand still: nothing of this process runs meanwhile, and everything is late afterwards."""
        self._paused_until = max(self._paused_until, self.world.now + seconds)
        self.world.at(self._paused_until, self._resume)

    def _resume(self) -> None:
        if self.paused:
            return
        held_back, self._held_back = self._held_back, []
        for call in held_back:
            self.deliver(call)

    def crash(self) -> None:
        self.alive = False
        self._held_back.clear()

    def deliver(self, call: Callable[[], None]) -> None:
        """Let something happen in this process: now, after its pause, or never."""
        if not self.alive:
            return
        if self.paused:
            self._held_back.append(call)
        else:
            call()


class SimulatedWakeup:
    """A flag with at most one waiter, which is enough for the core in a simulated process."""

    __slots__ = ("_flag", "waiter")

    def __init__(self) -> None:
        self._flag = False
        self.waiter: Callable[[], None] | None = None

    def set(self) -> None:
        self._flag = True
        if self.waiter is not None:
            waiter, self.waiter = self.waiter, None
            waiter()

    def clear(self) -> None:
        self._flag = False

    def is_set(self) -> bool:
        return self._flag


class _Suspend:
    """What a leaf yields to the scheduler: a flag to wait for, and a time to give up."""

    __slots__ = ("until", "wakeup")

    def __init__(self, wakeup: SimulatedWakeup, until: float | None) -> None:
        self.wakeup = wakeup
        self.until = until

    def __await__(self) -> Generator[_Suspend, None, None]:
        yield self


class SimulatedTask:
    """A coroutine in a process."""

    def __init__(self, process: Process, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self.name = name
        self.done = False
        self._process = process
        self._start = work
        self._work: Coroutine[Any, Any, None] | None = None
        self._turn = 0
        self._finished = SimulatedWakeup()
        process.world.after(0.0, lambda: process.deliver(self._step))

    def _step(self) -> None:
        self._turn += 1
        if self._work is None:
            self._work = self._start()
        _current.append(self)
        try:
            suspended = self._work.send(None)
        except StopIteration:
            self._finish()
            return
        finally:
            _current.pop()
        if not isinstance(suspended, _Suspend):
            raise InvariantBroken("a coroutine awaited something that is not of the simulated runtime")
        self._arm(suspended)

    def _arm(self, suspended: _Suspend) -> None:
        turn, process = self._turn, self._process

        def resume() -> None:
            if turn == self._turn:
                self._step()

        def wake() -> None:
            process.world.after(0.0, lambda: process.deliver(resume))

        suspended.wakeup.waiter = wake
        if suspended.until is not None:
            due = process.world_time(suspended.until)
            process.world.at(due, lambda: process.deliver(resume))

    def _finish(self) -> None:
        self.done = True
        self._finished.set()

    async def join(self, until: float | None = None) -> None:
        if not self.done and self not in _current:
            await _Suspend(self._finished, until)


_current: list[SimulatedTask] = []


class SimulatedRuntime:
    """The leaves of one simulated process."""

    colour: Colour = "asyncio"  # they suspend

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world
        self.now = process.now
        self.random = process.world.rng.random

    def secret(self) -> str:
        return f"{self._world.rng.getrandbits(128):032x}"

    def whoami(self) -> object:
        return _current[-1] if _current else None

    def wakeup(self) -> SimulatedWakeup:
        return SimulatedWakeup()

    def lock(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    async def wait(self, wakeup: Wakeup, until: float | None) -> bool:
        assert isinstance(wakeup, SimulatedWakeup)
        while not wakeup.is_set():
            if until is not None and self.now() >= until:
                return False
            await _Suspend(wakeup, until)
        return True

    async def readable(self, source: Readable, until: float) -> bool:
        raise InvariantBroken("there are no file descriptors in a simulated world")

    async def writable(self, source: Readable, until: float) -> bool:
        raise InvariantBroken("there are no file descriptors in a simulated world")

    async def call(self, function: Callable[..., T], *args: Any, urgent: bool = False) -> T:
        return function(*args)

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> Task:
        return SimulatedTask(self._process, work, name)
