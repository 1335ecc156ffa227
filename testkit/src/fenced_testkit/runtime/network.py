"""A simulated network: connections between simulated processes, which behave as TCP's do.

Inside a connection bytes arrive whole, once and in order. They arrive after a delay and often in pieces. A link stalls
while its direction is blocked, and what was sent then arrives later. A cut resets a connection after any prefix of the
bytes under way, or only at the client's end, and the server gets the bytes later. A process that is paused keeps its
sockets, and they keep what arrives. A process that crashes resets its connections, and new ones are refused. All
randomness is the world's, so one seed makes one run.

A server is a process and an object with three methods:

    class Echo:
        def on_open(self, connection): ...
        def on_bytes(self, connection, data): connection.send(data)
        def on_close(self, connection): ...

    world = World(seed)
    network = SimulatedNetwork(world)
    network.listen(Process(world, "echo"), ("echo", 7), Echo())
    runtime = SimulatedRuntime(Process(world, "client"), network)  # runtime.connect(("echo", 7), until) reaches it
    world.run(until=60.0)
"""

from __future__ import annotations

import errno
import itertools
import os
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from fenced.errors import InvariantBroken
from fenced.runtime.sockets import Late
from fenced.values.contracts import Endpoint, Runtime, SocketLike
from fenced_testkit.runtime.world import Process, World

DELAY_SECONDS = (0.0002, 0.002)
"""The shortest and the longest delay of a packet, unless `SimulatedNetwork.delay` is replaced."""
SPLIT_SHARE = 0.2
"""How many of the packets arrive in two pieces, at different times."""
UNREAD_BYTES_MAX = 2**18
"""How much a client may have sent that the server has not read; then its link is not writable."""


class _Signal(Enum):
    """What travels in a connection that is not data."""

    SYN, ACK, FIN, RESET, CUT = range(5)


class _Watched:
    """Something whose state changes, and tasks that wait for a condition on it."""

    def __init__(self) -> None:
        self.watchers: list[Callable[[], None]] = []

    def _changed(self) -> None:
        for call in list(self.watchers):
            call()

    async def wait_until(self, met: Callable[[], bool], runtime: Runtime, until: float) -> bool:
        """Wait for the condition (True) or the deadline (False)."""
        flag = runtime.wakeup()
        self.watchers.append(flag.set)
        try:
            while not met():
                # Nothing else runs between this line and the wait, so no change is missed.
                flag.clear()
                if not await runtime.wait(flag, until):
                    return False
            return True
        finally:
            self.watchers.remove(flag.set)


