"""Call a user callback; report its exception to `sys.excepthook` instead of letting it end the keeper.

Events that a program should know of are also logged, at WARNING, whether or not it has a callback.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from fenced import events

log = logging.getLogger("fenced")
LINES_MAX = 10
"""How many events of one kind are logged in a minute."""


def call_user_callback(call: Callable[..., Any], *args: object) -> None:
    """Call it; report an exception to `sys.excepthook`, as `threading` does for a thread of the program."""
    try:
        call(*args)
    except Exception:  # noqa: BLE001 - the callback is the user's and may raise anything
        sys.excepthook(*sys.exc_info())


class Reporter:
    """Passes every event on to the program's callback, and logs those that need attention.

    One outage may concern thousands of leases: of each kind of event at most ten a minute are logged, and then how many
    more there were. Several threads may report: a count that two of them change at once is off by one, and that is all.
    """

    def __init__(self, call: Callable[[events.Event], None] | None, now: Callable[[], float]) -> None:
        self._call = call
        self._now = now
        self._minutes: dict[type, tuple[float, int]] = {}
        """By kind of event: when the minute began, and how many there were in it."""

    def __call__(self, event: events.Event) -> None:
        if (sentence := _sentence(event)) is not None:
            self._log(type(event), sentence)
        if self._call is not None:
            call_user_callback(self._call, event)

    def _log(self, kind: type, sentence: str) -> None:
        now = self._now()
        began, count = self._minutes.get(kind, (now, 0))
        more = ""
        if now - began >= 60.0:
            more = f" (and {count - LINES_MAX} more of these before)" if count > LINES_MAX else ""
            began, count = now, 0
        self._minutes[kind] = (began, count + 1)
        if count < LINES_MAX:
            log.warning("%s%s", sentence, more)


def _sentence(event: events.Event) -> str | None:
    """The sentence that a log has for an event; None for those of a healthy program."""
    match event:
        case events.LeaseInJeopardy(names, token, _, remaining, why):
            return (
                f"{_shown(names, token)} cannot be renewed, and is lost in {max(remaining, 0):.1f} s: {why}"
            )
        case events.LeaseEnded(names, token, _, reason) if reason not in ("closed", "forked"):
            return f"{_shown(names, token)} was lost: {reason}"
        case events.ReleaseFailed(names, token, _, why):
            return f"{_shown(names, token)} is not released yet, and expires if no retry succeeds: {why}"
        case events.StillWaiting(names, waited, why):
            return f"{', '.join(names)}: waiting for {waited:.0f} s, without a limit: {why}. Pass wait= to give up"
        case events.KeeperFailed(why):
            return f"no lease is renewed any more: {why}"
    return None


def _shown(names: tuple[str, ...], token: int) -> str:
    return f"the lease of {', '.join(names)} (token {token})"
