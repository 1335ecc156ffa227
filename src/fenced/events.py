"""What a client tells its observer (`on_event`): one frozen value per happening.

Events are for logs, metrics and people; no correctness depends on anybody listening.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """The section is over, but the authority could not be told yet: the client goes on telling it.

    At worst the lease expires by itself.
    """

    names: tuple[str, ...]
    token: int
    grant: str
    why: str


@dataclass(frozen=True, slots=True)
class KeeperFailed:
    """The keeper met an error that it does not know; its leases are lost."""

    why: str


Event = LeaseGranted | LeaseReleased | LeaseInJeopardy | LeaseEnded | ReleaseFailed | KeeperFailed
