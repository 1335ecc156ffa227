"""Connections to ZooKeeper: many callers share one, and one of the waiting callers reads for all.

A session is bound to one connection, and its ephemeral nodes belong to the session. So callers cannot have a connection
each: they send their requests on the same one, and the server replies in that order. No thread is dedicated to
reading. One of the waiting callers reads for all of them; when it has its own replies, another takes over.
"""

from __future__ import annotations

import contextlib
import ssl
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from fenced.errors import FencedError, Misconfigured, Unavailable
from fenced.net.pool import ConnectionBroken
from fenced.net.tls import tls_refused
from fenced.runtime import sockets
from fenced.stores.zookeeper.address import ZooKeeperAddress
from fenced.stores.zookeeper.wire import jute
from fenced.stores.zookeeper.wire.sides import Sides
from fenced.values.contracts import Runtime, SocketLike, Wakeup

FRAME_MAX = 64 * 2**20
READS_MAX = 16
"""How often a connection is read at once, under its lock. What is left is read next time."""


class _Side:
    """The callers of one runtime: one of them reads, and the others wait."""

    def __init__(self, runtime: Runtime) -> None:
        self.bell = runtime.selector()
        self.taken = False
        self.waiting: dict[Wakeup, None] = {}


class Hub:
    """Lets one caller at a time wait for all connections of one client, and read for everybody.

    One of each side: an event loop that is blocked must not keep the threads from reading. If both read at the same
    time, the wire's lock decides who gets the bytes, and that one wakes the other.
    """

    def __init__(self, runtime: Sides) -> None:
        self._runtime = runtime
        self._lock = runtime.lock()
        self._sides = {side: _Side(side) for side in runtime.all}
        self.seen = 0
        """The newest transaction (zxid) that this client has seen: a server that is behind it refuses this client."""

    def add(self, wire: ZooKeeperWire) -> None:
        try:
            for side in self._sides.values():
                side.bell.add(wire.socket, wire)
        except (OSError, ValueError, RuntimeError) as error:
            wire.socket.close()
            raise Unavailable("this client is closed") from error

    def remove(self, wire: ZooKeeperWire) -> None:
        for side in self._sides.values():
            side.bell.remove(wire.socket)

    def wake(self) -> None:
        """Let the reading callers check their conditions again."""
        for side in self._sides.values():
            side.bell.wake()

    def _wake_other(self, mine: _Side) -> None:
        # Its reader is `taken` before it checks its condition. So either it finds what we have read, or we find it.
        for side in self._sides.values():
            if side is not mine and side.taken:
                side.bell.wake()

    def close(self) -> None:
        for side in self._sides.values():
            side.bell.close()

    async def wait(self, met: Callable[[], bool], wakeup: Wakeup, until: float) -> bool:
        """Wait until `met` (True) or `until` (False). The caller that makes it true sets the wake-up."""
        side = self._sides[self._runtime.side()]
        try:
            while not met():
                with self._lock:
                    # Decided and recorded under one lock: either we read, or the reader finds us in `waiting` when it
                    # leaves and wakes us. So no caller sleeps while none reads.
                    mine = not side.taken
                    if mine:
                        side.taken = True
                    else:
                        side.waiting[wakeup] = None
                if mine:
                    return await self._read(side, met, until)
                woken = await self._runtime.wait(wakeup, until)
                wakeup.clear()
                if not woken:
                    return met()
            return True
        finally:
            self._pass_on(side, wakeup)

    async def _read(self, side: _Side, met: Callable[[], bool], until: float) -> bool:
        """Read for all callers, until our own condition is met."""
        try:
            while not met():
                if self._runtime.now() >= until:
                    return False  # a server that never stops sending would keep us here; the caller reads once more
                try:
                    ready = await side.bell.wait(until)
                except (OSError, ValueError) as error:  # closed meanwhile
                    raise ConnectionBroken("this client is closed") from error
                if ready is None:
                    return met()
                for wire in ready:
                    assert isinstance(wire, ZooKeeperWire)
                    wire.receive()
                if ready:
                    self._wake_other(side)
            return True
        finally:
            # Without the lock: it is ours alone until now, and `_pass_on`, which follows, looks for another reader.
            side.taken = False

    def _pass_on(self, side: _Side, wakeup: Wakeup) -> None:
        """Called by every caller that leaves: if none of its side reads now, wake one that waits to do it."""
        with self._lock:
            side.waiting.pop(wakeup, None)
            following = next(iter(side.waiting), None) if not side.taken else None
        if following is not None:
            following.set()


class _Call:
    """Requests that were sent together, and the replies so far."""

    __slots__ = ("broken", "left", "replies", "wakeup")

    def __init__(self, left: int, wakeup: Wakeup) -> None:
        self.left = left
        self.wakeup = wakeup
        self.replies: list[jute.Reply] = []
        self.broken: ConnectionBroken | None = None

    def over(self) -> bool:
        return not self.left or self.broken is not None


