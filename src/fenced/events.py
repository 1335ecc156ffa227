"""The events that a client passes to its `on_event` callback, as frozen values.

Events are for logs and metrics; correctness never depends on them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "AskEnded",
    "AskQueued",
    "ConnectionFailed",
    "ConnectionMade",
    "Event",
    "GuardDecided",
    "KeeperFailed",
    "LeaseEnded",
    "LeaseGranted",
    "LeaseInJeopardy",
    "LeaseReleased",
    "LeaseSaved",
    "LoopBlocked",
    "ReleaseFailed",
    "RenewalRound",
    "StillWaiting",
    "observe_guards",
]


@dataclass(frozen=True, slots=True)
class AskQueued:
    """An acquire has to wait in the queue. `AskEnded` or `LeaseGranted` follows."""

    names: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class AskEnded:
    """An acquire has ended without a lease."""

    names: tuple[str, ...]
    waited_seconds: float
    why: str
    """busy (it did not want to wait), timeout, unavailable, indeterminate, cancelled or error."""
    queued: bool


@dataclass(frozen=True, slots=True)
class ConnectionFailed:
    """The authority did not answer a request, for the first time since it last did."""

    why: str


@dataclass(frozen=True, slots=True)
class ConnectionMade:
    """The authority has answered again."""


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    names: tuple[str, ...]
    token: int
    grant: str
    waited_seconds: float
    queued: bool = False


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    names: tuple[str, ...]
    token: int
    grant: str
    held_seconds: float


@dataclass(frozen=True, slots=True)
class LeaseInJeopardy:
    names: tuple[str, ...]
    token: int
    grant: str
    remaining_seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class LeaseSaved:
    """A lease that was in jeopardy has been renewed in time."""

    names: tuple[str, ...]
    token: int
    grant: str


@dataclass(frozen=True, slots=True)
class RenewalRound:
    """One request has renewed, or tried to renew, all leases that were due: up to 5000, so more need several."""

    kept: int
    unknown: int
    """Those that are tried again, because the authority did not answer about them."""
    ended: int
    """Those that were over: lost, or released meanwhile."""
    used_ratio: float | None
    """The largest share of a ttl that had passed since the renewal in front of this one, of the leases that were kept.

    A third is on time, 1 would be lost. None: none was kept.
    """


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The lease was lost while somebody may still be working under it."""

    names: tuple[str, ...]
    token: int
    grant: str
    reason: str
    held_seconds: float = 0.0
    late_seconds: float = 0.0
    """How long after the deadline the holder noticed that its lease had expired."""
    paused_seconds: float = 0.0
    """The longest time since the last renewal in which this process did not run, as far as its keeper noticed by waking
    late. 0: it noticed none of more than a quarter of a second.
    """


@dataclass(frozen=True, slots=True)
class ReleaseFailed:
    """The program has released the lease, but the authority has not confirmed it: the client retries.

    If no retry succeeds, the lease expires by itself. No other event follows: for the program it has ended.
    """

    names: tuple[str, ...]
    token: int
    grant: str
    why: str
    held_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StillWaiting:
    """An acquire without `wait` has waited for a minute, and goes on."""

    names: tuple[str, ...]
    waited_seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class LoopBlocked:
    """The program's event loop runs nothing but one call, for `seconds` by now. Leases are renewed all the same.

    `where`: the line that the call is at, such as `report.py:146 build_report()`; "" if that is unknown. The callback
    of an `AsyncClient` runs in its event loop, so it gets this when the call has returned; the log has it at once.
    """

    seconds: float
    where: str


@dataclass(frozen=True, slots=True)
class KeeperFailed:
    """The keeper failed with an unexpected error; its leases are lost."""

    why: str


@dataclass(frozen=True, slots=True)
class GuardDecided:
    """A guard object of this process has refused an operation, or let one through that a later stage would refuse.

    Guards over cells and in SQLite also tell of operations that raised a mark, with the verdict `admit`. Guards have no
    client: they tell those who have called `observe_guards`.
    """

    guard: str
    """The guarded table; of a guard that guards no tables, its address."""
    name: str | None
    token: int | None
    mark: int | None
    """The highest token that the guard had seen before; None: none, or it is not known."""
    verdict: str
    ruling: str


Event = (
    AskQueued
    | AskEnded
    | ConnectionFailed
    | ConnectionMade
    | LeaseGranted
    | LeaseReleased
    | LeaseInJeopardy
    | LeaseSaved
    | RenewalRound
    | LeaseEnded
    | ReleaseFailed
    | StillWaiting
    | LoopBlocked
    | KeeperFailed
    | GuardDecided
)

_observers: tuple[Callable[[Event], None], ...] = ()


def observe_guards(call: Callable[[Event], None]) -> Callable[[], None]:
    """Call it with each `GuardDecided` of this process from now on, until the function that is returned is called."""
    global _observers  # noqa: PLW0603 - replaced, never changed: whoever goes through it has one that is whole
    _observers = (*_observers, call)

    def stop() -> None:
        global _observers  # noqa: PLW0603
        _observers = tuple(each for each in _observers if each is not call)

    return stop


def tell_observers(decided: GuardDecided) -> None:
    """For guards. An exception of an observer is its own: it must not change what a guard has decided."""
    for call in _observers:
        try:
            call(decided)
        except Exception:  # noqa: BLE001 - the callback is the user's and may raise anything
            sys.excepthook(*sys.exc_info())


def is_observed() -> bool:
    """Whether anybody has called `observe_guards`."""
    return bool(_observers)


def __dir__() -> list[str]:
    return __all__
