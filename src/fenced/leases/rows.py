"""The lease algorithm for stores that offer rows and short transactions.

A store supplies the verbs of `Rows`, and runs one `LeaseAlgorithm` in each transaction. This file defines what an
authority must do: the memory authority runs it over dictionaries, and tests compare every authority that decides
elsewhere (PostgreSQL's functions, Redis's scripts) with it.

A transaction must exclude every other transaction on the same names (SQLite has one write lock, memory one mutex), and
`now` is read after that lock is taken: a request that waited for the lock cannot revive an attempt that has expired.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

from fenced.leases.rules import NOBODY, QUEUE_MAX, holder_from, holder_text, reused_attempt
from fenced.values import timing
from fenced.values.model import (
    Ask,
    AskAnswer,
    Busy,
    Ended,
    Gone,
    Granted,
    HeldBy,
    Kept,
    NameView,
    ReleaseAnswer,
    Released,
    RenewAnswer,
    Waiter,
    Waiting,
    check_floor,
    grant_id,
)

NS = 10**9
"""Times and durations of rows are whole nanoseconds, on the store's own clock."""

SWEEP_EVERY_TOKENS = 64
"""One in this many grants also deletes old attempts, so that no background process is needed."""
SWEEP_AT_GRANT = 200
SWEEP_AT_ENTRY = 4

_LAST = 2**62
"""Greater than every ticket: the place of an attempt that is not queued."""
_WAITER_TTL_MAX = int(timing.WAITER_TTL_MAX * NS)
_REMEMBER_MIN = int(timing.REMEMBER_SECONDS_MIN * NS)
_RELEASED = Released()


@lru_cache(maxsize=1024)
def names_json(names: tuple[str, ...]) -> str:
    return json.dumps(names, ensure_ascii=False)


@lru_cache(maxsize=1024)
def names_of(text: str) -> tuple[str, ...]:
    return tuple(json.loads(text))


class AttemptRow(NamedTuple):
    """One ask, from its arrival until it is deleted: numbers and texts, as a table stores them."""

    id: str
    """The public id; the secret is not stored."""
    namespace: int
    state: str
    """waiting, granted, or how it ended: released, withdrawn, expired, revoked."""
    names_json: str
    """Empty for a tombstone: the attempt was withdrawn before its ask arrived."""
    ttl: int
    lock_delay: int
    ticket: int
    """Its place in the queues of all its names; 0: it was never queued."""
    token: int
    expires: int
    forget: int
    """When this row may be deleted."""
    wake: str
    """Where its client receives wake-ups."""
    holder: str
    """JSON: id, label, host, pid."""

    @property
    def names(self) -> tuple[str, ...]:
        return names_of(self.names_json)

    def free_at(self) -> int:
        """When a name that this attempt holds, or held last, may be granted again."""
        return self.expires + self.lock_delay

    def is_open(self) -> bool:
        return self.state in ("granted", "waiting")

    def holds(self, now: int) -> bool:
        return self.state == "granted" and self.expires > now


new_row: Callable[[tuple[Any, ...]], AttemptRow] = partial(tuple.__new__, AttemptRow)
"""Of all its fields. The class itself is a function in Python, which takes twice as long."""


