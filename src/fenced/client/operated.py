"""The guards at an address, for whoever looks at them again and again in one thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fenced.client import registry
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.values.contracts import Operator

T = TypeVar("T")


class OperatedGuards:
    """The guarded tables of a database, or one guard that guards no tables. Used in one thread."""

    def __init__(self, url: str) -> None:
        self.connection: Any = None
        """To the database of guarded tables."""
        self.lags = False
        """Whether decisions are seen late, and each look costs several requests."""
        if registry.is_engine(url):
            engine = registry.engine(url)
            self.connection = engine.connect(url)
            self._operator = engine.operator(self.connection)
        else:
            self._guard = registry.guard(url, BlockingRuntime())
            self.lags = any(trait.key == "audit-lags" for trait in self._guard.traits)

    def run(self, work: Callable[[Operator], Awaitable[T]]) -> T:
        if self.connection is None:
            return step(self._guard.operate(work))

        async def run() -> T:
            return await work(self._operator)

        return step(run())

    def close(self) -> None:
        if self.connection is None:
            step(self._guard.close())
        else:
            self.connection.close()
