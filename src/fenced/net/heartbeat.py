"""Pings on streams that may be idle for long. Pure.

A balancer, a NAT or a firewall may drop a connection silently: then nothing arrives on it any more, and neither end
gets an error. A request detects that by its deadline. A stream on which a client only listens must send pings.
"""

from __future__ import annotations

IDLE_SECONDS = 10.0
"""Ping a stream that was silent for this long. etcd allows one ping in five seconds."""
ANSWER_SECONDS = 5.0
"""If nothing arrives within this time after a ping, the stream is dead: close it and open another."""


class Heartbeat:
    """When to ping a stream, and when to consider it dead."""

    def __init__(self, now: float) -> None:
        self.received(now)

    def received(self, now: float) -> None:
        """Any byte is a sign of life."""
        self.due = now + IDLE_SECONDS
        self.pinged = False

    def ping_sent(self, now: float) -> None:
        self.due = now + ANSWER_SECONDS
        self.pinged = True

    def is_dead(self, now: float) -> bool:
        """Call this after a read: if the process was paused, the reply may already be in the socket's buffer."""
        return self.pinged and now >= self.due
