"""One connection to one member: a call at a time, or one stream in which both sides speak when they like."""

from __future__ import annotations

import ssl
from collections.abc import Sequence

from fenced.contracts import Runtime, SocketLike
from fenced.runtime import sockets
from fenced.wire import http2
from fenced.wire.heartbeat import Heartbeat
from fenced.wire.http2 import GrpcConnection, Malformed, Status
from fenced.wire.pool import ConnectionBroken

METADATA = (("hasleader", "true"),)
"""A member that knows no leader says so at once."""
PING_SECONDS = 1.0
"""Pings are answered no more often: each answer brings about the next ping, and that a wake-up in the next call."""


class Failed(Exception):
    """The server has ended the call with another status than OK."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.text)
        self.status = status


class EtcdConnection:
    """Connected, and greeted. Broken: nobody knows whether the call was carried out; http2.Refused: it was not."""

    def __init__(self, link: SocketLike, where: str, runtime: Runtime, turn: int) -> None:
        self.turn = turn
        """Whose turn it was when this one was made."""
        self.line = runtime.stream(link)
        self._where = where
        self._now = runtime.now
        self._scheme = "https" if isinstance(link, ssl.SSLSocket) else "http"
        self._heads: dict[str, bytes] = {}
        self._token = ""
        self._talk = GrpcConnection()
        self._out = self._talk.hello()
        self._answered = runtime.now()

    @property
    def closing(self) -> bool:
        """The server takes no more calls here."""
        return self._talk.closing

    def is_alive(self) -> bool:
        """Whether it can be used again, by what the server has said since the last call."""
        try:
            if read_available := self.line.read_available():
                self._out += self._talk.receive(read_available)
        except (OSError, Malformed, http2.StreamRefused):
            return False
        return not self._talk.closing

    async def greet(self, until: float) -> None:
        """Wait for the server's first word. With TLS it comes once our certificate is accepted."""
        out, self._out = self._out, b""
        await self.line.send(out, until)
        try:
            self._out = self._talk.receive(await self.line.receive(until))
        except (Malformed, http2.StreamRefused) as error:
            raise OSError(str(error)) from error

    async def call(self, path: str, requests: Sequence[bytes], until: float, token: str = "") -> list[bytes]:
        """The replies of a call, one to each request; it is over then."""
        talk, late = self._talk, False
        try:
            out, self._out = self._out + talk.begin(self._head(path, token), requests), b""
            if talk.pings and self._now() - self._answered > PING_SECONDS:
                out, talk.pings, self._answered = out + talk.pings, b"", self._now()
            await self.line.send(out, until)
            while talk.status is None:
                if late:
                    raise sockets.Late
                # After the deadline read once more, as an answer that arrived in time counts, but not for ever.
                late = self._now() >= until
                if answers := talk.receive(await self.line.receive(until)):
                    await self.line.send(answers, until)
        except (OSError, Malformed) as error:
            raise ConnectionBroken(f"{self._where}: {error}") from error
        if talk.status.code != http2.OK:
            raise Failed(talk.status)
        if len(talk.messages) != len(requests):
            raise ConnectionBroken(f"{self._where}: the call ended before all was answered")
        return list(talk.messages)

    def _head(self, path: str, token: str) -> bytes:
        """The headers of a call, which are made once as long as the token is the same."""
        if token != self._token:
            self._heads.clear()
            self._token = token
        known = self._heads.get(path)
        if known is None:
            known = self._heads[path] = http2.head(self._scheme, self._where, path, METADATA, token)
        return known

    def stream(self, path: str, runtime: Runtime, token: str = "") -> Stream:
        """Begin a call without an end; nothing else can be done with this connection then."""
        out = self._out + self._talk.receive(self.line.detach())
        out += self._talk.begin(self._head(path, token), (), end=False)
        return Stream(self, self._talk, out, runtime, token)

    def interrupt(self) -> None:
        """End the call that is under way; its caller closes the connection. Safe from any thread."""
        self.line.interrupt()

    def close(self) -> None:
        self.line.close()


class Stream:
    """A call without an end. Anybody may send; one receives, when the link can be read."""

    def __init__(
        self, connection: EtcdConnection, talk: GrpcConnection, out: bytes, runtime: Runtime, token: str
    ) -> None:
        self.link = connection.line.link
        self.turn = connection.turn
        self.token = token
        self.over = False
        """Nothing more will come of it."""
        self.heartbeat = Heartbeat(runtime.now())
        self._talk = talk
        self._out = out
        self._runtime = runtime
        self._lock = runtime.lock()
        self._closed = self._flushing = False

    async def send(self, request: bytes, until: float) -> None:
        """If that is not possible in time, the stream is over, and who receives is told."""
        with self._lock:
            self._out += self._talk.say((request,))
        await self._flush(until)

    async def ping(self, until: float) -> None:
        """Ask for a sign of life; `heartbeat` says whether one came."""
        self.heartbeat.ping_sent(self._runtime.now())
        with self._lock:
            self._out += http2.PING_FRAME
        await self._flush(until)

    async def _flush(self, until: float) -> None:
        """Only one at a time waits, for the others too."""
        with self._lock:
            if self._flushing:
                return
            self._flushing = True
        try:
            while self._blocked():
                if not await self._runtime.writable(self.link, until):
                    self._shut()
        finally:
            with self._lock:
                self._flushing = False
                if self._closed:
                    self.link.close()

    def _blocked(self) -> bool:
        """Send what is there; whether there is more than can be sent now."""
        with self._lock:
            try:
                while self._out and not self._closed:
                    self._out = self._out[self.link.send(self._out) :]
            except sockets.NOT_NOW:
                return True
            except OSError:
                self._out = b""  # who receives will find the same
        return False

    def _shut(self) -> None:
        """End the connection, so that the task that waits for it wakes. Its descriptor stays open until that task
        closes it: another connection must not get the same number while somebody waits for it."""
        with self._lock:
            self._out = b""
            sockets.shut_down(self.link)

    async def receive(self, until: float) -> list[bytes]:
        """What has come, without waiting for more. Look whether it is over then, however it ended."""
        messages: list[bytes] = []
        with self._lock:
            try:
                self.over = self._closed or not self._take()
                messages += self._talk.messages
                self._talk.messages.clear()
            except (OSError, Malformed, http2.StreamRefused):
                self.over = True
        if not self.over:
            await self._flush(until)
        return messages

    def _take(self) -> bool:
        """Whether more can come."""
        while self._talk.status is None:
            try:
                data = self.link.recv(sockets.READ_BYTES)
            except sockets.NOT_NOW:
                return True
            if not data:
                return False
            self.heartbeat.received(self._runtime.now())
            self._out += self._talk.receive(data) + self._talk.pings
            self._talk.pings = b""
        return False

    def interrupt(self) -> None:
        """Shut the socket down: a thread that waits for the stream wakes and finds it ended.

        Takes no lock: a finalizer may run in the thread that holds it.
        """
        sockets.shut_down(self.link)

    def cancel(self) -> None:
        """End it. May be called from another thread, and again."""
        with self._lock:
            self._closed = True
            if not self._flushing:
                self.link.close()
                return
        self._shut()  # and who waits for it now closes it
