"""Signs of life: when an attempt of this client was last asked for or renewed, and whether it was given up.

All names of a client hang on a few leases of etcd's, so etcd ends none of them while any is renewed. What a name's
own ttl says is kept here: before a lease of etcd's that was prolonged could carry a name past it, the name is ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Sign:
    """Of one attempt, from its first ask until somebody knows that nothing of it is left."""

    public: str
    ttl: float
    """For how long it lives after `since` without another sign, as far as we know: its record knows better."""
    since: float
    under_way: float = -math.inf
    """Until when a call about it may be under way. A time and no count: no interrupt can leave it too high for ever."""
    stored: bool = False
    """Its record was there once. Where it is not, it is forgotten, and no first ask is under way any more."""
    end: str = ""
    """How its owner wants it to end; nobody knows yet whether that was carried out."""
    freed: bool = False
    """Its names are free, and its record does not say so yet: etcd had no space."""
    delay: float = 0.0
    delays: tuple[tuple[bytes, bytes], ...] = ()
    """It has expired, and this is what keeps its names free for `delay` seconds more: keys and their values."""

    def over(self, now: float) -> bool:
        if now < self.under_way:
            return False
        return bool(self.end) or now >= self.since + self.ttl + (self.delay if self.delays else 0.0)


class Signs:
    """Those of one client. Threads may call at the same time: each step is a single one of a dictionary."""

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

    def renewed(self, publics: Iterable[str]) -> list[Sign]:
        """Those that are renewed too late are returned, and are over all the same."""
        now, late = self._now(), []
        for public in publics:
            if (sign := self._signs.get(public)) is None:
                continue
            if sign.over(now):
                late.append(sign)
            else:
                sign.since = now
        return late

    def given_up(self, public: str, end: str, until: float) -> Sign:
        """Its owner ends it now; what fails is repeated."""
        sign = self._signs.get(public)
        if sign is None:
            sign = self._signs.setdefault(public, Sign(public, 0.0, self._now()))
        sign.under_way, sign.end = until, end  # in this order: nobody else ends it meanwhile
        return sign

    def drop(self, public: str) -> None:
        self._signs.pop(public, None)

    def get(self, public: str) -> Sign | None:
        return self._signs.get(public)

    def over(self) -> list[Sign]:
        """What is to be ended now; last what can wait."""
        now = self._now()
        found = [sign for sign in list(self._signs.values()) if sign.over(now)]
        return sorted(found, key=lambda sign: sign.freed)
