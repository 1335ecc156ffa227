"""A pool of connections to a server, and what a broken connection means for its request.

After a connection breaks, or stays silent past the deadline, nobody knows whether its request was carried out. A
request that may be repeated is retried once, on a new connection. If that breaks too, the outcome is
`Indeterminate`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet

from fenced.errors import FencedError, Indeterminate, Unavailable
from fenced.values.contracts import Runtime, Wakeup

T = TypeVar("T")


class ConnectionBroken(Exception):
    """The connection cannot be used again, and its request may or may not have been carried out."""


class PooledConnection(Protocol):
    def close(self) -> None:
        """Close the connection at once, without waiting. May be repeated."""


C = TypeVar("C", bound=PooledConnection)


class Interruptible(Protocol):
    def interrupt(self) -> None:
        """Shut the connection down; its user closes it. Takes no lock, and may be called from any thread."""


W = TypeVar("W", bound=Interruptible)
_inherited: list[object] = []
"""The parent's connections in a forked child. Kept referenced, so that no finalizer touches the shared sockets."""


class Wires(WeakSet[W]):
    """All connections of a client that exist, idle or in use."""

    def interrupt(self) -> None:
        """Shut all of them down: one that is in use is closed by its user."""
        for wire in list(self):
            wire.interrupt()

    def forked(self) -> None:
        """Start without connections; those of a parent process are left as they are."""
        _inherited.extend(self)
        super().__init__()  # as new: a thread of the parent may have been in the middle of an iteration


class _Turn(Generic[C]):
    """A waiter: it is handed a connection, or permission to open one (None)."""

    def __init__(self, wakeup: Wakeup) -> None:
        self.wakeup = wakeup
        self.connection: C | None = None


class Pool(Generic[C]):
    """At most `limit` connections. A caller that finds none idle waits in a queue, first come, first served."""

    def __init__(
        self, runtime: Runtime, connect: Callable[[float], Awaitable[C]], *, limit: int, where: str
    ) -> None:
        self._runtime = runtime
        self._connect = connect
        self._limit = limit
        self._where = where
        self.broken = 0
        """Counts requests whose outcome is unknown: they may have been carried out, or may still be."""
        self.forked()

    def forked(self) -> None:
        """Start without connections; those of a parent process are left as they are."""
        self._idle: list[C] = []
        self._count = 0
        self._turns: deque[_Turn[C]] = deque()
        self._lock = self._runtime.lock()
        self._closed = False

    async def request(self, work: Callable[[C], Awaitable[T]], until: float, *, repeatable: bool = True) -> T:
        """Run `work` on a connection. A `FencedError` that it raises is a definite answer; `ConnectionBroken` is not.

        Once a try has broken, every later error becomes Indeterminate: the first try may have been carried out.
        """
        doubt: ConnectionBroken | None = None
        while True:
            try:
                connection = await self.take(until)
            except FencedError as error:
                raise _doubted(error, doubt) from error
            try:
                result = await work(connection)
            except FencedError as error:
                self.give(connection)
                raise _doubted(error, doubt) from error
            except ConnectionBroken as error:
                with self._lock:  # a caller compares it with an earlier value, so no count may be lost
                    self.broken += 1
                self.drop(connection)
                self.close_idle()  # the same cause has most likely broken them, too
                if doubt is not None or not repeatable or self._runtime.now() >= until:
                    raise Indeterminate(str(error)) from error
                doubt = error
            except BaseException:
                self.drop(connection)  # cancelled or interrupted: its reply may still come
                raise
            else:
                self.give(connection)
                return result

    async def take(self, until: float) -> C:
        """A connection, for a caller that does not use `request`. The caller must `give` it back or `drop` it."""
        turn: _Turn[C] | None = None
        # Decided and recorded under one lock: either a connection is free for us, or whoever frees one next finds our
        # turn. So no caller waits while a connection is idle.
        with self._lock:
            # Pop without testing first: `abandon` pops without the lock, so the list may be empty after the test.
            with contextlib.suppress(IndexError):
                return self._idle.pop()
            if self._count < self._limit:
                self._count += 1
            else:
                turn = _Turn(self._runtime.wakeup())
                self._turns.append(turn)
        if turn is not None and (connection := await self._await(turn, until)) is not None:
            return connection
        try:
            connection = await self._connect(until)
        except BaseException:
            self._pass_on(None)
            raise
        return connection

    async def _await(self, turn: _Turn[C], until: float) -> C | None:
        """Wait for a connection, or for permission to open one (None)."""
        try:
            if await self._runtime.wait(turn.wakeup, until):
                return turn.connection
        except BaseException:
            # Cancelled, and perhaps something was handed over meanwhile, of which nobody else knows: it goes to the
            # next caller, or the pool would have one connection less for ever.
            if not self._leave(turn):
                self._pass_on(turn.connection)
            raise
        if self._leave(turn):
            raise Unavailable(f"{self._where}: all {self._limit} connections are busy")
        return turn.connection  # it was handed over at the last moment

    def _leave(self, turn: _Turn[C]) -> bool:
        """Stop waiting; False if a connection was handed over meanwhile."""
        with self._lock:
            if turn in self._turns:
                self._turns.remove(turn)
                return True
        return False

    def give(self, connection: C) -> None:
        if self._closed:
            self.drop(connection)
        else:
            self._pass_on(connection)

    def drop(self, connection: C) -> None:
        connection.close()
        self._pass_on(None)

    def _pass_on(self, connection: C | None) -> None:
        """Hand a connection, or permission to open one, to the caller that has waited longest."""
        with self._lock:
            turn = self._turns.popleft() if self._turns else None
            if turn is not None:
                turn.connection = connection
            elif connection is not None:
                self._idle.append(connection)
            else:
                self._count -= 1
        # It has left the queue before it wakes: only this turn's caller has the connection now, and `_leave` says so
        # even if its time is over.
        if turn is not None:
            turn.wakeup.set()

    def close_idle(self) -> None:
        """Close the idle connections."""
        while True:
            with self._lock:
                try:
                    connection = self._idle.pop()
                except IndexError:
                    return
            self.drop(connection)

    def abandon(self) -> None:
        """Close the idle connections, without the lock: a finalizer may interrupt the thread that holds it.

        `list.pop` is atomic, so no connection is both closed here and taken by `take`.
        """
        self._closed = True
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread has just taken it
                self._idle.pop().close()

    def close(self) -> None:
        """Close all connections; one that is in use is closed when it is given back."""
        # First: what is given back from now on is closed, and not put among the idle ones.
        self._closed = True
        self.close_idle()


def _doubted(error: FencedError, doubt: ConnectionBroken | None) -> FencedError:
    return error if doubt is None else Indeterminate(f"{doubt}; then: {error}")
