"""The marks of `once`: which versions of a piece of work are done, and the grid of instants that schedules share.

A tick is the nominal instant of a period, in whole seconds since 1970. Every machine counts the same grid, so a clock
that is ahead runs a tick early and one that is behind finds it done: no clock makes a tick happen twice.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal, NamedTuple

from fenced.errors import Misuse, shown
from fenced.values.model import check_name

Missed = Literal["last", "all", "none"]
VERSION_MAX = 2**53 - 1
SLOTS = 16_384
"""Marks that end (`keep`) share this many names, so that ids without end need bounded room."""
GRACE_SHARE = 0.1
"""With missed="none", a tick is missed when this share of its period is over."""


class DoneWork(NamedTuple):
    """What a mark says: the version that is done, under which token, and when it may be forgotten (0: never)."""

    version: int
    token: int
    at: float
    by: str
    until: float = 0.0


class MarkPlace(NamedTuple):
    """Where the mark of a piece of work is: the name of its lease and value, and its key in that value."""

    name: str
    key: str


def check_version(version: object) -> int:
    if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version <= VERSION_MAX:
        raise Misuse(f"a version is a whole number from 0 to 2**53-1, not {shown(version)}")
    return version


def check_keep(keep: object) -> float | None:
    if keep is None:
        return None
    if not isinstance(keep, int | float) or isinstance(keep, bool) or not keep > 0:
        raise Misuse(f"keep is a time in seconds, not {shown(keep)}")
    return float(keep)


def marked(name: str, keep: float | None) -> MarkPlace:
    """A name that stays has a value of its own. Names that end share slots: two of one slot wait for each other."""
    check_name(name)
    if keep is None:
        return MarkPlace(f"once/{name}", name)
    slot = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % SLOTS
    return MarkPlace(f"once/slot/{slot}", name)


def read(value: bytes | None) -> dict[str, DoneWork]:
    """The marks in a stored value."""
    if not value:
        return {}
    try:
        return {key: DoneWork(*fields) for key, fields in json.loads(value).items()}
    except (ValueError, TypeError, AttributeError):
        raise Misuse(
            f"the value of a mark is not one of fenced's: {shown(value)}; another program writes under once/"
        ) from None


def written(marks: dict[str, DoneWork], key: str, done: DoneWork) -> bytes:
    """The value with one more mark, without those that have ended."""
    kept = {each: mark for each, mark in marks.items() if not mark.until or mark.until > done.at}
    return json.dumps({**kept, key: done}, separators=(",", ":")).encode()


def tick_of(now: float, every: float, at: float = 0.0) -> int:
    """The last instant of the grid that is not after `now`: `at` seconds past a multiple of `every`."""
    if every < 1 or every != int(every):
        raise Misuse(f"a period is a whole number of seconds, at least one, not {every:g}")
    return int((now - at) // every * every + at)


def due(now: float, every: float, at: float, last: int | None, missed: Missed) -> list[int]:
    """The ticks to run now, in order, when `last` is the newest one that is done.

    `last`: only the newest of those that were missed; `all`: each of them; `none`: only one whose time has just come.
    """
    tick = tick_of(now, every, at)
    if last is not None and tick <= last:
        return []
    if missed == "all" and last is not None:
        first = tick - (tick - last - 1) // int(every) * int(every)
        return list(range(first, tick + 1, int(every)))
    if missed == "none" and now - tick > every * GRACE_SHARE:
        return []
    return [tick]
