"""The limits of an instance, and the rate of each client. What each is answered with: docs/service.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fenced.runtime import clocks

BURST_MIN = 10.0
CLIENTS_MAX = 10_000
"""Of how many clients the rate is remembered; the others have been quiet."""


@dataclass(frozen=True)
class Limits:
    """What one instance bears. Times are seconds."""

    connections: int = 20_000
    running: int = 10_000
    """Requests under way, without those that are held."""
    held: int = 10_000
    """Requests of waiters that are held. More are answered at once, and ask again later."""
    held_each: int = 5_000
    """The same for one bearer token."""
    rate: float | None = None
    """Requests a second of each client: of each bearer token, or else of each address; None: any."""
    body_time: float = 10.0
    """For a body."""
    request_time: float = 20.0
    """For a whole request, from its first byte; and for the client to read on while an answer is sent."""
    idle_time: float = 75.0
    """For a connection to send its next request."""


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
