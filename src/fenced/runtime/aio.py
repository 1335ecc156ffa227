"""The asyncio runtime: leaves suspend, blocking functions go to threads of our own."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fenced.contracts import Colour, Readable, Task, Wakeup
from fenced.errors import Misuse, Unavailable
from fenced.runtime import clocks

T = TypeVar("T")

OTHER_LOOP = "this belongs to another event loop; make a new one for this loop"
SLICE_SECONDS = 1.0
"""The longest single sleep: the loop's clock stands still while the machine is suspended."""
JOIN_SECONDS = 10.0


class AioWakeup:
    """A flag that also other threads may set: a lease that a worker thread finds lost, for one."""

    __slots__ = ("_event", "_loop")

    def __init__(self) -> None:
        self._event = asyncio.Event()
        # Set here and not at the first wait: another thread that sets the flag before that must go through the loop.
        self._loop = _running_loop()

    def set(self) -> None:
        if self._loop is None or self._loop is _running_loop():
            self._event.set()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits in it any more
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


def _settle(future: asyncio.Future[bool], result: bool) -> None:
    if not future.done():
        future.set_result(result)


class AioRuntime:
    """One event loop. Everything here but `AioWakeup.set` is called in that loop's thread."""

    colour: Colour = "asyncio"
    now = staticmethod(clocks.now)
    random = staticmethod(random.random)

    def __init__(self) -> None:
        self.forked()

    def forked(self) -> None:
        """Threads of our own, and no loop yet; a forked child has none of its parent's."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = ThreadPoolExecutor(1, "fenced")  # one: who asks first is asked for first
        self._urgent = ThreadPoolExecutor(1, "fenced-urgent")

    def _same_loop(self) -> asyncio.AbstractEventLoop:
        """A client's keeper runs in one loop: in another one its leases would not be renewed."""
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

    def wakeup(self) -> AioWakeup:
        return AioWakeup()

    def lock(self) -> contextlib.AbstractContextManager[object]:
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
            timer = loop.call_later(min(left, SLICE_SECONDS), _settle, ready, False)
            add(fd, _settle, ready, True)
            try:
                if await ready:
                    return True
            finally:
                remove(fd)
                timer.cancel()
        return False

    async def call(self, function: Callable[..., T], *args: Any, urgent: bool = False) -> T:
        threads = self._urgent if urgent else self._threads
        try:
            running = self._same_loop().run_in_executor(threads, function, *args)
        except RuntimeError as error:  # shut down
            raise Unavailable(f"this client is closed: {error}") from error
        return await running

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> Task:
        return _AioTask(work, name)

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