class _End(_Watched):
    """One end of a connection, as its kernel keeps it: unread bytes, and what is under way to the peer."""

    peer: _End

    def __init__(self, network: SimulatedNetwork, process: Process) -> None:
        super().__init__()
        self.process = process
        self.connected = self.closed = self.ended = False
        """`closed`: by this end. `ended`: the peer sends no more."""
        self.broken: OSError | None = None
        self.unread = bytearray()
        self._network = network
        self._transit: deque[tuple[float, bytes | _Signal]] = deque()
        self._last_due = 0.0

    def put(self, packet: bytes | _Signal) -> None:
        """Send to the peer. Packets of one direction never overtake each other."""
        network, world = self._network, self._network.world
        if isinstance(packet, bytes):
            late = network.lets_go_now(self.process, self.peer.process)
            if late is not None:
                self._transmit(packet)
                self.let_go(late)
                return
            if network.cuts_now(self.process, self.peer.process):
                self._transmit(packet[: world.rng.randrange(len(packet))])
                packet = _Signal.CUT
            elif len(packet) > 1 and world.rng.random() < network.split:
                at = world.rng.randrange(1, len(packet))
                self._transmit(packet[:at])
                packet = packet[at:]
        self._transmit(packet)

    def _transmit(self, packet: bytes | _Signal) -> None:
        world = self._network.world
        delay = self._network.delay(self.process, self.peer.process)
        self._last_due = max(self._last_due, world.now + delay)
        self._transit.append((self._last_due, packet))
        world.at(self._last_due, self.pump)

    def pump(self) -> None:
        """Let everything arrive that is due, unless the direction is blocked."""
        now = self._network.world.now
        while self._transit and self._transit[0][0] <= now:
            if self._network.is_blocked(self.process, self.peer.process):
                return
            self.peer.arrived(self._transit.popleft()[1])
        self._forget_if_over()

    def arrived(self, packet: bytes | _Signal) -> None:
        if isinstance(packet, bytes):
            if self.broken is not None:
                return None
            if self.closed:
                return self.put(_Signal.RESET)
            self.unread += packet
        elif packet is _Signal.ACK:
            self.connected = True
        elif packet is _Signal.FIN:
            self.ended = True
        elif packet is _Signal.RESET:
            self.reset(errno.ECONNRESET if self.connected else errno.ECONNREFUSED)
        elif packet is _Signal.CUT:
            self.peer.reset()
            self.reset()
        return self._changed()

    def reset(self, code: int = errno.ECONNRESET) -> None:
        """The connection ends here with an error. Bytes that have arrived can still be read, those under way cannot."""
        self._transit.clear()
        if self.broken is None:
            self.broken = OSError(code, os.strerror(code))
            self._changed()
        self._forget_if_over()

    def let_go(self, seconds: float) -> None:
        """Reset this end now. What it has sent still arrives, so many seconds later; what comes back is lost."""
        world = self._network.world
        due = max(self._last_due, world.now + seconds)
        sent = [packet for _, packet in self._transit]
        self._transit = deque((due, packet) for packet in (*sent, _Signal.RESET))
        self._last_due = due
        self.peer._transit.clear()
        self.broken = OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        world.at(due, self.pump)
        self._changed()

    def cut(self) -> None:
        """Let a random prefix of the bytes under way to the peer arrive, and lose the rest."""
        data = b""
        for _, packet in self._transit:
            if not isinstance(packet, bytes):
                break  # nothing arrives from behind a cut that is under way: that would leave a hole in the stream
            data += packet
        self._transit.clear()
        self.peer.unread += data[: self._network.world.rng.randint(0, len(data))]

    def under_way(self) -> int:
        """How many bytes were sent that the peer has not read."""
        return len(self.peer.unread) + sum(len(data) for _, data in self._transit if isinstance(data, bytes))

    def close(self) -> None:
        self._leave(_Signal.FIN)

    def _leave(self, signal: _Signal) -> None:
        if not self.closed:
            self.closed = True
            if self.broken is None:
                self.put(signal)
            self._changed()
            self._forget_if_over()

    def _forget_if_over(self) -> None:
        """Once this end is closed and all it has sent has arrived, nothing happens to it any more."""
        if (self.closed or self.broken is not None) and not self._transit:
            self._network.forget(self)

    def die(self) -> None:
        """The process has crashed: its kernel resets the connection."""
        self._leave(_Signal.RESET)


class SimulatedLink(_End):
    """The client's end: as a non-blocking socket."""

    def __init__(self, network: SimulatedNetwork, process: Process, number: int) -> None:
        super().__init__(network, process)
        self._number = number
        self._shut = False

    def is_readable(self) -> bool:
        return bool(self.unread or self.ended or self.broken or self._shut or self.closed)

    def is_writable(self) -> bool:
        ends = self.broken or self._shut or self.closed
        return bool(ends) or self.under_way() < UNREAD_BYTES_MAX

    def send(self, data: bytes | bytearray, /) -> int:
        if self.closed or self._shut:
            raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))
        if self.broken is not None:
            raise self.broken
        room = UNREAD_BYTES_MAX - self.under_way()
        if room <= 0:
            raise BlockingIOError
        sent = bytes(data[:room])
        if sent:
            self.put(sent)
        return len(sent)

    def recv(self, count: int, /) -> bytes:
        if self.closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self._shut:
            return b""
        if self.unread:
            data = bytes(self.unread[:count])
            del self.unread[:count]
            return data
        if self.broken is not None:
            raise self.broken
        if self.ended:
            return b""
        raise BlockingIOError

    def shutdown(self, how: int, /) -> None:
        if not self._shut and not self.closed and self.broken is None:
            self.put(_Signal.FIN)
        self._shut = True
        self._changed()

    def fileno(self) -> int:
        return -1 if self.closed else self._number


