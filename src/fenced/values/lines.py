"""How many lines about one thing a log gets: by default ten a minute, and then how many were left out. Pure."""

from __future__ import annotations

import math

LINES_MAX = 10
LINES_SECONDS = 60.0


class LineLimit:
    """Counts the lines about one thing.

    Several threads may ask without a lock: a count that two of them change at once is off by one, and that is all.
    """

    __slots__ = ("_began", "_left_out", "_lines", "_most")

    def __init__(self, most: int = LINES_MAX) -> None:
        self._most = most
        self._began = -math.inf
        self._lines = 0
        self._left_out = 0

    def admit(self, now: float) -> str | None:
        """None: leave this line out. Otherwise what to add to it: how many were left out before it."""
        if now - self._began >= LINES_SECONDS:
            self._began, self._lines = now, 0
        if self._lines >= self._most:
            self._left_out += 1
            return None
        self._lines += 1
        left_out, self._left_out = self._left_out, 0
        return f" ({left_out} more like this before it)" if left_out else ""
