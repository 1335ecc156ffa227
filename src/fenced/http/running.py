"""The order of requests within one process: an older request that runs ends before a newer one begins."""

from __future__ import annotations

import math
from collections.abc import Callable

from fenced.errors import Contended, Indeterminate
from fenced.values.contracts import Runtime, Wakeup

OVERTIME_SECONDS = 10.0
"""For how long a request may still be sent, or its answer taken, once a newer token waits."""


Cut = Callable[[], bool]
"""Ends what a request does with its client. True: its program waits for the client, and nothing else will happen."""


class RunningRequest:
    """A request that is being judged, or runs."""

    __slots__ = ("began", "cut", "cut_at", "ended", "names", "number", "over", "reads", "token", "waited_for")

    def __init__(
        self, names: tuple[str, ...], token: int, number: int, reads: bool = False, cut: Cut | None = None
    ) -> None:
        self.names = names
        self.token = token
        self.number = number
        self.reads = reads
        """It changes nothing, so nobody waits for it."""
        self.cut = cut
        """None: it cannot be cut off."""
        self.cut_at = -math.inf
        self.began: float | None = None
        """When it had waited for older ones."""
        self.waited_for: float | None = None
        """Since when a newer token waits for it."""
        self.over = False
        self.ended: Wakeup | None = None
        """Made by the first request that waits for this one: hardly any has to."""


class RunningRequests:
    """The requests of this process, by name."""

    def __init__(
        self, runtime: Runtime, *, one_at_a_time: bool = False, overtime: float = OVERTIME_SECONDS
    ) -> None:
        self._runtime = runtime
        self._overtime = overtime
        self._one_at_a_time = one_at_a_time
        self._by_name: dict[str, list[RunningRequest]] = {}
        self._count = 0
        self._lock = runtime.lock()

    def begin(
        self, names: tuple[str, ...], token: int, *, reads: bool = False, cut: Cut | None = None
    ) -> RunningRequest:
        """Call it before the store judges the request, so that a newer request cannot overlook this one."""
        with self._lock:  # a few lines that never wait
            self._count += 1
            request = RunningRequest(names, token, self._count, reads, cut)
            for name in names:
                self._by_name.setdefault(name, []).append(request)
        return request

    async def wait_for_older(self, request: RunningRequest, patience: float) -> None:
        """Wait, `patience` seconds in all, for the older requests that are there now. The store has raised the mark.

        Safe, because an older request that is not there yet will be judged by the raised mark, and refused. Requests
        wait only for lower tokens, or for lower numbers of the same token, so no two wait for each other.
        """
        with self._lock:  # a few lines that never wait
            now = self._runtime.now()
            ahead = [
                other
                for name in request.names
                for other in self._by_name[name]
                if self._precedes(other, request)
            ]
            for other in ahead:
                if other.ended is None:
                    other.ended = self._runtime.wakeup()
                if other.waited_for is None and other.token < request.token:
                    other.waited_for = now
        for other in ahead:
            if not await self._has_ended(other, now + patience):
                raise Contended(
                    f"{request.names[0]}: an older request is still running; send this one again later"
                )
        request.began = self._runtime.now() if ahead else now

    async def _has_ended(self, other: RunningRequest, until: float) -> bool:
        """Wait for an older request. Once a newer token has waited for it for `overtime`, it is cut off."""
        assert other.ended is not None
        while other.cut is not None and other.waited_for is not None:
            now = self._runtime.now()
            # One that waits for others itself has not begun; it is looked at again later.
            since = now if other.began is None else max(other.began, other.waited_for, other.cut_at)
            if since + self._overtime <= now:
                self._cut_off(other, now)
            elif since + self._overtime >= until:
                break
            elif await self._runtime.wait(other.ended, since + self._overtime):
                return True
        return await self._runtime.wait(other.ended, until)

    def _cut_off(self, other: RunningRequest, now: float) -> None:
        """Cut it off; again after a while, if its program did not wait for its client and does so by now."""
        with self._lock:  # of several that wait, one cuts it off
            if now - other.cut_at < self._overtime:
                return
            other.cut_at = now
        if other.cut is not None and other.cut():
            self.end(other)

    def _precedes(self, other: RunningRequest, request: RunningRequest) -> bool:
        if other.reads:
            return False
        if other.token == request.token:
            return self._one_at_a_time and other.number < request.number
        return other.token < request.token

    def end(self, request: RunningRequest) -> None:
        """The request was refused, or the program has answered it. Wakes those that wait for it. Once is enough."""
        # A waiter makes `ended` under the same lock, so it is set here or the request is gone.
        with self._lock:
            if request.over:
                return
            request.over = True
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


def cut_off() -> Indeterminate:
    """What a program gets that was cut off while it read from its client."""
    return Indeterminate(
        "this request was cut off, because a newer holder has waited for it; what the program has done of it is unknown"
    )
