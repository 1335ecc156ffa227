"""The clock for leases: it also runs while the machine is suspended."""

from __future__ import annotations

import time

# CLOCK_MONOTONIC stands still while the machine is suspended, but leases still expire.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    return time.clock_gettime(_CLOCK)


def now_ns() -> int:
    return time.clock_gettime_ns(_CLOCK)


def wall_time() -> float:
    """Seconds since 1970, for people and for grids that machines share. It jumps, and orders nothing."""
    return time.time()
