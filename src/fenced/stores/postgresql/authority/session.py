"""One connection to PostgreSQL, through libpq's non-blocking functions: the runtime waits for the socket.

One statement is one transaction and one round trip. Warnings that come with a reply are kept: a warning during
the commit of a grant makes the outcome of that grant unknown.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo
from psycopg.pq import DiagnosticField, PollingStatus
from psycopg.pq.abc import PGconn, PGresult

from fenced.errors import FencedError, Misconfigured, Unavailable
from fenced.net.pool import ConnectionBroken
from fenced.runtime import sockets
from fenced.stores.postgresql.authority.queries import SQL
from fenced.stores.postgresql.authority.settings import Settings
from fenced.values.contracts import Runtime

Row = tuple[bytes | None, ...]

# Prefixes of error codes (SQLSTATE), from PostgreSQL's table.
_CONNECTION_LOST = ("08", "57P01", "57P02", "57P03", "57P05")
_STANDBY = ("25006",)
_FORBIDDEN = ("42501", "28", "3D000")
_NO_SCHEMA = ("3F000", "42883", "42P01")
_PREPARED_ELSEWHERE = ("26000", "42P05")

_PASSWORD = "in the address, in PGPASSWORD, in a service file or in ~/.pgpass"
_REFUSALS = (
    ("password authentication failed", f"Correct the password {_PASSWORD}"),
    ("SASL authentication failed", f"Correct the password {_PASSWORD}"),
    ("authentication failed", "The server's pg_hba.conf says how this role may log in"),
    ("no pg_hba.conf entry", "Add an entry for this role, database and machine on the server"),
    ("is not permitted to log in", "Give it the right: ALTER ROLE ... LOGIN"),
    ("permission denied for database", "Give this role the right: GRANT CONNECT ON DATABASE ... TO ..."),
    ("does not support SSL, but SSL was required", "Switch TLS on there, or ask for less with sslmode"),
    ("certificate verify failed", "Name the certificates to trust with sslrootcert"),
    ("does not match host name", "Use the name that is in the server's certificate"),
    ("does not exist", "Correct the address, or create it"),
    ("no such user", "Correct the address, or the pooler's list of users"),
    ("no such database", "Correct the address, or the pooler's list of databases"),
)
"""Parts of messages of a server, a pooler or libpq after which a retry cannot succeed, and what to do instead."""

_NO_SUCH_VALUE = "none_such"


class _PreparedElsewhere(Exception):
    """The server process that replied does not have our prepared statement: it did nothing."""


@dataclass(frozen=True, slots=True)
class _Place:
    """One of the servers that an address names, in libpq's options."""

    host: str
    hostaddr: str
    port: str

    @property
    def known(self) -> bool:
        """Whether no name look-up is needed: it is an IP address or a socket file."""
        return bool(self.hostaddr) or not self.host or self.host.startswith(("/", "@"))


