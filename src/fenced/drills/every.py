"""`fenced drill all`: every story in a process of its own, and its control without a guard. Several run at a time."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fenced.drills.catalog import STORIES
from fenced.drills.declared import Drill
from fenced.drills.story import StoryStep
from fenced.runtime.clocks import now

JOBS = 4
Told: TypeAlias = dict[str, Any]
"""What a drill printed as JSON, or only its verdict and a sentence if it could not run."""


@dataclass(frozen=True, slots=True)
class DrillRow:
    """A drill with the guard, and without one if that was asked for."""

    drill: Drill
    told: Told
    control: Told | None = None

    @property
    def runs(self) -> Iterator[tuple[str, Told]]:
        yield "with the guard", self.told
        if self.control is not None:
            yield "without a guard", self.control


@dataclass(slots=True)
class DrillBatch:
    """The processes of one run. Ended together: each ends its holders on SIGTERM."""

    options: Sequence[str]
    control: Sequence[str] | None = None
    """The options of the control; None: there is none."""
    done: Callable[[DrillRow], None] = lambda row: None
    _running: set[subprocess.Popen[str]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _over: bool = False

    def run(self, drills: Sequence[Drill] = STORIES, jobs: int = JOBS) -> list[DrillRow]:
        pool = ThreadPoolExecutor(jobs)
        try:
            rows = [pool.submit(self._row, each) for each in drills]
            found = []
            for row in rows:
                found.append(row.result())
                self.done(found[-1])
            return found
        finally:
            self._end()
            pool.shutdown(cancel_futures=True)

    def _row(self, drill: Drill) -> DrillRow:
        told = self._run(drill, self.options)
        return DrillRow(drill, told, None if self.control is None else self._run(drill, self.control))

    def _run(self, drill: Drill, options: Sequence[str]) -> Told:
        command = [sys.executable, "-P", "-m", "fenced.drills", drill.name, "--json", *options]
        began = now()
        with self._lock:  # `_end` has not looked yet, or nothing is started any more
            if self._over:
                raise InterruptedError
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
            )
            self._running.add(process)
        said, complained = process.communicate()
        with self._lock:
            self._running.discard(process)
        with contextlib.suppress(json.JSONDecodeError):
            told: Told = json.loads(said)
            return told | {"wall_seconds": round(now() - began, 2)}
        why = complained.strip().splitlines()[-1:] or ["it printed nothing"]
        sentence = f"This shows nothing: {why[0].removeprefix('drill: ')}"
        return {"drill": drill.name, "verdict": "inconclusive", "sentence": sentence, "steps": []}

    def _end(self) -> None:
        with self._lock:
            self._over = True
            for each in self._running:
                each.send_signal(signal.SIGTERM)


def steps_of(told: Told) -> list[StoryStep]:
    return [StoryStep(**each) for each in told["steps"]]


def status_of(rows: Sequence[DrillRow]) -> int:
    """As of one drill; the controls are there to lose data, and do not count."""
    verdicts = {row.told["verdict"] for row in rows}
    return 1 if "broken" in verdicts else 2 if "inconclusive" in verdicts else 0
