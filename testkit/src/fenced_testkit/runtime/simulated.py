"""The simulated runtime: coroutines of simulated processes, on virtual time and a simulated network.

Its methods yield to the scheduler, so the code that ships runs unchanged in thousands of worlds, and one seed always
makes the same world.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from fenced.errors import InvariantBroken
from fenced.runtime.sockets import SocketStream
from fenced.values.contracts import ByteStream, Colour, Endpoint, Readable, Selector, SocketLike, Wakeup
from fenced_testkit.runtime.network import SimulatedLink, SimulatedNetwork, SimulatedSelector
from fenced_testkit.runtime.world import Process, SimulatedWakeup

T = TypeVar("T")


class _Suspend:
    """What a method yields to the scheduler: a flag to wait for, and a deadline."""

    __slots__ = ("until", "wakeup")

    def __init__(self, wakeup: SimulatedWakeup, until: float | None) -> None:
        self.wakeup = wakeup
        self.until = until

    def __await__(self) -> Generator[_Suspend, None, None]:
        yield self


class SimulatedTask:
    """A coroutine in a process."""

    def __init__(self, process: Process, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self.name = name
        self.done = False
        self._process = process
        self._start = work
        self._work: Coroutine[Any, Any, None] | None = None
        self._turn = 0
        self._finished = SimulatedWakeup()
        process.world.after(0.0, lambda: process.deliver(self._step))

    def runs_in(self, process: Process) -> bool:
        return process is self._process

    def throw(self, error: BaseException) -> None:
        """Raise it in the coroutine where it waits: the task is cancelled, or the program interrupted."""
        self._process.deliver(lambda: None if self.done or self._work is None else self._step(error))

    def _step(self, error: BaseException | None = None) -> None:
        self._turn += 1
        if self._work is None:
            self._work = self._start()
        _current.append(self)
        try:
            suspended = self._work.send(None) if error is None else self._work.throw(error)
        except StopIteration:
            self._finish()
            return
        finally:
            _current.pop()
        if not isinstance(suspended, _Suspend):
            raise InvariantBroken("a coroutine awaited something other than the simulated runtime")
        self._arm(suspended)

    def _arm(self, suspended: _Suspend) -> None:
        turn, process = self._turn, self._process

        def resume() -> None:
            if turn == self._turn:
                self._step()

        def wake() -> None:
            process.world.after(0.0, lambda: process.deliver(resume))

        suspended.wakeup.waiter = wake
        if suspended.until is not None:
            due = process.world_time(suspended.until)
            process.world.at(due, lambda: process.deliver(resume))

    def _finish(self) -> None:
        self.done = True
        self._finished.set()

    async def join(self, until: float | None = None) -> None:
        if not self.done and self not in _current:
            await _Suspend(self._finished, until)


_current: list[SimulatedTask] = []


class SimulatedRuntime:
    """The runtime of one simulated process."""

    colour: Colour = "asyncio"  # they suspend

    def __init__(self, process: Process, network: SimulatedNetwork | None = None) -> None:
        self._process = process
        self._network = network
        self._world = process.world
        self.now = process.now
        self.random = process.world.rng.random

    def secret(self) -> str:
        return f"{self._world.rng.getrandbits(128):032x}"

    def whoami(self) -> object:
        return _current[-1] if _current else None

    def runs_here(self) -> bool:
        return bool(_current) and _current[-1].runs_in(self._process)

    def wakeup(self) -> SimulatedWakeup:
        return SimulatedWakeup()

    def lock(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    async def wait(self, wakeup: Wakeup, until: float | None) -> bool:
        assert isinstance(wakeup, SimulatedWakeup)
        while not wakeup.is_set():
            if until is not None and self.now() >= until:
                return False
            await _Suspend(wakeup, until)
        return True

    async def readable(self, source: Readable, until: float) -> bool:
        link = _simulated(source)
        return await link.wait_until(link.is_readable, self, until)

    async def writable(self, source: Readable, until: float) -> bool:
        link = _simulated(source)
        return await link.wait_until(link.is_writable, self, until)

    async def connect(
        self, endpoint: Endpoint, until: float, context: ssl.SSLContext | None = None
    ) -> SocketLike:
        if self._network is None or context is not None:
            raise InvariantBroken("this simulated process has no network, or one without TLS")
        return await self._network.connect(self._process, endpoint, self, until)

    def stream(self, link: SocketLike) -> ByteStream:
        return SocketStream(link, self)

    def selector(self) -> Selector:
        return SimulatedSelector(self)

    async def call(self, function: Callable[..., T], *args: Any, urgent: bool = False) -> T:
        return function(*args)

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> SimulatedTask:
        return SimulatedTask(self._process, work, name)

    def deliver(self, call: Callable[..., object], *args: object) -> None:
        def run() -> None:
            call(*args)

        if not _current or _current[-1].runs_in(self._process):
            run()
        else:
            self._soon(run)

    def pulse(self) -> SimulatedPulse:
        return SimulatedPulse(self._soon)

    def _soon(self, call: Callable[[], None]) -> None:
        self._world.after(0.0, lambda: self._process.deliver(call))


class SimulatedPulse:
    """Of the process that stands for an event loop: it is blocked while that is paused."""

    def __init__(self, soon: Callable[[Callable[[], None]], None]) -> None:
        self.ask = soon

    def where(self) -> str:
        return ""

    def over(self) -> bool:
        return False


def _simulated(source: Readable) -> SimulatedLink:
    if not isinstance(source, SimulatedLink):
        raise InvariantBroken("there are no file descriptors in a simulated world")
    return source
