"""Locks of any make, as far as a bench uses them, and how they are measured: alone, and with a queue behind them.

A hand-over is measured while a queue drains. One contender holds the lock until all others wait for it; then it
releases, and everybody takes one turn: acquire, hold for a moment, release. What counts is the time from just
before release() in one thread or task to the return of acquire() in the next. Nobody asks twice in a drain: a lock
that lets who comes by at the right moment barge in would be measured by its luckiest moments only.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from bench.interleaved import async_medians, medians

HOLD_SECONDS = 0.001
SPREAD_SECONDS = 0.01
"""Over so long the contenders arrive, each at a time of its own; of a poller, over one interval of its polling."""

SETTLE_SECONDS = 0.02
SETTLE_SECONDS_EACH = 0.001
"""How long after the last one asked all are taken to stand in the queue."""

WARM_UP = 200


class Lock(Protocol):
    def acquire(self) -> object: ...

    def release(self) -> object: ...


class AsyncLock(Protocol):
    def acquire(self) -> Awaitable[object]: ...

    def release(self) -> Awaitable[object]: ...


@dataclass(frozen=True)
class Kind:
    """One make of lock. `crew` makes so many contenders; the stack closes what they need."""

    key: str
    label: str
    crew: Callable[[contextlib.ExitStack, int], list[Lock]] | None
    async_crew: Callable[[contextlib.AsyncExitStack, int], Awaitable[list[AsyncLock]]] | None = None
    poll_seconds: float = 0.0
    """How long a waiter sleeps between two looks; 0: it is woken."""
    targets: dict[str, float] = field(default_factory=dict)
    """By column: at least so many times our own time."""
    note: str = ""

    @property
    def spread(self) -> float:
        return max(SPREAD_SECONDS, self.poll_seconds)


class Turn(NamedTuple):
    asked: float
    acquired: float
    released: float


def handovers(first_release: float, turns: Iterable[Turn]) -> list[float]:
    """The seconds of every hand-over to somebody who was waiting when the one before released."""
    found = []
    released = first_release
    for turn in sorted(turns, key=lambda turn: turn.acquired):
        if turn.asked < released:
            found.append(turn.acquired - released)
        released = turn.released
    return found


def schedule(kinds: Sequence[Kind], cycles: int) -> Iterator[int]:
    """Whose turn it is to drain, in an order that is drawn anew; a poller takes so long that it has half of them."""
    order = list(range(len(kinds)))
    shuffle = random.Random(7).shuffle
    for cycle in range(cycles):
        shuffle(order)
        yield from (index for index in order if cycle % 2 == 0 or not kinds[index].poll_seconds)


# With threads.


class Drain:
    """A queue of threads that empties once."""

    def __init__(self, contenders: Sequence[Lock], spread: float, draw: random.Random) -> None:
        self._gate, *crowd = contenders
        self._asked: list[float] = []
        self._turns: list[Turn] = []
        self._threads = [
            threading.Thread(target=self._contend, args=(lock, draw.uniform(0, spread)), daemon=True)
            for lock in crowd
        ]

    def _contend(self, lock: Lock, delay: float) -> None:
        time.sleep(delay)
        asked = time.perf_counter()
        self._asked.append(asked)
        lock.acquire()
        acquired = time.perf_counter()
        time.sleep(HOLD_SECONDS)
        released = time.perf_counter()
        lock.release()
        self._turns.append(Turn(asked, acquired, released))

    def queue_up(self) -> None:
        """Return when the gate is held and everybody waits behind it."""
        self._gate.acquire()
        for thread in self._threads:
            thread.start()
        while len(self._asked) < len(self._threads):
            time.sleep(0.001)
        time.sleep(SETTLE_SECONDS + SETTLE_SECONDS_EACH * len(self._threads))

    def run(self) -> list[float]:
        """Open the gate, and return the seconds of every hand-over when the queue is empty."""
        opened = time.perf_counter()
        self._gate.release()
        for thread in self._threads:
            thread.join()
        if len(self._turns) < len(self._threads):
            raise RuntimeError("a contender failed; see above")
        return handovers(opened, self._turns)


def pairs(kinds: Sequence[Kind], rounds: int, warm_up: int) -> list[float]:
    """The median seconds of an uncontended acquire and release of each."""
    with contextlib.ExitStack() as stack:
        locks = [lock for kind in kinds for lock in crew_of(kind, stack, 1)]
        return medians(*map(_pair, locks), rounds=rounds, warm_up=warm_up)


def crew_of(kind: Kind, stack: contextlib.ExitStack, count: int) -> list[Lock]:
    assert kind.crew is not None
    return kind.crew(stack, count)


def _pair(lock: Lock) -> Callable[[], None]:
    def acquire_and_release() -> None:
        lock.acquire()
        lock.release()

    return acquire_and_release


def drains(kinds: Sequence[Kind], waiters: int, cycles: int) -> list[list[float]]:
    """The hand-over times of each, with so many waiters when a drain begins."""
    draw = random.Random(11)
    times: list[list[float]] = [[] for _ in kinds]
    with contextlib.ExitStack() as stack:
        crews = [crew_of(kind, stack, waiters + 1) for kind in kinds]
        for lock in (lock for crew in crews for lock in crew):
            _pair(lock)()  # connects
        for kind, crew in zip(kinds, crews, strict=True):
            _drain(kind, crew, draw)  # makes the server know what it will be asked
        for chosen in schedule(kinds, cycles):
            times[chosen] += _drain(kinds[chosen], crews[chosen], draw)
    return times


def _drain(kind: Kind, crew: Sequence[Lock], draw: random.Random) -> list[float]:
    drain = Drain(crew, kind.spread, draw)
    drain.queue_up()
    return drain.run()


# With tasks.


async def async_pairs(kinds: Sequence[Kind], rounds: int, warm_up: int) -> list[float]:
    async with contextlib.AsyncExitStack() as stack:
        locks = [lock for kind in kinds for lock in await _async_crew(kind, stack, 1)]
        return await async_medians(*map(_async_pair, locks), rounds=rounds, warm_up=warm_up)


async def async_drains(kinds: Sequence[Kind], waiters: int, cycles: int) -> list[list[float]]:
    draw = random.Random(11)
    times: list[list[float]] = [[] for _ in kinds]
    async with contextlib.AsyncExitStack() as stack:
        crews = [await _async_crew(kind, stack, waiters + 1) for kind in kinds]
        for lock in (lock for crew in crews for lock in crew):
            await _async_pair(lock)()
        for kind, crew in zip(kinds, crews, strict=True):
            await _async_drain(kind, crew, draw)
        for chosen in schedule(kinds, cycles):
            times[chosen] += await _async_drain(kinds[chosen], crews[chosen], draw)
    return times


async def _async_crew(kind: Kind, stack: contextlib.AsyncExitStack, count: int) -> list[AsyncLock]:
    assert kind.async_crew is not None
    return await kind.async_crew(stack, count)


def _async_pair(lock: AsyncLock) -> Callable[[], Awaitable[None]]:
    async def acquire_and_release() -> None:
        await lock.acquire()
        await lock.release()

    return acquire_and_release


async def _async_drain(kind: Kind, crew: Sequence[AsyncLock], draw: random.Random) -> list[float]:
    gate, *crowd = crew
    left = len(crowd)
    all_asked = asyncio.Event()

    async def contend(lock: AsyncLock, delay: float) -> Turn:
        nonlocal left
        await asyncio.sleep(delay)
        left -= 1
        if not left:
            all_asked.set()
        asked = time.perf_counter()
        await lock.acquire()
        acquired = time.perf_counter()
        await asyncio.sleep(HOLD_SECONDS)
        released = time.perf_counter()
        await lock.release()
        return Turn(asked, acquired, released)

    await gate.acquire()
    tasks = [asyncio.create_task(contend(lock, draw.uniform(0, kind.spread))) for lock in crowd]
    await all_asked.wait()
    await asyncio.sleep(SETTLE_SECONDS + SETTLE_SECONDS_EACH * len(crowd))
    opened = time.perf_counter()
    await gate.release()
    return handovers(opened, await asyncio.gather(*tasks))
