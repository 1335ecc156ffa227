"""The asyncio runtime: leaves suspend, blocking functions go to threads of our own."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fenced.contracts import Readable, Task, Wakeup
from fenced.runtime import clocks

T = TypeVar("T")

SLICE_SECONDS = 1.0
"""The longest single sleep: the loop's clock stands still while the machine is suspended."""


class AioRuntime:
    """One event loop. Everything here is called in that loop's thread."""

    now = staticmethod(clocks.now)
    random = staticmethod(random.random)

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(8, "fenced")
        self._urgent = ThreadPoolExecutor(1, "fenced-urgent")

    def secret(self) -> str:
        return secrets.token_hex(16)

    def whoami(self) -> object:
        return asyncio.current_task()

    def wakeup(self) -> asyncio.Event:
        return asyncio.Event()

    async def wait(self, wakeup: Wakeup, until: float | None) -> bool:
        assert isinstance(wakeup, asyncio.Event)
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
        ready = asyncio.Event()
        loop.add_reader(source.fileno(), ready.set)
        try:
            return await self.wait(ready, until)
        finally:
            loop.remove_reader(source.fileno())

    async def call(self, function: Callable[..., T], *args: Any, urgent: bool = False) -> T:
        threads = self._urgent if urgent else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, function, *args)

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                if task.cancelled():
                    raise
                cancelled = error
            except BaseException:  # noqa: BLE001 - the task's own; raised below
                break
        if cancelled is not None:
            task.exception()  # looked at, so that nobody complains that it was not
            raise cancelled
        return task.result()

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> Task:
        return _AioTask(work, name)

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        self._urgent.shutdown(wait=False)


class _AioTask:
    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._task = asyncio.create_task(work(), name=name)

    async def join(self) -> None:
        if self._task is not asyncio.current_task():
            await asyncio.wait([self._task], timeout=10)
