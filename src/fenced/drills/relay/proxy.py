"""The proxy, as tests use it."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Self

from fenced.drills.relay.links import Link, Traffic
from fenced.drills.relay.loop import Loop
from fenced.drills.relay.ports import HOST, free_port
from fenced.drills.relay.triggers import Fault, Trigger


def http2_reply(chunk: bytes) -> bool:
    """Whether a chunk that begins with an HTTP/2 frame contains headers or data, so that it is a reply."""
    at = 0
    while at + 9 <= len(chunk):
        if chunk[at + 3] in (0, 1):
            return True
        at += 9 + int.from_bytes(chunk[at : at + 3], "big")
    return False


class Proxy:
    """A proxy in front of a server, on loopback. It runs until `stop` or the end of its context.

    It counts `connections` that clients have made, and `requests`: each time a client sends something for the
    first time, or for the first time since the server has sent something. For clients that wait for each reply
    before the next request these are the round trips, including those of a handshake.

    `is_reply` decides for each chunk from the server whether it is a reply; see `http2_reply`.
    """

    def __init__(
        self, target_host: str, target_port: int, is_reply: Callable[[bytes], bool] = lambda _: True
    ) -> None:
        self.host = HOST
        self.port = free_port()
        self._delay = self._drip = 0.0
        self._up = self._down = (False, False)  # closed, and what comes is dropped
        self._listener: socket.socket | None = None
        self._loop = Loop(f"proxy-{self.port}")
        self._traffic = Traffic(self._loop, (target_host, target_port), is_reply)
        _proxies.add(self)
        self._loop.run(self._listen)

    @property
    def connections(self) -> int:
        return self._traffic.connections

    @property
    def requests(self) -> int:
        return self._traffic.requests

    @property
    def dropped(self) -> tuple[int, int]:
        """How many chunks open connections have lost on the way to the server, and on the way to the client."""
        links = list(self._traffic.links)
        return sum(link.up.dropped for link in links), sum(link.down.dropped for link in links)

    # Faults that last until `heal`.

    def delay(self, seconds: float, *, only_new: bool = False) -> None:
        """Delay bytes in each direction by `seconds`, on all connections or only on new ones."""

        def order() -> None:
            self._delay = seconds
            if not only_new:
                self._traffic.each(self._apply)

        self._loop.run(order)

    def drip(self, seconds: float) -> None:
        """Forward the server's bytes one at a time, with `seconds` between them."""

        def order() -> None:
            self._drip = seconds
            self._traffic.each(self._apply)

        self._loop.run(order)

    def black_hole(
        self, up: bool = True, down: bool = True, *, drop: bool = False, only_new: bool = False
    ) -> None:
        """Stop forwarding bytes to the server (`up`) or to the client (`down`); connections stay open.

        Bytes that are sent meanwhile, and closes, are delivered after `heal`, as TCP does. With `drop` they are lost,
        and a connection that has lost something stays silent in that direction for good, like one whose state a
        firewall has forgotten. New connections are still accepted, and then receive nothing.
        """

        def order() -> None:
            self._up, self._down = (up, drop), (down, drop)
            if not only_new:
                self._traffic.each(self._apply)

        self._loop.run(order)

    def refuse(self) -> None:
        """Refuse new connections, like a machine on which no server runs."""
        self._loop.run(self._shut)

    def heal(self) -> None:
        """End delays, dripping, black holes and refused connections. Triggers and their effects stay."""

        def order() -> None:
            self._delay = self._drip = 0.0
            self._up = self._down = (False, False)
            self._listen()
            self._traffic.each(self._apply)

        self._loop.run(order)

    # Faults that happen once.

    def reset(self) -> None:
        """Reset all open connections, on both sides."""
        self._loop.run(lambda: self._traffic.each(Link.reset))

    def cut(self) -> None:
        """Close all open connections, on both sides."""
        self._loop.run(lambda: self._traffic.each(Link.close))

    def on(self, match: bytes, do: Fault, times: int = 1) -> Trigger:
        """Apply a fault to the next request, or the next `times` requests, in which these bytes occur.

        The bytes may arrive in several chunks. If several triggers match one request, the oldest is used. While a
        connection waits for the reply that a trigger acts on, no other trigger is used on it.
        """
        if not match or times < 1:
            raise ValueError("a trigger needs bytes to look for, and is for one request at least")
        trigger = Trigger(match, do, times, deliver=self._deliver, disarm=self._disarm)
        self._loop.run(lambda: self._traffic.armed.append(trigger))
        return trigger

    def stop(self) -> None:
        """Close all connections and end."""
        if not self._loop.stopped:
            self._loop.run(self._close)
            self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # Run in the loop's thread.

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = socket.create_server((self.host, self.port), backlog=128)
            self._listener.setblocking(False)
            self._loop.select(self._listener, selectors.EVENT_READ, self._accept)

    def _shut(self) -> None:
        if self._listener is not None:
            self._loop.select(self._listener, 0, self._accept)
            self._listener.close()
            self._listener = None

    def _accept(self, _: int) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            client, _address = self._listener.accept()
            self._traffic.connections += 1
            link = Link(self._traffic, client)
            self._traffic.links.add(link)
            self._apply(link)

    def _apply(self, link: Link) -> None:
        """Apply the current faults to a connection."""
        link.down.drip = self._drip
        link.up.fault(self._delay, self, *self._up)
        link.down.fault(self._delay, self, *self._down)

    def _close(self) -> None:
        self._shut()
        self._traffic.each(Link.close)

    # Called by triggers, and after a fork.

    def _deliver(self, trigger: Trigger) -> None:
        def order() -> None:
            for link in list(self._traffic.links):
                link.up.release(trigger)
                link.down.release(trigger)

        self._loop.run(order)

    def _disarm(self, trigger: Trigger) -> None:
        def order() -> None:
            with contextlib.suppress(ValueError):  # it was used up
                self._traffic.armed.remove(trigger)

        self._loop.run(order)

    def _forked(self) -> None:
        """In a forked child: close the sockets, which would otherwise keep connections open after a reset."""
        if not self._loop.stopped:
            self._loop.forked()
            for link in self._traffic.links:
                link.client.close()
                link.server.close()
            if self._listener is not None:
                self._listener.close()


_proxies: weakref.WeakSet[Proxy] = weakref.WeakSet()


def _after_fork() -> None:
    for proxy in list(_proxies):
        proxy._forked()


os.register_at_fork(after_in_child=_after_fork)
