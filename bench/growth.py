"""Whether a lease costs more after many names than after few."""

from __future__ import annotations

import random
from collections.abc import Callable

import fenced
from bench.figures import Figure, ratio
from bench.interleaved import Effort, medians

FEW = 1000
MANY = 1_000_000
ROUNDS = 1500
WARM_UP = 200
TARGET = 1.2


def used_name(number: int) -> str:
    """All of one length, so that one can stand in for another."""
    return f"used/{number:07}"


def figure(key: str, few: fenced.Client, many: fenced.Client, names: int, effort: Effort) -> Figure:
    """Pairs on names drawn from those that were used before, in both stores turn by turn."""
    small, large = medians(
        _pair(few, FEW), _pair(many, names), rounds=effort.of(ROUNDS), warm_up=effort.size(WARM_UP)
    )
    what = f"acquire and release after {names:,} names"
    return ratio(f"{key}.growth", what, large, small, target=TARGET, against=f"after {FEW:,} names")


def _pair(client: fenced.Client, names: int) -> Callable[[], None]:
    draw = random.Random(names)

    def acquire_and_release() -> None:
        client.acquire(used_name(draw.randrange(names))).release()

    return acquire_and_release
