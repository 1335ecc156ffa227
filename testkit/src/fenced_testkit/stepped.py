"""An authority in plain code: each of its calls has run when it returns."""

from __future__ import annotations

import inspect
from typing import Any

from fenced.leases.rowauthority import RowAuthority
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced.values.contracts import Authority


class Stepped:
    """An authority under the blocking runtime."""

    def __init__(self, authority: Authority | RowAuthority) -> None:
        self._authority = authority

    @classmethod
    def over(cls, store: MemoryStore) -> Stepped:
        """The oracle of tests: leases in memory."""
        return cls(MemoryAuthority(store, BlockingRuntime()))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._authority, name)
        if not inspect.iscoroutinefunction(method):
            return method
        return lambda *args, **options: step(method(*args, **options))
