"""The exchange of one request and its answer, between a client and the upstream."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fenced.errors import FencedError, InvariantBroken, MissingStamp, Refused, Unsupported
from fenced.http.protocol import read_fence
from fenced.http.receiving import proven
from fenced.http1.bodies import LAST_CHUNK, Data, chunk
from fenced.http1.exchanges import ServerExchange
from fenced.http1.heads import CHUNKED, BadMessage
from fenced.proofs import Proof
from fenced.proxy.callers import Caller
from fenced.proxy.names import NoName
from fenced.proxy.passing import (
    OutcomeUnknown,
    PassedRequest,
    PassedResponse,
    UpstreamUnreachable,
    passed,
    reply_of,
)
from fenced.values.model import Stamp

if TYPE_CHECKING:
    from fenced.proxy.gate import Line
    from fenced.proxy.server import FencingProxy
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
        "_line",
        "_passed",
        "_retried",
        "_size",
        "_token",
        "chunks_back",
        "client",
        "head",
        "proxy",
        "received_all",
        "responding",
        "sent_all",
        "upstream",
    )

    def __init__(self, proxy: FencingProxy, client: ServerExchange) -> None:
        self.proxy = proxy
        self.client = client
        self.head = client.head
        self._passed: PassedRequest
        self.upstream: UpstreamConnection | None = None
        self._size = 0
        """Of the body, as far as it has come."""
        self.received_all = self.sent_all = self.responding = self.chunks_back = self._retried = False
        self._body: list[Data] = []
        self._line: Line | None = None

    def begin(self) -> None:
        """Look at the head and at what has come of the body."""
        head, most = self.head, self.proxy.options.body_bytes_max
        try:
            if head.note is None:
                head.note = passed(head)
            if 0 <= most < head.length:
                raise BadMessage(413, "the body is too long")
        except BadMessage as error:
            self.refuse(error)
            return
        self._passed = head.note
        self.client.on_gone = self._abandon
        self.client.on_pressure = self._press
        self.client.stream(self._receive)
        if not self.client.done:
            self._start()
            self._flush()

    # The request

    def _start(self) -> None:
        """Decide, and pass the request on: at once if nothing has to be awaited, else in a task."""
        proxy, head = self.proxy, self._passed
        if head.safe and not head.fence:
            self._connect()
            return
        try:
            name, keys = proxy.naming.name_of(self.head.target, head.passed_headers), proxy.options.keys
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
        fence, keys = read_fence(self._passed.fence), self.proxy.options.keys
        if keys and fence is not None:
            return proven(fence, keys)
        if isinstance(fence, Proof):
            raise Unsupported("this proxy has no keys to check a proof with, and does not ignore it")
        return fence

    async def _enter(self, name: str, stamp: Stamp | None) -> None:
        proxy = self.proxy
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
        # While the gate decided, the client may have gone: `_connect` looks, and gives back what was let in.
        self._connect()

    def _hold(self, line: Line, token: int) -> None:
        """Newer tokens wait for this request from now on, unless it is a read: that changes nothing."""
        self._line, self._token = line, token
        if self._passed.safe:
            self._give_back()

    def is_overdue(self) -> bool:
        """Whether newer tokens have waited for this request for too long, however it trickles."""
        proxy = self.proxy
        return self._line is not None and proxy.gate.overdue(self._line, self._token, proxy.options.overtime)

    def _caller(self) -> Caller:
        agents = [value for name, value in self.head.headers() if name == b"user-agent"]
        return Caller.of(self.client.peer or "", b", ".join(agents))

    def _connect(self) -> None:
        """Pass the request on over an idle connection, or over a new one."""
        if self.client.done:  # the client has gone meanwhile, and nothing was sent
            self._give_back()
            return
        connection = None if self._retried else self.proxy.pool.take()
        if connection is not None:
            self._pass_on(connection)
        else:
            self.proxy.spawn(self._connect_anew)

    async def _connect_anew(self) -> None:
        try:
            connection = await self.proxy.pool.connect()
        except OSError as error:
            self._give_back()
            why = str(error) or type(error).__name__
            self.proxy.upstream_outages.failed(error)
            self.refuse(
                UpstreamUnreachable(f"the upstream cannot be reached, and nothing was sent to it: {why}")
            )
            return
        self.proxy.upstream_outages.worked()
        if self.client.done:
            connection.close()
            self._give_back()
        else:
            self._pass_on(connection)

    def _pass_on(self, connection: UpstreamConnection) -> None:
        self.upstream = connection
        connection.start(self)
        self.client.go_on()
        self._body.insert(0, self._passed.passed_on)
        self._send()
        self.client.resume("gate")

    def _receive(self, pieces: list[Data], received_all: bool) -> None:
        """A part of the body."""
        self.received_all = received_all
        for piece in pieces:
            self._size += len(piece)
            if self.head.length == CHUNKED:
                self._body += chunk(piece)
            else:
                self._body.append(piece)
        if 0 <= self.proxy.options.body_bytes_max < self._size:
            if self.upstream is None:
                self.refuse(BadMessage(413, "the body is too long"))
            else:
                self.client.abort()  # a part of it was passed on
            return
        self._flush()

    def _flush(self) -> None:
        """Send what has been received since the last time."""
        if self.upstream is not None:
            if self._body or (self.received_all and not self.sent_all):
                self._send()
        elif self._size > BUFFERED_BYTES or len(self._body) > BUFFERED_PARTS:
            self.client.pause("gate")

    def _send(self) -> None:
        upstream = self.upstream
        assert upstream is not None
        if self._line is not None and not self.proxy.gate.may_send(self._line, self._token):
            # This proxy was stopped for so long that others may have let newer requests through.
            upstream.abort("this proxy was stopped, or could not reach its store, for too long")
            return
        parts, self._body = self._body, []
        if self.received_all and not self.sent_all:
            self.sent_all = True
            if self.head.length == CHUNKED:
                parts.append(LAST_CHUNK)
        upstream.quiet = 0
        upstream.write(parts)

    # The answer

    def pass_interim(self, head: PassedResponse) -> None:
        if self.head.new:
            self.client.pass_back([head.lines, b"\r\n"])

    def begin_answer(self, length: int, status: int) -> bytes:
        """Count the answer. Returns the lines that its head gets in addition."""
        self.responding = True
        client, added = self.client, b""
        self.proxy.counts.answers[status // 100] += 1
        if length < 0:
            if self.head.new:
                self.chunks_back = True
                added = b"transfer-encoding: chunked\r\n"
            else:
                client.keep = False
        word = client.connection_word()
        return added + b"connection: %b\r\n" % word.encode() if word else added

    def answered(self) -> None:
        """The upstream has answered everything."""
        # So a newer token may enter, whether or not the client takes the answer.
        self.upstream = None
        self._give_back()
        self.client.end()

    def broken(self, why: str) -> None:
        """The connection to the upstream has ended. What was sent may have been carried out."""
        connection, self.upstream = self.upstream, None
        assert connection is not None
        if (
            connection.used
            and self._passed.safe
            and not self.responding
            and not self._retried
            and not self._size
        ):
            self._retried = True  # a safe request may be repeated, and the upstream closes idle connections
            self.sent_all = False
            self._connect()
            return
        proxy, held = self.proxy, ""
        if self._passed.safe:
            self._give_back()  # it changes nothing, however long it runs
        elif self._line is not None:
            held = f"; newer holders wait for {proxy.options.settle:g} s"
            proxy.note_unknown(self._line.name, why)
            proxy.gate.doubt(self._line, self._token)
            self._line = None
        if self.responding:
            self.client.abort()
        else:
            self.refuse(OutcomeUnknown(f"the outcome of the request is unknown: {why}{held}"))

    def refuse(self, error: FencedError | BadMessage) -> None:
        """Answer without the upstream, or instead of it."""
        if not self.client.done:
            found = reply_of(error)
            self.proxy.counts.own[found.status] += 1
            if isinstance(error, BadMessage):
                self.client.keep = False  # whatever follows it
            self.client.reply(*found)

    def _abandon(self) -> None:
        """The client has gone. A request that was sent in whole is waited for: its order must be kept."""
        if self.upstream is not None:
            if self.sent_all:
                self.upstream.let_go()
            else:
                self.upstream.abort("the client has gone before the request was complete")

    def _press(self, stuck: bool) -> None:
        """The client does not take what was written, or does again."""
        if self.upstream is not None:
            if stuck:
                self.upstream.hold_back()
            else:
                self.upstream.let_go()

    def _give_back(self) -> None:
        # Once: the gate counts. Given back twice, a newer token would enter while another request is in flight.
        if self._line is not None:
            self.proxy.gate.answered(self._line, self._token)
            self._line = None
