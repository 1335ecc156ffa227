"""One connection to one member: it carries one call after another, or one call without an end (a stream)."""

from __future__ import annotations

import ssl
from collections.abc import Sequence

from fenced.net.heartbeat import Heartbeat
from fenced.net.pool import ConnectionBroken
from fenced.runtime import sockets
from fenced.stores.etcd.wire import http2
from fenced.stores.etcd.wire.http2 import GrpcConnection, GrpcStatus, MalformedFrame
from fenced.values.contracts import Runtime, SocketLike

METADATA = (("hasleader", "true"),)
"""Metadata that makes a member without a leader refuse the call at once, instead of letting it wait."""
READS_MAX = 16
"""How often a stream is read at once: a server may send faster than its messages are handled."""
PING_SECONDS = 1.0
"""Pings are answered no more often: etcd follows each reply with another ping, which wakes the next call once more."""


class Failed(Exception):
    """The server ended the call with a status other than OK."""

    def __init__(self, status: GrpcStatus) -> None:
        super().__init__(status.text)
        self.status = status


class EtcdConnection:
    """A connection for calls. ConnectionBroken: the call may have been carried out. http2.StreamRefused: it was not."""

    def __init__(self, link: SocketLike, where: str, runtime: Runtime, turn: int) -> None:
        self.turn = turn
        """Which member this leads to: the cluster's `turn` when it was connected."""
        self.line = runtime.stream(link)
        self._where = where
        self._now = runtime.now
        self._scheme = "https" if isinstance(link, ssl.SSLSocket) else "http"
        self._heads: dict[str, bytes] = {}
        self._token = ""
        self._grpc = GrpcConnection()
        self._out = self._grpc.hello()
        self._answered = runtime.now()

    @property
    def closing(self) -> bool:
        """Whether the server accepts no more calls on this connection."""
        return self._grpc.closing

    def is_alive(self) -> bool:
        """Whether it can be used again. Reads what the server has sent since the last call, without waiting."""
        try:
            if read_available := self.line.read_available():
                self._out += self._grpc.receive(read_available)
        except (OSError, MalformedFrame, http2.StreamRefused):
            return False
        return not self._grpc.closing

    async def greet(self, until: float) -> None:
        """Wait for the server's first bytes. With TLS they come only after the server has accepted our certificate."""
        out, self._out = self._out, b""
        await self.line.send(out, until)
        try:
            self._out = self._grpc.receive(await self.line.receive(until))
        except (MalformedFrame, http2.StreamRefused) as error:
            raise OSError(str(error)) from error

    async def call(self, path: str, requests: Sequence[bytes], until: float, token: str = "") -> list[bytes]:
        """Make a call and wait for its end; returns the replies, one to each request."""
        grpc = self._grpc
        try:
            out, self._out = self._out + grpc.begin(self._head(path, token), requests), b""
            if grpc.pings and self._now() - self._answered > PING_SECONDS:
                out, grpc.pings, self._answered = out + grpc.pings, b"", self._now()
            await self.line.send(out, until)
            while grpc.status is None:
                if answers := grpc.receive(await self.line.receive(until)):
                    await self.line.send(answers, until)
        except (OSError, MalformedFrame) as error:
            raise ConnectionBroken(f"{self._where}: {error}") from error
        if grpc.status.code != http2.OK:
            raise Failed(grpc.status)
        if len(grpc.messages) != len(requests):
            raise ConnectionBroken(f"{self._where}: the call ended before all replies had arrived")
        return list(grpc.messages)

    def _head(self, path: str, token: str) -> bytes:
        """The headers of a call. They are packed once for each path, as long as the token is the same."""
        if token != self._token:
            self._heads.clear()
            self._token = token
        known = self._heads.get(path)
        if known is None:
            known = self._heads[path] = http2.head(self._scheme, self._where, path, METADATA, token)
        return known

    def stream(self, path: str, runtime: Runtime, token: str = "") -> EtcdStream:
        """Begin a call without an end. The connection carries nothing else from then on."""
        out = self._out + self._grpc.receive(self.line.detach())
        out += self._grpc.begin(self._head(path, token), (), end=False)
        return EtcdStream(self, self._grpc, out, runtime, token)

    def interrupt(self) -> None:
        """End the current call; its caller closes the connection. Safe from any thread."""
        self.line.interrupt()

    def close(self) -> None:
        self.line.close()


