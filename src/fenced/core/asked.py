"""One call of `acquire`, as its events tell it."""

from __future__ import annotations

from collections.abc import Callable

from fenced import events
from fenced.core.holding import GrantState
from fenced.errors import Indeterminate, NotGranted, Unavailable
from fenced.values.contracts import Runtime


class AskedCall:
    """Tells that a call queued, and how it ended. Without a callback it tells nothing."""

    __slots__ = ("_began", "_emit", "_names", "_queued", "_runtime")

    def __init__(
        self, names: tuple[str, ...], runtime: Runtime, emit: Callable[[events.Event], None] | None
    ) -> None:
        self._names = names
        self._runtime = runtime
        self._emit = emit
        self._began = 0.0 if emit is None else runtime.now()
        self._queued = False

    def queued(self, why: str) -> None:
        """Once for each call, also if it loses its place and queues again."""
        if self._emit is not None and not self._queued:
            self._queued = True
            self._emit(events.AskQueued(self._names, why))

    def granted(self, lease: GrantState) -> None:
        if self._emit is not None:
            waited = self._runtime.now() - self._began
            self._emit(events.LeaseGranted(lease.names, lease.token, lease.grant, waited, self._queued))

    def ended(self, error: BaseException, *, waits: bool) -> None:
        if self._emit is None or isinstance(error, GeneratorExit):  # a finalizer tells nothing
            return
        waited = self._runtime.now() - self._began
        self._emit(events.AskEnded(self._names, waited, _why(error, waits), self._queued))


def _why(error: BaseException, waits: bool) -> str:
    match error:
        case NotGranted():
            return "timeout" if waits else "busy"
        case Unavailable():
            return "unavailable"
        case Indeterminate():
            return "indeterminate"
        case Exception():
            return "error"
    return "cancelled"
