"""The order of requests within one process: an older request that runs ends before a newer one begins."""

from __future__ import annotations

from fenced.contracts import Runtime, Wakeup
from fenced.errors import Contended


class RunningRequest:
    """A request that is being judged, or runs."""

    __slots__ = ("ended", "names", "number", "token")

    def __init__(self, names: tuple[str, ...], token: int, number: int) -> None:
        self.names = names
        self.token = token
        self.number = number
        self.ended: Wakeup | None = None
        """Made by the first request that waits for this one: hardly any has to."""


class RunningRequests:
    """The requests of this process, by name."""

    def __init__(self, runtime: Runtime, *, one_at_a_time: bool = False) -> None:
        self._runtime = runtime
        self._one_at_a_time = one_at_a_time
        self._by_name: dict[str, list[RunningRequest]] = {}
        self._count = 0
        self._lock = runtime.lock()

    def begin(self, names: tuple[str, ...], token: int) -> RunningRequest:
        """Call it before the store judges the request, so that a newer request cannot overlook this one."""
        with self._lock:  # a few lines that never wait
            self._count += 1
            request = RunningRequest(names, token, self._count)
            for name in names:
                self._by_name.setdefault(name, []).append(request)
        return request

    async def wait_for_older(self, request: RunningRequest, patience: float) -> None:
        """Wait, `patience` seconds in all, for the older requests that are there now. The store has raised the mark.

        Safe, because an older request that is not there yet will be judged by the raised mark, and refused. Requests
        wait only for lower tokens, or for lower numbers of the same token, so no two wait for each other.
        """
        with self._lock:  # a few lines that never wait
            ahead = [
                other
                for name in request.names
                for other in self._by_name[name]
                if self._precedes(other, request)
            ]
            for other in ahead:
                if other.ended is None:
                    other.ended = self._runtime.wakeup()
        if not ahead:
            return
        until = self._runtime.now() + patience
        for other in ahead:
            assert other.ended is not None
            if not await self._runtime.wait(other.ended, until):
                raise Contended(
                    f"{request.names[0]}: an older request is still running; send this one again later"
                )

    def _precedes(self, other: RunningRequest, request: RunningRequest) -> bool:
        if other.token == request.token:
            return self._one_at_a_time and other.number < request.number
        return other.token < request.token

    def end(self, request: RunningRequest) -> None:
        """The request was refused, or the program has answered it. Wakes those that wait for it."""
        # A waiter makes `ended` under the same lock, so it is set here or the request is gone.
        with self._lock:
            for name in request.names:
                others = self._by_name[name]
                others.remove(request)
                if not others:
                    del self._by_name[name]
            ended = request.ended
        if ended is not None:
            ended.set()

    def __len__(self) -> int:
        return len(self._by_name)
