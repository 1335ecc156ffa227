"""Signs of life: when an attempt of this client was last asked for or renewed, and whether it was given up.

All names of a client share a few etcd leases, so etcd ends none of the names while any of them is renewed. This module
tracks each name's own ttl. When an etcd lease is prolonged, the client ends the names on it whose own ttl has passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Sign:
    """The sign of life of one attempt, from its first ask until a reply proves that nothing of it is left."""

    public: str
    ttl: float
    """How long it lives after `since` without another ask or renewal. Its record in etcd may have a longer ttl."""
    since: float
    under_way: float = -math.inf
    """Until when a call about it may be running. A time, not a count: an interrupted call cannot leave it set."""
    stored: bool = False
    """Its record was seen. If the record is missing later, etcd has deleted it; no first ask is still on its way."""
    end: str = ""
    """The state in which its owner ended it, while the outcome of that is unknown."""
    taken_until: float = -math.inf
    """It was released, and nobody is granted its names before this time."""
    freed: bool = False
    """Its names are free, but its record does not say so yet: etcd had no space."""
    delay: float = 0.0
    delays: tuple[tuple[bytes, bytes], ...] = ()
    """It has expired; these keys, with their values, keep its names ungranted for `delay` more seconds."""
    expiring: bool = False
    """Whether the expiry was carried out is unknown. `delays` count once its record says so."""

    def is_due(self, now: float) -> bool:
        """Whether it has to be ended now: its owner gave it up, or nobody renewed it in time."""
        if now < self.under_way:
            return False
        delay = self.delay if self.delays and not self.expiring else 0.0
        return bool(self.end) or now >= self.since + self.ttl + delay


class Signs:
    """The signs of one client. Safe from many threads: each step is one atomic operation on a dictionary."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._signs: dict[str, Sign] = {}

    def __len__(self) -> int:
        return len(self._signs)

    def clear(self) -> None:
        self._signs.clear()

    def asked(self, public: str, ttl: float, until: float) -> Sign:
        now = self._now()
        sign = self._signs.get(public)
        if sign is None:
            sign = self._signs.setdefault(public, Sign(public, ttl, now))
        sign.since, sign.under_way = now, until
        return sign

    def taken_over(self, public: str, ttl: float) -> None:
        """From now on this client carries the attempt, so this client has to end it if nobody renews it."""
        sign = self._signs.get(public)
        if sign is None:
            sign = self._signs.setdefault(public, Sign(public, ttl, self._now()))
        sign.ttl, sign.since, sign.stored = ttl, self._now(), True

    def renewed(self, publics: Iterable[str]) -> list[Sign]:
        """Note a renewal. Returns the signs that were renewed too late: a late renewal revives nothing."""
        now, late = self._now(), []
        for public in publics:
            if (sign := self._signs.get(public)) is None:
                continue
            if sign.is_due(now):
                late.append(sign)
            else:
                sign.since = now
        return late

    def given_up(self, public: str, end: str, until: float, taken_until: float = -math.inf) -> Sign:
        """Note that its owner ends it now. If that fails, `Ending.settle` retries it."""
        sign = self._signs.get(public)
        if sign is None:
            sign = self._signs.setdefault(public, Sign(public, 0.0, self._now()))
        # In this order: with `end` set first, another thread could end it at the same time.
        sign.under_way, sign.taken_until, sign.end = until, taken_until, end
        return sign

    def drop(self, public: str) -> None:
        self._signs.pop(public, None)

    def get(self, public: str) -> Sign | None:
        return self._signs.get(public)

    def due(self) -> list[Sign]:
        """The signs of attempts that have to be ended now; last those whose names are free already."""
        now = self._now()
        found = [sign for sign in list(self._signs.values()) if sign.is_due(now)]
        return sorted(found, key=lambda sign: sign.freed)