class LibpqConnection:
    """A connection. Its statements are prepared unless a pooler may change the server process."""

    def __init__(self, connection: PGconn, runtime: Runtime, where: str, alive: set[LibpqConnection]) -> None:
        self._connection = connection
        self._runtime = runtime
        self._where = where
        self._prepared: set[bytes] = set()
        self._alive = alive
        # Held while libpq closes or replaces the socket, and while another thread shuts it down: so that thread never
        # shuts down a reused descriptor. Re-entrant: a finalizer may take it in the thread that already holds it.
        self._lock = threading.RLock()
        self.pooled = False
        """Whether a pooler is between: then each transaction may run in another server process."""
        self.doubts: tuple[str, ...] = ()
        """How tokens could repeat on this server, judged by the settings when they were last read."""
        self.warnings: list[str] = []
        # Not a bound method: without that cycle a dropped session is freed at once.
        connection.notice_handler = partial(_noticed, self.warnings)
        alive.add(self)

    @classmethod
    async def connect(
        cls, conninfo: str, runtime: Runtime, where: str, until: float, alive: set[LibpqConnection]
    ) -> LibpqConnection:
        """Connect. Unavailable if that fails or takes too long; Misconfigured if a retry cannot succeed.

        Each server, and each address of a server, gets a share of the time: a silent one must not use up all of it.
        `alive` contains the session while it is open.
        """
        try:
            text = make_conninfo(conninfo, client_encoding="UTF8", fallback_application_name="fenced")
        except (psycopg.Error, ValueError):
            # Without the cause, which quotes the address and its password.
            raise Misconfigured(f"{where}: libpq does not understand this address") from None
        places, seconds_max = _places(text, where)
        failed: list[str] = []
        while True:
            place = places.pop(0)
            now = runtime.now()
            limit = now + min((until - now) / (len(places) + 1), seconds_max)
            try:
                if place.known:
                    there = make_conninfo(text, host=place.host, hostaddr=place.hostaddr, port=place.port)
                    return await cls._connect(there, runtime, where, limit, alive)
                places = await _looked_up(place, runtime, limit) + places
            except (Unavailable, OSError) as error:
                failed.append(str(error) if isinstance(error, Unavailable) else f"{where}: {error}")
                if not places:
                    raise Unavailable("; ".join(failed)) from error

    @classmethod
    async def _connect(
        cls, conninfo: str, runtime: Runtime, where: str, until: float, alive: set[LibpqConnection]
    ) -> LibpqConnection:
        session = cls(pq.PGconn.connect_start(conninfo.encode()), runtime, where, alive)
        try:
            await session._finish_connecting(until)
            session._connection.nonblocking = 1
            (await session.read_settings(until)).check(where)
        except (ConnectionBroken, psycopg.Error, OSError) as error:
            session.close()
            raise Unavailable(str(error)) from error  # no request was sent yet
        except BaseException:
            session.close()
            raise
        return session

    async def _finish_connecting(self, until: float) -> None:
        while True:
            # libpq may close its socket here, and `interrupt` must not shut down a reused descriptor.
            with self._lock:
                status = self._connection.connect_poll()
            if status == PollingStatus.OK:
                return
            if status == PollingStatus.FAILED:
                raise self._not_connected()
            waiting = self._runtime.writable if status == PollingStatus.WRITING else self._runtime.readable
            if not await waiting(self, until):
                raise Unavailable(f"{self._where}: no connection in time")

    def _not_connected(self) -> FencedError:
        message = f"{self._where}: {_text(self._connection.error_message)}"
        if self._connection.needs_password:
            return Misconfigured(f"{message}. The server asks for a password: put it {_PASSWORD}")
        for sign, remedy in _REFUSALS:
            if sign in message:
                return Misconfigured(f"{message}. {remedy}")
        return Unavailable(message)

    async def read_settings(self, until: float) -> Settings:
        """Read the server's settings, and find out whether a pooler is between.

        There is a pooler if the server process that replies is not the one that we connected to.
        """
        process = self._connection.backend_pid
        ((pid, *values, _),) = await self.run(b"", SQL["settings"], (b"%d" % process,), until)
        self.pooled = int(pid or 0) != process
        settings = Settings.of(values)
        self.doubts = settings.doubts()
        return settings

    def fileno(self) -> int:
        return self._connection.socket

    async def run(
        self, name: bytes, statement: bytes, parameters: Sequence[bytes | None], until: float
    ) -> list[Row]:
        """The rows of one statement. `ConnectionBroken`: the connection broke, or no reply came in time."""
        self.warnings.clear()
        try:
            if name and not self.pooled:
                try:
                    return await self._run_prepared(name, statement, parameters, until)
                except _PreparedElsewhere:
                    self.pooled = True
            self._check_time(until)
            self._connection.send_query_params(statement, parameters)
            return await self._results(until)
        except (psycopg.Error, OSError) as error:
            raise ConnectionBroken(f"{self._where}: {error}") from error

    async def _run_prepared(
        self, name: bytes, statement: bytes, parameters: Sequence[bytes | None], until: float
    ) -> list[Row]:
        if name not in self._prepared:
            self._connection.send_prepare(name, statement)
            await self._results(until)
            self._prepared.add(name)
        self._check_time(until)
        self._connection.send_query_prepared(name, parameters)
        return await self._results(until)

    def _check_time(self, until: float) -> None:
        """Unavailable after the deadline: nothing was sent, so it is certain that nothing happened."""
        if self._runtime.now() >= until:
            raise Unavailable(f"{self._where}: the deadline passed before the request was sent")

    async def script(self, statements: bytes, until: float) -> None:
        """Several statements in one transaction."""
        try:
            self._connection.send_query(statements)
            await self._results(until)
        except (psycopg.Error, OSError) as error:
            raise ConnectionBroken(f"{self._where}: {error}") from error

    async def _results(self, until: float) -> list[Row]:
        connection, runtime = self._connection, self._runtime
        while connection.flush():
            if not await runtime.writable(self, until):
                raise ConnectionBroken(f"{self._where}: the request could not be sent in time")
        rows: list[Row] = []
        failure: Exception | None = None
        while True:
            while connection.is_busy():
                late = not await runtime.readable(self, until)
                connection.consume_input()  # also after the deadline: a reply that arrived in time counts
                if late and connection.is_busy():
                    raise ConnectionBroken(f"{self._where}: no answer in time")
            result = connection.get_result()
            if result is None:
                break
            if result.error_message:
                failure = failure or self._failure(result)
            for row in range(result.ntuples):
                rows.append(tuple(result.get_value(row, column) for column in range(result.nfields)))
        if failure is not None:
            raise failure
        return rows

    def _failure(self, result: PGresult) -> Exception:
        """What an error of the server means. Its transaction was rolled back, unless the server went away."""
        code = _text(result.error_field(DiagnosticField.SQLSTATE))
        message = f"{self._where}: {_text(result.error_field(DiagnosticField.MESSAGE_PRIMARY))} ({code})"
        severity = result.error_field(DiagnosticField.SEVERITY_NONLOCALIZED)
        if not code or severity in (b"FATAL", b"PANIC") or code.startswith(_CONNECTION_LOST):
            return ConnectionBroken(message)
        if code in _PREPARED_ELSEWHERE:
            return _PreparedElsewhere()
        if code == "ZFA01":
            return Misconfigured(
                f"{message}. A standby was promoted, or this was restored from a backup, and tokens may be missing "
                "here that guards have seen: run `fenced authority raise --above N` first"
            )
        if code == "ZFA02":
            return Misconfigured(f"{message}; start a new namespace")
        if code == "ZFA03":
            return Misconfigured(
                f"{message}: ALTER ROLE ... SET default_transaction_isolation = 'read committed'"
            )
        if code.startswith(_STANDBY):
            return Unavailable(f"{message}: this is a standby, or set to read only")
        if code.startswith(_FORBIDDEN):
            return Misconfigured(
                f"{message}: a holder needs USAGE on schema fenced; an operator also EXECUTE on force_release and "
                "raise_floor"
            )
        if code.startswith(_NO_SCHEMA):
            return Misconfigured(f"{message}: the schema fenced is missing or not ours")
        return Unavailable(message)  # locked too long, cancelled, out of disk or connections ...

    async def listen(self, channel: str, until: float) -> None:
        await self.run(b"", f'LISTEN "{channel}"'.encode(), (), until)

    async def notified(self, until: float) -> list[str]:
        """Wait until a notification arrives, at most until `until`; returns the payloads that arrived."""
        try:
            payloads = self._notifications()
            while not payloads and await self._runtime.readable(self, until):
                self._connection.consume_input()
                payloads = self._notifications()
        except (psycopg.Error, OSError) as error:
            raise Unavailable(f"{self._where}: {error}") from error
        return payloads

    def _notifications(self) -> list[str]:
        payloads = []
        while (notification := self._connection.notifies()) is not None:
            payloads.append(notification.extra.decode())
        return payloads

    def interrupt(self) -> None:
        """Shut the socket down, from any thread: the thread that waits for it wakes up and closes the session."""
        with self._lock, contextlib.suppress(OSError, psycopg.Error):  # closed already
            link = socket.socket(fileno=self.fileno())
            try:
                link.shutdown(socket.SHUT_RDWR)
            finally:
                link.detach()

    def close(self) -> None:
        """Close the connection. The server detects that and ends a statement that still runs."""
        with self._lock:
            self._connection.finish()
        self._alive.discard(self)


