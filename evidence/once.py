"""Many processes at one piece of work, and schedules on clocks that disagree while machines are stopped at random."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import fenced
from fenced.values import ticks

TTL = 1.0
SKEW_SECONDS = 0.4
STOP_SECONDS_MAX = 2.0


def run_schedule(url: str, log: Path, end: int, skew: float) -> None:
    """One machine, whose clock is wrong by `skew`, until the tick `end` has passed."""
    with fenced.Client(url, guarantee="best-effort") as client:
        while (tick := ticks.tick_of(time.time() + skew, 1)) <= end:
            # A machine that was stopped in its turn is refused when it writes its mark: another one has run the tick.
            # One that was stopped inside a transaction of SQLite's blocks the others until it goes on.
            with (
                contextlib.suppress(fenced.LeaseLost, fenced.StaleToken, fenced.NotGranted, fenced.Contended),
                client.once("tick", tick, ttl=TTL, wait=4 * TTL) as turn,
            ):
                if turn:
                    line = f"{tick} {turn.token}\n".encode()
                    with log.open("ab", buffering=0) as file:
                        file.write(line)
            time.sleep(0.05)


def measure(url: str, folder: Path, count: int, processes: int = 4, seed: int = 1) -> dict[str, Any]:
    """Run `count` ticks of one second; runs that no mark followed are those of machines stopped in their turn."""
    drawn = random.Random(seed)
    log, end = folder / "ticks.log", int(time.time()) + count
    log.touch()
    context = multiprocessing.get_context("spawn")
    skews = [drawn.uniform(-SKEW_SECONDS, SKEW_SECONDS) for _ in range(processes)]
    machines: list[BaseProcess] = [
        context.Process(target=run_schedule, args=(url, log, end, skew)) for skew in skews
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
    runs = [
        (int(tick), int(token)) for tick, token in (line.split() for line in log.read_text().splitlines())
    ]
    by_token = [tick for tick, _ in sorted(runs, key=lambda run: run[1])]
    return {
        "ticks": len(set(by_token)),
        "runs": len(runs),
        "twice": sorted({tick for tick in by_token if by_token.count(tick) > 1}),
        "in the order of tokens": by_token == sorted(by_token),
        "stops": stops,
        "exit statuses": sorted({machine.exitcode for machine in machines}, key=str),
    }


def arrive(url: str, log: Path, begin: float) -> None:
    """One of many machines that start at the same time; the one that gets the turn works for a second."""
    with fenced.Client(url, guarantee="best-effort") as client:
        time.sleep(max(0.0, begin - time.time()))
        with client.once("schema", 7) as turn:
            if turn:
                time.sleep(1.0)
        line = f"{'ran' if turn else 'skipped'} {time.time()}\n".encode()
        with log.open("ab", buffering=0) as file:
            file.write(line)


def together(url: str, folder: Path, processes: int = 64) -> dict[str, Any]:
    """All start at once: how many ran, and how long after the end of the work did the last one skip?"""
    log, begin = folder / "together.log", time.time() + processes * 0.25
    context = multiprocessing.get_context("spawn")
    machines = [context.Process(target=arrive, args=(url, log, begin)) for _ in range(processes)]
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
        folder = Path(name)
        url = f"sqlite:///{folder}/leases.db"
        return {"together": together(url, folder), "ticks": measure(url, folder, count)}
