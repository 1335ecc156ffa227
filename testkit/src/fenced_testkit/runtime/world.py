"""A simulated world: virtual time, seeded events, and processes that pause, crash and drift."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable


class World:
    """One simulated run: its time, its events, its randomness."""

    def __init__(self, seed: int | str) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Schedule a call. Calls that are due together happen in the order in which they were scheduled."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), call))

    def after(self, delay: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), call))

    def run(self, until: float) -> None:
        """Run the events that are due until that time."""
        events, pop = self._events, heapq.heappop
        while events and events[0][0] <= until:
            due, _, call = pop(events)
            if due > self.now:
                self.now = due
            call()
        self.now = max(self.now, until)

    def jump(self, seconds: float) -> None:
        """Let time pass in which nothing happens, as when all machines were suspended. What was due happens next."""
        self.now += seconds


class Process:
    """A process in a world: it has a clock with its own speed, and may be paused or crash."""

    def __init__(self, world: World, name: str, *, rate: float = 1.0, offset: float = 0.0) -> None:
        self.world = world
        self.name = name
        self.rate = rate
        self.offset = offset
        self.alive = True
        self.on_crash: list[Callable[[], None]] = []
        """Called when the process dies: the kernel closes its sockets."""
        self._paused_until = 0.0
        self._held_back: list[Callable[[], None]] = []

    def now(self) -> float:
        return self.world.now * self.rate + self.offset

    def world_time(self, local: float) -> float:
        """A time of the world at which this process's clock has certainly reached `local`."""
        return (local - self.offset) / self.rate + 1e-9

    @property
    def paused(self) -> bool:
        return self.world.now < self._paused_until

    def paused_since(self, when: float) -> bool:
        """Whether the process was paused at any time since `when`."""
        return self._paused_until > when

    def pause(self, seconds: float) -> None:
        """Let nothing of this process run for a while. Events that are due meanwhile run afterwards."""
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
        for call in self.on_crash:
            call()

    def deliver(self, call: Callable[[], None]) -> None:
        """Run a call in this process: now, after its pause, or never if it has crashed."""
        if not self.alive:
            return
        if self.world.now < self._paused_until:
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
