"""An event loop of asyncio for one simulated process: servers that ship run in a world as they are.

Their callbacks and tasks are events of the world, their times its times, and their transports ends of its network.
Nothing else of a loop is there: no sockets, no threads, no signals. A server that asked for one would fail.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import events
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, cast

from fenced.errors import InvariantBroken
from fenced.runtime import clocks
from fenced.runtime.aio import AioRuntime
from fenced.values.contracts import Endpoint
from fenced_testkit.runtime.network import SimulatedConnection, SimulatedLink, SimulatedNetwork
from fenced_testkit.runtime.simulated import SimulatedRuntime
from fenced_testkit.runtime.world import Process

READ_BYTES = 2**18
CONNECT_SECONDS = 5.0
Factory = Callable[[], asyncio.BaseProtocol]


_AnyLoop: Any = asyncio.AbstractEventLoop
"""A loop has 60 methods. Those that are not below raise NotImplementedError."""


class SimulatedLoop(_AnyLoop):  # type: ignore[misc]
    """The loop of one process. It lives and dies with it."""

    def __init__(self, process: Process, network: SimulatedNetwork) -> None:
        self._process = process
        self._network = network
        self._tasks: dict[asyncio.Task[Any], None] = {}
        process.on_crash.append(self.close)

    def close(self) -> None:
        """The process has crashed, or the world is over. What its tasks do at their ends reaches nobody any more."""
        tasks, self._tasks = list(self._tasks), {}
        with self._running():
            for task in tasks:
                with contextlib.suppress(Exception):
                    cast(Coroutine[Any, Any, Any], task.get_coro()).close()

    __del__ = close

    # What asyncio asks of a loop.

    def time(self) -> float:
        return self._process.now()

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._process.world.after(0.0, lambda: self._process.deliver(partial(self._step, handle)))
        return handle

    call_soon_threadsafe = call_soon

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        due = self._process.world_time(when)
        self._process.world.at(due, lambda: self._process.deliver(partial(self._step, handle)))
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        return  # it does nothing when it is due

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        options.pop("context", None)
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, **options)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise InvariantBroken(f"a task of {self._process.name} has failed: {error!r}") from error

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None:
            return  # a task of a process that has crashed
        raise InvariantBroken(f"{self._process.name}: {context.get('message')}: {error!r}") from error

    # How the world runs it.

    def _step(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            with self._running():
                handle._run()

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call it as the loop would. For the network, in this process."""
        with self._running():
            return call(*args)

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin a task."""
        self.run(lambda: self.create_task(work()))

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """This is the running loop, and its process has its own clock. A world has one thread."""
        before = events._get_running_loop(), clocks.now, AioRuntime.now
        events._set_running_loop(self)
        clocks.now, AioRuntime.now = self._process.now, staticmethod(self._process.now)
        try:
            yield
        finally:
            events._set_running_loop(before[0])
            clocks.now, AioRuntime.now = before[1], staticmethod(before[2])

    # Connections.

    def listen(self, endpoint: Endpoint, factory: Factory) -> None:
        """As `create_server`, for an endpoint of the world."""
        self._network.listen(self._process, endpoint, _Accepting(self, factory))

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        runtime = SimulatedRuntime(self._process, self._network)
        made: asyncio.Future[SimulatedLink] = self.create_future()

        async def connect() -> None:
            try:
                link = cast(
                    SimulatedLink, await runtime.connect((host, port), runtime.now() + CONNECT_SECONDS)
                )
            except OSError as error:
                self.run(self._connected, made, None, error)
            else:
                self.run(self._connected, made, link, None)

        runtime.spawn(connect, "connecting")
        link = await made
        protocol = protocol_factory()
        transport = _LinkTransport(self, link, protocol)
        protocol.connection_made(transport)
        transport.look()
        return transport, protocol

    def _connected(
        self, made: asyncio.Future[SimulatedLink], link: SimulatedLink | None, error: OSError | None
    ) -> None:
        if made.done():  # nobody waits for it any more
            if link is not None:
                link.close()
        elif link is not None:
            made.set_result(link)
        elif error is not None:
            made.set_exception(error)


class _Transport(asyncio.Transport):
    """What the transports of both ends have in common."""

    def __init__(self, loop: SimulatedLoop, peer: str) -> None:
        super().__init__({"peername": (peer, 1)})
        self._loop = loop
        self._paused = False
        self._closing = False

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self._closing

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._loop.call_soon(self.look)

    def look(self) -> None:
        raise NotImplementedError


class _ConnectionTransport(_Transport):
    """The server's end."""

    def __init__(self, loop: SimulatedLoop, connection: SimulatedConnection, protocol: Any) -> None:
        super().__init__(loop, connection.peer.process.name)
        self._connection = connection
        self._protocol = protocol
        self._unread = b""

    def received(self, data: bytes) -> None:
        self._unread += data
        self.look()

    def look(self) -> None:
        if self._unread and not self._paused and not self._closing:
            data, self._unread = self._unread, b""
            self._protocol.data_received(data)

    def write(self, data: Any) -> None:
        self._connection.send(bytes(data))

    def close(self) -> None:
        self._closing = True
        self._connection.close()

    def abort(self) -> None:
        self._closing = True
        self._connection.abort()

    def lost(self) -> None:
        self._closing = True
        self._protocol.connection_lost(None)


class _LinkTransport(_Transport):
    """The client's end."""

    def __init__(self, loop: SimulatedLoop, link: SimulatedLink, protocol: Any) -> None:
        super().__init__(loop, link.peer.process.name)
        self._link = link
        self._protocol = protocol
        self._lost = False
        link.watchers.append(self._changed)

    def _changed(self) -> None:
        process = self._loop._process
        process.world.after(0.0, lambda: process.deliver(partial(self._loop.run, self.look)))

    def look(self) -> None:
        if self._lost:
            return
        error: Exception | None = None
        try:
            while not self._paused and not self._closing:
                data = self._link.recv(READ_BYTES)
                if not data:
                    self._closing = True
                    break
                self._protocol.data_received(data)
        except BlockingIOError:
            return
        except OSError as broken:
            self._closing, error = True, broken
        if self._closing:
            self._lost = True
            self._link.close()
            self._protocol.connection_lost(error)

    def write(self, data: Any) -> None:
        with contextlib.suppress(OSError):  # the end is noticed by reading
            self._link.send(bytes(data))

    def close(self) -> None:
        self._closing = True
        self._loop.call_soon(self.look)

    abort = close


class _Accepting:
    """Makes a connection of the shipped server for each one that the network accepts."""

    def __init__(self, loop: SimulatedLoop, factory: Factory) -> None:
        self._loop = loop
        self._factory = factory
        self._transports: dict[SimulatedConnection, _ConnectionTransport] = {}

    def on_open(self, connection: SimulatedConnection) -> None:
        protocol = self._factory()
        transport = self._transports[connection] = _ConnectionTransport(self._loop, connection, protocol)
        self._loop.run(protocol.connection_made, transport)

    def on_bytes(self, connection: SimulatedConnection, data: bytes) -> None:
        self._loop.run(self._transports[connection].received, data)

    def on_close(self, connection: SimulatedConnection) -> None:
        self._loop.run(self._transports.pop(connection).lost)
