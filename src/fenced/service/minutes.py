"""Counts by the minute, for the last hour of the live page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

MINUTES = 60
KEPT_MAX = 2 * MINUTES
"""More than are shown: records bear the clocks of their guards, which may be ahead."""
Key = TypeVar("Key", bound=Hashable)


class Minutes(Generic[Key]):
    """How often each key was counted in each minute. Bounded by KEPT_MAX times the keys of one minute."""

    def __init__(self) -> None:
        self._counts: dict[int, Counter[Key]] = {}

    def add(self, key: Key, at: float, count: int = 1) -> None:
        minute = int(at // 60)
        found = self._counts.get(minute)
        if found is None:
            found = self._counts[minute] = Counter()
            if len(self._counts) > KEPT_MAX:
                del self._counts[min(self._counts)]
        found[key] += count

    def hour(self, key: Key, now: float) -> list[int]:
        """The last sixty minutes, the current one at the end."""
        last, none = int(now // 60), Counter[Key]()
        return [self._counts.get(each, none)[key] for each in range(last - MINUTES + 1, last + 1)]
