"""One request and its answer. What is said to an exchange after its end does nothing, so no answer can reach the client
of another request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from fenced.http1.bodies import LAST_CHUNK, Body, Data, body_of, chunk
from fenced.http1.heads import BadMessage, RequestHead
from fenced.http1.writing import CONTINUE, ServerReply, reply_head

if TYPE_CHECKING:
    from fenced.http1.connections import ServerConnection

DRAINED_BYTES_MAX = 65_536
"""A body that is no longer than this is read and dropped if the answer comes before it. Then the connection is kept."""
Read = Callable[[bytes | BadMessage], None]
Take = Callable[[list[Data], bool], None]


class Handler(Protocol):
    """Answers requests."""

    def begin(self, exchange: ServerExchange) -> None:
        """A request: its head has come, and maybe its body. Answer it now or later, without a task if possible."""

    def refusal(self, error: BadMessage) -> ServerReply:
        """The answer to what is no request (400, 431, 501, 505), comes too late (408) or is one too many (503)."""


class ServerExchange:
    """One request and its answer."""

    done = False
    """The answer is complete, or its client has gone."""
    on_gone: Callable[[], None] | None = None
    """Called if the client goes before its answer is complete."""
    on_pressure: Callable[[bool], None] | None = None
    """Called with True when the client does not take what was written, with False when it does again."""
    _body: Body | None = None
    _chunked = False
    _pieces: list[Data]
    """Of the body; there once some of it has come."""
    _read: tuple[int, Read] | None = None
    _size = 0
    _take: Take | None = None

    def __init__(self, connection: ServerConnection, head: RequestHead, whole: bytes | None = None) -> None:
        """`whole`: the body, if it has come with the head."""
        self._connection = connection
        self.head = head
        self.keep = head.keep
        """The connection is kept afterwards."""
        self._pieces = [whole] if whole else []
        self.received_all = whole is not None

    @property
    def peer(self) -> str | None:
        """The client's address, or that of what stands between; None: a Unix socket."""
        return self._connection.peer

    # The request

    def read(self, limit: int, then: Read) -> None:
        """Call `then` with the whole body, maybe at once; or with BadMessage if it is too long (413) or late (408)."""
        if self.head.length > limit or self._size > limit:
            self._read = limit, then
            self.fail(BadMessage(413, "the body is too long"))
        elif self.received_all:
            pieces = self._pieces
            then(bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces))
        else:
            self._read = limit, then
            self._connection.await_body(self._connection.request_until)
            self.go_on()

    def stream(self, take: Take) -> None:
        """Call `take` with each part of the body, the first one at once, and whether it was the last one."""
        self._take = take
        if not self.received_all:
            self._connection.await_body()
        pieces, self._pieces = self._pieces, []
        take(pieces, self.received_all)

    @property
    def is_streamed(self) -> bool:
        return self._take is not None

    def go_on(self) -> None:
        """Tell a client that waits for it to send the body."""
        if self.head.expects and not self._size and not self.received_all and not self.done:
            self._connection.write([CONTINUE])

    def receive(self, data: Data) -> Data | None:
        """A part of the body. Returns what follows the request, None if its body is not complete. Or BadMessage."""
        if self._body is None:
            self._body = body_of(self.head.length)
        pieces, rest = self._body.feed(data)
        for piece in pieces:
            self._size += len(piece)
        self.received_all = rest is not None
        self._pieces += pieces
        return rest

    def deliver(self) -> None:
        """Pass on what was received since the last time."""
        if self._take is not None:
            pieces, self._pieces = self._pieces, []
            self._take(pieces, self.received_all)
        elif self.done:
            self._pieces.clear()  # it is answered already
        elif self._read is not None:
            limit, then = self._read
            if self._size > limit:
                self.fail(BadMessage(413, "the body is too long"))
            elif self.received_all:
                self._read = None
                then(b"".join(self._pieces))
            elif len(self._pieces) > 1:  # as objects of their own, bytes cost a hundred times as much memory
                self._pieces = [b"".join(self._pieces)]

    def fail(self, error: BadMessage) -> None:
        """The body is not one, or too late. What was passed on of it ends with the connection."""
        self.keep = False
        if self._read is None:
            self.abort()
        else:
            (_, then), self._read = self._read, None
            then(error)

    # The answer

    def reply(self, status: int, headers: tuple[tuple[str, str], ...] = (), body: bytes = b"") -> None:
        """The whole answer."""
        if self.done:
            return
        connection = self._connection
        head = reply_head(status, headers, connection.server.date, self.connection_word())
        sent = b"" if self.head.method == b"HEAD" else body
        connection.write_whole(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), sent))
        self._finish()

    def connection_word(self) -> str:
        """What the Connection header of the answer says. From now on it is settled whether the connection is kept."""
        head = self.head
        if self.keep and not self.received_all:
            self.keep = 0 < head.length <= DRAINED_BYTES_MAX and not head.expects
        if not self.keep or self._connection.server.stopping:
            self.keep = False
            return "close"
        return "" if head.new else "keep-alive"

    def begin(self, status: int, headers: tuple[tuple[str, str], ...], first: bytes = b"") -> None:
        """The head of an answer in pieces, and the first piece."""
        if self.done:
            return
        self._chunked = self.head.new
        self.keep = self.keep and self._chunked
        head = reply_head(status, headers, self._connection.server.date, self.connection_word())
        coding = b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n"
        self._connection.write([b"".join((head, coding, *self._framed(first)))])

    def write(self, data: bytes) -> None:
        if not self.done and data:
            self._connection.write([b"".join(self._framed(data))])

    def end(self, last: bytes = b"") -> None:
        """The last piece."""
        if not self.done:
            ending = (LAST_CHUNK,) if self._chunked and self.head.method != b"HEAD" else ()
            if last or ending:
                self._connection.write([b"".join((*self._framed(last), *ending))])
            self._finish()

    def _framed(self, data: bytes) -> tuple[Data, ...]:
        if not data or self.head.method == b"HEAD":
            return ()
        return chunk(data) if self._chunked else (data,)

    def pass_back(self, parts: list[Data]) -> None:
        """Bytes of an answer that the handler frames itself. `end` ends it."""
        if not self.done:
            self._connection.write(parts)

    def _finish(self) -> None:
        # First: `answered` may begin the next request, and nothing that is still said here may reach its client.
        self.done = True
        self._read = self._take = None
        self._connection.answered(self)

    def abort(self) -> None:
        """End the connection: nothing that could still be written would be the rest of this answer."""
        if not self.done:
            self._connection.abort()

    def is_gone(self) -> None:
        """The client has gone."""
        if self.done:
            return
        # First, so that nothing which the calls below answer is written.
        self.done = True
        self._take = None
        if self._read is not None:
            self.fail(BadMessage(400, "the client has gone before its request had arrived"))
        if self.on_gone is not None:
            self.on_gone()

    # Back-pressure

    def pause(self, why: str) -> None:
        """Read nothing more of this client for now."""
        if not self.done:
            self._connection.pause(why)

    def resume(self, why: str) -> None:
        if not self.done:
            self._connection.resume(why)