class ZooKeeperWire:
    """One connection, after its handshake."""

    def __init__(
        self,
        link: SocketLike,
        hub: Hub,
        runtime: Sides,
        where: str,
        on_event: Callable[[jute.WatchEvent | None], None],
    ) -> None:
        self.socket = link
        self.zxid = 0
        self.closed = False
        self._hub = hub
        self._runtime = runtime
        self._where = where
        self._on_event = on_event
        self._lock = runtime.lock()
        self._secure = isinstance(link, ssl.SSLSocket)
        self._xid = 0
        self._answers = 0
        self._out = bytearray()
        self._in = bytearray()
        self._pending: deque[tuple[int, _Call]] = deque()
        hub.add(self)

    async def exchange(self, requests: Sequence[bytes], until: float) -> list[jute.Reply]:
        """The replies, in order. `ConnectionBroken`: it is unknown which of the requests were carried out."""
        call = _Call(len(requests), self._runtime.wakeup())
        # Bytes and `_pending` get the same order in one step: the server replies in it.
        with self._lock:
            if self.closed:
                raise ConnectionBroken(f"{self._where}: the connection is gone")
            answers = self._answers
            for request in requests:
                self._xid = self._xid + 1 & 0x7FFFFFFF
                self._pending.append((self._xid, call))
                self._out += struct.pack(">ii", len(request) + 4, self._xid)
                self._out += request
        # A caller may be interrupted from here on. Its replies are read and dropped when they come.
        await self._flush(until)
        done = await self._hub.wait(call.over, call.wakeup, until)
        if not done:
            self.receive()  # the reply may have arrived in time, and no caller has read it yet
            self._hub.wake()  # what else was read may be for a caller that reads itself
        if call.broken is not None:
            raise call.broken
        if not call.over():
            if self._answers == answers:
                # Replies come in order, so later requests on this connection would wait behind ours: close it.
                self.close("no answer in time")
            # Otherwise the server is still answering other callers' requests: do not break them for our deadline.
            raise ConnectionBroken(f"{self._where}: no answer in time")
        return call.replies

    async def _flush(self, until: float) -> None:
        while True:
            trouble = ""
            # Whoever has the lock sends what all callers have appended. Ours was sent, then, when nothing is left.
            with self._lock:
                if self.closed or not self._out:
                    return
                try:
                    del self._out[: self.socket.send(self._out)]
                    continue
                except sockets.NOT_NOW:
                    pass
                except OSError as error:
                    trouble = str(error) or type(error).__name__
            if trouble:
                self.close(trouble)
            elif not await self._runtime.writable(self.socket, until):
                self.close("the request could not be sent in time")

    def receive(self) -> None:
        """Read what has arrived, and notify the callers and watches concerned. Outside the lock: they may call back."""
        events: list[jute.WatchEvent] = []
        done: list[_Call] = []
        trouble = ""
        with self._lock:
            if self.closed:
                return
            try:
                for _ in range(READS_MAX):
                    data = self.socket.recv(sockets.READ_BYTES)
                    self._in += data
                    if not data:
                        trouble = "the server closed the connection"
                    if not data or (len(data) < sockets.READ_BYTES and not self._secure):
                        break
            except sockets.NOT_NOW:
                pass
            except OSError as error:
                trouble = str(error) or type(error).__name__
            try:
                self._take(events, done)
            except (jute.MalformedJute, struct.error, UnicodeDecodeError) as error:
                trouble = f"this is not a ZooKeeper server: {error}"
        for event in events:
            self._on_event(event)
        for call in done:
            call.wakeup.set()
        if trouble:
            self.close(trouble)

    def _take(self, events: list[jute.WatchEvent], done: list[_Call]) -> None:
        at = 0
        while len(self._in) - at >= 4:
            (size,) = struct.unpack_from(">i", self._in, at)
            if not 16 <= size <= FRAME_MAX:
                raise jute.MalformedJute(f"a frame of {size} bytes")
            if len(self._in) - at < 4 + size:
                break
            xid, reply = jute.reply(bytes(self._in[at + 4 : at + 4 + size]))
            at += 4 + size
            if xid == jute.XID_EVENT:
                events.append(jute.event(reply.body))
                continue
            call = self._call_of(xid)
            self.zxid = max(self.zxid, reply.zxid)
            self._answers += 1
            call.replies.append(reply)
            call.left -= 1
            if not call.left:
                done.append(call)
        del self._in[:at]

    def _call_of(self, xid: int) -> _Call:
        """The call that this reply is for. The server replies in order: MalformedJute if the numbers differ."""
        if not self._pending or self._pending[0][0] != xid:
            raise jute.MalformedJute("a reply to no request of ours")
        return self._pending.popleft()[1]

    def close(self, why: str = "closed") -> None:
        """Close the connection; the session lives on. May be repeated, and called from any thread."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            pending, self._pending = list(self._pending), deque()
            # Under the lock: no other thread reads or writes a descriptor that the system has given to another socket.
            self._hub.remove(self)
            self.socket.close()
        for _, call in pending:
            call.broken = ConnectionBroken(f"{self._where}: {why}")
            call.wakeup.set()
        self._on_event(None)
        self._hub.wake()  # last: the caller that reads must find what that has woken

    def farewell(self) -> None:
        """End the session, if that can be sent without waiting; then close."""
        with contextlib.suppress(OSError):
            self.socket.send(jute.frame(struct.pack(">i", self._xid + 1) + jute.close()))
        self.close()


# Connecting.


class OneConnects:
    """Lets one caller at a time connect, and the others wait for it."""

    def __init__(self, runtime: Sides, url: str) -> None:
        self._runtime = runtime
        self._url = url
        self._lock = runtime.lock()
        self._connecting = False
        self._waiting: list[Wakeup] = []

    async def wire(
        self,
        usable: Callable[[], ZooKeeperWire | None],
        connect: Callable[[float], Awaitable[ZooKeeperWire]],
        until: float,
    ) -> ZooKeeperWire:
        """The connection that is `usable`, or a new one. `connect` records it where `usable` finds it."""
        while True:
            with self._lock:
                # Decided and recorded under one lock: either we connect, or the caller that connects finds our
                # wake-up in `_waiting` when it is done.
                if (wire := usable()) is not None:
                    return wire
                turn = self._runtime.wakeup() if self._connecting else None
                if turn is not None:
                    self._waiting.append(turn)
                self._connecting = True
            if turn is not None:
                if not await self._runtime.wait(turn, until):
                    raise Unavailable(f"{self._url}: no connection in time")
                continue
            wire = await self._runtime.beside(lambda: self._connect(connect, until), until)
            if wire is None:
                raise Unavailable(f"{self._url}: no connection in time")
            return wire

    async def _connect(
        self, connect: Callable[[float], Awaitable[ZooKeeperWire]], until: float
    ) -> ZooKeeperWire:
        try:
            return await connect(until)
        finally:
            with self._lock:
                self._connecting = False
                waiting, self._waiting = self._waiting, []
            for turn in waiting:
                turn.set()


async def any_member(
    address: ZooKeeperAddress,
    runtime: Runtime,
    until: float,
    join: Callable[[tuple[str, int], float], Awaitable[ZooKeeperWire]],
) -> ZooKeeperWire:
    """Join one of the members, tried in a new random order; each gets a share of the time."""
    members = sorted(address.members, key=lambda _: runtime.random())
    failures: list[FencedError] = []
    while members:
        member = members.pop()
        share = (until - runtime.now()) / (len(members) + 1)
        try:
            return await join(member, runtime.now() + share)
        except (Unavailable, Misconfigured) as error:
            failures.append(error)
    wrong = next((error for error in failures if isinstance(error, Misconfigured)), None)
    raise wrong or Unavailable(f"{address.url}: {'; '.join(map(str, failures))}")


async def dial(
    address: ZooKeeperAddress,
    member: tuple[str, int],
    runtime: Runtime,
    hello: jute.Connected,
    seen: int,
    until: float,
) -> tuple[SocketLike, jute.Connected]:
    """Connect to one member; returns the link and the server's view of the session (timeout 0: it has ended)."""
    where = f"{member[0]}:{member[1]}"
    try:
        link = await runtime.connect(member, until, address.context)
    except OSError as error:
        raise (tls_refused(error, where) or Unavailable(f"{where}: {error}")) from error
    try:
        return link, await _greet(link, address, runtime, hello, seen, until)
    except (OSError, struct.error, jute.MalformedJute) as error:
        link.close()
        raise Unavailable(f"{where}: {error}") from error
    except BaseException:
        link.close()
        raise


