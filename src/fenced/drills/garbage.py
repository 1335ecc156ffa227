"""Garbage that takes the collector of Python long: a real pause, of a length that was measured."""

from __future__ import annotations

import gc
import math
import random

from fenced.runtime.clocks import now

OBJECTS = 500_000
LISTS_MAX = 100


def slow_to_collect(seconds: float) -> tuple[list[object], float]:
    """Objects that the collector of Python needs at least `seconds` for, and how long it needed.

    What costs time are references to objects all over the memory, not the objects: it follows each of them twice.
    """
    gc.disable()  # no collection of its own while the lists are made
    objects: list[object] = [[] for _ in range(OBJECTS)]
    references = random.choices(objects, k=2 * OBJECTS)
    found: list[object] = [objects]
    took = 0.0
    while took < seconds and len(found) < LISTS_MAX:
        missing = seconds / took if took else 2.0
        found += [list(references) for _ in range(max(1, math.ceil(len(found) * (missing - 1))))]
        began = now()
        gc.collect()
        took = now() - began
    gc.enable()
    return found, took
