"""Calls to a cluster: all go to one member until it fails, then to the next.

Every call demands a member that knows a leader. A member that knows none refuses at once, and the call is retried
until the election is over. Why we use gRPC: record 0021.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence

from fenced.errors import FencedError, Indeterminate, Misconfigured, Misuse, Unavailable, Unsupported
from fenced.net.pool import ConnectionBroken, Pool
from fenced.net.tls import tls_refused
from fenced.stores.etcd.address import EtcdAddress
from fenced.stores.etcd.wire import http2, messages
from fenced.stores.etcd.wire.connection import EtcdConnection, EtcdStream, Failed
from fenced.stores.etcd.wire.http2 import GrpcStatus
from fenced.values.contracts import Runtime, SocketLike

CONNECTIONS_MAX = 8
TRY_SECONDS = 1.5
"""How long one of several members may take to reply before another is asked."""

ELECTION_BACKOFF_SECONDS = 0.05

CANCELLED, UNKNOWN, DEADLINE_EXCEEDED, NOT_FOUND, RESOURCE_EXHAUSTED = 1, 2, 4, 5, 8
ABORTED, INTERNAL, UNAVAILABLE = 10, 13, 14
"""gRPC status codes that a call may end with."""
_UNSURE = (CANCELLED, UNKNOWN, DEADLINE_EXCEEDED, ABORTED, INTERNAL, UNAVAILABLE)
_DISTRUST = ("CERTIFICATE", "UNKNOWN_CA")
"""Texts of TLS errors: one side does not accept the other's certificate."""
_LIMITS = ("request is too large", "larger than max", "too many operations")
"""Texts of errors about requests that the server never takes."""
_TOKEN_OVER = ("invalid auth token", "revision of auth store is old", "revision in header is old")


class LeaseExists(Exception):
    """The lease exists already: an earlier try created it."""


class LeaseGone(Unavailable):
    """The server knows no such lease: nothing happened. Whoever uses its own leases makes a new one and retries."""


class NoSpace(Unavailable):
    """The server's quota is reached: it accepts deletes, reads and keep-alives, and refuses writes.

    Usually it refuses before carrying out the request. A member with less space than the others may refuse afterwards.
    """


class _NotSent(Exception):
    """The request was not carried out. `passing`: the member waits for a leader, and may serve it soon."""

    def __init__(self, why: str, *, passing: bool = False) -> None:
        super().__init__(why)
        self.passing = passing


