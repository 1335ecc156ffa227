"""How far the queues of names have come: places with an earlier ticket are gone, and nobody takes one any more.

Until a compaction etcd walks through all keys that a range ever had. Places have keys of their own, so without this
a name would slow down with every hand-over. What is remembered here may be forgotten at any time. Whom a floor
hides by mistake is not granted too much: it is passed over, and asks again.
"""

from __future__ import annotations

from collections.abc import Callable

from fenced.authorities.etcd.messages import KeyValue

NAMES_MAX = 10_000
TELL_STEP = 300
"""In revisions: about a hundred hand-overs."""
TICKET_SECONDS = 10.0
"""Within much less than this who has taken a ticket has taken its place, or has given up."""


class Floors:
    """What one client knows."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._history = b""
        self._tickets: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._free: dict[str, tuple[int, float]] = {}
        """When a name was free, with nobody waiting: the revision, and our time."""

    def clear(self) -> None:
        self._tickets.clear()
        self._told.clear()
        self._free.clear()

    def unknown(self, names: tuple[str, ...]) -> bool:
        """Whether to ask what others have told."""
        return len(names) == 1 and names[0] not in self._tickets

    def learn(self, names: tuple[str, ...], told: KeyValue | None, revision: int) -> None:
        """What others have written down; 0 if that is nothing, or cannot be true."""
        digits = told.value if told is not None else b""
        ticket = int(digits) if digits.isdigit() and len(digits) < 20 else 0
        self.let_in(names, ticket if ticket < revision else 0)

    def to_tell(self, names: tuple[str, ...], ticket: int) -> bool:
        """Whether who is let in writes it down for others: now and then."""
        return len(names) == 1 and ticket - self._told.get(names[0], -TELL_STEP) >= TELL_STEP

    def of(self, names: tuple[str, ...], history: bytes) -> int:
        """A ticket, or 0 if nothing is known. Of several names nothing is: a transaction has no room for it."""
        if self._history != history:  # tickets of another history say nothing
            self.clear()
            self._history = history
        return self._tickets.get(names[0], 0) if len(names) == 1 else 0

    def let_in(self, names: tuple[str, ...], ticket: int, *, told: bool = False) -> None:
        """Somebody with this ticket: so nobody was ahead of it, and nobody takes a place with an earlier one now."""
        if len(self._tickets) > NAMES_MAX:
            self._tickets.clear()
            self._told.clear()
        if told:
            self._told[names[0]] = ticket
        for name in names:
            self._tickets[name] = max(ticket, self._tickets.get(name, 0))

    def was_free(self, names: tuple[str, ...], revision: int) -> None:
        """Nobody waited. Who was turned away before takes its place soon or never: free again later, it is a floor."""
        now = self._now()
        for name in names:
            before = self._free.get(name)
            if before is not None and now - before[1] <= TICKET_SECONDS:
                continue
            if before is not None:
                self.let_in((name,), before[0])
            elif len(self._free) > NAMES_MAX:
                self._free.clear()
            self._free[name] = (revision, now)
