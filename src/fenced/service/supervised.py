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
