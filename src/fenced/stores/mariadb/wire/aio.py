"""asyncmy with a deadline for the whole of a call."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Any

import asyncmy
import asyncmy.errors
from asyncmy.connection import Connection

from fenced.errors import Misuse
from fenced.net.pool import ConnectionBroken
from fenced.runtime.aio import OTHER_LOOP
from fenced.stores.mariadb.address import MariadbAddress
from fenced.stores.mariadb.wire.connection import QUIT, Result
from fenced.stores.mariadb.wire.failures import NO_LOGIN, NO_TLS, ServerRefusal, connection_lost
from fenced.values.contracts import Endpoint, Runtime


class MyAioDriver:
    """Belongs to the event loop that it was connected in."""

    def __init__(self, connection: Any, runtime: Runtime, where: str) -> None:
        self._connection = connection
        self._runtime = runtime
        self._where = where
        self._loop = asyncio.get_running_loop()
        self._idle = True
        self._link = connection._transport.get_extra_info("socket")

    @classmethod
    async def connect(
        cls, endpoint: Endpoint, address: MariadbAddress, runtime: Runtime, until: float
    ) -> MyAioDriver:
        where = address.named(endpoint)
        place: dict[str, Any] = (
            {"unix_socket": endpoint}
            if isinstance(endpoint, str)
            else {"host": endpoint[0], "port": endpoint[1]}
        )
        left = until - runtime.now()
        made: Any = None
        try:
            made = Connection(  # type: ignore[no-untyped-call]
                **place,
                user=address.user,
                password=(address.password or "").encode(),
                database=address.database,
                charset="utf8mb4",
                autocommit=True,
                program_name="fenced",
                connect_timeout=max(left, 0.001),
                ssl=address.context if address.tls else None,
            )
            async with asyncio.timeout(left):
                await made.connect()
        except BaseException as error:
            if made is not None:
                made.close()
            raise _translated(error, where, 0) from error
        return cls(made, runtime, where)

    async def run(self, script: str, until: float) -> list[Result]:
        if asyncio.get_running_loop() is not self._loop:
            raise Misuse(OTHER_LOOP)
        connection = self._connection
        results: list[Result] = []
        self._idle = False
        try:
            async with asyncio.timeout(until - self._runtime.now()):
                await connection.query(script)
                while True:
                    result = connection._result
                    results.append(
                        Result(result.rows or (), result.insert_id or 0, result.affected_rows or 0)
                    )
                    if not result.has_next:
                        break
                    await connection.next_result()
        except BaseException as error:
            translated = _translated(error, self._where, len(results))
            self._idle = isinstance(translated, ServerRefusal)
            raise translated from error
        self._idle = True
        return results

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):  # closed already
            self._link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Only the loop's thread may close it; a finalizer that runs in another one leaves that to the loop."""
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = not self._loop.is_running()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if here:
                self._close()
            else:
                self.interrupt()
                self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        transport = self._connection._transport
        if transport is not None and not transport.is_closing():
            if self._idle:
                transport.write(QUIT)
            transport.abort()  # `close` would wait for the other end to take leave of TLS
        self._connection.close()


def _translated(error: BaseException, where: str, at: int) -> BaseException:
    if isinstance(error, TimeoutError):
        return ConnectionBroken(f"{where}: no answer in time")
    if isinstance(error, asyncmy.errors.Error):
        if isinstance(error.__cause__, ssl.SSLCertVerificationError):
            return ServerRefusal(NO_TLS, str(error.args[1]), at)
        code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        if code and not connection_lost(code):
            return ServerRefusal(code, str(error.args[1]), at)
    if isinstance(error, RuntimeError):  # a package is missing that the account's way to log in needs
        return ServerRefusal(NO_LOGIN, str(error), at)
    if isinstance(error, asyncmy.errors.Error | OSError | ValueError):
        return ConnectionBroken(f"{where}: {error}")
    return error