class SimulatedConnection(_End):
    """The server's end: its methods are called from the server's `on_...` methods and from timers of the world."""

    server: SimulatedServer

    def __init__(self, network: SimulatedNetwork, endpoint: Endpoint, process: Process) -> None:
        super().__init__(network, process)
        self.endpoint = endpoint
        self._opened = self._closed_noted = False

    def send(self, data: bytes) -> None:
        """Bytes for the client; dropped if the connection has ended."""
        if data and not self.closed and self.broken is None and self.process.alive:
            self.put(data)

    def abort(self) -> None:
        """End the connection with a reset."""
        self._leave(_Signal.RESET)

    def arrived(self, packet: bytes | _Signal) -> None:
        if packet is not _Signal.SYN:
            return super().arrived(packet)
        self.process, server = self._network.listener(self.endpoint)
        if not self.process.alive:
            return self._leave(_Signal.RESET)
        # The kernel accepts the connection; the process handles it when it runs again.
        self.server, self.connected = server, True
        self.put(_Signal.ACK)
        return self._changed()

    def _changed(self) -> None:
        # As a separate event: the server's `close` must not call `on_close` recursively.
        if self.connected:
            self._network.world.after(0.0, lambda: self.process.deliver(self._react))

    def _react(self) -> None:
        """Pass to the server what its kernel has received. Called when the process runs, never while it is paused."""
        if not self._opened:
            self._opened = True
            self.server.on_open(self)
        if self.unread and not self.closed:
            data = bytes(self.unread)
            self.unread.clear()
            self.peer._changed()  # there is room again: the client may wait to send
            self.server.on_bytes(self, data)
        if (self.ended or self.broken or self.closed) and not self._closed_noted:
            self._closed_noted = True
            self.close()
            self.server.on_close(self)


class SimulatedServer(Protocol):
    """A server in a simulated world. Its process is the one that listens."""

    def on_open(self, connection: SimulatedConnection) -> None: ...
    def on_bytes(self, connection: SimulatedConnection, data: bytes) -> None:
        """Bytes as TCP delivers them: half a request, or two and a half."""

    def on_close(self, connection: SimulatedConnection) -> None:
        """The connection has ended, from either side. Called once."""


