"""Rows in dictionaries that record every change, and can be made again from the record.

The journal holds what changed, not what was asked for: a later version of the lease algorithm that decides something
differently still reads the same state from an old journal. Rows hold public ids, so no secret is recorded.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from sys import intern
from typing import Any

from fenced.leases.dictionaries import MemoryRows
from fenced.leases.rows import NS, AttemptRow, new_row
from fenced.values import timing

Change = list[Any]
"""The number of a namespace, a verb and its arguments, all of them values that JSON has."""

ROWS = 500
"""How many attempts a snapshot has in one change."""
IDLE_EVERY_COUNTS = 32
"""One in this many new attempts also checks twice as many series, if so many are silent."""
MANY = 32
"""How many ids of a series are kept before anybody looks whether the attempts still exist."""
_STATE, _HOLDER = AttemptRow._fields.index("state"), AttemptRow._fields.index("holder")
_ENDS = frozenset({"end", "update", "free", "dequeue", "forget", "silent"})
_IDLE = int(timing.REMEMBER_SECONDS_MIN * NS)


def only_ends(changes: list[Change]) -> bool:
    """Whether these changes only end attempts. If a power cut undoes them, a lease lasts longer, and nothing is wrong.

    The next sync has them, too: whoever is granted a name that was released cannot lose the release alone.
    """
    for change in changes:
        verb = change[1]
        # An update renews an attempt, or keeps the names of a released one taken, unless it says that one has expired.
        if verb not in _ENDS or (verb == "update" and change[3] != "expired"):
            return False
    return True


class Series:
    """What is remembered of a client that counts its attempts."""

    __slots__ = ("attempts", "checked", "many", "seen", "settled")

    def __init__(self) -> None:
        self.settled = 0
        """Attempts up to this number are over, and their client never sends them again."""
        self.seen = 0
        """When it asked last."""
        self.checked = 0
        """When it was silent, and its attempts were looked at."""
        self.attempts: OrderedDict[int, str] = OrderedDict()
        """The public ids of its later attempts, in the order in which they came."""
        self.many = MANY
        """With more attempts than this, those that were deleted are dropped."""


class RecordedRows(MemoryRows):
    """The rows of one namespace. Every change is applied and appended to `changes`.

    A token is recorded with its grant. If anything else raised it, `record_token` must follow.
    """

    def __init__(self, name: str, realm: str, number: int, changes: list[Change]) -> None:
        super().__init__()
        self.name = name
        self.realm = realm
        self.recorded_token = 0
        """The last token that is in a change."""
        self.series: OrderedDict[str, Series] = OrderedDict()
        """By their ids, which are not the clients' secrets; the one that asked last is the last."""
        self._number = number
        self._changes = changes
        self._counts = 0

    def __len__(self) -> int:
        return len(self._attempts)

    # The verbs of the algorithm.

    def record_token(self) -> None:
        self._changes.append([self._number, "token", self.token])
        self.recorded_token = self.token

    def record_floor(self, above: int) -> None:
        """A restart finds at least this token. Nothing is granted above it until it is raised in memory."""
        self._changes.append([self._number, "token", max(self.token, above)])

    def put(self, row: AttemptRow) -> None:
        super().put(row)
        self._changes.append([self._number, "put", *row])

    def grant(self, row: AttemptRow) -> None:
        super().grant(row)
        self._changes.append([self._number, "grant", *row])
        self.recorded_token = row.token

    def update(self, ids: Sequence[str], state: str, expires: int, forget: int) -> None:
        super().update(ids, state, expires, forget)
        self._changes.append([self._number, "update", list(ids), state, expires, forget])

    def end(self, row: AttemptRow, state: str, forget: int) -> None:
        super().end(row, state, forget)
        self._changes.append([self._number, "end", row.id, state, forget])

    def forget(self, row: AttemptRow) -> None:
        super().forget(row)
        self._changes.append([self._number, "forget", row.id])

    def free(self, row: AttemptRow) -> None:
        before = len(self._claims)
        self._free(row)
        if len(self._claims) != before:
            self._changes.append([self._number, "free", row.id])

    def enqueue(self, row: AttemptRow) -> None:
        super().enqueue(row)
        self._changes.append([self._number, "enqueue", row.id, row.ticket, row.names_json])

    def dequeue(self, row: AttemptRow) -> None:
        super().dequeue(row)
        self._changes.append([self._number, "dequeue", row.id])

    # Clients that count their attempts.

    def is_settled(self, series: str, number: int) -> bool:
        known = self.series.get(series)
        return known is not None and number <= known.settled

    def count(self, series: str, number: int, settled: int, public: str, now: int) -> None:
        """Remember a new attempt of a series, and delete those that are settled, have ended and keep no name taken.

        Others that are settled are forgotten by their age. A lease that is held for long is one of them: its client
        does not wait for it to be over before it calls it settled, and may still repeat its release.
        """
        over = []
        for each in self._count(series, number, settled, public, now):
            if self._is_over(each, now):
                self._delete(each)
                over.append(each)
        self._changes.append([self._number, "count", series, number, settled, public, now, over])
        self._counts += 1
        if self._counts % IDLE_EVERY_COUNTS == 0:
            self._forget_idle(now)

    def _is_over(self, public: str, now: int) -> bool:
        """Whether nothing depends on it any more. A claim that it left enforces `keep` or its `lock_delay`."""
        row = self._attempts.get(public)
        if row is None or row.is_open():
            return False
        return row.free_at() <= now or not any(self._claims.get(name) == public for name in row.names)

    def _count(self, series: str, number: int, settled: int, public: str, now: int) -> list[str]:
        """The attempts that are settled by this, taken out of their series."""
        known = self.series.get(series)
        if known is None:
            known = self.series[series] = Series()
        else:
            self.series.move_to_end(series)
        attempts = known.attempts
        known.seen = now
        attempts[number] = public
        if settled > known.settled:
            known.settled = settled
        # Numbers rise, but asks may overtake each other: whatever is left behind an unsettled one comes next time.
        settles = []
        while attempts and next(iter(attempts)) <= known.settled:
            settles.append(attempts.popitem(last=False)[1])
        if len(attempts) > known.many:
            self._drop_deleted(known)
        return settles

    def _delete(self, public: str) -> None:
        self._free(self._attempts.pop(public))

    def _drop_deleted(self, known: Series) -> None:
        """Drop the ids of attempts that were deleted by their age. So rarely that an ask pays for few ids."""
        known.attempts = OrderedDict(
            (number, public) for number, public in known.attempts.items() if public in self._attempts
        )
        known.many = 2 * len(known.attempts) + MANY

    def _forget_idle(self, now: int) -> None:
        """Forget series that were silent for as long as attempts are remembered; those that asked first come first."""
        for _ in range(min(2 * IDLE_EVERY_COUNTS, len(self.series))):
            series, known = next(iter(self.series.items()))
            if max(known.seen, known.checked) + _IDLE > now:
                return
            self._drop_deleted(known)
            if known.attempts:
                known.checked = now  # a long lease: it is checked again after as long
                self.series.move_to_end(series)
            else:
                del self.series[series]
                self._changes.append([self._number, "silent", series])

    # Making the rows again.

    def redo(self, verb: str, arguments: list[Any]) -> None:
        """Apply a recorded change. Nothing is recorded."""
        match verb:
            case "put":
                super().put(AttemptRow(*arguments))
            case "rows":
                self._put_all(*arguments)
            case "token":
                self.token = self.recorded_token = max(self.token, arguments[0])
            case "grant":
                row = AttemptRow(*arguments)
                super().grant(row)
                self.token = self.recorded_token = max(self.token, row.token)
            case "update":
                super().update(*arguments)
            case "end":
                public, state, forget = arguments
                super().end(self._attempts[public], state, forget)
            case "free":
                self._free(self._attempts[arguments[0]])
            case "forget":
                super().forget(self._attempts[arguments[0]])
            case "enqueue":
                public, self.ticket, names = arguments
                super().enqueue(AttemptRow(public, 0, "", names, 0, 0, self.ticket, 0, 0, 0, "", ""))
            case "dequeue":
                super().dequeue(self._attempts[arguments[0]])
            case "count":
                *counted, over = arguments
                self._count(*counted)
                for public in over:
                    self._delete(public)
            case "silent":
                del self.series[arguments[0]]
            case "ticket":
                self.ticket = arguments[0]
            case "claim":
                name, public = arguments
                self._claims[name] = public
            case "settled":
                self._restore_series(*arguments)
            case _:
                raise ValueError(f"unknown change {verb!r}")

    def _put_all(self, holders: list[str], columns: list[list[Any]]) -> None:
        """Most of a restart is spent here: a snapshot may have a million rows. So no loop runs in Python."""
        ids, count = columns[0], len(columns[0])
        if len(columns) != len(AttemptRow._fields):
            raise ValueError("another number of columns")
        columns[_STATE] = list(map(intern, columns[_STATE]))
        columns[_HOLDER] = list(map(list(map(intern, holders)).__getitem__, columns[_HOLDER]))
        full = (itertools.repeat(each[0], count) if len(each) == 1 else each for each in columns)
        rows = map(new_row, zip(*full, strict=True))
        self._attempts.update(zip(ids, rows, strict=True))

    def _restore_series(self, series: str, settled: int, seen: int, attempts: list[tuple[int, str]]) -> None:
        known = self.series[series] = Series()
        known.settled, known.seen, known.attempts = settled, seen, OrderedDict(attempts)

    def copied(self) -> Iterator[Change]:
        """The shortest list of changes that makes these rows, as they are now.

        The dictionaries are copied here; the rows in them are immutable, so the caller may use the result later and
        in another thread.
        """
        number, attempts, claims = self._number, list(self._attempts.values()), list(self._claims.items())
        waiting = sorted({place for queue in self._queues.values() for place in queue})
        names = {public: self._attempts[public].names_json for _, public in waiting}
        return itertools.chain(
            [[number, "namespace", self.name, self.realm], [number, "token", self.token]],
            (
                [number, "rows", *_in_columns(attempts[at : at + ROWS])]
                for at in range(0, len(attempts), ROWS)
            ),
            ([number, "claim", *claim] for claim in claims),
            ([number, "enqueue", public, ticket, names[public]] for ticket, public in waiting),
            [[number, "ticket", self.ticket]],  # after the queues: the last waiter may have left
            [[number, "settled", *each] for each in self.settled()],
        )

    def settled(self) -> list[tuple[str, int, int, list[tuple[int, str]]]]:
        """The series, each with its attempts that are still remembered."""
        return [
            (
                series,
                known.settled,
                known.seen,
                [each for each in known.attempts.items() if each[1] in self._attempts],
            )
            for series, known in self.series.items()
        ]


def _in_columns(rows: list[AttemptRow]) -> tuple[list[str], list[list[Any]]]:
    """The holders of these rows, each once, and the columns; the one of the holders has their places in that list.

    A column whose values are all the same has one value.
    """
    columns: list[list[Any]] = list(map(list, zip(*rows, strict=True)))
    holders = {holder: place for place, holder in enumerate(dict.fromkeys(columns[_HOLDER]))}
    columns[_HOLDER] = [holders[each] for each in columns[_HOLDER]]
    return list(holders), [each[:1] if each.count(each[0]) == len(each) else each for each in columns]
