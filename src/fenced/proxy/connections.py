"""What the connections of both sides have in common: how they write."""

from __future__ import annotations

import asyncio
import os
from typing import cast

from fenced.proxy.bodies import Data

PARTS_MAX = 1000
"""The system takes 1,024 parts in one call."""


class ProxyConnection(asyncio.Protocol):
    """A connection that writes to its socket directly as long as the transport has nothing to write.

    That saves a turn of the event loop, and a copy of what is written.
    """

    def __init__(self) -> None:
        self._transport = cast(asyncio.Transport, None)
        self._socket = -1
        """Its number; -1 with TLS, where only the transport can write."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if transport.get_extra_info("sslcontext") is None:
            self._socket = transport.get_extra_info("socket").fileno()

    def write(self, parts: list[Data]) -> None:
        """Write the parts one after the other, or nothing if the connection is closing."""
        transport = self._transport
        # The transport closes its socket some time after it is closing: until then the number is not another socket's.
        if transport.is_closing():
            return
        # Nothing may overtake what the transport has not written yet.
        if self._socket < 0 or len(parts) > PARTS_MAX or transport.get_write_buffer_size():
            transport.writelines(parts)
            return
        try:
            sent = os.writev(self._socket, parts)
        except BlockingIOError:
            sent = 0
        except OSError:
            transport.abort()
            return
        for part in parts:
            if sent < len(part):
                transport.write(part[sent:])
                sent = 0
            else:
                sent -= len(part)
