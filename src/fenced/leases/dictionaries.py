"""The rows of the lease algorithm in dictionaries: the memory authority and the ledger."""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Sequence

from fenced.leases.rows import AttemptRow, names_of, new_row
from fenced.leases.rules import tokens_used_up
from fenced.values.model import TOKEN_MAX


class MemoryRows:
    """The rows of one namespace. Callers hold the store's lock.

    Tickets rise, so each queue is sorted by them.
    """

    namespace = 0

    def __init__(self) -> None:
        self.token = 0
        self.ticket = 0
        self._attempts: OrderedDict[str, AttemptRow] = OrderedDict()
        """By id, in the order in which they are checked for deletion."""
        self._claims: dict[str, str] = {}
        self._queues: dict[str, list[tuple[int, str]]] = {}
        self._order: list[str] = []
        """The names in order, as the last survey found them; some may be gone by now."""
        self._ordered: set[str] = set()

    def mint(self) -> int:
        if self.token >= TOKEN_MAX:
            raise tokens_used_up()
        self.token += 1
        return self.token

    def next_ticket(self) -> int:
        self.ticket += 1
        return self.ticket

    def raise_floor(self, above: int) -> int:
        self.token = max(self.token, above)
        return self.token

    def attempt(self, public: str) -> AttemptRow | None:
        return self._attempts.get(public)

    def attempts(self, ids: Sequence[str]) -> dict[str, AttemptRow]:
        known = self._attempts
        return {public: known[public] for public in ids if public in known}

    def put(self, row: AttemptRow) -> None:
        self._attempts[row.id] = row

    def grant(self, row: AttemptRow) -> None:
        self._attempts[row.id] = row
        for name in names_of(row.names_json):
            self._claims[name] = row.id

    def update(self, ids: Sequence[str], state: str, expires: int, forget: int) -> None:
        for public in ids:
            _, space, _, names, ttl, delay, ticket, token, _, _, wake, holder = self._attempts[public]
            self._attempts[public] = new_row(  # faster than `_replace`
                (public, space, state, names, ttl, delay, ticket, token, expires, forget, wake, holder)
            )

    def end(self, row: AttemptRow, state: str, forget: int) -> None:
        public, space, _, names, ttl, delay, ticket, token, expires, _, wake, holder = row
        self._attempts[public] = new_row(
            (public, space, state, names, ttl, delay, ticket, token, expires, forget, wake, holder)
        )
        self._free(row)

    def forget(self, row: AttemptRow) -> None:
        del self._attempts[row.id]

    def overdue(self, now: int, near: str = "", limit: int = 0) -> list[AttemptRow]:
        """Check the next `limit` rows in turn, so that every row is checked again and again, however long it lives."""
        if not limit:
            return [row for row in self._attempts.values() if row.forget <= now]
        attempts = self._attempts
        rows = list(itertools.islice(attempts.values(), limit))
        for row in rows:
            attempts.move_to_end(row.id)
        return [row for row in rows if row.forget <= now]

    def claim(self, name: str) -> AttemptRow | None:
        public = self._claims.get(name)
        return None if public is None else self._attempts[public]

    def free(self, row: AttemptRow) -> None:
        self._free(row)

    def _free(self, row: AttemptRow) -> None:
        for name in names_of(row.names_json):
            if self._claims.get(name) == row.id:
                del self._claims[name]

    def enqueue(self, row: AttemptRow) -> None:
        for name in names_of(row.names_json):
            self._queues.setdefault(name, []).append((row.ticket, row.id))

    def dequeue(self, row: AttemptRow) -> None:
        for name in names_of(row.names_json):
            queue = self._queues.get(name, [])
            place = bisect.bisect_left(queue, (row.ticket, ""))
            if place < len(queue) and queue[place][1] == row.id:
                del queue[place]
            if not queue:
                self._queues.pop(name, None)

    def before(self, name: str, ticket: int) -> AttemptRow | None:
        if name not in self._queues:
            return None
        place = self.ahead(name, ticket)
        return self._attempts[self._queues[name][place - 1][1]] if place else None

    def ahead(self, name: str, ticket: int) -> int:
        return bisect.bisect_left(self._queues.get(name, ()), (ticket, ""))

    def head(self, name: str, now: int) -> AttemptRow | None:
        for _, public in self._queues.get(name, ()):
            row = self._attempts[public]
            if row.expires > now:
                return row
        return None

    def queue(self, name: str) -> list[AttemptRow]:
        return [self._attempts[public] for _, public in self._queues.get(name, ())]

    def naming(self, name: str) -> list[AttemptRow]:
        return [row for row in self._attempts.values() if name in row.names]

    def names(self, after: str, limit: int) -> list[str]:
        """In the order of their code points, which is that of their bytes.

        Only names that are new since the last call are sorted: sorting 20,000 takes as long as hundreds of grants.
        """
        present = self._claims.keys() | self._queues.keys()
        if len(self._ordered) > 2 * len(present):
            self._order = [name for name in self._order if name in present]
            self._ordered = set(self._order)
        if new := present - self._ordered:
            self._order += new
            self._order.sort()
            self._ordered |= new
        later = self._order[bisect.bisect_right(self._order, after) :]
        return list(itertools.islice(filter(present.__contains__, later), limit))
