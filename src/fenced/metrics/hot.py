"""Hot names: which names are contended most, in bounded memory."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

NAMES_MAX = 200
HALVED_SECONDS = 300.0
"""After so long every count is halved, so that the list shows what is hot now."""


@dataclass(frozen=True, slots=True)
class HotName:
    name: str
    count: int
    error: int
    """By how much the count may be too high."""


class HotNames:
    """The heaviest names of a stream, by the space-saving algorithm: a new name takes the place of the lightest one.

    A count is never too low, and too high by at most what the name inherited. Used in one thread, or under a lock.
    """

    def __init__(self, limit: int = NAMES_MAX) -> None:
        self._limit = limit
        self._counts: dict[str, int] = {}
        self._errors: dict[str, int] = {}
        self._floor = 0
        self._at_floor: list[str] = []
        """Names that had the lowest count at the last scan: they are used up before the next one."""
        self._halved = 0.0

    def add(self, name: str, now: float) -> None:
        counts = self._counts
        if now - self._halved >= HALVED_SECONDS:
            self._halve(now)
        if name in counts:
            counts[name] += 1
        elif len(counts) < self._limit:
            counts[name], self._errors[name] = 1, 0
        else:
            least = self._least()
            floor = counts.pop(least)
            del self._errors[least]
            counts[name], self._errors[name] = floor + 1, floor

    def _least(self) -> str:
        counts = self._counts
        while self._at_floor:
            name = self._at_floor.pop()
            if counts.get(name) == self._floor:
                return name
        self._floor = min(counts.values())
        self._at_floor = [name for name, count in counts.items() if count == self._floor]
        return self._at_floor.pop()

    def _halve(self, now: float) -> None:
        # After twice the time nothing of a count would be left that matters.
        shift = 1 if now - self._halved < 2 * HALVED_SECONDS else 64
        self._halved, self._at_floor = now, []
        for name, count in list(self._counts.items()):
            if count >> shift:
                self._counts[name], self._errors[name] = count >> shift, self._errors[name] >> shift
            else:
                del self._counts[name], self._errors[name]

    def top(self, now: float, limit: int = 10) -> list[HotName]:
        """Those that are certainly hotter than what is not counted by itself; none where no name stands out."""
        if now - self._halved >= HALVED_SECONDS:
            self._halve(now)
        full = len(self._counts) >= self._limit
        floor = min(self._counts.values()) if full else 0
        best = heapq.nlargest(limit, self._counts.items(), key=lambda pair: pair[1])
        found = [HotName(name, count, self._errors[name]) for name, count in best]
        return [each for each in found if each.count - each.error > floor]
