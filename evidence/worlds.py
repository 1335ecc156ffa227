"""Ten thousand fresh worlds of every authority, on all cores."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from fenced_testkit.simulation import BACKENDS, fresh_seeds, simulate, site_of
from fenced_testkit.worlds.judge import PromiseBroken

WORLDS = 10_000
CHUNK = 100


def run(worlds: int = WORLDS) -> dict[str, Any]:
    """By authority: which seeds, what happened in their worlds, and the seeds whose promises were broken."""
    return {"worlds_each": worlds, **{authority: _of(authority, worlds) for authority in BACKENDS}}


def _of(authority: str, worlds: int) -> dict[str, Any]:
    seeds, began = fresh_seeds(worlds), time.monotonic()
    counts: Counter[str] = Counter()
    broken: dict[str, str] = {}
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        chunks = [seeds[at : at + CHUNK] for at in range(0, worlds, CHUNK)]
        for happened, failed in pool.map(_run_chunk, [authority] * len(chunks), chunks):
            counts.update(happened)
            broken |= failed
    seconds = round(time.monotonic() - began)
    return {
        "seeds": f"{seeds[0]}-{seeds[-1]}",
        "seconds": seconds,
        "broken": broken,
        "counts": dict(counts.most_common()),
    }


def _run_chunk(authority: str, seeds: Sequence[int]) -> tuple[Counter[str], dict[str, str]]:
    site_type = site_of(authority)
    counts: Counter[str] = Counter()
    broken: dict[str, str] = {}
    for seed in seeds:
        try:
            counts.update(simulate(seed, site_type).counts)
        except PromiseBroken as error:
            broken[str(seed)] = str(error)
    return counts, broken