class SimulatedNetwork:
    """All connections of a world, and what can go wrong with them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.split = SPLIT_SHARE
        self.delay: Callable[[Process, Process], float] = lambda source, target: world.rng.uniform(
            *DELAY_SECONDS
        )
        """The delay of the next packet in this direction. May be replaced."""
        self._listeners: dict[Endpoint, tuple[Process, SimulatedServer]] = {}
        self._processes: dict[Process, None] = {}
        self._ends: dict[_End, None] = {}
        self._blocked: dict[tuple[Process, Process], None] = {}
        self._cutting: dict[tuple[Process, Process], None] = {}
        self._letting_go: dict[tuple[Process, Process], float] = {}
        self._numbers = itertools.count(3)

    def listen(self, process: Process, endpoint: Endpoint, server: SimulatedServer) -> None:
        """Serve an endpoint, also in the place of a process that has crashed. While none lives there, it refuses."""
        self._listeners[endpoint] = (process, server)
        self._attend(process)

    def listener(self, endpoint: Endpoint) -> tuple[Process, SimulatedServer]:
        return self._listeners[endpoint]

    async def connect(
        self, process: Process, endpoint: Endpoint, runtime: Runtime, until: float
    ) -> SimulatedLink:
        if endpoint not in self._listeners:
            raise OSError(errno.EHOSTUNREACH, f"{endpoint}: no such host")
        link = SimulatedLink(self, process, next(self._numbers))
        connection = SimulatedConnection(self, endpoint, self._listeners[endpoint][0])
        link.peer, connection.peer = connection, link
        self._ends[link] = self._ends[connection] = None
        self._attend(process)
        link.put(_Signal.SYN)
        try:
            met = await link.wait_until(lambda: link.connected or link.broken is not None, runtime, until)
            if link.broken is not None:
                raise link.broken
            if not met:
                raise Late
        except BaseException:
            link.close()
            raise
        return link

    # What can go wrong.

    def block(self, source: Process, target: Process) -> None:
        """Let nothing arrive in this direction: what is sent stalls. Both directions make a black hole."""
        self._blocked[source, target] = None

    def unblock(self, source: Process, target: Process) -> None:
        """Let what has stalled arrive, and all that follows."""
        self._blocked.pop((source, target), None)
        for end in list(self._ends):
            end.pump()

    def is_blocked(self, source: Process, target: Process) -> bool:
        return (source, target) in self._blocked

    def stall(self, one: Process, other: Process, seconds: float) -> None:
        """Block both directions for a while."""
        self.block(one, other)
        self.block(other, one)
        self.world.after(seconds, lambda: self.unblock(one, other))
        self.world.after(seconds, lambda: self.unblock(other, one))

    def cut(self, one: Process, other: Process) -> None:
        """Reset all connections between two processes now. Of the bytes under way a random prefix arrives."""
        for end in list(self._ends):
            if end.broken is None and {end.process, end.peer.process} == {one, other}:
                both = (end, end.peer)
                for each in both:
                    each.cut()
                for each in both:
                    each.reset()

    def reset_all(self) -> None:
        """Reset all connections. Nothing arrives of what is under way or unread."""
        for end in list(self._ends):
            end.unread.clear()
            end.reset()

    def cut_next(self, source: Process, target: Process) -> None:
        """Reset the connection on which `source` next sends to `target`, after a part of what it sends."""
        self._cutting[source, target] = None

    def let_go(self, client: Process, server: Process, seconds: float) -> None:
        """Reset a client's connections to a server at the client's end only, as a balancer does.

        What the client has sent arrives at the server so many seconds later.
        """
        for end in list(self._ends):
            if end.broken is None and not end.closed and (end.process, end.peer.process) == (client, server):
                end.let_go(seconds)

    def let_go_next(self, client: Process, server: Process, seconds: float) -> None:
        """The same with the connection on which the client sends next, as soon as it has sent."""
        self._letting_go[client, server] = seconds

    def lets_go_now(self, source: Process, target: Process) -> float | None:
        return self._letting_go.pop((source, target), None)

    def cut_no_more(self) -> None:
        """Forget the cuts of `cut_next` and `let_go_next` that nobody has met yet."""
        self._cutting.clear()
        self._letting_go.clear()

    def cuts_now(self, source: Process, target: Process) -> bool:
        return self._cutting.pop((source, target), self) is None

    def _attend(self, process: Process) -> None:
        """Reset the connections of this process when it crashes."""
        if process not in self._processes:
            self._processes[process] = None
            process.on_crash.append(lambda: self._crashed(process))

    def _crashed(self, process: Process) -> None:
        for end in list(self._ends):
            if end.process is process:
                end.die()

    def forget(self, end: _End) -> None:
        self._ends.pop(end, None)


class SimulatedSelector(_Watched):
    """Waits for several links of one simulated process."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime
        self._owners: dict[SimulatedLink, object] = {}
        self._woken = self._closed = False

    def add(self, link: SocketLike, owner: object) -> None:
        if not isinstance(link, SimulatedLink):
            raise InvariantBroken("there are no file descriptors in a simulated world")
        if self._closed:
            raise ValueError("this selector is closed")
        self._owners[link] = owner
        link.watchers.append(self._changed)
        self._changed()

    def remove(self, link: SocketLike) -> None:
        if isinstance(link, SimulatedLink) and self._owners.pop(link, self) is not self:
            link.watchers.remove(self._changed)

    def wake(self) -> None:
        self._woken = True
        self._changed()

    async def wait(self, until: float) -> list[object] | None:
        if not await self.wait_until(
            lambda: self._closed or self._woken or bool(self._ready()), self._runtime, until
        ):
            return None
        if self._closed:
            raise ValueError("this selector is closed")
        self._woken = False
        return self._ready()

    def _ready(self) -> list[object]:
        return [owner for link, owner in self._owners.items() if not link.closed and link.is_readable()]

    def close(self) -> None:
        self._closed = True
        for link in list(self._owners):
            self.remove(link)
        self._changed()
