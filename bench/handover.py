"""From just before release() in one process to the return of acquire() in the next one."""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import fenced
from bench.figures import Figure
from bench.interleaved import Effort

HANDOVERS = 400
TURNS_MIN = 20
"""Of fewer turns, one process may have taken all before the other one has started."""
HOLD_SECONDS = 0.003
"""Long enough for the one who released to stand in the queue again."""

CROWD = 16
CROWD_TURNS = 15
QUEUED_NS = 1_000_000
"""A hand-over counts if the next holder had asked so long before the release."""


class Turn(NamedTuple):
    """One hold. CLOCK_MONOTONIC is the same for all processes of a machine."""

    token: int
    worker: str
    asked: int
    acquired: int
    released: int


def take_turns(url: str, worker: str, turns: int, threads: int) -> list[Turn]:
    """Take the name `turns` times in each of `threads` threads; runs in a process of its own."""
    found: list[Turn] = []
    with fenced.Client(url) as client:

        def work(name: str) -> None:
            for _ in range(turns):
                asked = time.monotonic_ns()
                lease = client.acquire("baton")
                acquired = time.monotonic_ns()
                time.sleep(HOLD_SECONDS)
                released = time.monotonic_ns()
                lease.release()
                found.append(Turn(lease.token, name, asked, acquired, released))

        crew = [threading.Thread(target=work, args=(f"{worker}.{index}",)) for index in range(threads)]
        for each in crew:
            each.start()
        for each in crew:
            each.join()
    return found


def measure(url: str, sizes: list[tuple[int, int]]) -> list[float]:
    """Run one process per (turns, threads) and return the seconds of every hand-over between workers: two at least."""
    times: list[float] = []
    while len(times) < 2:  # of a few turns, one process may have taken all before the other has started
        times += _measure_once(url, sizes)
    return times


def _measure_once(url: str, sizes: list[tuple[int, int]]) -> list[float]:
    with fenced.Client(url) as first:
        first.acquire("baton").release()  # makes the file, which is not what is measured
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(sizes), mp_context=spawn) as pool:
        jobs = [
            pool.submit(take_turns, url, str(number), turns, threads)
            for number, (turns, threads) in enumerate(sizes)
        ]
        turns = sorted(turn for job in jobs for turn in job.result())
    return [
        (after.acquired - before.released) / 1e9
        for before, after in pairwise(turns)
        if after.worker != before.worker and after.asked + QUEUED_NS < before.released
    ]


def run(folder: Path, effort: Effort) -> Iterator[Figure]:
    pair = measure(f"sqlite:///{folder}/pair.db", [(max(TURNS_MIN, effort.of(HANDOVERS // 2)), 1)] * 2)
    turns = effort.of(CROWD_TURNS)
    crowd = measure(f"sqlite:///{folder}/crowd.db", [(turns, 1), (turns, CROWD)])
    yield _figure("handover", "hand-over between two processes", pair, 2.0)
    yield _figure("handover_crowd", f"the same with {CROWD} waiting threads in the other", crowd, None)


def _figure(key: str, what: str, times: list[float], target: float | None) -> Figure:
    high = statistics.quantiles(times, n=10)[-1]
    detail = f"median of {len(times)}; 90 % under {high * 1e3:.2f} ms"
    return Figure(key, what, statistics.median(times) * 1e3, "ms", target, detail)
