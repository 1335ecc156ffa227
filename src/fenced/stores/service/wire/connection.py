"""One connection to an instance of a service: a request out, its response in, at most until a deadline.

The pool decides whether a request may be sent again. `InstanceRoute` says which instance is next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from fenced.errors import FencedError, Misconfigured, Unavailable
from fenced.http1.heads import BadMessage, ResponseHead
from fenced.http1.responses import EndOfResponse, Event, ResponseReader
from fenced.http1.writing import request as written_request
from fenced.net.pool import ConnectionBroken
from fenced.net.tls import tls_refused
from fenced.runtime.sockets import CLOSED, NOT_NOW, READ_BYTES
from fenced.stores.service.address import ServiceAddress
from fenced.values.contracts import ByteStream, Endpoint, Runtime, SocketLike

REPLY_BYTES_MAX = 2**26
"""A survey of many names with long queues is the largest reply."""
INTERIM_MAX = 16
"""How many interim answers (1xx) may come before the answer to a request."""
LINES_MEDIA_TYPE = "application/x-ndjson"


class HttpReply(NamedTuple):
    """A response. `body` is its first line if `parked` holds the connection on which the rest arrives."""

    status: int
    media_type: str
    body: bytes
    parked: Parked | None = None
    etag: str = ""


class InstanceRoute:
    """The instances of a service. New connections lead to one of them, until it fails."""

    def __init__(self, address: ServiceAddress, runtime: Runtime) -> None:
        self._address = address
        self._runtime = runtime
        # Clients begin at different instances, so that each instance gets a share of them.
        self._current = int(runtime.random() * len(address.endpoints))

    async def connect(self, until: float) -> tuple[SocketLike, Endpoint, str]:
        """A connected link to the first instance that accepts, its endpoint and its host header.

        Each instance gets an equal share of the time left, so that a silent one does not use up the time of the others.
        """
        count = len(self._address.endpoints)
        for tries in range(count, 0, -1):
            endpoint, host = self._address.endpoints[self._current % count]
            now = self._runtime.now()
            try:
                link = await self._runtime.connect(
                    endpoint, now + (until - now) / tries, self._address.context
                )
            except OSError as error:
                self.failed(endpoint)
                if tries == 1:
                    raise _unreachable(error, self._address.url) from error
            else:
                return link, endpoint, host
        raise AssertionError  # the last try returns or raises

    def failed(self, endpoint: Endpoint) -> None:
        """An instance did not answer: connect to the next one."""
        count = len(self._address.endpoints)
        if self._address.endpoints[self._current % count][0] == endpoint:
            self._current = (self._current + 1) % count


def _unreachable(error: OSError, where: str) -> FencedError:
    return tls_refused(error, where) or Unavailable(f"{where}: cannot connect: {error}")


class HttpWire:
    """Takes one request at a time. If its connection was lost, it reconnects before the next request."""

    def __init__(self, address: ServiceAddress, route: InstanceRoute, runtime: Runtime) -> None:
        self._address = address
        self._where = address.url
        self._route = route
        self._runtime = runtime
        self._stream: ByteStream | None = None
        self._reader = ResponseReader(REPLY_BYTES_MAX)
        self._endpoint: Endpoint = ""
        self._answered = False
        """Whether the server has answered on this connection."""
        self._headers: list[tuple[str, str]] = []

    async def connect(self, until: float) -> ByteStream:
        """Connect. Unavailable or Misconfigured if that fails; then no request was sent."""
        self.close()
        self._headers = self._credentials()
        link, self._endpoint, host = await self._route.connect(until)
        self._headers.append(("host", host))
        self._reader = ResponseReader(REPLY_BYTES_MAX)
        self._stream = stream = self._runtime.stream(link)
        self._answered = False
        return stream

    def _credentials(self) -> list[tuple[str, str]]:
        """The bearer token, read for each new connection: it can be rotated without a restart."""
        path = self._address.bearer_file
        if path is None:
            return []
        try:
            with open(path, encoding="ascii") as file:
                return [("authorization", f"Bearer {file.read().strip()}")]
        except (OSError, ValueError) as error:
            raise Misconfigured(f"{self._where}: bearer_file: {error}") from error

    async def exchange(
        self,
        method: str,
        target: str,
        body: bytes,
        until: float,
        *,
        held: float = 0.0,
        once: bool = False,
        headers: Sequence[tuple[str, str]] = (),
    ) -> HttpReply:
        """Send a request and return its response.

        `held`: how many seconds the service may hold back the second line of a response in lines; then the reply has
        its first line, and the connection on which the rest arrives. `once`: the request must not be repeated, so an
        idle connection that the instance has closed is replaced before it is sent.
        """
        if once:
            self._close_if_ended()
        stream = self._stream or await self.connect(until)
        headers = [*self._headers, *headers]
        if body:
            headers.append(("content-type", "application/json"))
        if held:
            headers = [*headers, ("accept", LINES_MEDIA_TYPE), ("prefer", f"wait={held:g}")]
        request = written_request(method, self._address.base + target, headers, body)
        try:
            self._reader.expect(method)
            await stream.send(request, until)
            return await self._response(stream, until, held)
        except (OSError, ValueError) as error:  # no response in time, connection closed, or another protocol
            self._route.failed(self._endpoint)
            raise ConnectionBroken(f"{self._where}: {error}{self._hint(error)}") from error

    def _hint(self, error: Exception) -> str:
        """A server that speaks TLS closes a plain connection without a word."""
        plain = self._address.context is None and not isinstance(self._endpoint, str)
        silent = plain and not self._answered and str(error) == CLOSED
        return " without an answer; if it speaks TLS, its address begins with https://" if silent else ""

    async def _response(self, stream: ByteStream, until: float, held: float) -> HttpReply:
        head = await self._event(stream, until)
        for _ in range(INTERIM_MAX + 1):
            if not isinstance(head, ResponseHead) or head.status >= 200:
                break
            head = await self._event(stream, until)
        else:
            raise BadMessage(502, f"more than {INTERIM_MAX} interim answers")
        if not isinstance(head, ResponseHead):
            raise BadMessage(502, "a body without a head")
        self._answered = True
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(head.headers())
        }
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        body = bytearray()
        while not isinstance(event := await self._event(stream, until), EndOfResponse):
            assert isinstance(event, bytes)
            body += event
            if media_type == LINES_MEDIA_TYPE and b"\n" in body:
                line, _, rest = bytes(body).partition(b"\n")
                parked = self._park(stream, rest, held, keeps=head.keep)
                return HttpReply(head.status, media_type, line, parked)
        if not head.keep:
            self.close()
        return HttpReply(head.status, media_type, bytes(body), etag=headers.get("etag", ""))

    async def _event(self, stream: ByteStream, until: float) -> Event:
        while (event := self._reader.next()) is None:
            self._reader.feed(await stream.receive(until))
        return event

    def _park(self, stream: ByteStream, rest: bytes, held: float, *, keeps: bool) -> Parked:
        """Hand the connection over to a wire of its own: this one connects again for its next request."""
        parked = Parked(self._address, self._route, self._runtime)
        parked._headers, parked._endpoint = self._headers, self._endpoint
        parked._stream, self._stream = stream, None
        parked._reader = self._reader
        parked._reader.feed(stream.detach())
        parked.begin(stream, rest, self._runtime.now() + held, keeps=keeps)
        return parked

    def _close_if_ended(self) -> None:
        if self._stream is not None:
            try:
                ended = bool(self._stream.read_available())  # bytes that nobody asked for
            except OSError:
                ended = True
            if ended:
                self.close()

    @property
    def is_open(self) -> bool:
        """Whether it has a connection, as far as it knows."""
        return self._stream is not None

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def interrupt(self) -> None:
        """Shut the socket down: a thread that waits for it wakes and finds it closed. Safe from any thread."""
        if (stream := self._stream) is not None:
            stream.interrupt()


class Parked(HttpWire):
    """A connection whose response is not complete: its second line says that it is time to ask again.

    After that it takes requests again, so that the next ask needs no new connection.
    """

    link: SocketLike
    until: float
    """When the instance sends the second line at the latest."""

    def begin(self, stream: ByteStream, rest: bytes, until: float, *, keeps: bool) -> None:
        self.link = stream.link
        self.until = until
        self.over = False
        """Nothing more arrives."""
        self._keeps = keeps
        self._rest = rest
        self._broken = False

    @property
    def turn(self) -> bool:
        """Whether to ask again, once it is over. An instance that held nothing back sends no second line."""
        return self._broken or bool(self._rest.strip())

    def read(self) -> None:
        """Take what has arrived. Never waits."""
        try:
            while not self._complete():
                try:
                    data = self.link.recv(READ_BYTES)
                except NOT_NOW:
                    return
                if not data:
                    raise OSError(CLOSED)
                self._reader.feed(data)
        except (OSError, ValueError):
            self._broken = True
        self.over = True

    def _complete(self) -> bool:
        """Whether the response has ended, as far as it was read."""
        while (event := self._reader.next()) is not None:
            if isinstance(event, EndOfResponse):
                return True
            assert isinstance(event, bytes)
            self._rest += event
        return False

    def resume(self) -> bool:
        """Take requests again, once it is over. False: the connection is of no use; the instance may be stopping."""
        if self._broken or not self._keeps or not self._reader.is_between or not self._is_turn():
            return False
        self._stream = self._runtime.stream(self.link)
        return True

    def _is_turn(self) -> bool:
        try:
            return bool(json.loads(self._rest) == {"turn": True})
        except (ValueError, RecursionError):
            return False
