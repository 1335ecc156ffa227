"""The reference guard: cells in a dictionary, decided by the pure function alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from fenced.contracts import MANY_NAMES, Runtime, Trait
from fenced.decision import Rule
from fenced.guards.shared.cellguard import AUDIT_LOCAL, CellGuard, options_in
from fenced.guards.shared.cells import CONFIG
from fenced.runtime.blocking import BlockingRuntime


class MemoryCells:
    """Cells in one process. A version counts the swaps of its cell, and 0 means that there is none."""

    def __init__(self) -> None:
        self.blobs: dict[str, tuple[int, bytes]] = {}
        self._lock = threading.Lock()

    async def get(self, key: str) -> tuple[int, bytes | None]:
        return self.blobs.get(key, (0, None))

    async def swap(self, changes: Sequence[tuple[str, int, bytes | None]]) -> bool:
        with self._lock:  # nothing waits in here; it makes comparing and replacing one step
            if any(self.blobs.get(key, (0, b""))[0] != version for key, version, _ in changes):
                return False
            self.blobs.update(
                {key: (version + 1, blob) for key, version, blob in changes if blob is not None}
            )
            return True

    async def keys(self) -> list[str]:
        return list(self.blobs)

    async def close(self) -> None:
        return


class MemoryGuard(CellGuard):
    """Values under names, in one process."""

    traits: tuple[Trait, ...] = (
        Trait("one-process", "Values and marks live in one process; nothing survives it."),
        Trait("mandatory", "Every write goes through the guard; there is no other door."),
        MANY_NAMES,
        AUDIT_LOCAL,
    )
    kind = "a memory guard"

    def __init__(
        self,
        *,
        rule: Rule = "retry",
        mode: str = "enforce",
        clock: Callable[[], float] = time.time,
        cells: MemoryCells | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self.cells: MemoryCells
        super().__init__(
            cells or MemoryCells(), runtime or BlockingRuntime(), "memory:", rule=rule, mode=mode, clock=clock
        )
        self.cells.blobs.setdefault(CONFIG, (1, self._first.packed()))

    @classmethod
    def at(cls, url: str, runtime: Runtime) -> MemoryGuard:
        return cls(runtime=runtime, **options_in(url))
