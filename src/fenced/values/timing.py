"""Pure arithmetic about time: until when a holder may believe in its lease, and when to renew.

The authority's clock decides when a lease ends. The holder's own deadline must come earlier: it counts from the
instant *before* the request was sent, and subtracts a margin for clocks that run at different speeds.
"""

from __future__ import annotations

import math
from datetime import timedelta

from fenced.errors import Misuse, shown

Seconds = float | timedelta

TTL_DEFAULT = 30.0
TTL_MIN = 0.1
TTL_MAX = 24 * 3600.0
LOCK_DELAY_MAX = 3600.0
AT_LEAST_FOR_MAX = 24 * 3600.0
WAIT_MAX = 366 * 24 * 3600.0

DRIFT_RATIO = 0.01
DRIFT_SECONDS = 0.010
WAITER_TTL_MAX = 10.0
REMEMBER_SECONDS_MIN = 600.0
CALL_SECONDS = 5.0
"""How long a request to an authority may take if its caller sets no deadline."""
PATIENCE_SECONDS = 0.2
"""How long after its caller's deadline a request that was sent may still wait for its answer."""
PATIENCE_MAX = 60.0


def _seconds(value: object, what: str, low: float, high: float) -> float:
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Misuse(f"{what} is a number of seconds or a timedelta, not {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not low <= number <= high:  # also refuses nan
        raise Misuse(f"{what} is {low:g} to {high:.0f} seconds, not {shown(value)}")
    return number


def check_ttl(value: object) -> float:
    return _seconds(value, "ttl", TTL_MIN, TTL_MAX)


def check_wait(value: object) -> float | None:
    return None if value is None else _seconds(value, "wait", 0.0, WAIT_MAX)


def check_max_hold(value: object) -> float | None:
    return None if value is None else _seconds(value, "max_hold", TTL_MIN, WAIT_MAX)


def check_lock_delay(value: object) -> float:
    return _seconds(value, "lock_delay", 0.0, LOCK_DELAY_MAX)


def check_at_least_for(value: object) -> float:
    return _seconds(value, "at_least_for", 0.0, AT_LEAST_FOR_MAX)


def check_patience(value: object) -> float:
    return _seconds(value, "patience", 0.0, PATIENCE_MAX)


def check_need(value: object) -> float:
    return _seconds(value, "need", 0.0, TTL_MAX)


def check_bound(value: object, what: str) -> float:
    return _seconds(value, what, 0.0, WAIT_MAX)


def call_until(now: float, until: float | None) -> float:
    """When a request ends: at its caller's deadline, or after CALL_SECONDS if the caller has none."""
    return now + CALL_SECONDS if until is None else until


def local_deadline(sent: float, remaining: float) -> float:
    """Until when a holder may believe an answer to the request that it began to send at `sent`."""
    return sent + remaining - (remaining * DRIFT_RATIO + DRIFT_SECONDS)


def renew_after(ttl: float, jitter: float) -> float:
    """Seconds from one renewal to the next; `jitter` in [0, 1) makes clients renew at different times."""
    return ttl / 3 * (1 - 0.15 * jitter)


def overdue_after(ttl: float) -> float:
    """Seconds after a confirmed renewal until the lease is in jeopardy, unless another renewal is confirmed."""
    return ttl / 2


def retry_after(ttl: float) -> float:
    """Seconds until a failed renewal is retried."""
    return min(max(ttl / 12, 0.01), 1.0)


def waiter_ttl(ttl: float) -> float:
    """How long a waiter that is not renewed keeps its place; never longer than a lease that is not renewed."""
    return min(ttl, WAITER_TTL_MAX)


def repeat_for(ttl: float) -> float:
    """How long the withdrawal of an attempt is retried. After that it has expired, even if a new leader restarted
    its ttl."""
    return 2 * ttl


def remember_for(ttl: float) -> float:
    """How long the authority keeps an ended attempt, so that a delayed request cannot revive it."""
    return max(REMEMBER_SECONDS_MIN, 4 * ttl)
