"""What a SQL engine declares, so that no module outside its package knows it by name.

An engine is registered under its scheme: built-in ones in `fenced.client.registry`, others by the entry point
`fenced.engines`. Its module must be cheap to import: drivers and sessions are imported by the methods below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from fenced.errors import FencedError
from fenced.guards.claims import ClaimTable
from fenced.guards.spec import Spec
from fenced.values.contracts import Colour, Operator, UnitOfWork
from fenced.values.decision import Mark
from fenced.values.model import Credential


class Registered(NamedTuple):
    """A guard that is installed: what it protects, and whether it has triggers."""

    spec: Spec
    mandatory: bool


class TableGuard(UnitOfWork, Protocol):
    """A guard on one of the program's tables, over one of the program's connections.

    If the connection is in a transaction, `install`, `uninstall` and `script` are part of it and the caller commits. If
    one of them fails, everything that it did is undone, and the caller's transaction can continue. Outside a
    transaction they begin and commit one.
    """

    async def install(self, mode: str | None, *, replace: bool = False) -> None:
        """Misconfigured if the installed guard has another name, rule or epoch column, or no triggers. `replace` it."""

    async def script(self, mode: str | None, *, replace: bool = False, transaction: bool = True) -> str: ...
    async def uninstall(self) -> None: ...
    async def set_mode(self, mode: str, pattern: str, wait: float = ...) -> tuple[str, ...]: ...
    async def adopt(self, realm: str) -> None: ...
    async def peek(self, name: str, at_least: int) -> Mark | None: ...
    async def announce(self, credential: Credential) -> None: ...
    async def announce_within(self, credential: Credential) -> None: ...
    async def clear(self, credential: Credential) -> None: ...
    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]: ...

    async def statements(self, mode: str | None, *, replace: bool = False) -> list[str]:
        """The statements of `install`, for the program's own migration. Reads the table's present shape."""

    async def removal(self) -> list[str]:
        """The statements of `uninstall`."""

    async def registered(self) -> list[Registered]:
        """Every guard of this database, whatever its table."""

    def is_own(self, schema: str | None, table: str) -> bool:
        """Whether fenced created this table for itself."""


class StampSource(Protocol):
    """Where a stamp's values come from: the hold of a lease, or a stamp."""

    @property
    def realm(self) -> str: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def token(self) -> int: ...
    @property
    def grant(self) -> str: ...


class Direct(Protocol):
    """Makes a guarded transaction for one lease without coroutines, for stores whose statements are cheaper."""

    def __call__(
        self,
        connection: Any,
        spec: Spec,
        mandatory: bool,
        source: StampSource,
        seq: int | None,
        names: tuple[str, ...],
        /,
    ) -> AbstractContextManager[Any]: ...


class Driver(NamedTuple):
    """How a guard works on the connections of one class."""

    table: Callable[[Spec, Any, bool], TableGuard]
    """From a Spec, a session, and whether the guard is mandatory."""
    session: Callable[[Any], Any]
    """From a connection."""
    direct: Direct | None = None
    claims: Callable[[Spec, Any, Any], ClaimTable] | None = None
    """From a Spec, what `table` has made, and its session."""


ConnectionClass = tuple[str, str]
"""The package and the name of a connection's class, or of a class that it inherits from."""


class Engine(Protocol):
    """A database engine whose tables can be guarded."""

    @property
    def name(self) -> str:
        """The scheme of its addresses."""

    @property
    def dialects(self) -> frozenset[str]:
        """How SQLAlchemy (`dialect.name`) and Django (`vendor`) name this database."""

    @property
    def quote(self) -> str:
        """The character around an identifier."""

    @property
    def drivers(self) -> Mapping[Colour, Mapping[ConnectionClass, Callable[[], Driver]]]:
        """The connections that a guard works on, by colour and class. The functions import what they return."""

    def refusal(self, error: BaseException) -> FencedError | None:
        """The typed error for a refusal of this engine's guards; None for other errors."""

    def outbox(self) -> Mapping[str, str]:
        """The statements of an outbox: create, put, take, remove, with fields in braces; Unsupported without one."""

    def connect(self, dsn: str) -> Any:
        """A blocking connection, for an operator. Creates nothing: Misconfigured if there is no such database."""

    def operator(self, connection: Any) -> Operator:
        """What an operator can do on a connection that `connect` has opened."""
