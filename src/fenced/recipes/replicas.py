"""A primary and versioned replicas: what a majority has acknowledged, every later primary has.

The primary is whoever holds the lease, and its version is the token. A replica refuses lower versions. It has three
calls, each one atomic, durable step: `bump` (from now on refuse every lower version), `install` (take this log) and
`append`. A primary bumps a majority before it writes, takes the newest log that it finds there, and makes a majority
equal to it.

    primary = Primary(lease.announcement(), len(replicas))     # replicas: objects with these three calls
    drive(primary.open(), replicas)
    drive(primary.append(b"an entry"), replicas)               # returns when a majority has it

The steps of a primary are generators that do no I/O: each says which call goes to which replicas, and is resumed with
what those that carried it out returned. `drive` is for replicas that are called one after the other.

This is not consensus: the authority decides who is primary, and without it, or without a majority, nothing is written.

Why nothing acknowledged is lost: the majority that a later primary bumps shares a replica with the majority that has
acknowledged. That replica had the entry before it promised, since afterwards it refuses. Of two logs with the same last
version one is a beginning of the other, because one primary wrote both in order. And a log with a higher last version
has, by induction, all that was acknowledged below it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fenced.errors import Indeterminate, Misuse, StaleToken, Unavailable
from fenced.values.model import Stamp

__all__ = [
    "Behind",
    "Entry",
    "NoMajority",
    "Primary",
    "Replica",
    "ReplicaLog",
    "ReplicaStore",
    "Round",
    "drive",
]


def __dir__() -> list[str]:
    return __all__


Log = tuple["Entry", ...]
log = logging.getLogger("fenced")


class Entry(NamedTuple):
    version: int
    value: bytes | None
    """None: a primary has opened the log. Its first entry is this, so the log's last version is its own."""


class Behind(Unavailable):
    """This replica lacks entries before those that were sent: it must be rebuilt."""


class NoMajority(Indeterminate):
    """No majority has answered: what was to be written may be there or not. Step down."""


class Replica(Protocol):
    """The three calls, over whatever transport. Each may raise StaleToken, Behind, or any error of the transport."""

    def bump(self, version: Stamp) -> Log: ...
    def install(self, version: Stamp, log: Log) -> int: ...
    def append(self, version: Stamp, index: int, entries: Log) -> int: ...


class ReplicaStore(Protocol):
    """Where a replica keeps its log. Each call compares the version and takes effect in one durable step."""

    def announce(self, version: Stamp) -> None:
        """Refuse every lower version from now on."""

    def read(self, version: Stamp) -> Log: ...
    def replace(self, version: Stamp, log: Log) -> None: ...
    def extend(self, version: Stamp, entries: Log) -> None: ...


class ReplicaLog:
    """A replica over a store that guards it, such as a guarded file. Its process alone writes there."""

    def __init__(self, store: ReplicaStore) -> None:
        self._store = store

    def bump(self, version: Stamp) -> Log:
        # Announced first: what is read after that cannot be changed any more by an earlier primary.
        self._store.announce(version)
        return self._store.read(version)

    def install(self, version: Stamp, log: Log) -> int:
        here = self._store.read(version)
        if here and here[-1].version == version.token and len(here) >= len(log):
            return len(here)  # a late copy of an install: what was appended since stays
        self._store.replace(version, log)
        return len(log)

    def append(self, version: Stamp, index: int, entries: Log) -> int:
        here = self._store.read(version)
        if not here or here[-1].version != version.token or index > len(here):
            raise Behind(f"{len(here)} entries are here, and number {index} was sent")
        if new := entries[len(here) - index :]:  # a late copy appends nothing
            self._store.extend(version, new)
        return len(here) + len(new)


class Round(NamedTuple):
    """One call to some of the replicas."""

    call: str
    """bump, install or append."""
    arguments: tuple[Any, ...]
    replicas: frozenset[int]


Steps = Generator[Round, Mapping[int, Any], None]
"""Yields rounds; is sent, by replica, what those that carried it out returned. A majority is enough to go on."""


class Primary:
    """One primary, for as long as it holds its lease. One of its generators at a time."""

    def __init__(self, version: Stamp, count: int) -> None:
        if count < 1:
            raise Misuse("a primary needs replicas")
        self.version, self.count = version, count
        self.majority = count // 2 + 1
        self.log: Log = ()
        self.current: set[int] = set()
        """The replicas that have all that this primary has written. Another one is stale until it is rebuilt."""
        self._open = False

    @property
    def values(self) -> tuple[bytes, ...]:
        """What the log holds, in order. Shown to nobody but by a primary that is open."""
        if not self._open:
            raise _closed()
        return tuple(entry.value for entry in self.log if entry.value is not None)

    @property
    def stale(self) -> set[int]:
        return set(range(self.count)) - self.current

    def open(self) -> Steps:
        """Bump a majority, take the newest log there is, and make a majority equal to it."""
        found = yield Round("bump", (self.version,), frozenset(range(self.count)))
        self._expect_majority(found)
        self.log = (*self._newest(list(found.values())), Entry(self.version.token, None))
        yield from self._install(found)
        self._expect_majority(self.current)
        self._open = True

    def rebuild(self) -> Steps:
        """Give stale replicas the whole log."""
        if not self._open:
            raise _closed()
        if self.stale:
            # Bumped first, as when the primary opened: a replica that comes back promises before it counts.
            found = yield Round("bump", (self.version,), frozenset(self.stale))
            yield from self._install(found)

    def append(self, *values: bytes) -> Steps:
        """Ends when a majority has them. After NoMajority they may be there or not: step down."""
        if not self._open:
            raise _closed()
        index, entries = len(self.log), tuple(Entry(self.version.token, value) for value in values)
        self.log += entries
        self._open = (
            False  # until a majority has them, this log is ahead of it, and nobody may see or extend it
        )
        done = yield Round("append", (self.version, index, entries), frozenset(self.current))
        self.current &= done.keys()  # who missed one entry acknowledges none after it
        self._expect_majority(done)
        self._open = True

    def _install(self, which: Collection[int]) -> Steps:
        if which:
            self.current |= (yield Round("install", (self.version, self.log), frozenset(which))).keys()

    def _expect_majority(self, done: Collection[int]) -> None:
        if len(done) < self.majority:
            raise NoMajority(f"{len(done)} of {self.count} replicas, and {self.majority} are needed")

    def _newest(self, logs: Sequence[Log]) -> Log:
        return max(logs, key=_age)


def drive(steps: Steps, replicas: Sequence[Replica]) -> None:
    """Run the steps against these replicas, one after the other. StaleToken if one has promised a newer primary."""
    answers: dict[int, Any] | None = None
    while True:
        try:
            round_ = steps.send(answers) if answers is not None else next(steps)
        except StopIteration:
            return
        answers = {}
        for which in sorted(round_.replicas):
            try:
                answers[which] = getattr(replicas[which], round_.call)(*round_.arguments)
            except StaleToken:
                raise
            except Exception as error:  # noqa: BLE001 - a transport may raise anything: this one did not acknowledge
                log.warning("replica %d did not answer %s: %s", which, round_.call, error)


def _closed() -> Misuse:
    return Misuse("open the primary first; after an error it stays closed: step down, and make another one")


def _age(log: Log) -> tuple[int, int]:
    """The version of the last entry first: a longer log of an older version may hold what was never acknowledged."""
    return (log[-1].version, len(log)) if log else (0, 0)
