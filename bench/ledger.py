"""Pairs a second in one process: the ledger against the SQLite authority, one caller and 64, and in batches."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from bench.figures import Figure
from bench.interleaved import Effort
from fenced.client import registry
from fenced.runtime.aio import AioRuntime
from fenced.values.model import Ask, Granted, Holder, Release

TASKS = 64
ROUNDS = 5
SECONDS = 0.6
AGAINST = "the SQLite authority"

Pairs = Callable[[Any, AioRuntime, int, float], Awaitable[int]]
"""Makes pairs as one of many tasks for so many seconds, one at least; returns how many."""


def run(folder: Path, effort: Effort) -> Iterator[Figure]:
    one = asyncio.run(_compare(folder, effort, 1))
    many = asyncio.run(_compare(folder, effort, TASKS))
    yield _figure("ledger_1", "1 task", one["ledger"], one["sqlite"])
    yield _figure("ledger_64", f"{TASKS} tasks", many["ledger"], many["sqlite"])
    yield _figure("ledger_batch", f"batches of {TASKS} operations", many["batch"], many["sqlite"])


def _figure(key: str, what: str, ours: float, theirs: float) -> Figure:
    detail = f"{ours:,.0f} against {theirs:,.0f} pairs a second of {AGAINST}"
    return Figure(
        key, f"durable grants and releases, {what}", ours / theirs, "x", detail=detail, direction="at least"
    )


async def _compare(folder: Path, effort: Effort, tasks: int) -> dict[str, float]:
    """The medians of pairs a second. The authorities take turns, so that all of them meet the same machine."""
    runtime, seconds = AioRuntime(), effort.seconds(SECONDS)
    found: dict[str, list[float]] = {"sqlite": [], "ledger": [], "batch": []}
    sqlite = registry.authority(f"sqlite:///{folder}/leases-{tasks}.db", runtime)
    ledger = registry.authority(f"ledger:///{folder}/ledger-{tasks}.db", runtime)
    for authority in (sqlite, ledger):
        await authority.open()
    for _ in range(max(2, effort.of(ROUNDS))):
        found["sqlite"].append(await _rate(sqlite, runtime, _singly, tasks, seconds))
        found["ledger"].append(await _rate(ledger, runtime, _singly, tasks, seconds))
        found["batch"].append(await _rate(ledger, runtime, _in_batches, 2, seconds))
    for authority in (sqlite, ledger):
        await authority.close()
    runtime.close()
    return {name: sorted(rates)[len(rates) // 2] for name, rates in found.items()}


async def _rate(authority: Any, runtime: AioRuntime, pairs: Pairs, tasks: int, seconds: float) -> float:
    began = time.perf_counter()
    counts = await asyncio.gather(*(pairs(authority, runtime, task, seconds) for task in range(tasks)))
    return sum(counts) / (time.perf_counter() - began)


def _asks(runtime: AioRuntime, task: int) -> Iterator[Ask]:
    """Attempts of one holder, each settled when the next one but one batch is asked."""
    holder, series = Holder(runtime.secret(), "bench", "host", 1), runtime.secret()
    for number in itertools.count(1):
        name, settled = f"name/{task}/{number % TASKS}", max(0, number - 2 * TASKS)
        yield Ask(runtime.secret(), (name,), 30.0, holder, series=series, number=number, settled=settled)


async def _singly(authority: Any, runtime: AioRuntime, task: int, seconds: float) -> int:
    until = time.perf_counter() + seconds
    for count, ask in enumerate(_asks(runtime, task), 1):
        answer = await authority.ask(ask)
        assert isinstance(answer, Granted)
        await authority.release(ask.secret)
        if time.perf_counter() >= until:
            return count
    raise AssertionError("asks do not end")


async def _in_batches(authority: Any, runtime: AioRuntime, task: int, seconds: float) -> int:
    """Each batch releases what the batch before it has been granted, and asks again."""
    until, asks, count = time.perf_counter() + seconds, _asks(runtime, task), 0
    held: list[Ask] = []
    while not held or time.perf_counter() < until:
        new = list(itertools.islice(asks, TASKS // 2))
        answers = await authority.many([*(Release(ask.secret) for ask in held), *new])
        assert all(isinstance(answer, Granted) for answer in answers[len(held) :])
        held, count = new, count + len(held)
    await authority.many([Release(ask.secret) for ask in held])
    return count + len(held)
