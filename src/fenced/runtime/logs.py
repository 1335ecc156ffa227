"""Log lines about what goes wrong, few enough to be read: one when it begins, one when it is over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from fenced.errors import FencedError, Indeterminate, Unavailable, redacted
from fenced.runtime import clocks
from fenced.values.lines import LineLimit

QUIET_SECONDS = 5.0
"""An outage is over when something has worked this long after the last failure."""


class OutageLog:
    """One line when something cannot be used, and one when it can be used again. Used in the loop's thread only."""

    def __init__(self, log: logging.Logger, what: str, now: Callable[[], float] = clocks.now) -> None:
        self._log = log
        self._what = what
        self._now = now
        self._since: float | None = None
        self._last = 0.0
        self._failures = 0

    def note(self, results: Iterable[object]) -> None:
        """What a store has answered; only its failures count, not what it refuses."""
        for result in results:
            if isinstance(result, (Unavailable, Indeterminate)):
                self.failed(result)
                return
        self.worked()

    def failed(self, error: Exception) -> None:
        self._last = self._now()
        self._failures += 1
        if self._since is None:
            self._since = self._last
            self._log.warning("%s cannot be used: %s", self._what, line_of(error))

    def worked(self) -> None:
        if self._since is None or self._now() - self._last < QUIET_SECONDS:
            return
        self._log.warning(
            "%s works again; it had failed %d times in %.0f s",
            self._what,
            self._failures,
            self._last - self._since,
        )
        self._since, self._failures = None, 0


class LimitedLog:
    """At most ten lines a minute. The next one says how many were left out."""

    def __init__(self, log: logging.Logger, now: Callable[[], float] = clocks.now) -> None:
        self._log = log
        self._now = now
        self._limit = LineLimit()

    def warning(self, text: str) -> None:
        more = self._limit.admit(self._now())
        if more is not None:
            self._log.warning("%s%s", text, more)


def line_of(error: Exception) -> str:
    """The first line of an error, without passwords."""
    text = str(error) if isinstance(error, FencedError) else f"{type(error).__name__}: {error}"
    return str(redacted(text)).partition("\n")[0]
