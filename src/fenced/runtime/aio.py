"""The asyncio runtime: its methods suspend, and blocking functions run in its own threads."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import ssl
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fenced.errors import Misuse, Unavailable
from fenced.runtime import clocks, sockets
from fenced.runtime.pulse import LoopPulse
from fenced.values.contracts import (
    ByteStream,
    Colour,
    Endpoint,
    Readable,
    Runtime,
    Selector,
    SocketLike,
    Task,
    Wakeup,
)

T = TypeVar("T")

OTHER_LOOP = "this belongs to another event loop; make a new one for this loop"
SLICE_SECONDS = 1.0
"""The longest single sleep: the loop's clock stands still while the machine is suspended."""
JOIN_SECONDS = 10.0


class AioWakeup:
    """A flag that any thread may set, for example a worker thread that finds its lease lost."""

    __slots__ = ("_event", "_loop")

    def __init__(self) -> None:
        self._event = asyncio.Event()
        # Set here and not at the first wait: another thread that sets the flag before that must go through the loop.
        self._loop = _running_loop()

    def set(self) -> None:
        if self._loop is None or self._loop is _running_loop():
            self._event.set()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
                self._loop.call_soon_threadsafe(self._event.set)

    def clear(self) -> None:
        self._event.clear()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._event.wait()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _resolve(future: asyncio.Future[bool], result: bool) -> None:
    # The socket and the timer may both come in one turn of the loop, and the caller may be cancelled before it wakes.
    if not future.done():
        future.set_result(result)


