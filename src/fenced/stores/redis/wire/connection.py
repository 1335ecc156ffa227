"""One connection to the server, blocking or asyncio: a request out, one reply in, at most until a deadline.

The pool decides whether a request may be sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fenced.errors import FencedError, Unavailable
from fenced.net.pool import ConnectionBroken
from fenced.runtime.sockets import Late
from fenced.stores.redis.address import RedisAddress
from fenced.stores.redis.wire.finding import REDIRECTS_MAX, Route, read_reply, redirection
from fenced.stores.redis.wire.refusals import connect_failed, login_refused, refused
from fenced.stores.redis.wire.resp import ErrorReply, Incomplete, RespReader, command
from fenced.values.contracts import ByteStream, Endpoint, Runtime, SocketLike

_NO_PRIMARY = ("READONLY", "MASTERDOWN", "LOADING", "CLUSTERDOWN")
"""Refusals after which another server may be the primary."""
_ASKING = command("ASKING")


class SettingsCheck(Protocol):
    """Requests that every new connection sends together with its login, and a judgement of the replies."""

    def requests(self) -> Sequence[bytes]: ...
    def objection(self, replies: Sequence[Any]) -> FencedError | None:
        """Why no token may be minted on this connection; None: it may."""


class RedisWire:
    """Takes one request at a time. If its connection was lost, it reconnects before the next request."""

    def __init__(
        self, address: RedisAddress, route: Route, runtime: Runtime, check: SettingsCheck | None = None
    ) -> None:
        self._address = address
        self._route = route
        self._endpoint: Endpoint = ""
        self._asking = False
        self._where = address.url
        self._runtime = runtime
        self._check = check
        self._stream: ByteStream | None = None
        self._reader = RespReader()
        self.objection: FencedError | None = None
        """Why no token may be minted on this connection; None: it may."""

    async def connect(self, until: float) -> ByteStream:
        """Connect. Unavailable or Misconfigured if that fails; then no request was sent."""
        return await self._connect_to(await self._route.endpoint(until), until)

    async def _connect_to(self, endpoint: Endpoint, until: float) -> ByteStream:
        self.close()
        self._endpoint = endpoint
        made: SocketLike | ByteStream | None = None
        try:
            made = link = await self._runtime.connect(endpoint, until, self._address.context)
            made = stream = self._runtime.stream(link)
            await self._introduce(stream, until)
        except BaseException as error:
            if made is not None:
                made.close()
            self._route.forget(endpoint)
            if isinstance(error, OSError | ConnectionBroken | ValueError):
                raise connect_failed(error, self._where) from error
            raise
        self._stream = stream
        return stream

    async def _introduce(self, stream: ByteStream, until: float) -> None:
        """Authenticate, select the database, check that it is a primary, read the settings: all in one round trip."""
        address = self._address
        words: list[tuple[str, ...]] = []
        if address.login:
            words.append(("AUTH", *address.login))
        if address.db:
            words.append(("SELECT", str(address.db)))
        if address.client_name:
            words.append(("CLIENT", "SETNAME", address.client_name))
        if self._route.found:
            words.append(("ROLE",))
        extra = list(self._check.requests()) if self._check is not None else []
        requests = [command(*each) for each in words] + extra
        if not requests:
            return
        replies = await self._replies(stream, requests, until)
        for word, reply in zip(words, replies, strict=False):
            if isinstance(reply, ErrorReply):
                raise login_refused(reply, self._where) if word[0] == "AUTH" else refused(reply, self._where)
            if word[0] == "ROLE" and reply[0] != b"master":
                raise Unavailable(
                    f"{self._where}: {self._endpoint} was named as the primary, but it is not (yet) a primary"
                )
        if self._check is not None and extra:
            self.objection = self._check.objection(replies[len(words) :])

    async def _replies(self, stream: ByteStream, requests: Sequence[bytes], until: float) -> list[Any]:
        await stream.send(b"".join(requests), until)
        return [await read_reply(stream, self._reader, until) for _ in requests]

    async def pipeline(self, requests: Sequence[bytes], until: float) -> list[Any]:
        """The replies to several requests, in one round trip."""
        stream = self._stream or await self.connect(until)
        try:
            return await self._replies(stream, requests, until)
        except (OSError, ValueError) as error:
            raise self._broken(error) from error

    async def exchange(self, request: bytes, until: float, *, mints: bool = False) -> Any:
        """The reply; a refusal of the server is an ErrorReply. ConnectionBroken: it may have been carried out.

        A request that `mints` tokens is not sent if there is an objection to this connection. A node of a cluster that
        redirects us has done nothing, so the same request goes to the node that it names, and to no other after that.
        """
        for _ in range(REDIRECTS_MAX):
            reply = await self._exchange_once(request, until, mints)
            redirected = redirection(reply, self._endpoint) if self._route.found else None
            if redirected is None:
                break
            target, only_now = redirected
            if not only_now:
                self._route.moved(target)
            await self._connect_to(target, until)
            self._asking = only_now
        else:
            raise Unavailable(
                f"{self._where}: its nodes send us round in a circle; the cluster is being changed"
            )
        if isinstance(reply, ErrorReply) and reply.code in _NO_PRIMARY:
            self.misrouted()
        return reply

    async def _exchange_once(self, request: bytes, until: float, mints: bool) -> Any:
        stream = self._stream or await self.connect(until)
        if mints and self.objection is not None:
            objection = self.objection
            self.close()  # the next connection is checked again
            raise objection
        if self._reader.has_bytes:  # they would be taken for the reply to this request
            raise ConnectionBroken(f"{self._where}: it sent more than one reply to a request")
        try:
            if self._asking:
                await stream.send(_ASKING + request, until)
                await read_reply(stream, self._reader, until)  # the reply to ASKING
                return await read_reply(stream, self._reader, until)
            await stream.send(request, until)
            self._reader.feed(await stream.receive(until))
            try:
                return self._reader.next()  # a reply nearly always comes in one piece
            except Incomplete:
                return await read_reply(stream, self._reader, until)
        except (OSError, ValueError) as error:  # no reply in time, connection closed, or another protocol
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> ConnectionBroken:
        self._route.forget(self._endpoint)
        return ConnectionBroken(f"{self._where}: {error}")

    def close_if_ended(self) -> None:
        """Notice that the server has ended an idle connection, for a request that must not be sent twice."""
        if self._stream is not None:
            try:
                # Bytes that nobody asked for: do not trust the rest.
                ended = bool(self._stream.read_available())
            except OSError:
                ended = True
            if ended:
                self.close()

    def misrouted(self) -> None:
        """This server is no primary: look for the primary again before the next request."""
        self._route.forget(self._endpoint)
        if self._route.found:
            self.close()

    async def send(self, request: bytes, until: float) -> None:
        """Send a request whose reply arrives as a message (SUBSCRIBE, PING)."""
        stream = self._stream
        if stream is None:
            raise ConnectionBroken(f"{self._where}: not connected")
        try:
            await stream.send(request, until)
        except OSError as error:
            raise ConnectionBroken(f"{self._where}: {error}") from error

    async def next_message(self, until: float) -> Any:
        """The next message that the server pushes, or None if none arrives until `until`."""
        stream = self._stream
        if stream is None:
            raise ConnectionBroken(f"{self._where}: not connected")
        try:
            return await read_reply(stream, self._reader, until)
        except Late:
            return None
        except (OSError, ValueError) as error:
            raise self._broken(error) from error

    def close(self) -> None:
        stream, self._stream = self._stream, None
        self._reader, self.objection, self._asking = RespReader(), None, False
        if stream is not None:
            stream.close()

    def interrupt(self) -> None:
        """Shut the socket down: a thread that waits for the server wakes and finds it closed. Safe from any thread."""
        if (stream := self._stream) is not None:
            stream.interrupt()
