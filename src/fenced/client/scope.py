"""Cancels the body of an asyncio `with` block when its lease is lost, as `asyncio.timeout` does at its deadline."""

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
        self._grant: GrantState | None = None
        self._cancelled = False
        self._cancelling_before = 0

    def enter(self, grant: GrantState) -> None:
        self._grant = grant
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        if self._task is not None:
            self._cancelling_before = self._task.cancelling()
        self._arm()
        grant.on_lost(self._lost)

    def _arm(self) -> None:
        """Check the deadline at least once per slice: the loop's clock stands still while the machine is suspended.

        The keeper checks it too, but may be waiting for a reply at that moment.
        """
        assert self._grant is not None and self._loop is not None
        if self._grant.remaining() > 0:
            delay = min(self._grant.remaining(), SLICE_SECONDS)
            self._timer = self._loop.call_later(delay, self._arm)
        else:
            _ = self._grant.state  # marks the lease lost, which calls `_lost`

    def _lost(self, reason: str) -> None:
        # Cancelled from the loop: this may run in the body itself or in another thread, where cancel() is not safe.
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._cancel, reason)

    def _cancel(self, reason: str) -> None:
        if self._task is not None and not self._task.done():
            self._cancelled = True
            self._task.cancel(f"the lease was lost: {reason}")

    def leave(self, exc: BaseException | None) -> bool:
        """Stop watching. True if `exc` is the cancellation that this scope requested, and nobody else did."""
        task, self._task = self._task, None
        if self._timer is not None:
            self._timer.cancel()
        if not self._cancelled or task is None:
            return False
        return task.uncancel() <= self._cancelling_before and isinstance(exc, asyncio.CancelledError)