async def _greet(
    link: SocketLike,
    address: ZooKeeperAddress,
    runtime: Runtime,
    hello: jute.Connected,
    seen: int,
    until: float,
) -> jute.Connected:
    request = jute.frame(jute.connect(seen, hello.timeout, hello.session, hello.password))
    if address.credentials is not None:
        request += jute.frame(jute.auth("digest", address.credentials))
    await sockets.send(link, request, runtime, until)
    session = jute.connected(await _frame(link, runtime, until))
    if session.timeout > 0 and address.credentials is not None:
        _, reply = jute.reply(await _frame(link, runtime, until))
        if reply.error:
            raise Misconfigured(f"{address.url}: the server does not accept the credentials")
    return session


async def _frame(link: SocketLike, runtime: Runtime, until: float) -> bytes:
    """Exactly one frame."""
    size = struct.unpack(">i", await _exactly(link, 4, runtime, until))[0]
    if not 0 < size <= sockets.READ_BYTES:
        raise jute.MalformedJute("this is not a ZooKeeper server")
    return await _exactly(link, size, runtime, until)


async def _exactly(link: SocketLike, count: int, runtime: Runtime, until: float) -> bytes:
    data, late_reads = b"", sockets.LateReads(runtime)
    while len(data) < count:
        late_reads.check(until)
        more = await sockets.receive(link, runtime, until, count - len(data))
        if not more:
            raise OSError(
                "the server closed the connection: it is not serving, or it is behind what we have seen"
            )
        data += more
    return data
