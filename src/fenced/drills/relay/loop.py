"""The proxy's thread: it waits for sockets and timers, and runs functions for other threads."""

from __future__ import annotations

import heapq
import itertools
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

CALL_SECONDS = 10.0
"""How long a function that another thread passes to `run` may take; each is short."""


class Loop:
    """Only `run`, `stop` and `forked` are for other threads. The rest runs in the loop's thread and needs no lock."""

    def __init__(self, name: str) -> None:
        self.stopped = False
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._orders: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self.select(self._woken, selectors.EVENT_READ, self._drain_waker)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, order: Callable[[], None]) -> None:
        """Run a function in the loop's thread, and return when it has finished."""
        if self.stopped:
            raise RuntimeError("the proxy is stopped")
        done: Future[None] = Future()
        # Appended before the wake-up: the loop looks at the queue after it wakes.
        self._orders.append((order, done))
        self._waker.send(b"!")
        done.result(CALL_SECONDS)

    def stop(self) -> None:
        """End the thread."""

        def order() -> None:
            self.stopped = True

        self.run(order)
        self._thread.join()
        self._close()

    def forked(self) -> None:
        """In a forked child, which has no such thread: only close the descriptors."""
        self.stopped = True
        self._close()

    def _close(self) -> None:
        self._selector.close()
        self._waker.close()
        self._woken.close()

    def _work(self) -> None:
        while not self.stopped:
            wait = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            for key, events in self._selector.select(wait):
                key.data(events)
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()
            while self._orders:
                order, done = self._orders.popleft()
                try:
                    order()
                except OSError as error:
                    done.set_exception(error)
                else:
                    done.set_result(None)

    def _drain_waker(self, _: int) -> None:
        self._woken.recv(4096)

    def later(self, due: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (due, next(self._numbers), work))

    def select(self, end: socket.socket, wanted: int, ready: Callable[[int], None]) -> None:
        """Call `ready` whenever the socket is ready for the `wanted` events; 0 unregisters it."""
        known = end in self._selector.get_map()
        if wanted and known:
            self._selector.modify(end, wanted, ready)
        elif wanted:
            self._selector.register(end, wanted, ready)
        elif known:
            self._selector.unregister(end)