class Rows(Protocol):
    """What a store supplies: verbs on its rows, all in the transaction that is open."""

    namespace: int
    """Attempts of all namespaces may share a table: ids are unique across namespaces."""

    # Counters. They are never deleted, and never fall.
    def mint(self) -> int:
        """The next token. Raises `tokens_used_up`, and changes nothing, after the last one."""

    def next_ticket(self) -> int: ...

    def raise_floor(self, above: int) -> int:
        """Make the last token at least `above`; returns the last token."""

    # Attempts.
    def attempt(self, public: str) -> AttemptRow | None:
        """The attempt with this id."""

    def attempts(self, ids: Sequence[str]) -> Mapping[str, AttemptRow]:
        """The attempts that exist, by their ids."""

    def put(self, row: AttemptRow) -> None:
        """Insert it, or replace the row with its id."""

    def grant(self, row: AttemptRow) -> None:
        """The same, and record this attempt as the claim on each of its names."""

    def update(self, ids: Sequence[str], state: str, expires: int, forget: int) -> None:
        """Set the same values in the rows of several attempts."""

    def end(self, row: AttemptRow, state: str, forget: int) -> None:
        """Set its state, and delete the claims that are still its own."""

    def forget(self, row: AttemptRow) -> None:
        """Delete it."""

    def overdue(self, now: int, near: str = "", limit: int = 0) -> Iterable[AttemptRow]:
        """Attempts that may be deleted: all, or those among `limit` rows near a random id."""

    # Claims: which attempt holds a name, or held it last and expired, or was released and keeps it taken.
    def claim(self, name: str) -> AttemptRow | None: ...

    def free(self, row: AttemptRow) -> None:
        """Delete the claims that are still this attempt's."""

    # Queues: attempts at a name, by their tickets.
    def enqueue(self, row: AttemptRow) -> None: ...
    def dequeue(self, row: AttemptRow) -> None: ...

    def before(self, name: str, ticket: int) -> AttemptRow | None:
        """The attempt directly ahead of a ticket."""

    def ahead(self, name: str, ticket: int) -> int:
        """How many attempts are ahead of a ticket, expired ones included."""

    def head(self, name: str, now: int) -> AttemptRow | None:
        """The first attempt in the queue that has not expired."""

    def queue(self, name: str) -> Sequence[AttemptRow]:
        """All attempts in the queue, in the order of their tickets."""

    def naming(self, name: str) -> Iterable[AttemptRow]:
        """All attempts at a name that are not forgotten, in any order."""

    def names(self, after: str, limit: int) -> Sequence[str]:
        """Names greater than `after` that have a claim or a queue, in byte order."""


