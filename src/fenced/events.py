"""The events that a client passes to its `on_event` callback, as frozen values.

Events are for logs and metrics; correctness never depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Event",
    "KeeperFailed",
    "LeaseEnded",
    "LeaseGranted",
    "LeaseInJeopardy",
    "LeaseReleased",
    "ReleaseFailed",
    "StillWaiting",
]


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    names: tuple[str, ...]
    token: int
    grant: str
    waited_seconds: float


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
class LeaseEnded:
    """The lease was lost while somebody may still be working under it."""

    names: tuple[str, ...]
    token: int
    grant: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseFailed:
    """The `with` block has ended, but the authority has not confirmed the release: the client retries.

    If no retry succeeds, the lease expires by itself.
    """

    names: tuple[str, ...]
    token: int
    grant: str
    why: str


@dataclass(frozen=True, slots=True)
class StillWaiting:
    """An acquire without `wait` has waited for a minute, and goes on."""

    names: tuple[str, ...]
    waited_seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class KeeperFailed:
    """The keeper failed with an unexpected error; its leases are lost."""

    why: str


Event = (
    LeaseGranted | LeaseReleased | LeaseInJeopardy | LeaseEnded | ReleaseFailed | StillWaiting | KeeperFailed
)


def __dir__() -> list[str]:
    return __all__