def _noticed(warnings: list[str], result: PGresult) -> None:
    if result.error_field(DiagnosticField.SEVERITY_NONLOCALIZED) == b"WARNING":
        warnings.append(_text(result.error_field(DiagnosticField.MESSAGE_PRIMARY)))


def _places(conninfo: str, where: str) -> tuple[list[_Place], float]:
    """The servers that an address names, and the longest time that connecting to one of them may take.

    Service files and environment variables contribute options, so libpq itself merges them. An invalid
    target_session_attrs makes it stop after that, before it looks up any name.
    """
    # With a password given here, libpq skips the password file, which the real connection reads anyway.
    text = make_conninfo(conninfo, target_session_attrs=_NO_SUCH_VALUE, password="none")
    asked = pq.PGconn.connect_start(text.encode())
    try:
        if _NO_SUCH_VALUE not in (message := _text(asked.error_message)):
            raise Misconfigured(f"{where}: {message}")
        options = {option.keyword.decode(): (option.val or b"").decode() for option in asked.info}
    finally:
        asked.finish()
    try:
        seconds = float(options["connect_timeout"] or 0)
    except ValueError:
        raise Misconfigured(f"{where}: connect_timeout is a number of seconds") from None
    lists = [options[key].split(",") for key in ("host", "hostaddr", "port")]
    count = max(map(len, lists))
    columns = [values * count if len(values) == 1 else values for values in lists]
    places = [_Place(*each) for each in zip(*columns, strict=True)]
    return places, seconds if seconds > 0 else float("inf")


async def _looked_up(place: _Place, runtime: Runtime, until: float) -> list[_Place]:
    """The addresses of a host. libpq would look them up in this thread, without a deadline."""
    found = await sockets.resolved(place.host, 0, runtime, until)
    addresses = dict.fromkeys(str(address[0]) for *_, address in found)
    return [replace(place, hostaddr=address) for address in addresses]


def _text(message: bytes | str | None) -> str:
    text = message.decode(errors="replace") if isinstance(message, bytes) else message or ""
    return " ".join(text.split())
