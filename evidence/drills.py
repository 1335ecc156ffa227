"""Every drill again and again, with both cores busy: is a verdict ever wrong, and does the control lose data?

`make test` runs each twice. Here: on the embedded default, and on PostgreSQL with leases from etcd.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fenced.drills.bound import bound
from fenced.drills.catalog import STORIES
from fenced.drills.every import DrillBatch, DrillRow
from fenced.drills.stage import with_rule
from fenced.runtime.clocks import now
from fenced_testkit.servers import EtcdServer, PostgresqlServer

ROUNDS = 20
CONTROLS = 5
JOBS = 6


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


def run(rounds: int = ROUNDS) -> dict[str, Any]:
    with busy_cores():
        found = {"sqlite": _stack([], rounds)}
        with EtcdServer() as etcd, PostgresqlServer() as postgresql:
            guard = postgresql.url(postgresql.create_database())
            with_rule(guard, "sequenced")
            found["etcd and postgresql"] = _stack(["--authority", etcd.url(), "--guard", guard], rounds)
    return {**found, "rounds": rounds, "controls": min(CONTROLS, rounds), "jobs": JOBS}


def _stack(options: list[str], rounds: int) -> dict[str, Any]:
    """For each drill, how often it ended with which verdict, with the guard and, until it has lost data, without."""
    verdicts = {each.name: Counter[str]() for each in STORIES}
    controls = {each.name: Counter[str]() for each in STORIES}
    whys: dict[str, str] = {}
    seconds = []
    none = [*options[:2], "--guard", "none"]
    for number in range(rounds):
        began = now()
        lossless = [each for each in STORIES if each.loses and not controls[each.name]["broken"]]
        controlled = [each for each in STORIES if each in lossless and number < CONTROLS]
        plain = [each for each in STORIES if each not in controlled]
        rows: list[DrillRow] = []
        for chosen, control in ((plain, None), (controlled, none)):
            rows += DrillBatch(options, control).run(chosen, JOBS)
        if not controlled:
            seconds.append(round(now() - began, 1))
        for row in rows:
            verdicts[row.drill.name][row.told["verdict"]] += 1
            if row.told["verdict"] != "held":
                whys[row.drill.name] = row.told["sentence"]
            if row.control is not None:
                controls[row.drill.name][row.control["verdict"]] += 1
        unlike = {name: dict(each) for name, each in verdicts.items() if len(each) > 1}
        print(f"round {number + 1}: {now() - began:.0f} s {unlike}", flush=True)
    return {
        "verdicts": {name: dict(each) for name, each in verdicts.items()},
        "without_a_guard": {name: dict(each) for name, each in controls.items()},
        "not_held_because": whys,
        "seconds_of_all": [min(seconds, default=None), max(seconds, default=None)],
    }
