"""Finds the engine and the driver for one of the program's connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from fenced.client import registry
from fenced.errors import Unsupported, shown
from fenced.guards.claims import ClaimTable
from fenced.guards.engine import ConnectionClass, Driver, Engine, TableGuard
from fenced.guards.spec import Spec
from fenced.sql.frameworks import FRAMEWORKS, Found
from fenced.values.contracts import Colour


class OnConnection(NamedTuple):
    """The engine, the driver, and the connection. For a scoped_session it is the session of this thread or task."""

    engine: Engine
    driver: Driver
    connection: Any

    def table(self, spec: Spec, mandatory: bool) -> TableGuard:
        return self.driver.table(spec, self.driver.session(self.connection), mandatory)

    def claims(self, spec: Spec) -> ClaimTable:
        if self.driver.claims is None:
            raise Unsupported(f"claims do not work on {shown(type(self.connection))}")
        session = self.driver.session(self.connection)
        return self.driver.claims(spec, self.driver.table(spec, session, True), session)


def on(connection: object, colour: Colour) -> OnConnection:
    """Find them. Unsupported if no engine declares connections of this class, or its framework's database."""
    dialect = None
    kind: Any = type(connection)
    ask = _framework(kind)
    if ask is not None:
        connection, dialect = ask(connection)
        kind = type(connection)
    found = _found(kind, dialect, colour)
    if found is None:
        raise _unknown(connection, dialect, colour)
    return OnConnection(*found, connection)


def _classes(kind: type[object]) -> Iterator[ConnectionClass]:
    return ((base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__)


@lru_cache(maxsize=64)
def _framework(kind: type[object]) -> Callable[[Any], Found] | None:
    return next((FRAMEWORKS[one] for one in _classes(kind) if one in FRAMEWORKS), None)


@lru_cache(maxsize=64)
def _found(kind: type[object], dialect: str | None, colour: Colour) -> tuple[Engine, Driver] | None:
    for one in _classes(kind):
        for engine in registry.engines():
            load = engine.drivers.get(colour, {}).get(one)
            if load is not None and (dialect is None or dialect in engine.dialects):
                return engine, load()
    return None


def _unknown(connection: object, dialect: str | None, colour: Colour) -> Unsupported:
    own: set[ConnectionClass] = {*_classes(type(connection))}
    declared = [(engine, engine.drivers.get(colour, {})) for engine in registry.engines()]
    if dialect is not None:
        able = sorted(engine.name for engine, classes in declared if own & classes.keys())
        if able:
            package = type(connection).__module__.partition(".")[0]
            return Unsupported(f"a guard works on {package} over {', '.join(able)}, not over {dialect}")
    other: Colour = "asyncio" if colour == "blocking" else "blocking"
    hint = ""
    if any(own & engine.drivers.get(other, {}).keys() for engine, _ in declared):
        hint = f"; use {'AsyncGuard' if colour == 'blocking' else 'Guard'} for it"
    kinds = ", ".join(sorted({f"{package}'s {name}" for _, classes in declared for package, name in classes}))
    return Unsupported(f"a guard works on {kinds}, not on {shown(type(connection))}{hint}")
