"""Pings on streams that may be idle for long. Pure.

A balancer, a NAT or a firewall may forget a connection without a word: then nothing arrives on it any more, and
nothing says so. A request has a deadline and notices. A stream on which a client only listens must ask.
"""

from __future__ import annotations

IDLE_SECONDS = 10.0
"""A stream that was silent for so long is pinged. etcd allows no more than a ping in five seconds."""
ANSWER_SECONDS = 5.0
"""If nothing arrives within that time after a ping, the stream is dead: closed, and opened again."""


class Heartbeat:
    """When to ping a stream, and when to believe that it is dead."""

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
        """To be asked after a read: a process that stood still finds the answer among the bytes that are waiting."""
        return self.pinged and now >= self.due
