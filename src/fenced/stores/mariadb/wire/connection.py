"""One connection to MariaDB or MySQL: a script of statements out in one packet, their results in, until a deadline.

The drivers log in and read what comes. Which server of an address is taken, how long that may last and what an error
means is decided here, once for both.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

from fenced.errors import Unavailable
from fenced.net.pool import ConnectionBroken
from fenced.stores.mariadb.address import MariadbAddress
from fenced.stores.mariadb.wire.failures import ServerRefusal, connect_failed
from fenced.values.contracts import Endpoint, Runtime

Row = tuple[Any, ...]
QUIT = b"\x01\0\0\0\x01"
"""Sent before an idle connection is closed; without it the server's log calls the connection aborted."""
_PLAIN = re.compile(r"[ -&(-\[\]-~]*")
"""Printable ASCII without a quote and without a backslash: it means the same in every sql_mode."""


class Result(NamedTuple):
    rows: tuple[Row, ...]
    insert_id: int
    changed: int = 0
    """How many rows the statement changed."""


def literal(text: str) -> str:
    """A text as a literal, whatever sql_mode and character set the session has. Columns for it are VARBINARY."""
    return f"'{text}'" if _PLAIN.fullmatch(text) else f"x'{text.encode().hex()}'"


class WireDriver(Protocol):
    """A logged-in connection of a driver. Its errors are `ServerRefusal`, or `ConnectionBroken` for all others."""

    async def run(self, script: str, until: float) -> list[Result]: ...
    def interrupt(self) -> None: ...
    def close(self) -> None: ...


class MariadbConnection:
    """Takes one script at a time; the pool sees to that."""

    def __init__(self, driver: WireDriver, runtime: Runtime, where: str, endpoint: Endpoint) -> None:
        self._driver = driver
        self._runtime = runtime
        self._where = where
        self.endpoint = endpoint
        self.doubts: tuple[str, ...] = ()
        """How tokens could repeat on this server, by its settings when they were last read."""

    async def run(self, statements: Sequence[str], until: float) -> list[Result]:
        """Their results, in one round trip. The first one that the server refuses ends it with a ServerRefusal.

        `ConnectionBroken`: any of them may have been carried out. Unavailable after the deadline: nothing was sent.
        """
        if self._runtime.now() >= until:
            raise Unavailable(f"{self._where}: the deadline passed before the request was sent")
        return await self._driver.run("; ".join(statements), until)

    def interrupt(self) -> None:
        """Shut the socket down, from any thread: who waits for the server wakes up and closes it."""
        self._driver.interrupt()

    def close(self) -> None:
        """Close the connection; the server then rolls back what is open."""
        self._driver.close()


Greeting = Callable[[MariadbConnection, float], Awaitable[None]]


async def connect(
    address: MariadbAddress, runtime: Runtime, until: float, greet: Greeting | None = None
) -> MariadbConnection:
    """Connect to the first server that answers and passes `greet`, which raises Unavailable for a wrong one.

    Each server gets a share of the time, so that a silent one does not use up all of it. Unavailable if none can be
    used; Misconfigured if a retry cannot succeed.
    """
    failed: list[str] = []
    for place, endpoint in enumerate(address.endpoints):
        now = runtime.now()
        limit = now + (until - now) / (len(address.endpoints) - place)
        try:
            return await _connect_to(endpoint, address, runtime, limit, greet)
        except Unavailable as error:
            failed.append(str(error))
    raise Unavailable("; ".join(failed))


async def _connect_to(
    endpoint: Endpoint, address: MariadbAddress, runtime: Runtime, until: float, greet: Greeting | None
) -> MariadbConnection:
    where = address.named(endpoint)
    if until <= runtime.now():
        raise Unavailable(f"{where}: no time is left to connect")
    try:
        driver = await _log_in(endpoint, address, runtime, until)
    except (ServerRefusal, ConnectionBroken) as error:
        raise connect_failed(error, where) from error
    connection = MariadbConnection(driver, runtime, where, endpoint)
    try:
        if greet is not None:
            await greet(connection, until)
    except BaseException as error:
        connection.close()
        if isinstance(error, ServerRefusal | ConnectionBroken):
            raise connect_failed(error, where) from error
        raise
    return connection


async def _log_in(endpoint: Endpoint, address: MariadbAddress, runtime: Runtime, until: float) -> WireDriver:
    # Imported when it is needed: a program of one colour does without the driver of the other.
    if runtime.colour == "blocking":
        from fenced.stores.mariadb.wire.blocking import PymysqlDriver

        return await PymysqlDriver.connect(endpoint, address, runtime, until)
    from fenced.stores.mariadb.wire.aio import MyAioDriver

    return await MyAioDriver.connect(endpoint, address, runtime, until)
