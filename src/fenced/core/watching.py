"""Watches an event loop from the keeper's thread: whether it runs, how long it did not, and which line blocks it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from fenced.values.contracts import Pulse

NOTICED_SECONDS = 0.1
"""An event loop that gives no sign of life for so long is blocked."""
LOOK_SECONDS_MAX = 1.0
SAY_AGAIN_SECONDS = 60.0


class Block(NamedTuple):
    """A time in which the event loop ran nothing but one call."""

    seconds: float
    where: str
    until: float


class LoopWatch:
    """Asks an event loop for a sign of life. The keeper calls everything but `note`, which any thread may call."""

    def __init__(self, pulse: Pulse, now: Callable[[], float]) -> None:
        self._pulse = pulse
        self._now = now
        self._asked_at = now()
        self._question = self._answer = 0
        """Numbers: the keeper alone counts the questions, and the event loop repeats the number."""
        self._where = ""
        self._last = Block(0.0, "", -math.inf)
        self._say_at = -math.inf
        self.look_at = math.inf
        """When the keeper has to look for an answer."""

    @property
    def over(self) -> bool:
        """The event loop was closed: nothing of the program runs there any more."""
        return self._pulse.over()

    @property
    def _open(self) -> bool:
        return self._answer != self._question

    def ask(self) -> None:
        """Ask, unless a question is open."""
        if self._open:
            return
        self._where, self._say_at = "", -math.inf
        self._asked_at = self._now()
        self.look_at = self._asked_at + NOTICED_SECONDS
        self._question = number = self._question + 1  # last: the answer is about all this
        self._pulse.ask(lambda: self._answered(number))

    def _answered(self, number: int) -> None:
        """Called in the event loop."""
        now = self._now()
        if now - self._asked_at > NOTICED_SECONDS:
            self._last = Block(now - self._asked_at, self._where, now)
        self._answer = number  # last: from here on the keeper may ask again

    def look(self, ttl: float) -> Block | None:
        """Look for the answer. Returns what the program should be told now, if it should."""
        now = self._now()
        if not self._open:
            self.look_at = math.inf
            return None
        seconds, every = now - self._asked_at, min(ttl / 6, LOOK_SECONDS_MAX)
        if now < self._asked_at + NOTICED_SECONDS:
            # As `look_at` was computed: a difference may round to less.
            self.look_at = self._asked_at + NOTICED_SECONDS
            return None
        self.look_at = now + max(every, NOTICED_SECONDS)
        where = self._pulse.where()
        if not self._open:  # it has answered meanwhile: that line blocked nothing
            return None
        self._where = where
        if seconds < every or now < self._say_at:
            return None
        self._say_at = now + SAY_AGAIN_SECONDS
        return Block(seconds, where, now)

    def discount(self, seconds: float) -> None:
        """The whole process has not run for so long, and the event loop could not answer."""
        self._asked_at += seconds

    def note(self, since: float) -> str | None:
        """For people: that the event loop was blocked after `since`."""
        block = self._last
        if self._open and self._now() - self._asked_at > NOTICED_SECONDS:
            block = Block(self._now() - self._asked_at, self._where, math.inf)
        if block.until < since:
            return None
        return f"the event loop was blocked for {block.seconds:.1f} s{shown_place(block.where)}"


def shown_place(where: str) -> str:
    return f" in {where}" if where else ""
