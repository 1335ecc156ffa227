"""The proxy's thread: it waits for sockets and for times, and does what other threads order."""

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
"""How long an order may take, which is no more than a few moves."""


class Loop:
    """Everything but `run`, `stop` and `forked` is for the loop's own thread, and needs no lock there."""

    def __init__(self, name: str) -> None:
        self.stopped = False
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._orders: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._selector = selectors.DefaultSelector()
        self._bell, self._ringing = socket.socketpair()
        self.select(self._ringing, selectors.EVENT_READ, self._rung)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, order: Callable[[], None]) -> None:
        """Have the thread do it, and return when it is done."""
        if self.stopped:
            raise RuntimeError("the proxy is stopped")
        done: Future[None] = Future()
        self._orders.append((order, done))
        self._bell.send(b"!")
        done.result(CALL_SECONDS)

    def stop(self) -> None:
        """End the thread, by an order."""

        def order() -> None:
            self.stopped = True

        self.run(order)
        self._thread.join()
        self._let_go()

    def forked(self) -> None:
        """In a child, where the thread is not."""
        self.stopped = True
        self._let_go()

    def _let_go(self) -> None:
        self._selector.close()
        self._bell.close()
        self._ringing.close()

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

    def _rung(self, _: int) -> None:
        self._ringing.recv(4096)

    def later(self, due: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (due, next(self._numbers), work))

    def select(self, end: socket.socket, wanted: int, ready: Callable[[int], None]) -> None:
        """Call `ready` whenever the socket is ready for what is wanted; nothing wanted ends it."""
        known = end in self._selector.get_map()
        if wanted and known:
            self._selector.modify(end, wanted, ready)
        elif wanted:
            self._selector.register(end, wanted, ready)
        elif known:
            self._selector.unregister(end)
