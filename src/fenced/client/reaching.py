"""The operator of the guards at an address: a database whose tables are guarded, or any other guard."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from fenced.client import registry
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.values.contracts import Operator

if TYPE_CHECKING:
    from fenced.guards.engine import Engine

T = TypeVar("T")


def operate(dsn: str, work: Callable[[Operator], Coroutine[Any, Any, T]]) -> T:
    """Run an operator's work on the guards at an address. Creates no file: a mistyped path is not an empty database."""
    if registry.is_engine(dsn):
        with connected(dsn) as (engine, connection):
            return step(work(engine.operator(connection)))
    guard = registry.guard(dsn, BlockingRuntime())
    try:
        return step(guard.operate(work))
    finally:
        step(guard.close())


@contextmanager
def connected(dsn: str) -> Iterator[tuple[Engine, Any]]:
    """A connection to a database whose tables are guarded, and its engine."""
    engine = registry.engine(dsn)
    try:
        connection = engine.connect(dsn)
    except ImportError as error:
        raise registry.needs_driver(engine.name, error) from error
    try:
        yield engine, connection
    finally:
        connection.close()
