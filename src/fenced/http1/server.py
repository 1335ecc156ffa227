"""The server: where it listens, the sweep that ends slow connections, certificates that are replaced, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime

from fenced.errors import Misconfigured
from fenced.http1.connections import ServerConnection
from fenced.http1.exchanges import Handler
from fenced.http1.heads import Heads
from fenced.http1.limits import HttpLimits, Ticks
from fenced.runtime.certificates import ends_at, load_chain, server_context, why_not_now

GONE_SECONDS = 30
"""After how long a peer that acknowledges nothing is taken for gone."""
SOCKET_MODE = 0o600
BACKLOG = 2048
STOP_LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class ListenOptions:
    """Where a server listens."""

    address: tuple[str, int] | None = None
    socket: str | None = None
    """The path of a Unix socket; the owner of its file may connect."""
    certificate: tuple[str, str] | None = None
    """The files of a chain of certificates and of its key, for TLS on the address."""
    client_ca: str | None = None
    """Only clients with a certificate of this CA may connect to the address."""
    any_host: bool = False
    """Answer requests for any host, also where only loopback and no credential protects the service."""


class HttpServer:
    """Listens, and gives each request to the handler. Used in the loop's thread only."""

    def __init__(self, handler: Handler, options: ListenOptions, limits: HttpLimits) -> None:
        self.handler = handler
        self.limits = limits
        self.ticks = Ticks(limits)
        self.heads = {False: Heads(), True: Heads()}
        """Those of Unix sockets (True) are separate: a handler may note on a head who sends it."""
        self.connections: dict[ServerConnection, None] = {}
        """In the order in which they came, so that a seed makes one world."""
        self.answered = 0
        """How many requests were answered."""
        self.stopping = False
        self.date = b""
        """The line of the replies of this second."""
        self._options = options
        files = options.certificate
        self._context = None if files is None else server_context(*files, options.client_ca)
        if self._context is not None:
            self._context.set_alpn_protocols(["http/1.1"])
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.Task[None] | None = None
        self.note_time()

    async def start(self, sockets: list[socket.socket] | None = None) -> list[socket.socket]:
        """Accept connections from now on; returns the sockets. Misconfigured if it cannot listen."""
        sockets = listening(self._options) if sockets is None else sockets
        loop = asyncio.get_running_loop()
        for each in sockets:
            context = None if each.family == socket.AF_UNIX else self._context
            self._servers.append(
                await loop.create_server(self.connection, sock=each, ssl=context, backlog=BACKLOG)
            )
        self._sweeper = loop.create_task(self._sweeping())
        return sockets

    def connection(self) -> ServerConnection:
        """One that is not made yet: a transport does that."""
        return ServerConnection(self)

    async def _sweeping(self) -> None:
        while True:
            await asyncio.sleep(self.ticks.seconds)
            self.sweep()

    def sweep(self) -> None:
        """End the connections whose time is over."""
        self.ticks.now += 1
        self.note_time()
        for connection in list(self.connections):
            if connection.until < self.ticks.now:
                connection.is_late()

    def note_time(self) -> None:
        self.date = f"date: {format_datetime(datetime.now(UTC), usegmt=True)}\r\n".encode()

    # Certificates

    def reload(self) -> bool:
        """Read the certificate again, if there is one, for new connections. If that fails, the old one stays in use."""
        files, context = self._options.certificate, self._context
        if files is None or context is None:
            return False
        # A failed attempt would leave the new certificate without a key, so the files are tried elsewhere first.
        load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *files)
        load_chain(context, *files)
        return True

    def why_not_now(self) -> str | None:
        """Why clients refuse the certificate, which may be replaced while the server runs; None if they do not."""
        files, context = self._options.certificate, self._context
        why = None if files is None or context is None else why_not_now(context, files[0])
        return (
            None if why is None or files is None else f"the certificate {files[0]} {why}: clients refuse it"
        )

    def certificate(self) -> tuple[str, float] | None:
        """The file of the certificate, and the seconds until it ends; None: there is none."""
        files, context = self._options.certificate, self._context
        at = None if files is None or context is None else ends_at(context, files[0])
        return None if at is None or files is None else (files[0], at - datetime.now(UTC).timestamp())

    # The end

    def close_listeners(self) -> None:
        """Accept nothing more. Answers say from now on that their connections end."""
        self.stopping = True
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.close_if_idle()

    async def stop(self, grace: float, more: Callable[[], bool] = lambda: False) -> None:
        """Accept nothing more, and answer what is under way, or what `more` says, for so many seconds at most."""
        self.close_listeners()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                # Once in the life of a server, so it need not be notified.
                while more() or any(connection.is_busy for connection in self.connections):  # noqa: ASYNC110
                    await asyncio.sleep(STOP_LOOK_SECONDS)
        await self.end()

    async def end(self) -> None:
        """End all connections."""
        for connection in list(self.connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await asyncio.sleep(0)  # the transports tell their connections


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """That of uvloop, if it is installed: a request takes less CPU."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def listening(options: ListenOptions) -> list[socket.socket]:
    """The sockets of these options: the kernel accepts connections from now on. Misconfigured if it cannot."""
    made: list[socket.socket] = []
    try:
        if options.address is not None:
            host, port = options.address
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            made.append(socket.socket(family, socket.SOCK_STREAM))
            made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _notice_gone_peers(made[-1])
            made[-1].bind((host, port))
        if options.socket is not None:
            _remove_stale(options.socket)
            made.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            made[-1].bind(options.socket)
            os.chmod(options.socket, SOCKET_MODE)
        for each in made:
            each.listen(BACKLOG)
    except OSError as error:
        for each in made:
            each.close()
        where = options.socket if made and made[-1].family == socket.AF_UNIX else _address_of(options)
        raise Misconfigured(f"cannot listen on {where}: {error.strerror or error}") from error
    return made


def _address_of(options: ListenOptions) -> str:
    host, port = options.address or ("", 0)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _notice_gone_peers(listener: socket.socket) -> None:
    """End connections whose peer has vanished without a word. The accepted sockets inherit these options."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, GONE_SECONDS)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, GONE_SECONDS // 3)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_SECONDS * 1000)


def _remove_stale(path: str) -> None:
    """Remove the socket file of an instance that has ended. One that still listens keeps it: binding then fails."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
