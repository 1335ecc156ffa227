"""Wake-ups for one client of a store that is in the same process."""

from __future__ import annotations

from fenced.values.contracts import Runtime, Wakeup


class LocalWakeups:
    """The public ids of attempts that may now be at the head of their queue. Any thread may add one."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._publics: dict[str, None] = {}
        self._wakeup: Wakeup | None = None

    def add(self, public: str) -> None:
        """Stored before the event is set, so the waiting caller finds it when it wakes."""
        self._publics[public] = None
        self.interrupt()

    async def next(self, until: float) -> list[str]:
        if self._wakeup is None:
            self._wakeup = self._runtime.wakeup()
        # One caller at a time, the client's listener. An id that is added before the flag exists is in the dictionary,
        # which is looked at after that.
        if not self._publics:
            await self._runtime.wait(self._wakeup, until)
        # Cleared before the ids are copied: one that is added in between is copied, and sets the flag for nothing.
        self._wakeup.clear()
        woken = list(self._publics)
        for public in woken:  # one that is added again meanwhile goes, too: it is told after both
            self._publics.pop(public, None)
        return woken

    def interrupt(self) -> None:
        if self._wakeup is not None:
            self._wakeup.set()