class LeaseAlgorithm:
    """One transaction: its rows, and the store's clock, read after the transaction took its lock."""

    __slots__ = ("now", "rows")

    def __init__(self, rows: Rows, now: int) -> None:
        self.rows = rows
        self.now = now

    # Asking.

    def ask(self, ask: Ask, wake: str = "") -> AskAnswer:
        public = grant_id(ask.secret)
        row = self.rows.attempt(public)
        return self._ask_first(public, ask, wake) if row is None else self._ask_again(row, ask, wake)

    def _ask_first(self, public: str, ask: Ask, wake: str) -> AskAnswer:
        _, names, seconds, asker, waits, lock_delay, *_ = ask  # faster than one attribute after the other
        free_at, claims = self._free_at(names, _LAST)
        text, holder = names_json(names), holder_text(asker)
        ttl, delay = int(seconds * NS), int(lock_delay * NS)
        if free_at <= self.now:
            return Granted(self._grant(public, text, ttl, delay, 0, holder, claims), seconds, seconds)
        ahead = self._ahead(names, _LAST)
        if not waits or ahead >= QUEUE_MAX:
            return Busy(ahead, self._holding(claims))
        namespace = self.rows.namespace
        row = AttemptRow(public, namespace, "waiting", text, ttl, delay, 0, 0, self.now, 0, wake, holder)
        return self._enqueue(row, free_at, ahead, claims)

    def _ask_again(self, row: AttemptRow, ask: Ask, wake: str) -> AskAnswer:
        asked = (self.rows.namespace, names_json(ask.names), int(ask.ttl * NS))
        if row.names and (row.namespace, row.names_json, row.ttl) != asked:
            raise reused_attempt()
        if row.is_open() and row.expires <= self.now:
            self._expire(row)
            return Ended("expired")
        if row.state == "granted":
            return Granted(row.token, (row.expires - self.now) / NS, ask.ttl)
        if row.state != "waiting":
            return Ended(row.state)
        free_at, claims = self._free_at(ask.names, row.ticket)
        if free_at <= self.now:
            token = self._grant(
                row.id, row.names_json, row.ttl, row.lock_delay, row.ticket, row.holder, claims
            )
            self.rows.dequeue(row)
            return Granted(token, ask.ttl, ask.ttl)
        return self._wait(row._replace(wake=wake), free_at, self._ahead(ask.names, row.ticket), claims)

    def _free_at(self, names: Sequence[str], ticket: int) -> tuple[int, list[AttemptRow]]:
        """When these names could be granted behind a ticket if no other request arrives, and the claims on them.

        `now`: at once. Ends expired waiters that are directly ahead.
        """
        free_at, claims = self.now, []
        for name in names:
            claim = self.rows.claim(name)
            if claim is not None:
                claims.append(claim)
                free_at = max(free_at, claim.free_at())
            before = self.rows.before(name, ticket)
            while before is not None and before.expires <= self.now:
                self._expire(before)
                before = self.rows.before(name, ticket)
            if before is not None:
                free_at = max(free_at, before.expires)
        return free_at, claims

    def _ahead(self, names: Sequence[str], ticket: int) -> int:
        return max(self.rows.ahead(name, ticket) for name in names)

    def _holding(self, claims: Sequence[AttemptRow]) -> HeldBy | None:
        return next((self._held_by(claim) for claim in claims if claim.holds(self.now)), None)

    def _enqueue(self, row: AttemptRow, free_at: int, ahead: int, claims: Sequence[AttemptRow]) -> Waiting:
        row = row._replace(ticket=self.rows.next_ticket())
        answer = self._wait(row, free_at, ahead, claims)
        # After its row, and before the sweep: no queue ever names an attempt without a row.
        self.rows.enqueue(row)
        self._sweep(row.id, SWEEP_AT_ENTRY)
        return answer

    def _wait(self, row: AttemptRow, free_at: int, ahead: int, claims: Sequence[AttemptRow]) -> Waiting:
        expires = self.now + min(row.ttl, _WAITER_TTL_MAX)
        self.rows.put(row._replace(expires=expires, forget=expires + remember(row.ttl)))
        return Waiting((free_at - self.now) / NS, ahead, self._holding(claims))

    def _grant(
        self,
        public: str,
        names: str,
        ttl: int,
        delay: int,
        ticket: int,
        holder: str,
        claims: Sequence[AttemptRow],
    ) -> int:
        """Mint the token here: the names are locked, so every earlier grant of them already has its token."""
        token = self.rows.mint()
        for claim in claims:
            if claim.state != "released":
                self._expire(claim)
        namespace, expires = self.rows.namespace, self.now + ttl
        forget = expires + delay + remember(ttl)
        self.rows.grant(
            new_row(
                (public, namespace, "granted", names, ttl, delay, ticket, token, expires, forget, "", holder)
            )
        )
        if token % SWEEP_EVERY_TOKENS == 0:
            self._sweep(public, SWEEP_AT_GRANT)
        return token

    def _expire(self, row: AttemptRow) -> None:
        """Record that it expired. Its claims stay until somebody else is granted them: they enforce its lock_delay."""
        over = max(self.now, row.free_at())
        self.rows.update((row.id,), "expired", row.expires, over + remember(row.ttl))
        if row.state == "waiting":
            self.rows.dequeue(row)

    # Renewing.

    def renew(self, publics: Sequence[str]) -> list[RenewAnswer]:
        """One answer per attempt. Attempts with the same state, ttl and lock_delay are extended by one statement."""
        found = self.rows.attempts(publics)
        alike: dict[tuple[str, int, int], list[str]] = {}
        for row in found.values():
            if self._is_renewable(row):
                alike.setdefault((row.state, row.ttl, row.lock_delay), []).append(row.id)
        for (state, ttl, delay), ids in alike.items():
            self._extend(ids, state, ttl, delay)
        return [self._renewed(found.get(public)) for public in publics]

    def _is_renewable(self, row: AttemptRow) -> bool:
        return row.expires > self.now and row.is_open() and row.namespace == self.rows.namespace

    def _extend(self, ids: Sequence[str], state: str, ttl: int, delay: int) -> None:
        held = state == "granted"
        expires = self.now + (ttl if held else min(ttl, _WAITER_TTL_MAX))
        self.rows.update(ids, state, expires, expires + (delay if held else 0) + remember(ttl))

    def _renewed(self, row: AttemptRow | None) -> RenewAnswer:
        """The answer for a row as it was before it was extended."""
        if row is None or row.namespace != self.rows.namespace:
            return Gone()
        if not self._is_renewable(row):
            return Ended("expired" if row.is_open() else row.state)
        if row.state == "granted":
            return Kept(row.ttl / NS)
        free_at, _ = self._free_at(row.names, row.ticket)
        return Waiting((free_at - self.now) / NS)

    # Ending. Each returns the waiters that may be granted now: the store notifies them after its commit.

    def release(self, secret: str, keep: float = 0.0) -> tuple[ReleaseAnswer, list[AttemptRow]]:
        public = grant_id(secret)
        row = self.rows.attempt(public)
        return (Gone(), []) if row is None else self._finish(row, "released", int(keep * NS))

    def withdraw(self, secret: str) -> tuple[ReleaseAnswer, list[AttemptRow]]:
        public = grant_id(secret)
        row = self.rows.attempt(public)
        if row is not None:
            return self._finish(row, "withdrawn")
        forget, nobody = self.now + remember(0), holder_text(NOBODY)
        self.rows.put(
            AttemptRow(public, self.rows.namespace, "withdrawn", "[]", 0, 0, 0, 0, 0, forget, "", nobody)
        )
        self._sweep(public, SWEEP_AT_ENTRY)
        return _RELEASED, []

    def _finish(self, row: AttemptRow, state: str, keep: int = 0) -> tuple[ReleaseAnswer, list[AttemptRow]]:
        """End an attempt at its owner's request. With `keep` its claims stay, and block the names until then."""
        if row.namespace != self.rows.namespace:
            return Gone(), []
        if not row.is_open():
            return _RELEASED if row.state in ("released", "withdrawn") else Ended(row.state), []
        if row.expires <= self.now:
            self._expire(row)
            return Ended("expired"), []
        if keep and row.state == "granted":
            free_at = self.now + keep
            self.rows.update((row.id,), state, free_at - row.lock_delay, free_at + remember(row.ttl))
            return _RELEASED, self._heads(row)  # they ask again, and learn when the names are free
        return _RELEASED, self._free(row, state)

    def _free(self, row: AttemptRow, state: str) -> list[AttemptRow]:
        """End it, and free its names. Returns the first living waiter of each."""
        self.rows.end(row, state, self.now + remember(row.ttl))
        if row.state == "waiting":
            self.rows.dequeue(row)
        return self._heads(row)

    def _heads(self, row: AttemptRow) -> list[AttemptRow]:
        heads: dict[str, AttemptRow] = {}
        for name in row.names:
            if (head := self.rows.head(name, self.now)) is not None:
                heads[head.id] = head
        return list(heads.values())

    # Operating.

    def force_release(self, name: str, token: int) -> tuple[int | None, list[AttemptRow]]:
        claim = self.rows.claim(name)
        if claim is None or claim.token != token or not claim.holds(self.now):
            return None, []
        return self.rows.mint(), self._free(claim, "revoked")

    def raise_floor(self, above: int) -> int:
        return self.rows.raise_floor(check_floor(above))

    def tidy(self) -> int:
        return self._forget(self.rows.overdue(self.now))

    def _sweep(self, near: str, limit: int) -> None:
        """Check a few rows near a new one. Ids are random, so every row is checked sooner or later."""
        self._forget(self.rows.overdue(self.now, near, limit))

    def _forget(self, over: Iterable[AttemptRow]) -> int:
        forgotten = 0
        for row in over:
            self.rows.free(row)
            if row.state == "waiting":
                self.rows.dequeue(row)
            self.rows.forget(row)
            forgotten += 1
        return forgotten

    # Looking.

    def survey(self, after: str, limit: int) -> list[NameView]:
        views: list[NameView] = []
        while len(views) < limit:
            names = self.rows.names(after, limit)
            found = map(self.observe, names)
            views += [view for view in found if view.held_by or view.waiters or view.free_in > 0]
            if len(names) < limit:
                break
            after = names[-1]
        return views[:limit]

    def observe(self, name: str) -> NameView:
        claim = self.rows.claim(name)
        free_in = max(0, claim.free_at() - self.now) / NS if claim is not None else 0.0
        waiters = tuple(
            Waiter(holder_from(row.holder), row.names, (row.expires - self.now) / NS)
            for row in self.rows.queue(name)
            if row.expires > self.now
        )
        if claim is None or not claim.holds(self.now):
            return NameView(name, None, (), None, free_in, waiters)
        return NameView(name, self._held_by(claim), claim.names, claim.ttl / NS, free_in, waiters)

    def _held_by(self, claim: AttemptRow) -> HeldBy:
        return HeldBy(holder_from(claim.holder), claim.token, claim.id, (claim.expires - self.now) / NS)


def remember(ttl: int) -> int:
    """How long an ended attempt is remembered: `timing.remember_for` in nanoseconds."""
    return max(_REMEMBER_MIN, 4 * ttl)
