"""Cancelling an asyncio body when its lease is lost, in the way of `asyncio.timeout`."""

from __future__ import annotations

import asyncio

from fenced.core.holding import GrantState
from fenced.runtime.aio import SLICE_SECONDS


class BodyScope:
    """Watches one task while it is inside `async with hold(...)`."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._hold: GrantState | None = None
        self._cancelled = False
        self._cancelling_before = 0

    def enter(self, hold: GrantState) -> None:
        self._hold = hold
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        if self._task is not None:
            self._cancelling_before = self._task.cancelling()
        self._arm()
        hold.on_lost(self._lost)

    def _arm(self) -> None:
        """Look again at the deadline, in slices: the loop's clock stands still in suspend.

        The keeper may hang in a request just then, so the deadline is watched here as well.
        """
        assert self._hold is not None and self._loop is not None
        if self._hold.remaining() > 0:
            delay = min(self._hold.remaining(), SLICE_SECONDS)
            self._timer = self._loop.call_later(delay, self._arm)
        else:
            _ = self._hold.state  # notices the deadline, and tells `_lost`

    def _lost(self, reason: str) -> None:
        # Later, and in the loop: who noticed may be the body itself, or a thread of its own.
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._cancel, reason)

    def _cancel(self, reason: str) -> None:
        if self._task is not None and not self._task.done():
            self._cancelled = True
            self._task.cancel(f"the lease was lost: {reason}")

    def leave(self, exc: BaseException | None) -> bool:
        """Stop watching. True when `exc` is our own cancellation, and nobody else's."""
        task, self._task = self._task, None
        if self._timer is not None:
            self._timer.cancel()
        if not self._cancelled or task is None:
            return False
        return task.uncancel() <= self._cancelling_before and isinstance(exc, asyncio.CancelledError)
