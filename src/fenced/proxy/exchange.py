"""The exchange of one request and its answer, between a client and the upstream."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fenced.errors import FencedError, InvariantBroken, MissingStamp, Refused, Unsupported
from fenced.http.protocol import read_fence
from fenced.http.receiving import proven
from fenced.proofs import Proof
from fenced.proxy.bodies import LAST_CHUNK, BadChunk, Chunks, Data, chunk
from fenced.proxy.callers import Caller
from fenced.proxy.messages import (
    CHUNKED,
    CONTINUE,
    BadMessage,
    OutcomeUnknown,
    PassedRequest,
    PassedResponse,
    UpstreamUnreachable,
    answer,
    problem_of,
)
from fenced.proxy.names import NoName
from fenced.values.model import Stamp

if TYPE_CHECKING:
    from fenced.proxy.front import Front
    from fenced.proxy.gate import Line
    from fenced.proxy.upstream import UpstreamConnection

BUFFERED_BYTES = 65_536
"""How much of a body is read before the request may be passed on."""
BUFFERED_PARTS = 256
"""In how many parts: each costs a hundred bytes of memory, however short it is."""


class Exchange:
    """One request, and its answer.

    It ends in one of four ways: the upstream has answered (`answered`), the outcome is unknown (`broken`), the proxy
    has answered by itself (`refuse`), or the client has gone (`abandon`). What the gate let in it is given back by the
    first two.
    """

    __slots__ = (
        "_body",
        "_chunks",
        "_line",
        "_retried",
        "_token",
        "chunks_back",
        "done",
        "front",
        "head",
        "keep",
        "received_all",
        "responding",
        "sent_all",
        "size",
        "upstream",
    )

    def __init__(self, front: Front, head: PassedRequest) -> None:
        self.front = front
        self.head = head
        self.keep = head.keep
        """The client's connection is kept afterwards."""
        self.upstream: UpstreamConnection | None = None
        self.received_all = not head.length
        self.size = 0
        self.sent_all = self.responding = self.done = self.chunks_back = self._retried = False
        self._body: list[Data] = []
        self._chunks = Chunks() if head.length == CHUNKED else None
        self._line: Line | None = None

    # The request

    def start(self) -> None:
        """Decide, and pass the request on: at once if nothing has to be awaited, else in a task."""
        proxy, head = self.front.proxy, self.head
        if head.safe and not head.fence:
            self._connect()
            return
        try:
            name, keys = proxy.naming.name_of(head.target, head.passed_headers), proxy.options.keys
            stamp = self._stamp() if keys else None
            if name is not None and (stamp is not None if keys else len(head.fence) == 1):
                entered = proxy.gate.enter_by_text(name, head.fence[0])
                if entered is not None:  # nearly always: a further request of the same holder
                    self._hold(*entered)
                    self._connect()
                    return
            stamp = stamp if keys else self._stamp()
        except FencedError as error:
            self.refuse(error)
            return
        if name is None:
            if head.safe or proxy.options.unnamed == "pass":
                self._connect()
            else:
                self.refuse(NoName("no --name of this proxy is for this path, so it is not passed on"))
            return
        proxy.spawn(partial(self._enter, name, stamp))

    def _stamp(self) -> Stamp | None:
        """The stamp of the request: proven, if this proxy has keys."""
        fence, keys = read_fence(self.head.fence), self.front.proxy.options.keys
        if keys and fence is not None:
            return proven(fence, keys)
        if isinstance(fence, Proof):
            raise Unsupported("this proxy has no keys to check a proof with, and does not ignore it")
        return fence

    async def _enter(self, name: str, stamp: Stamp | None) -> None:
        proxy = self.front.proxy
        try:
            if stamp is None:
                await proxy.gate.unstamped(name)
                proxy.note_caller(self._caller(), MissingStamp.kind, "pass", name)
            else:
                until = proxy.runtime.now() + proxy.options.wait
                line = await proxy.gate.enter(name, stamp, until)
                if line is not None:
                    self._hold(line, stamp.token)
        except FencedError as error:
            proxy.note_refusal(error)
            if isinstance(error, Refused):
                proxy.note_caller(self._caller(), error.kind, "refuse", name)
            self.refuse(error)
            return
        except Exception as error:  # noqa: BLE001 (a bug; without this the client would wait for ever)
            proxy.report(f"{type(error).__name__} while a request was judged: this is a bug")
            self.refuse(InvariantBroken("the proxy has failed"))
            return
        proxy.store_outages.worked()
        self._connect()

    def _hold(self, line: Line, token: int) -> None:
        """Newer tokens wait for this request from now on, unless it is a read: that changes nothing."""
        self._line, self._token = line, token
        if self.head.safe:
            self._give_back()

    def is_overdue(self) -> bool:
        """Whether newer tokens have waited for this request for too long, however it trickles."""
        proxy = self.front.proxy
        return self._line is not None and proxy.gate.overdue(self._line, self._token, proxy.options.overtime)

    def _caller(self) -> Caller:
        agents = [value for name, value in self.head.headers() if name == b"user-agent"]
        return Caller.of(self.front.address, b", ".join(agents))

    def _connect(self) -> None:
        """Pass the request on over an idle connection, or over a new one."""
        if self.done:  # the client has gone meanwhile, and nothing was sent
            self._give_back()
            return
        connection = None if self._retried else self.front.proxy.pool.take()
        if connection is not None:
            self._pass_on(connection)
        else:
            self.front.proxy.spawn(self._connect_anew)

    async def _connect_anew(self) -> None:
        try:
            connection = await self.front.proxy.pool.connect()
        except OSError as error:
            self._give_back()
            why = str(error) or type(error).__name__
            self.front.proxy.upstream_outages.failed(error)
            self.refuse(
                UpstreamUnreachable(f"the upstream cannot be reached, and nothing was sent to it: {why}")
            )
            return
        self.front.proxy.upstream_outages.worked()
        if self.done:
            connection.close()
            self._give_back()
        else:
            self._pass_on(connection)

    def _pass_on(self, connection: UpstreamConnection) -> None:
        self.upstream = connection
        connection.start(self)
        if self.head.expects and not self._body:
            self.front.write([CONTINUE])
        self._body.insert(0, self.head.passed_on)
        self._send()
        self.front.resume("gate")

    def receive(self, data: Data) -> Data | None:
        """A part of the body. Returns what follows the request, None if its body is not complete. Or BadMessage."""
        rest: Data | None = None
        if self._chunks is None:
            left = self.head.length - self.size
            self.size += len(data)
            if len(data) >= left:
                data, rest = data[:left], data[left:]
                self.size = self.head.length
            self._body.append(data)
        else:
            try:
                pieces, rest = self._chunks.feed(data)
            except BadChunk as error:
                raise BadMessage(400, str(error)) from error
            for piece in pieces:
                self.size += len(piece)
                self._body += chunk(piece)
            if 0 <= self.front.proxy.options.body_bytes_max < self.size:
                raise BadMessage(413, "the body is too long")
        self.received_all = rest is not None
        return rest

    def flush(self) -> None:
        """Send what has been received since the last time."""
        if self.upstream is not None:
            if self._body or (self.received_all and not self.sent_all):
                self._send()
        elif (self.size > BUFFERED_BYTES or len(self._body) > BUFFERED_PARTS) and not self.done:
            self.front.pause("gate")

    def _send(self) -> None:
        upstream = self.upstream
        assert upstream is not None
        if self._line is not None and not self.front.proxy.gate.may_send(self._line, self._token):
            # This proxy was stopped for so long that others may have let newer requests through.
            upstream.abort("this proxy was stopped, or could not reach its store, for too long")
            return
        parts, self._body = self._body, []
        if self.received_all and not self.sent_all:
            self.sent_all = True
            if self._chunks is not None:
                parts.append(LAST_CHUNK)
        upstream.quiet = 0
        upstream.write(parts)

    # The answer

    def pass_interim(self, head: PassedResponse) -> None:
        if self.head.new and not self.done:
            self.front.write([head.lines, b"\r\n"])

    def begin_answer(self, head: PassedResponse) -> bytes:
        """Count the answer. Returns the lines that its head gets in addition."""
        self.responding = True
        proxy, added = self.front.proxy, b""
        proxy.counts.answers[head.status // 100] += 1
        if head.length < 0:
            if self.head.new:
                self.chunks_back = True
                added = b"transfer-encoding: chunked\r\n"
            else:
                self.keep = False
        if not self.keep or proxy.stopping:
            self.keep = False
            added += b"connection: close\r\n"
        elif not self.head.new:
            added = b"connection: keep-alive\r\n"
        return added

    def pass_back(self, parts: list[Data]) -> None:
        if not self.done:
            self.front.write(parts)

    def answered(self) -> None:
        """The upstream has answered everything."""
        self.upstream = None
        if self._line is not None:
            self.front.proxy.gate.answered(self._line, self._token)
            self._line = None
        if not self.done:
            self.done = True
            self.front.next(self)

    def broken(self, why: str) -> None:
        """The connection to the upstream has ended. What was sent may have been carried out."""
        connection, self.upstream = self.upstream, None
        assert connection is not None
        if connection.used and self.head.safe and not self.responding and not self._retried and not self.size:
            self._retried = True  # a safe request may be repeated, and the upstream closes idle connections
            self.sent_all = False
            self._connect()
            return
        proxy, held = self.front.proxy, ""
        if self.head.safe:
            self._give_back()  # it changes nothing, however long it runs
        elif self._line is not None:
            held = f"; newer holders wait for {proxy.options.settle:g} s"
            proxy.note_unknown(self._line.name, why)
            proxy.gate.doubt(self._line, self._token)
            self._line = None
        if self.done:
            return
        if self.responding:
            self.front.abort()
            return
        self.refuse(OutcomeUnknown(f"the outcome of the request is unknown: {why}{held}"))

    def refuse(self, error: FencedError) -> None:
        """Answer without the upstream, or instead of it."""
        if self.done:
            return
        found = problem_of(error)
        self.front.proxy.counts.own[found.status] += 1
        # A client that still sends its body is not read to the end.
        self.keep = self.keep and self.received_all and not self.front.proxy.stopping
        self.front.write([answer(found, keep=self.keep, to_head=self.head.method == b"HEAD")])
        self.done = True
        self.front.next(self)

    def abandon(self) -> None:
        """The client has gone. A request that was sent in whole is waited for: its order must be kept."""
        self.done = True
        if self.upstream is not None:
            if self.sent_all:
                self.upstream.let_go()
            else:
                self.upstream.abort("the client has gone before the request was complete")

    def _give_back(self) -> None:
        if self._line is not None:
            self.front.proxy.gate.answered(self._line, self._token)
            self._line = None
