"""Many processes at one piece of work, and schedules on clocks that disagree while machines are stopped at random.

Every tick must be marked once, and none be left out. A tick may be *run* again: a machine that is stopped in its turn
leaves no mark, and its successor runs the tick under a higher token.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import tempfile
import time
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import fenced
from fenced.client import once
from fenced.values import ticks

TTL = 1.0
SKEW_SECONDS = 0.4
STOP_SECONDS_MAX = 2.0


class LoggedMarks(fenced.Values):
    """The marks of one machine, and a line in a file for each that was accepted."""

    def __init__(self, url: str, log: Path) -> None:
        super().__init__(url)
        self._log = log

    def write(self, *given: Any, **options: Any) -> Any:
        found = super().write(*given, **options)
        append(self._log, f"marked {ticks.read(given[2])['tick'].version} 0")
        return found


def append(log: Path, line: str) -> None:
    """In one system call, so that machines that are stopped do not share a line."""
    with log.open("ab", buffering=0) as file:
        file.write(f"{line}\n".encode())


def run_schedule(url: str, log: Path, end: int, skew: float, work: float) -> None:
    """One machine, whose clock is wrong by `skew`, until the tick `end` is done. It makes up for every missed tick."""
    with (
        fenced.Client(url, guarantee="best-effort") as client,
        LoggedMarks(once.marks_beside(url), log) as marks,
    ):
        while (found := once.done(marks, "tick")) is not None and found.version < end:
            # A machine that was stopped in its turn is refused when it writes its mark: another one has run the tick,
            # and this one looks again which are due. One that was stopped inside a transaction of SQLite's blocks the
            # others until it goes on.
            with contextlib.suppress(
                fenced.LeaseLost, fenced.StaleToken, fenced.NotGranted, fenced.Contended
            ):
                for tick in ticks.due(min(time.time() + skew, end), 1, 0, found.version, "all"):
                    with client.once("tick", tick, marks=marks, ttl=TTL, wait=4 * TTL) as turn:
                        if turn:
                            append(log, f"ran {tick} {turn.token}")
                            time.sleep(work)
            time.sleep(0.05)


def measure(
    url: str, folder: Path, count: int, processes: int = 4, seed: int = 1, work: float = 0.0
) -> dict[str, Any]:
    """Run `count` ticks of one second. Runs that no mark followed are those of machines stopped in their turn."""
    drawn = random.Random(seed)
    log, begin = folder / "ticks.log", int(time.time())
    with fenced.Client(url, guarantee="best-effort") as client, client.once("tick", begin) as turn:
        assert turn is not None
    end = begin + count
    context = multiprocessing.get_context("spawn")
    skews = [drawn.uniform(-SKEW_SECONDS, SKEW_SECONDS) for _ in range(processes)]
    machines: list[BaseProcess] = [
        context.Process(target=run_schedule, args=(url, log, end, skew, work)) for skew in skews
    ]
    for machine in machines:
        machine.start()
    stops = 0
    while time.time() < end - STOP_SECONDS_MAX:
        machine = drawn.choice(machines)
        if machine.pid is not None and machine.is_alive():
            os.kill(machine.pid, signal.SIGSTOP)
            time.sleep(drawn.uniform(0.1, STOP_SECONDS_MAX))
            os.kill(machine.pid, signal.SIGCONT)
            stops += 1
        time.sleep(0.3)
    for machine in machines:
        machine.join()
    lines = [line.split() for line in log.read_text().splitlines()]
    marked = sorted(int(tick) for what, tick, _ in lines if what == "marked")
    runs = sorted((int(token), int(tick)) for what, tick, token in lines if what == "ran")
    by_token = [tick for _, tick in runs]
    return {
        "ticks": count,
        "seconds of work in each": work,
        "each marked once, none left out": marked == list(range(begin + 1, end + 1)),
        "runs": len(runs),
        "run again by a successor": len(runs) - len(set(by_token)),
        "in the order of tokens": by_token == sorted(by_token),
        "stops": stops,
        "exit statuses": sorted({machine.exitcode for machine in machines}, key=str),
    }


def arrive(url: str, log: Path, start: Barrier) -> None:
    """One of many machines that start at the same time; the one that gets the turn works for a second."""
    with fenced.Client(url, guarantee="best-effort") as client:
        start.wait()
        with client.once("schema", 7) as turn:
            if turn:
                time.sleep(1.0)
                ended = time.monotonic()  # one clock for all processes of this machine
        append(log, f"ran {ended}" if turn else f"skipped {time.monotonic()}")


def together(url: str, folder: Path, processes: int = 64) -> dict[str, Any]:
    """All start at once: how many ran, and how long after the end of the work did the last one skip?"""
    log = folder / "together.log"
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(processes)
    machines = [context.Process(target=arrive, args=(url, log, start)) for _ in range(processes)]
    for machine in machines:
        machine.start()
    for machine in machines:
        machine.join()
    lines = [line.split() for line in log.read_text().splitlines()]
    ended = [float(at) for what, at in lines if what == "ran"]
    last = max(float(at) for what, at in lines if what == "skipped")
    return {
        "processes": processes,
        "ran": len(ended),
        "skipped": len(lines) - len(ended),
        "last skip after the end, seconds": round(last - max(ended), 2),
    }


def run(count: int = 3600) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder, apart = Path(name), Path(name) / "apart"
        apart.mkdir()
        url = f"sqlite:///{folder}/leases.db"
        return {
            "together": together(url, folder),
            "ticks": measure(url, folder, count),
            # So long that machines are stopped in their turn, and others run their tick.
            "ticks with work": measure(f"sqlite:///{apart}/leases.db", apart, count // 12, work=0.3),
        }
