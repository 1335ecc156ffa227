"""Every drill again and again, with both cores busy: is a verdict ever wrong, and does the control lose data?

`make test` runs each twice. Here: on the embedded default, and on PostgreSQL with leases from etcd, at the same time.
A drill waits for most of its time, so they are one queue: no round waits for its slowest drill.

In parts: `make evidence ARGS="drills --rounds 5"`, then 10. It goes on with what the file has of the same code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fenced
from fenced.drills.bound import bound
from fenced.drills.catalog import STORIES
from fenced.drills.declared import Drill
from fenced.drills.every import DrillBatch, DrillRow, Told
from fenced.drills.stage import with_rule
from fenced.runtime.clocks import now
from fenced_testkit.servers import EtcdServer, PostgresqlServer

PACKAGE = Path(fenced.__file__).parent
ROUNDS = 20
CONTROLS = 5
JOBS = 6
"""Of each stack."""

Keep = Callable[[dict[str, Any]], None]


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """A process for each core that never rests."""
    busy = [
        subprocess.Popen(bound([sys.executable, "-I", "-S", "-c", "while True: pass"]))
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def _counters() -> dict[str, Counter[str]]:
    return {each.name: Counter[str]() for each in STORIES}


def code() -> str:
    """A digest of the package: each drill starts programs from all over it."""
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


@dataclass(slots=True)
class StackTally:
    """For each drill, how often it ended with which verdict, with the guard and, until it has lost data, without."""

    options: list[str]
    rounds: int
    jobs: int
    told: Callable[[], None]
    verdicts: dict[str, Counter[str]] = field(default_factory=_counters)
    controls: dict[str, Counter[str]] = field(default_factory=_counters)
    whys: dict[str, list[str]] = field(default_factory=dict)

    def run(self) -> None:
        none = [*self.options[:2], "--guard", "none"]
        for _ in range(min(CONTROLS, self.rounds)):
            self._batch([each for each in STORIES if each.loses and not self._has_lost(each)], none)
        self._batch(
            [
                each
                for number in range(self.rounds)
                for each in STORIES
                if number >= self.verdicts[each.name].total()
            ],
            None,
        )

    def _has_lost(self, drill: Drill) -> bool:
        return self.controls[drill.name]["broken"] > 0

    def _batch(self, drills: Sequence[Drill], control: list[str] | None) -> None:
        DrillBatch(self.options, control, self._take).run(drills, self.jobs)

    def _take(self, row: DrillRow) -> None:
        name = row.drill.name
        self._count(name, "with the guard", row.told, self.verdicts[name], "held")
        if row.control is not None:
            self._count(name, "without a guard", row.control, self.controls[name], "broken")
        self.told()

    def _count(self, name: str, where: str, told: Told, counter: Counter[str], expected: str) -> None:
        verdict = told["verdict"]
        counter[verdict] += 1
        if verdict != expected:
            self.whys.setdefault(f"{name}, {where}", []).append(f"{verdict}: {told['sentence']}")
            record, path = tempfile.mkstemp(prefix=f"drill-{name}-{verdict}-", suffix=".json")
            os.close(record)
            Path(path).write_text(json.dumps(told, indent=2))
            print(f"{name}, {where}: {verdict}; its records are in {path}", flush=True)

    def go_on(self, before: dict[str, Any]) -> None:
        """With what an earlier part has found."""
        for mine, key in ((self.verdicts, "verdicts"), (self.controls, "without_a_guard")):
            for name, counted in before[key].items():
                mine[name].update(counted)
        self.whys |= before["otherwise_because"]

    @property
    def found(self) -> dict[str, Any]:
        return {
            "verdicts": {name: dict(each) for name, each in self.verdicts.items()},
            "without_a_guard": {name: dict(each) for name, each in self.controls.items()},
            "otherwise_because": self.whys,
        }


def run(
    rounds: int = ROUNDS,
    keep: Keep = lambda found: None,
    before: dict[str, Any] | None = None,
    *,
    jobs: int = JOBS,
    spin: bool = True,
) -> dict[str, Any]:
    """`keep` gets the figures after each drill, so that an interrupted run leaves what it has found.

    `spin`: keep both cores busy. Without it a machine that others use is left to them.
    """
    began, cpu, lock, here = now(), _cpu_seconds(), threading.Lock(), code()
    past = before if before is not None and before.get("code") == here else {"parts": []}

    def found() -> dict[str, Any]:
        idle, total = (after - before for after, before in zip(_cpu_seconds(), cpu, strict=True))
        part = {
            "until_round": rounds,
            "at_a_time": jobs * len(stacks),
            "spinning": spin,
            "seconds": round(now() - began),
            "cores_idle_percent": round(100 * idle / total, 1) if total else None,
        }
        return {
            **{name: each.found for name, each in stacks.items()},
            "code": here,
            "controls": min(CONTROLS, rounds),
            "parts": [*past["parts"], part],
        }

    def told() -> None:
        with lock:  # two stacks write one file
            keep(found())

    with (
        busy_cores() if spin else contextlib.nullcontext(),
        EtcdServer() as etcd,
        PostgresqlServer() as postgresql,
    ):
        guard = postgresql.url(postgresql.create_database())
        with_rule(guard, "sequenced")
        servers = ["--authority", etcd.url(), "--guard", guard]
        stacks = {
            "sqlite": StackTally([], rounds, jobs, told),
            "etcd and postgresql": StackTally(servers, rounds, jobs, told),
        }
        for name, stack in stacks.items():
            if name in past:
                stack.go_on(past[name])
        with ThreadPoolExecutor(len(stacks)) as pool:
            for running in [pool.submit(stack.run) for stack in stacks.values()]:
                running.result()
    return found()


def _cpu_seconds() -> tuple[float, float]:
    """How long the cores of this machine were idle, and how long they were there."""
    words = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    ticks = os.sysconf("SC_CLK_TCK")
    return (int(words[3]) + int(words[4])) / ticks, sum(map(int, words)) / ticks


def times() -> dict[str, Any]:
    """How long `fenced drill all` takes, as users run it; to be run on cores that do nothing else."""
    return {"all": _time_of(), "all --control": _time_of("--control"), "cores": os.cpu_count()}


def _time_of(*words: str) -> dict[str, Any]:
    load = os.getloadavg()[0]
    command = [sys.executable, "-m", "fenced", "drill", "all", "--json", *words]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    return {
        "seconds": told["seconds"],
        "verdicts": dict(Counter(told["verdicts"].values())),
        "load_before": round(load, 1),
    }
