"""The lowest live ticket of each queue: places with an earlier ticket are gone, and nobody takes one any more.

Until a compaction etcd walks through all keys that a range ever had. Places have keys of their own, so without this
a name would slow down with every hand-over. The values here may be forgotten at any time. A wrong value can only make
us skip a waiter (it asks again); it can never grant twice.
"""

from __future__ import annotations

from collections.abc import Callable

from fenced.wire.etcd.messages import KeyValue

NAMES_MAX = 10_000
TELL_STEP = 300
"""In revisions: about a hundred hand-overs."""
TICKET_SECONDS = 10.0
"""A waiter that takes a ticket takes its place, or gives up, in much less than this."""


class QueueProgress:
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
        """Whether to read the value that other clients have stored."""
        return len(names) == 1 and names[0] not in self._tickets

    def learn(self, names: tuple[str, ...], told: KeyValue | None, revision: int) -> None:
        """Take over the value that other clients have stored; 0 if there is none, or it cannot be true."""
        digits = told.value if told is not None else b""
        ticket = int(digits) if digits.isdigit() and len(digits) < 20 else 0
        self.let_in(names, ticket if ticket < revision else 0)

    def to_tell(self, names: tuple[str, ...], ticket: int) -> bool:
        """Whether this grant also stores the value for other clients: once every TELL_STEP revisions."""
        return len(names) == 1 and ticket - self._told.get(names[0], -TELL_STEP) >= TELL_STEP

    def of(self, names: tuple[str, ...], history: bytes) -> int:
        """Lowest live ticket, or 0. Always 0 for several names: the extra compares would exceed max-txn-ops."""
        if self._history != history:  # tickets of another history say nothing
            self.clear()
            self._history = history
        return self._tickets.get(names[0], 0) if len(names) == 1 else 0

    def let_in(self, names: tuple[str, ...], ticket: int, *, told: bool = False) -> None:
        """The waiter with this ticket was granted: nobody was ahead of it, and nobody takes an earlier place now."""
        if len(self._tickets) > NAMES_MAX:
            self._tickets.clear()
            self._told.clear()
        if told:
            self._told[names[0]] = ticket
        for name in names:
            self._tickets[name] = max(ticket, self._tickets.get(name, 0))

    def was_free(self, names: tuple[str, ...], revision: int) -> None:
        """Nobody waited. An ask that was turned away before takes its place soon or never.

        So if the name is free again after TICKET_SECONDS, the earlier revision is a floor.
        """
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
