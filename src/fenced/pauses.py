"""The pause meter: a thread that sleeps and notes how late it wakes. It is cheap enough to stay on in production.

What it sees is what a keeper suffers, too: a process that is stopped, a collector of garbage, a C call that holds the
interpreter, a machine without a free core, a suspended machine.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from fenced.errors import Misuse
from fenced.runtime import clocks

__all__ = ["PauseMeter", "Recording"]

EVERY_SECONDS = 0.05
"""How long it sleeps. Pauses that matter are a third of a ttl, and 10 ms would cost four times as much."""
LONG_SECONDS = 0.1
"""Pauses at least as long are recorded one by one; shorter ones are counted."""
LINES_MAX = 100_000
FORMAT = "pauses 1"
_NOTE_SECONDS = 60.0
_FIRST, _STEPS, _BUCKETS = 1e-4, 4, 104
_log = logging.getLogger("fenced")


@dataclass(slots=True)
class Buckets:
    """Lengths in 104 buckets, four for each doubling from 0.1 ms on: 19 % wide."""

    counts: Counter[int] = field(default_factory=Counter)
    longest: float = 0.0

    def add(self, seconds: float) -> None:
        place = 0 if seconds <= _FIRST else min(_BUCKETS - 1, 1 + int(_STEPS * math.log2(seconds / _FIRST)))
        self.counts[place] += 1
        self.longest = max(self.longest, seconds)

    @staticmethod
    def upper(place: int) -> float:
        return float(_FIRST * 2 ** (place / _STEPS))


class PauseMeter:
    """Measures the pauses of this process from `start` to `stop`; a `with` block does both.

        with PauseMeter("pauses.jsonl"):
            serve()

    A recording that cannot be written ends with a warning, and the program goes on. `fenced tune --from` reads it.
    """

    def __init__(self, record: str | os.PathLike[str] | None = None, every: float = EVERY_SECONDS) -> None:
        if not 0.001 <= every <= 1.0:
            raise Misuse(f"a pause meter sleeps 0.001 to 1 seconds, not {every}")
        self.every = every
        self.buckets = Buckets()
        self.cpu_seconds = 0.0
        """What the thread has used, when it has stopped."""
        self._path = record
        self._file: TextIO | None = None
        self._lines = 0
        self._began = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fenced-pauses", daemon=True)

    def start(self) -> Self:
        if self._path is not None:
            self._file = open(self._path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (stop closes it)
            self._write(fenced=FORMAT, began=clocks.wall_time(), every=self.every)
        self._began = clocks.now()  # a pause in which the thread starts counts, too
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        now, stopping, every = clocks.now, self._stopping.is_set, self.every
        began = noted = before = self._began
        while not stopping():
            time.sleep(every)  # noqa: TID251 (a thread that measures the sleep itself)
            after = now()
            late = after - before - every
            # The pause began somewhere in the sleep, on average in its middle. The next sleep begins now.
            length = late + every / 2 if late > every / 2 else late
            self.buckets.add(length)
            if length >= LONG_SECONDS:
                self._write(
                    at=round(clocks.wall_time(), 3), after=round(after - began, 4), seconds=round(length, 4)
                )
            if after - noted >= _NOTE_SECONDS:
                noted = after
                self._note(after - began)
            before = after if late <= every else now()
        self._note(now() - began)
        self.cpu_seconds = time.thread_time()
        if self._file is not None:
            self._file.close()

    def _note(self, ran: float) -> None:
        self._write(always=True, ran=round(ran, 3), counts=dict(self.buckets.counts))

    def _write(self, always: bool = False, **line: Any) -> None:
        if self._file is None or (self._lines >= LINES_MAX and not always):
            return
        self._lines += 1
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            _log.warning("pauses are no longer recorded: %s", error)
            self._file = None


@dataclass(frozen=True, slots=True)
class Recording:
    """What one or more meters have recorded."""

    seconds: float
    """How long they ran, in all."""
    pauses: tuple[tuple[float, float], ...]
    """The long ones: when each began, in seconds since the first meter started, and how long it lasted."""
    counts: Counter[int]
    """All wake-ups, by bucket."""

    @classmethod
    def read(cls, *paths: str | os.PathLike[str]) -> Recording:
        """The recordings in these files; Misuse if a file is none. A last line that was cut off is ignored."""
        seconds, pauses, counts = 0.0, list[tuple[float, float]](), Counter[int]()
        for path in paths:
            for run in _runs(Path(path)):
                notes = [line for line in run if "ran" in line]
                for line in run:
                    if "seconds" in line:
                        pauses.append((seconds + line["after"] - line["seconds"], line["seconds"]))
                seconds += notes[-1]["ran"] if notes else 0.0
                counts.update({int(place): n for place, n in (notes[-1]["counts"] if notes else {}).items()})
        if seconds <= 0.0:
            raise Misuse(
                "nothing was recorded yet: a meter writes how long it ran once a minute, and when it stops"
            )
        return cls(seconds, tuple(pauses), counts)


def _runs(path: Path) -> list[list[dict[str, Any]]]:
    """The lines of each start of a meter. What a meter that was killed has noted after its last minute is dropped."""
    runs: list[list[dict[str, Any]]] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
        except ValueError:
            if number == len(lines):
                continue
            raise Misuse(f"{path}, line {number}: this is no recording of pauses") from None
        if isinstance(line, dict) and line.get("fenced") == FORMAT:
            runs.append([])
        elif not runs or not isinstance(line, dict):
            raise Misuse(f"{path}, line {number}: this is no recording of pauses")
        else:
            runs[-1].append(line)
    return [_noted(run) for run in runs]


def _noted(run: list[dict[str, Any]]) -> list[dict[str, Any]]:
    last = max((place for place, line in enumerate(run) if "ran" in line), default=-1)
    return run[: last + 1]


def __dir__() -> list[str]:
    return __all__
