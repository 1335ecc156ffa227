"""The limits of an instance, and the rate of each client. What each is answered with: docs/service.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fenced.errors import Misuse, Unavailable
from fenced.runtime import clocks
from fenced.values.model import BatchAnswer, BatchOperation, Busy, Ended, Gone, Granted, Kept, Released

BURST_MIN = 10.0
KEEPING_TIMES = 10
"""How many times as many renewals and ends of leases a client may send as other requests."""
LOOK_SECONDS = 1.0
"""How often the leases of a token that has too many are looked through for those that are over."""
CLIENTS_MAX = 10_000
"""Of how many clients the rate is remembered; the others have been quiet."""


@dataclass(frozen=True)
class Limits:
    """Limits of one instance. Times are in seconds."""

    connections: int = 20_000
    running: int = 10_000
    """Requests under way, without those that are held."""
    held: int = 10_000
    """Requests of waiters that are held. More are answered at once, and ask again later."""
    held_each: int = 5_000
    """The same for one bearer token."""
    leases_each: int = 20_000
    """Leases and places in queues of one bearer token at a time, as far as this instance knows."""
    namespaces_each: int = 64
    """Namespaces that one bearer token has opened first."""
    pages_each: int = 20
    """Open live pages of one bearer token."""
    rate: float | None = None
    """Attempts and other requests a second of each bearer token, or else of each address; None: any."""
    body_time: float = 10.0
    """For a body."""
    request_time: float = 20.0
    """For a whole request, from its first byte; and for the client to read on while an answer is sent."""
    idle_time: float = 75.0
    """For a connection to send its next request."""


class TokenLeases:
    """The attempts of each bearer token that may hold a lease or a place now, as far as this instance knows.

    It knows what it was asked for and has answered. An end at another instance is known when the time is over.
    """

    def __init__(self, now: Callable[[], float] = clocks.now) -> None:
        self._now = now
        self._until: dict[str, dict[str, float]] = {}
        """By the id of a token: when each of its attempts is over at the latest."""
        self._looked: dict[str, float] = {}

    def admit(self, token: str, asks: Mapping[str, float], most: int) -> bool:
        """Whether a token may ask for all of these, attempts with their times. They count from now on."""
        known, now = self._until.setdefault(token, {}), self._now()
        new = sum(1 for attempt in asks if attempt not in known)
        if len(known) + new > most and now - self._looked.get(token, -math.inf) >= LOOK_SECONDS:
            self._looked[token] = now
            known = self._until[token] = {each: until for each, until in known.items() if until > now}
            new = sum(1 for attempt in asks if attempt not in known)
        if new and len(known) + new > most:
            return False
        known.update({attempt: now + seconds for attempt, seconds in asks.items() if attempt not in known})
        return True

    def answered(
        self, token: str, operations: Sequence[BatchOperation], results: Sequence[BatchAnswer]
    ) -> None:
        known, now = self._until.setdefault(token, {}), self._now()
        for operation, result in zip(operations, results, strict=True):
            if isinstance(result, (Granted, Kept)):
                known[operation.secret] = now + result.remaining
            elif isinstance(result, (Busy, Released, Ended, Gone, Misuse, Unavailable)):
                known.pop(operation.secret, None)  # it has nothing; of all others that is not known


class Rates:
    """One token bucket for each client. It holds the requests of one second, and ten at least.

    A request is admitted while there is one in the bucket, and may take more than that: a batch counts as all of its
    operations, and the client then waits longer.
    """

    def __init__(self, now: Callable[[], float] = clocks.now) -> None:
        self._now = now
        self._buckets: dict[str, tuple[float, float]] = {}
        """What was left, and when, by client."""

    def wait(self, client: str, rate: float, cost: int = 1) -> float:
        """How many seconds the client has to wait before its next request; 0.0: this one is admitted."""
        now, full = self._now(), max(rate, BURST_MIN)
        left, since = self._buckets.get(client, (full, now))
        left = min(full, left + (now - since) * rate)
        if left < 1:
            return (1 - left) / rate
        if len(self._buckets) >= CLIENTS_MAX and client not in self._buckets:
            self._buckets = {
                each: bucket
                for each, bucket in self._buckets.items()
                if now - bucket[1] < 1.0 or bucket[0] < 0
            }
        self._buckets[client] = left - cost, now
        return 0.0


def retry_after(seconds: float) -> str:
    """The header takes whole seconds."""
    return str(max(1, math.ceil(seconds)))
