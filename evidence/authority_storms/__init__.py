"""A storm on each authority: clients are killed, stopped, interrupted, cancelled; servers frozen, killed, cut off.

It measures how long a free name with live waiters stays ungranted, and checks safety meanwhile.
"""

from __future__ import annotations

import datetime
import shutil
import tempfile
from pathlib import Path
from typing import Any

from evidence.authority_storms.judge import Bounds, judge
from evidence.authority_storms.weather import SERVERS, events, storm

AUTHORITIES = ("sqlite", *SERVERS)
SECONDS = 600.0
WORKERS = 14
TTL = 2.0
SEED = 1
_TICK_MAX = 0.1
_SLACK_SECONDS = 2.0


def run(
    authorities: tuple[str, ...] = AUTHORITIES,
    *,
    seconds: float = SECONDS,
    workers: int = WORKERS,
    seed: int = SEED,
) -> dict[str, Any]:
    return {authority: run_one(authority, seconds, workers, seed) for authority in authorities}


def run_one(authority: str, seconds: float, workers: int, seed: int) -> dict[str, Any]:
    """Run and judge one storm. If a check fails, the folder with the events is kept and printed."""
    folder = Path(tempfile.mkdtemp(prefix=f"fenced-storm-{authority}-"))
    bounds = Bounds.of(authority, TTL, _TICK_MAX)
    quiet = (bounds.outage if authority == "sqlite" else bounds.silent_connections) + _SLACK_SECONDS
    facts = storm(
        authority, folder, seconds=seconds, workers=workers, ttl=TTL, quiet=quiet, seed=f"{seed}/{authority}"
    )
    judged = judge(events(folder), authority, facts["tick"])
    judged["broken"] += [f"worker {who} ended by itself" for who in facts["ended_by_themselves"]]
    if judged["broken"]:
        print(f"{authority}: the events are in {folder}", flush=True)
    else:
        shutil.rmtree(folder)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seconds": seconds,
        "workers": workers,
        "seed": seed,
        **facts,
        **judged,
    }
