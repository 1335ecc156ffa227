"""Free ports on loopback."""

from __future__ import annotations

import random
import socket

HOST = "127.0.0.1"
PORTS = range(12000, 32000)
"""Below the ephemeral ports: no client can be given a stopped server's port, or connect to itself there."""
_given_ports: set[int] = set()


def free_port() -> int:
    """A port on loopback that is free, outside the ephemeral range, and given only once in this process."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        if port in _given_ports and len(_given_ports) < len(PORTS) // 2:
            continue
        _given_ports.add(port)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
