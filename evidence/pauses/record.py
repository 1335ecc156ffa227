"""Record pauses of four kinds with the meter that ships: `python -m evidence.pauses.record KIND SECONDS`.

`stops`: SIGSTOP for a while, as a debugger or a hypervisor does. `starved`: stopped and continued by turns, as under a
CPU quota. `collections`: the garbage collector over millions of objects. `calls`: C calls that hold the interpreter.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fenced.pauses import PauseMeter

HERE = Path(__file__).parent


def stops(pid: int, seconds: float) -> None:
    """By a parent: 0.4 s in the middle, at most 6 s."""
    rng, until = random.Random(3), time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(rng.expovariate(1 / 2.5))
        os.kill(pid, signal.SIGSTOP)
        time.sleep(min(6.0, rng.lognormvariate(-0.9, 0.9)))
        os.kill(pid, signal.SIGCONT)


def starved(pid: int, seconds: float) -> None:
    """By a parent: a share of the processor, in slices that grow and shrink."""
    rng, until = random.Random(4), time.monotonic() + seconds
    while time.monotonic() < until:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(rng.uniform(0.1, 0.9))
        os.kill(pid, signal.SIGCONT)
        time.sleep(rng.uniform(0.02, 0.4))


def collections(seconds: float) -> None:
    rng, until = random.Random(5), time.monotonic() + seconds
    while time.monotonic() < until:
        kept = [[number] for number in range(int(rng.lognormvariate(13.6, 0.6)))]
        gc.collect()
        del kept
        time.sleep(rng.expovariate(1 / 0.7))


def calls(seconds: float) -> None:
    rng, until = random.Random(6), time.monotonic() + seconds
    while time.monotonic() < until:
        numbers = list(range(int(rng.lognormvariate(14.5, 0.7))))
        str(numbers)  # no other thread runs meanwhile
        del numbers
        time.sleep(rng.expovariate(1 / 0.7))


OUTSIDE: dict[str, Callable[[int, float], None]] = {"stops": stops, "starved": starved}
INSIDE: dict[str, Callable[[float], None]] = {"collections": collections, "calls": calls}


def main(kind: str, seconds: float) -> None:
    path = HERE / f"{kind}.jsonl"
    path.unlink(missing_ok=True)
    measured = multiprocessing.Process(target=_measured, args=(path, kind, seconds))
    measured.start()
    if kind in OUTSIDE:
        time.sleep(1.0)
        OUTSIDE[kind](measured.pid or 0, seconds - 3.0)
    measured.join()


def _measured(path: Path, kind: str, seconds: float) -> None:
    with PauseMeter(path):
        if kind in INSIDE:
            INSIDE[kind](seconds)
        else:
            time.sleep(seconds)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
