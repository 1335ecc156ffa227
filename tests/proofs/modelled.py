"""The worlds of the model of the protocol: what is in one, and in which setting it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fenced.values.decision import ModeName, Rule

NEW, HELD, TAKEN, OVER, FORGOTTEN = range(5)
"""What the authority knows of an attempt. TAKEN: it has ended, but lock_delay or keep still blocks its names."""

ENFORCING = ("canary", "enforce", "require")
"""The modes that refuse; of a canary, all names are enforced here."""

MISTAKES = {
    "nobody announces": "a holder reads and writes without announcing first",
    "announcing changes no mark": "an announcement is judged, and raises no mark",
    "no tombstone": "an attempt that was withdrawn or has ended is granted if a copy of its ask arrives",
    "a renewal revives": "a renewal that arrives late brings an ended lease back",
    "the first name is enough": "a lease over two names is granted as soon as the first is free",
    "settled frees the name": "an attempt that its client calls settled is deleted, with what keeps its name taken",
    "settled asks are new": "an attempt that was settled and deleted is granted if a copy of its ask arrives",
    "reused is admitted": "the guard does not compare grants",
    "the realm is not compared": "the guard does not compare realms",
    "no floor": "the new authority of a move counts from 1",
}


@dataclass(frozen=True)
class Setting:
    """What happens in one model, what is wrong in it, and how many states it has (0: not counted)."""

    what: str
    states: int = 0
    leases: tuple[str, ...] = ("x", "x", "x")
    """The names of each attempt, a letter each."""
    rule: Rule = "retry"
    writes: int = 1
    """How many writes each attempt makes to each of its names."""
    modes: tuple[ModeName, ...] = ("enforce",)
    """The guard goes from each of these to the next one and back, at any moment."""
    may: frozenset[str] = frozenset()
    """force, restore, notice, move, delay, unstamped, expect."""
    mistakes: tuple[str, ...] = ()
    counts_observed: bool = False
    """Also promise what was acknowledged in a mode that refuses nothing."""
    holder_is_admitted: bool = True
    """Whether it is checked that a holder is never refused."""

    @cached_property
    def names(self) -> str:
        return "".join(sorted(set("".join(self.leases))))

    def program(self, attempt: int) -> tuple[tuple[str, int, int], ...]:
        """The messages of a holder to the guard, in their order: what, which name, and its seq."""
        mine = [self.names.index(name) for name in self.leases[attempt]]
        first = ("read",) if "nobody announces" in self.mistakes else ("announce", "read")
        opening = [(what, name, 0) for what in first for name in mine]
        return (*opening, *(("write", name, seq) for name in mine for seq in range(1, self.writes + 1)))


class Attempt(NamedTuple):
    state: int = NEW
    token: int = 0
    realm: int = 0
    asked: bool = False
    at: int = 0
    """Which message of its program its client sends next, or waits for the reply to."""
    sent: int = 0
    """How many of them were ever sent."""
    stopped: bool = False
    """Its client has given up: it was refused, or has withdrawn its ask."""
    seen: tuple[int, ...] = ()
    """By name: the value that it read."""
    versions: tuple[int, ...] = ()
    """By name: the version that it read. Its writes expect this one and the following."""
    delays: bool = False
    """Its lock_delay or keep has not ended: what is true, whatever the authority knows."""


GuardMark = tuple[int, int, int]
"""Token, seq, attempt."""


class World(NamedTuple):
    attempts: tuple[Attempt, ...]
    values: tuple[int, ...]
    """By name: the updates in it, one bit each."""
    acknowledged: tuple[int, ...]
    """By name: the updates that must be in it."""
    marks: tuple[GuardMark | None, ...]
    versions: tuple[int, ...]
    counters: tuple[int, ...] = (0, 0)
    """Of two authorities: the last token."""
    top: tuple[int, ...] = (0, 0)
    """The highest token that each has ever minted."""
    backup: int = -1
    restored: bool = False
    doubted: bool = False
    """The authority has noticed that it was restored, and grants nothing until its floor is raised."""
    serving: int = 0
    guard_realm: int = 0
    mode: int = 0
    outsider: tuple[int, ...] | None = None
    """What a program without a lease has read."""