class EtcdWire:
    """All members of one cluster. `turn` says which of them is asked."""

    def __init__(self, address: EtcdAddress, runtime: Runtime) -> None:
        self.url = address.url
        self._address = address
        self._runtime = runtime
        self._pool: Pool[EtcdConnection] = Pool(
            runtime, self._connect, limit=CONNECTIONS_MAX, where=address.url
        )
        self.broken = 0
        """Counts tries whose outcome is unknown."""
        self.forked()

    def forked(self) -> None:
        """Start without connections; those of a parent process are left as they are."""
        self._pool.forked()
        self._abandoned = False
        self._used: set[EtcdConnection] = set()
        """Connections with a call under way, for `abandon`."""
        self.turn = 0
        """Selects the member that is asked; incremented when that member fails."""
        self.token = ""
        """Our login token at a server that has users; "": log in before the next call."""

    # One call.

    async def call(self, path: str, request: bytes, until: float, *, repeatable: bool = True) -> bytes:
        """The reply. Unavailable: nothing happened. Indeterminate: unknown. LeaseGone: the request's lease is gone."""
        return (await self._anywhere(path, (request,), until, repeatable))[0]

    async def exchange(self, path: str, requests: Sequence[bytes], until: float) -> list[bytes]:
        """The replies to several messages of one call; only for requests that may be repeated."""
        return await self._anywhere(path, requests, until, repeatable=True)

    async def stream(self, path: str, until: float) -> EtcdStream:
        """A stream to the current member, on a dedicated connection."""
        try:
            connection = await self._connect(until)
            try:
                return connection.stream(path, self._runtime, await self._authenticated(connection, until))
            except BaseException:
                connection.close()
                raise
        except (_NotSent, ConnectionBroken, Failed, http2.MalformedFrame, http2.StreamRefused) as error:
            raise Unavailable(f"{self.url}: {error}") from error

    async def _anywhere(
        self, path: str, requests: Sequence[bytes], until: float, repeatable: bool
    ) -> list[bytes]:
        """Try one member after the other. Once a try has broken, every later error becomes Indeterminate."""
        doubt: ConnectionBroken | None = None
        broken = unreached = 0
        while True:
            turn = self.turn
            try:
                return await self._once(path, requests, until)
            except _NotSent as error:
                self._leave(turn)
                unreached += not error.passing
                over = unreached >= len(self._address.members) or self._runtime.now() >= until
                if over:
                    raise self._unavailable(error, doubt) from error
                if error.passing:
                    pause = min(until, self._runtime.now() + ELECTION_BACKOFF_SECONDS)
                    await self._runtime.wait(self._runtime.wakeup(), pause)
            except ConnectionBroken as error:
                self._leave(turn)
                self.broken += 1
                broken += 1
                over = broken > max(1, len(self._address.members) - 1) or self._runtime.now() >= until
                if not repeatable or over:
                    raise Indeterminate(f"{self.url}: {error}") from error
                doubt = error
            except LeaseGone:
                raise  # also after a doubt: whoever uses its own leases reads what happened before it retries
            except FencedError as error:
                raise (error if doubt is None else Indeterminate(f"{doubt}; then: {error}")) from error

    def _unavailable(self, error: _NotSent, doubt: ConnectionBroken | None) -> FencedError:
        if doubt is not None:
            return Indeterminate(f"{self.url}: {doubt}; then: {error}")
        return Unavailable(f"{self.url}: {error}")

    async def _once(self, path: str, requests: Sequence[bytes], until: float) -> list[bytes]:
        if self._runtime.now() >= until:  # earlier steps of the same call have used up its time
            raise _NotSent("the deadline passed before the request was sent")
        if self._abandoned:
            raise _NotSent("this client was dropped")
        connection = await self._pool.take(until)
        # An idle one may lead to a member that has failed since, or may be closed by the server. Found out before
        # the request is sent, that leaves no doubt about the request.
        while connection.turn != self.turn or not connection.is_alive():
            self._pool.drop(connection)
            connection = await self._pool.take(until)
        until, kept = self._limit(until), False
        self._used.add(connection)
        try:
            if self._address.user:
                replies = await self._authorised(connection, path, requests, until)
            else:
                replies = await connection.call(path, requests, until)
            kept = True
        except Failed as error:
            kept = True
            raise _read(error.status, self.url) from error
        except http2.StreamRefused as error:
            raise _NotSent(str(error), passing=True) from error
        finally:
            self._used.discard(connection)
            # After any other error its reply may still come, and the next caller would take it for its own.
            if kept and not connection.closing:
                self._pool.give(connection)
            else:
                self._pool.drop(connection)
        return replies

    async def _authorised(
        self, connection: EtcdConnection, path: str, requests: Sequence[bytes], until: float
    ) -> list[bytes]:
        for last in (False, True):
            try:
                token = await self._authenticated(connection, until)
            except ConnectionBroken as error:
                raise _NotSent(str(error)) from error
            try:
                return await connection.call(path, requests, until, token)
            except Failed as error:  # the token may have expired: log in again, once
                if last or not any(sign in error.status.text for sign in _TOKEN_OVER):
                    raise
                self.distrust(token)
        raise AssertionError  # the second round returns or raises

    async def _authenticated(self, connection: EtcdConnection, until: float) -> str:
        """Our login token; logs in if one is needed and there is none."""
        token = self.token
        if self._address.user and not token:
            request = messages.authenticate(self._address.user, self._address.password)
            (reply,) = await connection.call(messages.AUTHENTICATE, (request,), until)
            token = self.token = messages.text_of(reply, 2)
        return token

    def distrust(self, token: str) -> None:
        """The server no longer accepts this token: log in before the next call."""
        if self.token == token:
            self.token = ""

    def _limit(self, until: float) -> float:
        """The deadline of one try. With several members it leaves time to ask another one."""
        if len(self._address.members) == 1:
            return until
        now = self._runtime.now()
        return now + min((until - now) / 2, TRY_SECONDS)

    # Connections.

    async def _connect(self, until: float) -> EtcdConnection:
        turn = self.turn
        host, port = self._address.members[turn % len(self._address.members)]
        where = self._address.targets[turn % len(self._address.targets)]
        until = self._limit(until)
        made: SocketLike | EtcdConnection | None = None
        try:
            made = link = await self._runtime.connect((host, port), until, self._address.context)
            made = connection = EtcdConnection(link, where, self._runtime, turn)
            if self._address.tls:
                await connection.greet(until)
        except BaseException as error:
            if made is not None:
                made.close()
            if isinstance(error, OSError) and (refused := tls_refused(error, where)) is not None:
                raise refused from error
            if isinstance(error, ssl.SSLError) and any(sign in str(error) for sign in _DISTRUST):
                raise Misconfigured(f"{where}: {error}") from error
            if isinstance(error, OSError):
                raise _NotSent(f"{where}: {error}") from error
            raise
        return connection

    def _leave(self, turn: int) -> None:
        """Switch to the next member, unless another caller has already done so."""
        if self.turn == turn:
            self.turn = turn + 1
            self._pool.close_idle()

    def close(self) -> None:
        """Close all connections; one that is in use is closed when its call ends."""
        self._pool.close()

    def abandon(self) -> None:
        """Close all connections; one that is in use is shut down here and closed by its user. Takes no lock."""
        self._abandoned = True
        self._pool.abandon()
        for connection in list(self._used):
            connection.interrupt()


def _read(status: GrpcStatus, url: str) -> Exception:
    """The exception for a failed call, which says whether its request was carried out."""
    code, text = status
    if code == UNAVAILABLE and "etcdserver: no leader" in text:
        return _NotSent(text, passing=True)
    if code == NOT_FOUND and "lease not found" in text:
        return LeaseGone(text)
    if "lease already exists" in text:
        return LeaseExists(text)
    if any(sign in text for sign in _LIMITS):
        return Unsupported(f"{url}: {text}; nothing was written")
    if "duplicate key" in text:
        return Misuse(f"{url}: {text}; nothing was written")
    if code == RESOURCE_EXHAUSTED:
        kind = NoSpace if "space exceeded" in text else Unavailable
        return kind(f"{url}: {text}")
    if code in _UNSURE:
        return ConnectionBroken(text)
    return Misconfigured(f"{url}: {text}")