class EtcdStream:
    """A call without an end. Any thread or task may send. One task receives, whenever the link is readable."""

    def __init__(
        self, connection: EtcdConnection, grpc: GrpcConnection, out: bytes, runtime: Runtime, token: str
    ) -> None:
        self.link = connection.line.link
        self.turn = connection.turn
        self.token = token
        self.over = False
        """Whether the stream has ended, for whatever reason."""
        self.heartbeat = Heartbeat(runtime.now())
        self._grpc = grpc
        self._out = out
        self._runtime = runtime
        self._lock = runtime.lock()
        self._closed = self._flushing = False

    async def send(self, request: bytes, until: float) -> None:
        """Send a message. If that takes too long, the connection is shut down, and the receiver finds its end."""
        # Packed and appended under one lock: the frames leave in the order in which they were counted.
        with self._lock:
            self._out += self._grpc.send((request,))
        await self._flush(until)

    async def ping(self, until: float) -> None:
        """Ask for a sign of life; `heartbeat` says whether one came."""
        self.heartbeat.ping_sent(self._runtime.now())
        with self._lock:
            self._out += http2.PING_FRAME
        await self._flush(until)

    async def _flush(self, until: float) -> None:
        """Send the pending bytes. One sender at a time waits for the link, and sends what others append meanwhile."""
        with self._lock:
            if self._flushing:
                return
            self._flushing = True
        try:
            while True:
                while self._blocked():
                    if not await self._runtime.writable(self.link, until):
                        self._shut()
                with self._lock:
                    # Senders append under this lock. So either their bytes are seen here, or they see `_flushing`
                    # false and send their bytes themselves.
                    if not self._out or self._closed:
                        self._end_flush()
                        return
        except BaseException:
            with self._lock:
                self._end_flush()
            raise

    def _end_flush(self) -> None:
        """Holds the lock. `cancel` leaves closing to the sender, so that no task waits for a closed descriptor."""
        self._flushing = False
        if self._closed:
            self.link.close()

    def _blocked(self) -> bool:
        """Send as much as the link takes; returns whether there is more."""
        with self._lock:
            try:
                while self._out and not self._closed:
                    self._out = self._out[self.link.send(self._out) :]
            except sockets.NOT_NOW:
                return True
            except OSError:
                self._out = b""  # the receiver finds the same error
        return False

    def _shut(self) -> None:
        """End the connection, so that the task that waits for it wakes. Its descriptor stays open until that task
        closes it: another connection must not get the same number while a task waits for it."""
        with self._lock:
            self._out = b""
            sockets.shut_down(self.link)

    async def receive(self, until: float) -> list[bytes]:
        """The messages that have arrived, without waiting. Sets `over` if the stream has ended."""
        messages: list[bytes] = []
        # Reading makes frames, too (window updates, answers to pings), so senders wait. Nothing under the lock waits.
        with self._lock:
            try:
                self.over = self._closed or not self._take()
                messages += self._grpc.take()
            except (OSError, MalformedFrame, http2.StreamRefused):
                self.over = True
        if not self.over:
            await self._flush(until)
        return messages

    def _take(self) -> bool:
        """Read what has arrived; returns whether more can come."""
        for _ in range(READS_MAX):  # then others get their turn; what is left is read next time
            try:
                data = self.link.recv(sockets.READ_BYTES)
            except sockets.NOT_NOW:
                return True
            if not data:
                return False
            self.heartbeat.received(self._runtime.now())
            self._out += self._grpc.receive(data) + self._grpc.pings
            self._grpc.pings = b""
            if self._grpc.status is not None:
                return False
        return True

    def interrupt(self) -> None:
        """Shut the socket down: a thread that waits for the stream wakes and finds it ended.

        Takes no lock: a finalizer may run in the thread that holds it.
        """
        sockets.shut_down(self.link)

    def cancel(self) -> None:
        """End the stream. May be called from another thread, and repeatedly."""
        with self._lock:
            self._closed = True
            if not self._flushing:
                self.link.close()
                return
        self._shut()  # the sender that waits for the link closes it