class AioRuntime:
    """One event loop. Everything here but `AioWakeup.set` and `deliver` is called in that loop's thread."""

    colour: Colour = "asyncio"
    now = staticmethod(clocks.now)
    random = staticmethod(random.random)

    def __init__(self) -> None:
        self.forked()

    def forked(self) -> None:
        """Start with new threads and no loop, at first and in a forked child, which has none of its parent's."""
        self._loop: asyncio.AbstractEventLoop | None = None
        # One thread: calls run in the order in which they were made.
        self._threads = ThreadPoolExecutor(1, "fenced")
        self._urgent = ThreadPoolExecutor(1, "fenced-urgent")

    def _same_loop(self) -> asyncio.AbstractEventLoop:
        """The running loop; Misuse if it is not the first one, in which the keeper renews the leases."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise Misuse(OTHER_LOOP)
        return loop

    def secret(self) -> str:
        return secrets.token_hex(16)

    def whoami(self) -> object:
        return asyncio.current_task()

    def runs_here(self) -> bool:
        return _running_loop() is not None

    def wakeup(self) -> AioWakeup:
        return AioWakeup()

    def lock(self) -> contextlib.AbstractContextManager[object]:
        # One thread runs all that takes these locks, and nothing is awaited under one: nobody else can be inside.
        return contextlib.nullcontext()

    async def wait(self, wakeup: Wakeup, until: float | None) -> bool:
        assert isinstance(wakeup, AioWakeup)
        while not wakeup.is_set():
            left = SLICE_SECONDS if until is None else until - self.now()
            if left <= 0:
                return False
            try:
                async with asyncio.timeout(min(left, SLICE_SECONDS)):
                    await wakeup.wait()
            except TimeoutError:
                continue
        return True

    async def readable(self, source: Readable, until: float) -> bool:
        loop = asyncio.get_running_loop()
        return await self._ready(source.fileno(), loop.add_reader, loop.remove_reader, until)

    async def writable(self, source: Readable, until: float) -> bool:
        loop = asyncio.get_running_loop()
        return await self._ready(source.fileno(), loop.add_writer, loop.remove_writer, until)

    async def _ready(
        self, fd: int, add: Callable[..., None], remove: Callable[[int], object], until: float
    ) -> bool:
        loop = asyncio.get_running_loop()
        while (left := until - self.now()) > 0:
            ready: asyncio.Future[bool] = loop.create_future()
            timer = loop.call_later(min(left, SLICE_SECONDS), _resolve, ready, False)
            add(fd, _resolve, ready, True)
            try:
                if await ready:
                    return True
            finally:
                # Also if the caller is cancelled: the next socket with this number must not find our reader.
                remove(fd)
                timer.cancel()
        return False

    async def connect(
        self, endpoint: Endpoint, until: float, context: ssl.SSLContext | None = None
    ) -> SocketLike:
        return await sockets.connect(endpoint, self, until, context)

    def stream(self, link: SocketLike) -> ByteStream:
        return LoopSocketStream(link, self)

    def selector(self) -> Selector:
        return sockets.SocketSelector(self)

    async def call(self, function: Callable[..., T], *args: Any, urgent: bool = False) -> T:
        threads = self._urgent if urgent else self._threads
        try:
            running = self._same_loop().run_in_executor(threads, function, *args)
        except RuntimeError as error:  # shut down
            raise Unavailable(f"this client is closed: {error}") from error
        return await running

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> Task:
        return _AioTask(work, name)

    def deliver(self, call: Callable[..., object], *args: object) -> None:
        loop = self._loop
        if loop is None or loop is _running_loop():
            call(*args)
        else:
            with contextlib.suppress(RuntimeError):
                # The loop is closed: nothing of the program runs there any more.
                loop.call_soon_threadsafe(call, *args)

    def pulse(self) -> LoopPulse:
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = loop
        return LoopPulse(loop)

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        self._urgent.shutdown(wait=False)


class _AioTask:
    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._task = asyncio.create_task(work(), name=name)

    async def join(self, until: float | None = None) -> None:
        if self._task is not asyncio.current_task():
            seconds = JOIN_SECONDS if until is None else max(0.0, until - clocks.now())
            await asyncio.wait([self._task], timeout=seconds)


class LoopSocketStream(sockets.SocketStream):
    """A stream that the event loop reads whenever bytes arrive: adding a reader for each wait would cost more."""

    def __init__(self, link: SocketLike, runtime: Runtime) -> None:
        super().__init__(link, runtime)
        self._data = b""
        self._over = ""
        self._detached = False
        self._waiter: asyncio.Future[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(link, self._read)

    def _read(self) -> None:
        try:
            data = self.link.recv(sockets.READ_BYTES)
            self._data += data
            if not data:
                self._end(sockets.CLOSED)
            elif self._waiter is None and len(self._data) > sockets.UNREQUESTED_BYTES_MAX:
                self._end(sockets.UNREQUESTED)
            elif isinstance(self.link, ssl.SSLSocket) and self.link.pending():
                # TLS has already read these bytes from the socket, so the loop's selector does not report them.
                self._loop.call_soon(self._read_pending)
        except sockets.NOT_NOW:
            return
        except OSError as error:
            self._end(str(error) or type(error).__name__)
        finally:
            if self._data or self._over:
                self._wake()

    def _read_pending(self) -> None:
        """In its own turn of the loop: a server that never stops sending must not starve the loop's other tasks."""
        if self.link.fileno() >= 0 and not self._over and not self._detached:
            self._read()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _alarm_due(self) -> None:
        self._alarm = None
        self._wake()

    def _wake_in(self, seconds: float) -> None:
        """Keep an earlier alarm: most calls end long before, so a new timer for each would be wasted."""
        if self._alarm is not None:
            if self._alarm.when() <= self._loop.time() + seconds:
                return
            self._alarm.cancel()
        self._alarm = self._loop.call_later(min(seconds, SLICE_SECONDS), self._alarm_due)

    def _end(self, why: str) -> None:
        self._over = why
        self._loop.remove_reader(self.link)

    def read_available(self) -> bytes:
        if self._over:
            raise OSError(self._over)
        data, self._data = self._data, b""
        return data

    async def send(self, data: bytes, until: float) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise Misuse(OTHER_LOOP)
        await super().send(data, until)

    async def receive(self, until: float) -> bytes:
        self._late_reads.check(until)
        while not self._data:
            if self._over:
                raise OSError(self._over)
            left = until - self._runtime.now()
            if left <= 0:
                self._read()  # bytes that arrived in time count, however late the loop runs this
                if not self._data and not self._over:
                    raise sockets.Late
                continue
            self._wake_in(left)
            # Nothing is awaited between the look at `_data` and this: what arrives from now on finds the waiter.
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        data, self._data = self._data, b""
        return data

    def detach(self) -> bytes:
        self._detached = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.remove_reader(self.link)
        if self._alarm is not None:
            self._alarm.cancel()
        data, self._data = self._data, b""
        return data

    def close(self) -> None:
        if self.link.fileno() < 0:
            return
        if not self._loop_runs_in_another_thread():
            self.detach()
            super().close()
            return
        # A finalizer may run in any thread, but only the loop's thread may use its selector: that thread closes it.
        self.interrupt()
        with contextlib.suppress(RuntimeError):  # the loop was closed just now
            self._loop.call_soon_threadsafe(self.close)

    def _loop_runs_in_another_thread(self) -> bool:
        try:
            return asyncio.get_running_loop() is not self._loop and self._loop.is_running()
        except RuntimeError:
            return self._loop.is_running()
