"""A client without leases: for what a test does behind the back of an authority."""

from __future__ import annotations

import socket
import struct
from typing import Self

from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.zookeeper.address import ZooKeeperAddress
from fenced.stores.zookeeper.wire import jute
from fenced.stores.zookeeper.wire.connection import dial

OPEN = jute.acl([("world", "anyone")])
NEW = jute.Connected(10_000, 0, b"\0" * 16)


class Raw:
    """One connection, and one session of its own; or another's, by its number and password."""

    def __init__(self, url: str, session: jute.Connected = NEW) -> None:
        runtime, address = BlockingRuntime(), ZooKeeperAddress(url)
        until = runtime.now() + 5
        link, self.session = step(dial(address, address.members[0], runtime, session, 0, until))
        assert isinstance(link, socket.socket)
        self._link = link
        self._link.settimeout(5)

    def ask(self, request: bytes) -> jute.Reply:
        self._link.sendall(jute.frame(struct.pack(">i", 1) + request))
        size = struct.unpack(">i", self._exactly(4))[0]
        return jute.reply(self._exactly(size))[1]

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._link.recv(count - len(data))
            if not more:
                raise ConnectionError("the server closed the connection")
            data += more
        return data

    def children(self, path: str) -> list[str]:
        reply = self.ask(jute.get_children(path))
        return [] if reply.error else jute.children_of(reply.body)[0]

    def get(self, path: str) -> tuple[bytes, jute.Stat]:
        reply = self.ask(jute.get_data(path))
        assert not reply.error, (path, reply.error)
        return jute.data_of(reply.body)

    def set(self, path: str, data: bytes) -> None:
        assert not self.ask(jute.set_data(path, data)).error

    def create(self, path: str, data: bytes = b"", flags: int = 0) -> None:
        assert not self.ask(jute.create(path, data, OPEN, flags)).error

    def delete(self, path: str) -> int:
        return self.ask(jute.delete(path)).error

    def end_session(self) -> None:
        """What the server does when it has heard nothing for too long."""
        if self.session.timeout > 0:
            self.ask(jute.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()
