"""What an HTTP server bears: connections, heads and times. Times are in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

SWEEP_SECONDS = 0.5
HEAD_BYTES_MAX = 32_768
LINGER_SECONDS = 2.0
"""For how long a client is read that does not notice that its connection has ended."""


@dataclass(frozen=True)
class HttpLimits:
    """Limits of one server."""

    connections: int = 1000
    refused: int = 500
    """How many surplus connections get an answer; further ones are closed without one."""
    head_bytes: int = HEAD_BYTES_MAX
    request_time: float = 20.0
    """For a head from its first byte, and for a body that is read as a whole, with its head. For a client to read on
    while an answer is sent."""
    body_time: float = 20.0
    """For a body that is read as a whole, after its head; for the next part of one that is passed on."""
    idle_time: float = 60.0
    """For a connection to send its next request."""
    half_open: bool = False
    """Whether a client that has closed its own side still waits for its answers. If not, it is taken for gone."""


class Ticks:
    """The same times in sweeps. One timer looks at all connections: one for each request would cost more than it."""

    def __init__(self, limits: HttpLimits) -> None:
        shortest = min(limits.request_time, limits.body_time, limits.idle_time)
        self.seconds = min(SWEEP_SECONDS, shortest / 4)
        """Between two sweeps."""
        self.now = 0
        self.request, self.body, self.idle, self.linger = (
            math.ceil(time / self.seconds) + 1  # the first one may come at once
            for time in (
                limits.request_time,
                limits.body_time,
                limits.idle_time,
                min(LINGER_SECONDS, 4 * shortest),
            )
        )
