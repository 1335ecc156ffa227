"""The lowest live ticket of each queue: no place has an earlier ticket, and none will.

Until a compaction, etcd walks through every key that ever was in a range. Each place has a different key, so without
this a name would slow down with every hand-over. The values here may be forgotten at any time. A wrong value can only
make us skip a waiter (it asks again); it can never grant twice.
"""

from __future__ import annotations

from collections.abc import Callable

from fenced.stores.etcd.wire.messages import KeyValue

NAMES_MAX = 10_000
STORE_STEP = 300
"""In revisions: about a hundred hand-overs."""
TICKET_SECONDS = 10.0
"""A waiter that takes a ticket takes its place, or gives up, in much less than this."""


class QueueProgress:
    """What one client knows."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._history = b""
        self._tickets: dict[str, int] = {}
        self._stored: dict[str, int] = {}
        self._free: dict[str, tuple[int, float]] = {}
        """When a name was last seen free and without waiters: the revision, and our time."""

    def clear(self) -> None:
        self._tickets.clear()
        self._stored.clear()
        self._free.clear()

    def unknown(self, names: tuple[str, ...]) -> bool:
        """Whether to read the value that other clients have stored."""
        return len(names) == 1 and names[0] not in self._tickets

    def learn(self, names: tuple[str, ...], stored: KeyValue | None, revision: int) -> None:
        """Use the value that another client has stored; 0 if there is none, or it is impossible."""
        digits = stored.value if stored is not None else b""
        ticket = int(digits) if digits.isdigit() and len(digits) < 20 else 0
        self.let_in(names, ticket if ticket < revision else 0)

    def should_store(self, names: tuple[str, ...], ticket: int) -> bool:
        """Whether this grant also stores the value for other clients: once every STORE_STEP revisions."""
        return len(names) == 1 and ticket - self._stored.get(names[0], -STORE_STEP) >= STORE_STEP

    def of(self, names: tuple[str, ...], history: bytes) -> int:
        """Lowest live ticket, or 0. Always 0 for several names: the extra compares would exceed max-txn-ops."""
        if self._history != history:  # tickets of another history are meaningless here
            self.clear()
            self._history = history
        return self._tickets.get(names[0], 0) if len(names) == 1 else 0

    def let_in(self, names: tuple[str, ...], ticket: int, *, stored: bool = False) -> None:
        """The waiter with this ticket was granted: nobody was ahead of it, and nobody takes an earlier place now."""
        if len(self._tickets) > NAMES_MAX:
            self._tickets.clear()
            self._stored.clear()
        if stored:
            self._stored[names[0]] = ticket
        for name in names:
            self._tickets[name] = max(ticket, self._tickets.get(name, 0))

    def was_free(self, names: tuple[str, ...], revision: int) -> None:
        """The name was free and nobody waited. An ask that was refused earlier takes its place soon or never.

        So if the name is free again after TICKET_SECONDS, no live ticket is below the earlier revision.
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
