"""Timing one thing against another: turn by turn, so that both meet the same weather, and by medians."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Action = Callable[[], object]
AsyncAction = Callable[[], Awaitable[object]]


WARM_UP = 1200
"""Commits until every write-ahead log has been through a checkpoint, even with one page a commit.

Until then the log grows, and a commit that lengthens its file takes twice as long as one that does not.
"""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much of the usual number of repetitions a run makes, and of the usual sizes, warm-ups and waits.

    With smaller sizes the figures mean nothing: such a run shows that everything can be measured.
    """

    share: float = 1.0
    sizes: float = 1.0

    def of(self, count: int) -> int:
        return max(1, round(count * self.share))

    def size(self, count: int) -> int:
        return max(1, round(count * self.sizes))

    def seconds(self, seconds: float) -> float:
        return seconds * self.sizes


def medians(*actions: Action, rounds: int, warm_up: int, before: Action = lambda: None) -> list[float]:
    """The median seconds of each action, each called once per round, in an order that is drawn anew.

    `before` is called in front of each, untimed.
    """
    for _ in range(warm_up):
        for action in actions:
            before()
            action()
    times: list[list[float]] = [[] for _ in actions]
    for chosen in _turns(len(actions), rounds):
        before()
        began = time.perf_counter()
        actions[chosen]()
        times[chosen].append(time.perf_counter() - began)
    return [statistics.median(each) for each in times]


async def async_medians(*actions: AsyncAction, rounds: int, warm_up: int) -> list[float]:
    """The same for coroutines, all in one loop, one at a time."""
    for _ in range(warm_up):
        for action in actions:
            await action()
    times: list[list[float]] = [[] for _ in actions]
    for chosen in _turns(len(actions), rounds):
        began = time.perf_counter()
        await actions[chosen]()
        times[chosen].append(time.perf_counter() - began)
    return [statistics.median(each) for each in times]


async def loaded_medians(
    *actions: Callable[[int], Awaitable[object]], tasks: int, count: int, rounds: int
) -> list[float]:
    """The median seconds of each action for one call, if this many tasks call it `count` times each, at once.

    The actions take turns. Each gets the number of its task.
    """

    async def several(action: Callable[[int], Awaitable[object]], task: int) -> None:
        for _ in range(count):
            await action(task)

    times: list[list[float]] = [[] for _ in actions]
    for number in range(1 + rounds):  # the first one warms up
        for action, found in zip(actions, times, strict=True):
            began = time.perf_counter()
            await asyncio.gather(*(several(action, task) for task in range(tasks)))
            if number:
                found.append((time.perf_counter() - began) / count / tasks)
    return [statistics.median(each) for each in times]


def _turns(count: int, rounds: int) -> Iterator[int]:
    """Everybody once per round, in an order that is drawn anew."""
    order = list(range(count))
    shuffle = random.Random(7).shuffle
    for _ in range(rounds):
        shuffle(order)
        yield from order


def connect(path: Path) -> sqlite3.Connection:
    """A durable connection as a careful program opens it: WAL, every commit synced."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def make_table(connection: sqlite3.Connection, rows: int) -> None:
    connection.execute(
        "CREATE TABLE orders (id INTEGER PRIMARY KEY, shop INTEGER, qty INTEGER, epoch INTEGER)"
    )
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(
        "INSERT INTO orders VALUES (?, 7, 0, NULL)", [(id_,) for id_ in range(1, rows + 1)]
    )
    connection.execute("COMMIT")
