"""Sockets to a server, in either colour: they never block, and the runtime waits for them until a deadline."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import ssl
from collections.abc import Callable
from typing import Any, TypeVar

from fenced.contracts import Runtime

T = TypeVar("T")

READ_BYTES = 65_536
WAIT_TO_READ = (BlockingIOError, ssl.SSLWantReadError)
WAIT_TO_WRITE = ssl.SSLWantWriteError


async def connect(
    host: str, port: int, runtime: Runtime, until: float, context: ssl.SSLContext | None = None
) -> socket.socket:
    """A connected socket, of which the other end is who the context says. OSError (also of TLS) if there is none."""
    link = await _reached(host, port, runtime, until)
    if context is None:
        return link
    try:
        link = context.wrap_socket(link, server_hostname=host, do_handshake_on_connect=False)
        await patiently(runtime, link, link.do_handshake, until=until)
    except BaseException:
        link.close()
        raise
    return link


async def _reached(host: str, port: int, runtime: Runtime, until: float) -> socket.socket:
    """A name may stand for several addresses, of which the first that answers is taken."""
    found = await runtime.call(socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM)
    while True:
        family, kind, protocol, _, place = found.pop(0)
        link = socket.socket(family, kind, protocol)
        try:
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            error = link.connect_ex(place)
            if error and not await runtime.writable(link, until):
                raise OSError("no connection in time")
            if error and (error := link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                raise OSError(error, os.strerror(error))
        except OSError:
            link.close()
            if not found:
                raise
        except BaseException:
            link.close()
            raise
        else:
            return link


async def patiently(
    runtime: Runtime, link: socket.socket, step: Callable[..., T], *args: Any, until: float
) -> T:
    """Repeat a step that does not block until it is done."""
    while True:
        try:
            return step(*args)
        except WAIT_TO_READ:
            ready = await runtime.readable(link, until)
        except WAIT_TO_WRITE:
            ready = await runtime.writable(link, until)
        if not ready:
            raise OSError("no answer in time")


class Bell:
    """Calls somebody who waits for sockets away from them. May be rung from any thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._ear, self._button = socket.socketpair()
        for end in (self._ear, self._button):
            end.setblocking(False)
        self._selector.register(self._ear, selectors.EVENT_READ, None)

    def add(self, link: socket.socket, owner: object) -> None:
        self._selector.register(link, selectors.EVENT_READ, owner)

    def remove(self, link: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(link)

    def ring(self) -> None:
        with contextlib.suppress(OSError):
            self._button.send(b"!")

    async def wait(self, runtime: Runtime, until: float) -> list[object] | None:
        """The owners of sockets that can be read, none if it rang; None at the end of the time.

        OSError or ValueError: it is closed.
        """
        if not await runtime.readable(self._selector, until):
            return None
        ready = [key.data for key, _ in self._selector.select(0)]
        if None in ready:
            with contextlib.suppress(OSError):
                self._ear.recv(READ_BYTES)
        return [owner for owner in ready if owner is not None]

    def close(self) -> None:
        self._selector.close()
        self._ear.close()
        self._button.close()
