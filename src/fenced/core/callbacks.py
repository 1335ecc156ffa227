"""Call a user callback; report its exception to `sys.excepthook` instead of letting it end the keeper.

In asyncio the keeper's thread calls none: the program's callbacks run in its event loop. Events that a program should
know of are also logged, at WARNING, whether or not it has a callback.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from fenced import events
from fenced.core.watching import shown_place
from fenced.values.contracts import Runtime
from fenced.values.lines import LINES_MAX, LineLimit

log = logging.getLogger("fenced")
_warned: dict[str, object] = {}
LINES: dict[type, int] = {events.LoopBlocked: 1}
"""How many lines a minute a log gets about an event, if not as many as about others."""


def call_user_callback(call: Callable[..., Any], *args: object) -> None:
    """Call it; report an exception to `sys.excepthook`, as `threading` does for a thread of the program."""
    try:
        call(*args)
    except Exception:  # noqa: BLE001 - the callback is the user's and may raise anything
        sys.excepthook(*sys.exc_info())


class Reporter:
    """Passes every event on to the program's callback, and logs those that need attention.

    One outage may concern thousands of leases, so the lines about each kind of event are limited. Several threads may
    report, without a lock: `setdefault` gives all of them the same counter.
    """

    def __init__(self, call: Callable[[events.Event], None] | None, runtime: Runtime) -> None:
        self._call = call
        self._runtime = runtime
        self._limits: dict[type, LineLimit] = {}
        """By kind of event."""
        self._out = False

    @property
    def observed(self) -> bool:
        """Whether the program has a callback. Events that no log has are made only if it has."""
        return self._call is not None

    def __call__(self, event: events.Event) -> None:
        if (sentence := _sentence(event)) is not None:
            self._log(type(event), sentence)
        if self._call is not None:
            self._runtime.deliver(call_user_callback, self._call, event)

    def reached(self, error: Exception | None = None) -> None:
        """The authority has answered, or not. Told when that changes; two threads that see it at once both tell it."""
        if self._call is None or (error is not None) is self._out:
            return
        self._out = error is not None
        self(events.ConnectionMade() if error is None else events.ConnectionFailed(str(error)))

    def _log(self, kind: type, sentence: str) -> None:
        more = self._limits.setdefault(kind, LineLimit(LINES.get(kind, LINES_MAX))).admit(self._runtime.now())
        if more is not None:
            log.warning("%s%s", sentence, more)


WANTED = ("closed", "forked", "resigned")
"""Why a lease ended of which no log needs to tell: its own program has ended it."""


def _sentence(event: events.Event) -> str | None:
    """The sentence that a log has for an event; None for those of a healthy program."""
    match event:
        case events.LeaseInJeopardy(names, token, _, remaining, why):
            return (
                f"{_shown(names, token)} cannot be renewed, and is lost in {max(remaining, 0):.1f} s: {why}"
            )
        case events.LeaseEnded(names, token, _, reason) if reason not in WANTED:
            return f"{_shown(names, token)} was lost: {reason}"
        case events.ReleaseFailed(names, token, _, why):
            return f"{_shown(names, token)} is not released yet, and expires if no retry succeeds: {why}"
        case events.StillWaiting(names, waited, why):
            return f"{', '.join(names)}: waiting for {waited:.0f} s, without a limit: {why}. Pass wait= to give up"
        case events.LoopBlocked(seconds, where):
            return (
                f"the event loop is blocked for {seconds:.1f} s by now{shown_place(where)}: leases are renewed, but "
                "nothing else runs in it"
            )
        case events.KeeperFailed(why):
            return f"no lease is renewed any more: {why}"
    return None


def _shown(names: tuple[str, ...], token: int) -> str:
    return f"the lease of {', '.join(names)} (token {token})"


def warn_once(warnings: tuple[str, ...]) -> None:
    """Log each warning once in a process, whatever the number of clients."""
    for warning in warnings:
        first = object()
        # `setdefault` is atomic: of several threads that open clients at the same time, one logs the warning.
        if _warned.setdefault(warning, first) is first:
            log.warning("fenced: warning: %s", warning)
