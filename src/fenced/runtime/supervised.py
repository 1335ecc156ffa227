"""What the service manager is notified of: systemd, or another one that sets NOTIFY_SOCKET."""

from __future__ import annotations

import os
import socket


def notify(state: str) -> None:
    """Send `READY=1` or `STOPPING=1` as sd_notify(3) does. Without a service manager nothing happens."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.sendto(state.encode(), address)


def watchdog_seconds() -> float | None:
    """How long the service manager waits for `WATCHDOG=1` before it kills this process; None: it does not wait."""
    asked = os.environ.get("WATCHDOG_USEC", "")
    for_us = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(asked) / 1e6 if asked.isdigit() and int(asked) > 0 and for_us else None
