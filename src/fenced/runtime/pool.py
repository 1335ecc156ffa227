"""Connections to a server: held open, taken for one request, given back; and what a broken one means.

A connection that breaks, or stays silent past the deadline, leaves it unknown whether its request was carried
out. What may be repeated is repeated once, on a new connection; what stays unknown is `Indeterminate`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from fenced.contracts import Runtime, Wakeup
from fenced.errors import FencedError, Indeterminate, Unavailable

T = TypeVar("T")


class Broken(Exception):
    """The connection is of no use any more, and the request on it may have been carried out or not."""


class Connection(Protocol):
    def close(self) -> None:
        """Let go of the connection at once; never waits, may be repeated."""


C = TypeVar("C", bound=Connection)


class Pool(Generic[C]):
    """At most `limit` connections; who finds none waits for its turn, first come, first served."""

    def __init__(
        self, runtime: Runtime, connect: Callable[[float], Awaitable[C]], *, limit: int, where: str
    ) -> None:
        self._runtime = runtime
        self._connect = connect
        self._limit = limit
        self._where = where
        self.forked()

    def forked(self) -> None:
        """Start without connections; those of a parent process are left as they are."""
        self._idle: list[C] = []
        self._open: set[C] = set()
        self._count = 0
        self._turns: deque[Wakeup] = deque()
        self._lock = self._runtime.lock()

    async def request(self, work: Callable[[C], Awaitable[T]], until: float, *, repeatable: bool = True) -> T:
        """Do `work` on a connection. A `FencedError` of it is an answer; `Broken` is not."""
        doubt: Broken | None = None
        while True:
            try:
                connection = await self._take(until)
            except Unavailable as error:
                if doubt is None:
                    raise
                raise Indeterminate(f"{doubt}; then: {error}") from error
            try:
                result = await work(connection)
            except FencedError:
                self._give(connection)
                raise
            except Broken as error:
                self._drop(connection)
                self.close_idle()  # what broke one has most likely broken all
                if doubt is not None or not repeatable or self._runtime.now() >= until:
                    raise Indeterminate(str(error)) from error
                doubt = error
            except BaseException:
                self._drop(connection)  # cancelled or interrupted: its reply is still under way
                raise
            else:
                self._give(connection)
                return result

    async def _take(self, until: float) -> C:
        while True:
            with self._lock:
                if self._idle:
                    return self._idle.pop()
                if self._count < self._limit:
                    self._count += 1
                    break
                turn = self._runtime.wakeup()
                self._turns.append(turn)
            try:
                came = await self._runtime.wait(turn, until)
            except BaseException:
                self._leave(turn)
                raise
            if not came:
                self._leave(turn)
                raise Unavailable(f"{self._where}: all {self._limit} connections are busy")
        try:
            connection = await self._connect(until)
        except BaseException:
            self._gone()
            raise
        self._open.add(connection)
        return connection

    def _leave(self, turn: Wakeup) -> None:
        """Stop waiting; a turn that came just now goes to the next."""
        with self._lock:
            if turn in self._turns:
                self._turns.remove(turn)
                return
        self._next()

    def _next(self) -> None:
        with self._lock:
            turn = self._turns.popleft() if self._turns else None
        if turn is not None:
            turn.set()

    def _give(self, connection: C) -> None:
        if connection in self._open:
            self._idle.append(connection)
            if self._turns:
                self._next()
        else:  # the pool was closed meanwhile
            connection.close()

    def _drop(self, connection: C) -> None:
        connection.close()
        if connection in self._open:
            self._open.discard(connection)
            self._gone()

    def _gone(self) -> None:
        with self._lock:
            self._count -= 1
        self._next()

    def close_idle(self) -> None:
        """Close the connections that nobody uses now."""
        while True:
            with self._lock:
                if not self._idle:
                    return
                connection = self._idle.pop()
            self._drop(connection)

    def close(self) -> None:
        """Close all connections; one that is in use is closed when it is given back."""
        self.close_idle()
        with self._lock:
            self._count -= len(self._open)
            self._open.clear()
