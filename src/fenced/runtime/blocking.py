"""The blocking runtime: its methods block and never suspend, so one `send` runs a coroutine to its end."""

from __future__ import annotations

import contextlib
import os
import random
import select
import threading
import warnings
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from fenced.errors import InvariantBroken
from fenced.runtime import clocks
from fenced.values.contracts import ByteStream, Colour, Endpoint, Readable, Selector, SocketLike, Task, Wakeup

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")

SLICE_SECONDS = 1.0
"""The longest single sleep. A sleeping thread's timer stands still while the machine is suspended."""
JOIN_SECONDS = 10.0


def step(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine under the blocking runtime. InvariantBroken if it suspends."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    work.close()
    raise InvariantBroken("a coroutine suspended under the blocking runtime")


def expect_interrupts() -> None:
    """Silence a warning in our own programs, which Ctrl-C may end anywhere.

    An interrupt between the creation of a coroutine and its first step is harmless: nothing had begun.
    """
    warnings.filterwarnings("ignore", r"coroutine .* was never awaited", RuntimeWarning)


class Flag:
    """Like threading.Event, but Ctrl-C in one of its methods cannot make a later call wait without an end.

    The gate is a lock that is free while the flag is set. `_on` decides: if an interrupt or two threads
    leave the gate in the other state, a waiter notices that after SLICE_SECONDS. A lock, and not a
    `queue.SimpleQueue`, because `get(timeout=...)` of that never returns if its time is over before it begins to wait
    (CPython 3.11: the remaining time is then negative, which means no limit).
    """

    __slots__ = ("_gate", "_on")

    def __init__(self) -> None:
        self._on = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def is_set(self) -> bool:
        return self._on

    def set(self) -> None:
        if not self._on:
            self._on = True
            self._open()

    def clear(self) -> None:
        self._on = False
        self._gate.acquire(blocking=False)

    def wait(self, timeout: float) -> None:
        """Return when it may be set, or after `timeout` seconds."""
        if self._gate.acquire(timeout=timeout) and self._on:
            self._open()  # for the next waiter

    def _open(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is open already
            self._gate.release()


class BlockingRuntime:
    """Runs background loops in threads."""

    colour: Colour = "blocking"
    now = staticmethod(clocks.now)
    random = staticmethod(random.random)
    whoami = staticmethod(threading.current_thread)  # an ident may be reused

    def secret(self) -> str:
        return os.urandom(16).hex()

    def runs_here(self) -> bool:
        return True

    def wakeup(self) -> Flag:
        return Flag()

    def lock(self) -> contextlib.AbstractContextManager[object]:
        return threading.Lock()

    async def wait(self, wakeup: Wakeup, until: float | None) -> bool:
        assert isinstance(wakeup, Flag)
        while not wakeup.is_set():
            left = SLICE_SECONDS if until is None else until - self.now()
            if left <= 0:
                return False
            wakeup.wait(min(left, SLICE_SECONDS))
        return True

    async def readable(self, source: Readable, until: float) -> bool:
        return self._ready(source, select.POLLIN, until)

    async def writable(self, source: Readable, until: float) -> bool:
        return self._ready(source, select.POLLOUT, until)

    def _ready(self, source: Readable, event: int, until: float) -> bool:
        poll = select.poll()
        poll.register(source, event)
        while (left := until - self.now()) > 0:
            if poll.poll(min(left, SLICE_SECONDS) * 1000):
                return True
        return False

    # Imported when they are needed: a program whose authority is a file loads neither ssl nor socket code.

    async def connect(
        self, endpoint: Endpoint, until: float, context: ssl.SSLContext | None = None
    ) -> SocketLike:
        from fenced.runtime import sockets

        return await sockets.connect(endpoint, self, until, context)

    def stream(self, link: SocketLike) -> ByteStream:
        from fenced.runtime import sockets

        return sockets.SocketStream(link, self)

    def selector(self) -> Selector:
        from fenced.runtime import sockets

        return sockets.SocketSelector(self)

    async def call(self, function: Callable[..., T], *args: Any, urgent: bool = False) -> T:
        return function(*args)

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> Task:
        return _Thread(work, name)

    def forked(self) -> None:
        """Nothing to do in a forked child: this runtime has neither a loop nor a pool of threads."""

    def close(self) -> None:
        """Nothing to do, for the same reason."""

    def deliver(self, call: Callable[..., object], *args: object) -> None:
        call(*args)

    def pulse(self) -> None:
        return None


class _Thread:
    """A daemon thread: it must not keep the interpreter alive at exit."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._thread = threading.Thread(target=lambda: step(work()), name=name, daemon=True)
        self._thread.start()

    async def join(self, until: float | None = None) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=JOIN_SECONDS if until is None else max(0.0, until - clocks.now()))
