"""Waiters of one client: each has a connection on which the service notifies it."""

from __future__ import annotations

import math
from collections.abc import Callable

from fenced.net.pool import Pool
from fenced.stores.service.wire.connection import HttpWire, Parked
from fenced.values.contracts import Runtime, Selector

LATE_SECONDS = 5.0
"""How long after its time the second line of a parked response may arrive."""

_inherited: list[Parked] = []
"""The parent's connections in a forked child. Kept referenced, so that no finalizer touches the shared sockets."""


class ServicePool(Pool[HttpWire]):
    """Connections for requests. One that is parked leaves the pool, and comes back when its waiter was notified."""

    def give(self, connection: HttpWire) -> None:
        if connection.is_open:
            super().give(connection)
        else:
            self._pass_on(None)

    def adopt(self, connection: HttpWire) -> None:
        """The next request gets this connection, unless the pool is full."""
        with self._lock:
            fits = self._count < self._limit
            self._count += fits
        if fits:
            self.give(connection)
        else:
            connection.close()


class ServiceWakeups:
    """The parked connections. Any thread parks and forgets; one thread or task waits.

    The lock is held while a connection is read or closed, so that no thread reads from a descriptor that another one
    has just closed. Nothing under it waits.
    """

    def __init__(self, runtime: Runtime, adopt: Callable[[HttpWire], None]) -> None:
        """`adopt` gets the connections that can be used again."""
        self._runtime = runtime
        self._adopt = adopt
        self.forked()

    def forked(self) -> None:
        """Start without connections; those of a parent process are left as they are."""
        _inherited.extend(getattr(self, "_parked", {}).values())
        self._parked: dict[str, Parked] = {}
        self._new: list[str] = []
        """Parked since the last look. They may hold bytes that were already read from the socket."""
        self._lock = self._runtime.lock()
        self._selector: Selector | None = None
        self._closed = False

    def park(self, public: str, parked: Parked) -> None:
        """Notify this attempt when something arrives. An earlier connection of the same attempt is closed."""
        self.forget(public)
        with self._lock:
            if self._closed:
                parked.close()
                return
            self._parked[public] = parked
            # Its second line may have come with the first one: it was read already, so no selector tells of it.
            self._new.append(public)
            self._opened().add(parked.link, public)
        self.interrupt()  # the waiting thread looks at the new connection

    def forget(self, public: str) -> None:
        """This attempt waits no more."""
        with self._lock:
            self._drop(public)

    def _drop(self, public: str) -> None:
        if (parked := self._taken(public)) is not None:
            parked.close()

    def _taken(self, public: str) -> Parked | None:
        parked = self._parked.pop(public, None)
        if parked is not None and self._selector is not None:
            self._selector.remove(parked.link)
        return parked

    def _opened(self) -> Selector:
        if self._selector is None:
            self._selector = self._runtime.selector()
        return self._selector

    async def next_wakeups(self, until: float) -> list[str]:
        with self._lock:
            if self._closed:
                return []
            # What is parked after this look is added to this selector and wakes it, so the wait below ends for it.
            selector = self._opened()
            new, self._new = self._new, []
        if woken := self._look(new):
            return woken
        try:
            ready = await selector.wait(min(until, self._due()))
        except (OSError, ValueError):  # closed meanwhile
            return []
        return self._look([public for public in ready or () if isinstance(public, str)])

    def _due(self) -> float:
        with self._lock:
            return min((parked.until for parked in self._parked.values()), default=math.inf) + LATE_SECONDS

    def _look(self, publics: list[str]) -> list[str]:
        """Read what has arrived. Returns the attempts that should ask again: also those with a dead connection."""
        woken, over, now = [], [], self._runtime.now() - LATE_SECONDS
        with self._lock:
            for public, parked in list(self._parked.items()):
                if public in publics:
                    parked.read()
                if parked.over or parked.until <= now:
                    if parked.turn or not parked.over:
                        woken.append(public)
                    # Nobody but this thread has it from now on, unless `close` was faster, which closes it.
                    if self._taken(public) is not None:
                        over.append(parked)
        # Outside the lock: the pool that adopts a connection wakes its own waiters.
        for parked in over:
            if parked.over and parked.resume():
                self._adopt(parked)
            else:
                parked.close()
        return woken

    def interrupt(self) -> None:
        if (selector := self._selector) is not None:
            selector.wake()

    def close(self) -> None:
        """Without the lock: a finalizer may interrupt the thread that holds it."""
        self._closed = True
        while self._parked:
            try:
                _, parked = self._parked.popitem()
            except KeyError:  # another thread has just removed it
                break
            parked.close()
        selector, self._selector = self._selector, None
        if selector is not None:
            selector.close()
