"""The connections of a proxy: queues of bytes in two directions, and how connections end."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable

from fenced.drills.relay.loop import Loop
from fenced.drills.relay.triggers import AT_THE_REPLY, Fault, Trigger

CHUNK = 65536
HELD_BYTES_MAX = 1 << 20
"""How many bytes one direction keeps. Above it the proxy stops reading, and TCP slows the sender down."""

_END = b""
"""In the queue: the sender has closed its side."""
_RESET = None
"""In the queue: the sender has reset the connection."""


class Traffic:
    """What the connections of one proxy share."""

    def __init__(self, loop: Loop, target: tuple[str, int], is_reply: Callable[[bytes], bool]) -> None:
        self.loop = loop
        self.target = target
        self.is_reply = is_reply
        self.connections = 0
        self.requests = 0
        self.armed: list[Trigger] = []
        self.links: set[Link] = set()

    def use(self, trigger: Trigger) -> None:
        trigger.left -= 1
        if trigger.left == 0:
            self.armed.remove(trigger)

    def each(self, do: Callable[[Link], None]) -> None:
        for link in list(self.links):
            do(link)


class Pipe:
    """One direction of a connection: bytes that were read are queued until they are due and nothing holds them."""

    def __init__(self, link: Link, source: socket.socket, target: socket.socket) -> None:
        self.source = source
        self.target = target
        self.delay = 0.0
        self.drip = 0.0  # if not 0: send single bytes, with this many seconds between them
        self.holders: set[object] = set()
        self.dropping = False
        self.dead = False  # something was lost: as after a gap in TCP, nothing more is delivered
        self.dropped = 0  # chunks that came, and were lost
        self.ended = False  # the source has closed, or is gone
        self.blocked = False  # the target takes no more for now
        self._link = link
        self._queue: deque[tuple[float, bytes | None]] = deque()
        self._size = 0
        self._wakes_at = math.inf
        self._next_drop = 0.0

    @property
    def reading(self) -> bool:
        return not self.ended and self._size < HELD_BYTES_MAX

    @property
    def over(self) -> bool:
        return self.ended and not self._queue

    def put(self, data: bytes | None) -> None:
        self.dead = self.dead or self.dropping
        if self.dead:
            self.dropped += 1
        else:
            self._queue.append((time.monotonic(), data))
            self._size += len(data or b"")
            self.flush()

    def fault(self, delay: float, holder: object, closed: bool, drop: bool) -> None:
        """Delay, hold, drop or forward, from now on, also the bytes that are queued."""
        self.delay = delay
        self.dropping = closed and drop
        if self.dropping and self._queue:
            self.lose()
        if closed and not drop:
            self.holders.add(holder)
        else:
            self.holders.discard(holder)
        self.flush()

    def lose(self) -> None:
        """Deliver nothing more, not even what is queued."""
        self.dead = True
        self._queue.clear()
        self._size = 0
        self.blocked = False

    def release(self, holder: object) -> None:
        if holder in self.holders:
            self.holders.discard(holder)
            self.flush()

    def flush(self) -> None:
        """Forward what is due."""
        self.blocked = False
        while self._queue and not self.holders and not self.blocked and not self._link.closed:
            came, data = self._queue[0]
            if self.delay and came + self.delay > time.monotonic():
                self._wake_at(came + self.delay)
                break
            if self.drip and self._next_drop > time.monotonic():
                self._wake_at(self._next_drop)
                break
            if data:
                self._send(came, data)
            elif data is _RESET:
                self._link.reset()
            else:
                self._queue.popleft()
                with contextlib.suppress(OSError):
                    self.target.shutdown(socket.SHUT_WR)
        self._link.watch()

    def _send(self, came: float, data: bytes) -> None:
        piece = data[:1] if self.drip else data
        try:
            sent = self.target.send(piece)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._link.broken(self.target)
            return
        self._size -= sent
        if sent == len(data):
            self._queue.popleft()
        else:
            self._queue[0] = (came, data[sent:])
            self.blocked = sent < len(piece)
        self._next_drop = time.monotonic() + self.drip

    def _wake_at(self, due: float) -> None:
        if due < self._wakes_at:
            self._wakes_at = due
            self._link.traffic.loop.later(due, self._wake)

    def _wake(self) -> None:
        self._wakes_at = math.inf
        self.flush()


class Link:
    """One client's connection to the proxy, and the proxy's connection to the server for it."""

    def __init__(self, traffic: Traffic, client: socket.socket) -> None:
        self.traffic = traffic
        self.client = client
        self.server = socket.socket()
        for end in (self.client, self.server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.up = Pipe(self, self.client, self.server)
        self.down = Pipe(self, self.server, self.client)
        self.closed = False
        self._awaiting: Trigger | None = None
        self._replied = True
        self._tail = b""
        self._watched: dict[socket.socket, int] = {}
        self.server.connect_ex(traffic.target)
        traffic.loop.select(self.server, selectors.EVENT_WRITE, self._connected)

    def watch(self) -> None:
        """Register the events that this link waits for; close it if there are none left."""
        if self.closed or not self._watched:
            return
        if self.up.over and self.down.over:
            self.close()
            return
        for inward, outward, ready in (
            (self.up, self.down, self._on_client),
            (self.down, self.up, self._on_server),
        ):
            end = inward.source
            wanted = selectors.EVENT_READ * inward.reading | selectors.EVENT_WRITE * outward.blocked
            if wanted != self._watched[end] and end.fileno() >= 0:
                self._watched[end] = wanted
                self.traffic.loop.select(end, wanted, ready)

    def _connected(self, _: int) -> None:
        if self.server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.reset()
        else:
            self._watched = {self.client: 0, self.server: selectors.EVENT_WRITE}
            self.watch()

    def _on_client(self, events: int) -> None:
        self._ready(events, self.up, self.down, self._from_client)

    def _on_server(self, events: int) -> None:
        self._ready(events, self.down, self.up, self._from_server)

    def _ready(self, events: int, inward: Pipe, outward: Pipe, take: Callable[[bytes], None]) -> None:
        if events & selectors.EVENT_WRITE:
            outward.flush()
        if not events & selectors.EVENT_READ or not inward.reading or self.closed:
            return
        try:
            data = inward.source.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self.broken(inward.source)
            return
        if data:
            take(data)
        else:
            inward.ended = True
            inward.put(_END)
            self._unanswered(inward)
        self.watch()

    def _from_client(self, data: bytes) -> None:
        if self._replied:
            self._replied = False
            self.traffic.requests += 1
        trigger = self._matching(data)
        if trigger is None:
            self.up.put(data)
            return
        if trigger.fault is Fault.CUT_BEFORE:
            self.reset()
        elif trigger.fault is Fault.SWALLOW:
            self.up.dead = True
        elif trigger.fault is Fault.HOLD:
            self.up.holders.add(trigger)
            self.up.put(data)
        else:
            self._awaiting = trigger
            if trigger.fault is Fault.CUT_AND_HOLD:
                self.up.holders.add(trigger)
            self.up.put(data)
            if trigger.fault in (Fault.CUT_AFTER, Fault.CUT_AND_HOLD):
                self._drop_client()
        if trigger.fault not in AT_THE_REPLY:
            trigger.fire()

    def _from_server(self, data: bytes) -> None:
        self._replied = True
        trigger = self._awaiting
        if trigger is None or not self.traffic.is_reply(data):
            self.down.put(data)
            return
        self._awaiting = None
        if trigger.fault is Fault.HOLD_REPLY:
            self.down.holders.add(trigger)
            self.down.put(data)
        elif trigger.fault is Fault.SWALLOW_REPLY:
            self.down.dead = True
        elif trigger.fault is Fault.CUT_AFTER_REPLY:
            # Corked, the last bytes and the end are one segment: the client cannot send between them.
            self.client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            self.down.put(data)
            self.close()
        else:
            self._drop_client()
            self.up.put(_END)  # the server finishes the request, and then sees the end
        if trigger.fault in AT_THE_REPLY:
            trigger.fire()

    def _unanswered(self, inward: Pipe) -> None:
        """The server has ended the connection: a request that is held for it does nothing any more."""
        trigger = self._awaiting
        if inward is self.down and trigger is not None and trigger.fault is Fault.CUT_AND_HOLD:
            self._awaiting = None
            trigger.fire()

    def _matching(self, data: bytes) -> Trigger | None:
        """The trigger whose match ends in this chunk; the match may have begun in earlier chunks."""
        if not self.traffic.armed or self._awaiting is not None:
            self._tail = b""
            return None
        text = self._tail + data
        before = len(self._tail)
        longest = max(len(trigger.match) for trigger in self.traffic.armed)
        self._tail = text[max(0, len(text) - longest + 1) :]
        for trigger in self.traffic.armed:
            if text.find(trigger.match, max(0, before - len(trigger.match) + 1)) >= 0:
                self.traffic.use(trigger)
                return trigger
        return None

    # Ends.

    def _drop_client(self) -> None:
        """Reset the client's side; the server's side stays open."""
        self.up.ended = True
        self.down.lose()
        self._end(self.client, reset=True)

    def broken(self, end: socket.socket) -> None:
        """One side was reset: reset the other after the bytes before the reset are delivered."""
        inward, outward = (self.up, self.down) if end is self.client else (self.down, self.up)
        inward.ended = True
        outward.lose()
        self._end(end, reset=False)
        inward.put(_RESET)
        self._unanswered(inward)

    def reset(self) -> None:
        """Reset both sides at once; queued bytes are lost."""
        self._finish(reset=True)

    def close(self) -> None:
        """Close both sides at once; queued bytes are lost."""
        self._finish(reset=False)

    def _finish(self, reset: bool) -> None:
        if not self.closed:
            self.closed = True
            self.traffic.links.discard(self)
            for end in (self.client, self.server):
                self._end(end, reset)

    def _end(self, end: socket.socket, reset: bool) -> None:
        if end.fileno() < 0:
            return
        self.traffic.loop.select(end, 0, self._on_client)
        if reset:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            with contextlib.suppress(OSError):  # bytes that nobody has read would turn the close into a reset
                while end.recv(CHUNK):
                    pass
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        end.close()
