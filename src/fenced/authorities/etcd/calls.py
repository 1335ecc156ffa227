"""One connection to one member: a call at a time, or one stream in which both sides speak when they like."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

from fenced.authorities.etcd import http2
from fenced.authorities.etcd.http2 import Malformed, Status, Talk
from fenced.contracts import Runtime
from fenced.runtime import links
from fenced.runtime.pool import Broken

PING_SECONDS = 1.0
"""Pings are answered no more often: each answer brings about the next ping, and that a wake-up in the next call."""
_LATER = (*links.WAIT_TO_READ, links.WAIT_TO_WRITE)


class Failed(Exception):
    """The server has ended the call with another status than OK."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.text)
        self.status = status


class Connection:
    """Connected, and greeted. Broken: nobody knows whether the call was carried out; http2.Refused: it was not."""

    def __init__(self, link: socket.socket, where: str, runtime: Runtime, turn: int) -> None:
        self.turn = turn
        """Whose turn it was when this one was made."""
        self.link = link
        self._where = where
        self._runtime = runtime
        self._secure = isinstance(link, ssl.SSLSocket)
        self._scheme = "https" if self._secure else "http"
        self._heads: dict[str, bytes] = {}
        self._token = ""
        self._talk = Talk()
        self._out = self._talk.hello()
        self._answered = runtime.now()

    @property
    def usable(self) -> bool:
        return not self._talk.closing

    def head(self, path: str, metadata: Sequence[tuple[str, str]], token: str) -> bytes:
        """The headers of a call, which are made once as long as the token is the same."""
        if token != self._token:
            self._heads.clear()
            self._token = token
        known = self._heads.get(path)
        if known is None:
            known = self._heads[path] = http2.head(self._scheme, self._where, path, metadata, token)
        return known

    async def greet(self, until: float) -> None:
        """Wait for the server's first word. With TLS it comes once our certificate is accepted."""
        try:
            await self._send(b"", until)
            self._out = self._talk.receive(await self._receive(until))
        except (Malformed, http2.Refused) as error:
            raise OSError(str(error)) from error

    async def call(self, head: bytes, requests: Sequence[bytes], until: float) -> list[bytes]:
        """The replies of a call, which is over then."""
        talk = self._talk
        if talk.pings and self._runtime.now() - self._answered > PING_SECONDS:
            self._out, talk.pings, self._answered = self._out + talk.pings, b"", self._runtime.now()
        try:
            await self._send(talk.begin(head, requests), until)
            while talk.status is None:
                if answers := talk.receive(await self._receive(until)):
                    await self._send(answers, until)
        except (OSError, Malformed) as error:
            raise Broken(f"{self._where}: {error}") from error
        if talk.status.code != http2.OK:
            raise Failed(talk.status)
        return list(talk.messages)

    async def _send(self, data: bytes, until: float) -> None:
        if self._out:
            data, self._out = self._out + data, b""
        while data:
            data = data[await links.patiently(self._runtime, self.link, self.link.send, data, until=until) :]

    async def _receive(self, until: float) -> bytes:
        if not self._secure and not await self._runtime.readable(self.link, until):
            raise OSError("no answer in time")
        data = await links.patiently(self._runtime, self.link, self.link.recv, links.READ_BYTES, until=until)
        if not data:
            raise OSError("the server closed the connection")
        return data

    def close(self) -> None:
        self.link.close()


class Stream:
    """A call without an end. Any thread may send; one receives, when the link can be read."""

    def __init__(self, connection: Connection, head: bytes, runtime: Runtime) -> None:
        self.link = connection.link
        self.turn = connection.turn
        self._runtime = runtime
        self._talk = connection._talk
        self._lock = runtime.lock()
        self._closed = False
        self._out = connection._out + self._talk.begin(head, (), end=False)

    async def send(self, request: bytes, until: float) -> None:
        """Who receives is told if that is not possible."""
        with self._lock:
            self._out += self._talk.say((request,))
        await self._flush(until)

    async def _flush(self, until: float) -> None:
        while True:
            with self._lock:
                if self._closed or not self._out:
                    return
                try:
                    self._out = self._out[self.link.send(self._out) :]
                    continue
                except _LATER:
                    pass
                except OSError:
                    return
            if not await self._runtime.writable(self.link, until):
                self.cancel()

    async def receive(self, until: float) -> list[bytes] | None:
        """What has come, without waiting for more; None: the stream is over, however it ended."""
        try:
            with self._lock:
                over = self._closed or not self._take()
                messages = list(self._talk.messages)
                self._talk.messages.clear()
        except (OSError, Malformed, http2.Refused):
            return None
        await self._flush(until)
        return messages if messages or not over else None

    def _take(self) -> bool:
        """Whether more can come."""
        while True:
            try:
                data = self.link.recv(links.READ_BYTES)
            except _LATER:
                return self._talk.status is None
            if not data:
                return False
            self._out += self._talk.receive(data) + self._talk.pings
            self._talk.pings = b""
            if self._talk.status is not None:
                return False

    def cancel(self) -> None:
        """End it. May be called from another thread, and again."""
        with self._lock:
            self._closed = True
            self.link.close()
