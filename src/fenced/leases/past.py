"""Attempts that are over, and not forgotten yet: read from the rows of the lease algorithm, which keeps no times.

A lease that is not renewed ends a ttl after it was granted or renewed, so its end tells that moment. An end by its
holder or by an operator sets when the row may be forgotten, which tells when that was.
"""

from __future__ import annotations

from fenced.leases.rows import NS, AttemptRow, LeaseAlgorithm, remember
from fenced.leases.rules import holder_from
from fenced.values import timing
from fenced.values.past import PastLease, State


def past(algorithm: LeaseAlgorithm, name: str, wall: float) -> list[PastLease]:
    """In the order of their tokens; those that were never granted come first. `wall`: what time it is now."""
    rows = sorted(algorithm.rows.naming(name), key=lambda row: (row.token, row.ticket))
    return [_past(row, algorithm.now, wall) for row in rows]


def _past(row: AttemptRow, now: int, wall: float) -> PastLease:
    def at(moment: int) -> float:
        return wall - (now - moment) / NS

    state: State = row.state  # type: ignore[assignment]
    over = row.forget - remember(row.ttl)
    kept = state == "released" and over == row.free_at()
    """Released, and its name kept: the end of that has overwritten both times."""
    lived = row.ttl if row.token else min(row.ttl, int(timing.WAITER_TTL_MAX * NS))
    ended = row.expires if state in ("granted", "waiting", "expired") else over
    return PastLease(
        row.names,
        holder_from(row.holder),
        row.id,
        row.token,
        state,
        row.ttl / NS,
        None if kept else at(row.expires - lived),
        None if kept else at(ended),
    )
