"""The reference guard: cells in a dictionary, decided by the pure function alone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from fenced.guards.cellguard import CellGuard
from fenced.guards.cells import CONFIG, Swapped
from fenced.guards.options import options_in
from fenced.guards.remembered import AUDIT_LAGS
from fenced.runtime.blocking import BlockingRuntime
from fenced.values.contracts import MANY_NAMES, Runtime, Trait
from fenced.values.decision import Rule

_NO_BLOB = 0, None


class MemoryCells:
    """Cells in one process. A version counts the swaps of its cell, and 0 means that there is none."""

    def __init__(self) -> None:
        self.blobs: dict[str, tuple[int, bytes]] = {}
        self._lock = threading.Lock()

    async def get(self, key: str) -> tuple[int, bytes | None]:
        return self.blobs.get(key, (0, None))

    async def get_many(self, keys: Sequence[str]) -> list[tuple[int, bytes | None]]:
        return [self.blobs.get(key, (0, None)) for key in keys]

    async def swap(self, changes: Sequence[tuple[str, int, bytes | None]]) -> Swapped:
        with self._lock:  # nothing waits in here; it makes comparing and replacing one step
            for key, version, _ in changes:
                if self.blobs.get(key, _NO_BLOB)[0] != version:
                    return Swapped(None)
            for key, version, blob in changes:
                if blob is not None:
                    self.blobs[key] = version + 1, blob
            return Swapped(tuple(version + (blob is not None) for _, version, blob in changes))

    async def keys(self) -> list[str]:
        return list(self.blobs)

    async def close(self) -> None:
        return


_SHARED: dict[tuple[int, str], MemoryCells] = {}
"""The cells of this process, by process id and name. So a forked child finds none of its parent's."""


class MemoryValues(CellGuard):
    """Values under names, in one process."""

    traits: tuple[Trait, ...] = (
        Trait(
            "one-process",
            "All guards of one process with the same address share values and marks; nothing survives the process.",
        ),
        Trait("mandatory", "Every write goes through the guard; there is no other door."),
        MANY_NAMES,
        AUDIT_LAGS,
    )
    kind = "a memory guard"
    remembers = True  # not for speed: the reference guard goes the same way as those over a network

    def __init__(
        self,
        *,
        rule: Rule | None = None,
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
    def at(cls, url: str, runtime: Runtime) -> MemoryValues:
        parts = urlsplit(url)
        # `setdefault` is one step: two threads that ask at the same time get the same cells.
        cells = _SHARED.setdefault((os.getpid(), parts.netloc + parts.path), MemoryCells())
        return cls(runtime=runtime, cells=cells, **options_in(url))
