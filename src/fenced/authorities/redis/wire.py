"""One connection to the server, in either colour: bytes out, one reply in, never later than a deadline.

The pool decides whether a request may be sent again.
"""

from __future__ import annotations

import contextlib
from typing import Any

from fenced.authorities.redis import probe
from fenced.authorities.redis.address import RedisAddress
from fenced.authorities.redis.replies import connect_failed, not_let_in, refused, weakened
from fenced.authorities.redis.scripts import command
from fenced.contracts import ByteStream, Runtime, SocketLike
from fenced.runtime.sockets import Late
from fenced.wire.pool import ConnectionBroken
from fenced.wire.resp import ErrorReply, Incomplete, parse


class Promise:
    """`given`: `open` found settings without doubts. Then each new connection reads the settings again."""

    def __init__(self) -> None:
        self.given = False


class RedisWire:
    """Takes one request at a time. If its connection was lost, it reconnects before the next request."""

    def __init__(self, address: RedisAddress, runtime: Runtime, promise: Promise) -> None:
        self._address = address
        self._where = address.url
        self._runtime = runtime
        self._promise = promise
        self._line: ByteStream | None = None
        self._doubts: tuple[str, ...] = ()
        self._said = b""

    async def connect(self, until: float) -> ByteStream:
        """Connect. Unavailable or Misconfigured if that fails; no request was sent then."""
        self.close()
        address = self._address
        made: SocketLike | ByteStream | None = None
        try:
            endpoint = address.path or (address.host, address.port)
            made = link = await self._runtime.connect(endpoint, until, address.context)
            made = line = self._runtime.stream(link)
            await self._introduce(line, until)
        except BaseException as error:
            if made is not None:
                made.close()
            if isinstance(error, OSError | ConnectionBroken | ValueError):
                raise connect_failed(error, self._where) from error
            raise
        self._line = line
        return line

    async def _introduce(self, line: ByteStream, until: float) -> None:
        """Authenticate, select the database and read the settings, all in one round trip."""
        address = self._address
        words: list[tuple[str, ...]] = []
        if address.user or address.password:
            words.append(("AUTH", *([address.user] if address.user else []), address.password))
        if address.db:
            words.append(("SELECT", str(address.db)))
        if address.client_name:
            words.append(("CLIENT", "SETNAME", address.client_name))
        look = self._promise.given
        requests = [command(*each) for each in words] + (list(probe.REQUESTS) if look else [])
        if not requests:
            return
        replies = await self._replies(line, requests, until)
        for word, reply in zip(words, replies, strict=False):
            if isinstance(reply, ErrorReply):
                raise not_let_in(reply, self._where) if word[0] == "AUTH" else refused(reply, self._where)
        self._doubts = probe.doubts(replies[len(words) :], self._where) if look else ()

    async def _replies(self, line: ByteStream, requests: list[bytes], until: float) -> list[Any]:
        await line.send(b"".join(requests), until)
        replies: list[Any] = []
        data, at = b"", 0
        while len(replies) < len(requests):
            try:
                reply, at = parse(data, at)
                replies.append(reply)
            except Incomplete:
                data += await line.receive(until)
        return replies

    async def look(self, until: float) -> tuple[str, ...]:
        """How tokens could repeat on this server, by its current settings."""
        line = self._line or await self.connect(until)
        try:
            replies = await self._replies(line, list(probe.REQUESTS), until)
        except (OSError, ValueError) as error:
            raise ConnectionBroken(f"{self._where}: {error}") from error
        self._doubts = ()  # the caller judges what it gets; the next connection reads the settings again
        return probe.doubts(replies, self._where)

    async def exchange(self, request: bytes, until: float, *, mints: bool = False) -> Any:
        """The reply; a refusal of the server is an ErrorReply. Broken: the request may have been carried out.

        A request that `mints` tokens is not sent if the settings were without doubts at opening and no longer are.
        """
        line = self._line or await self.connect(until)
        if mints and self._doubts:
            self.close()  # the next connection reads the settings again
            raise weakened(self._doubts, self._where)
        try:
            await line.send(request, until)
            data = await line.receive(until)
            while True:
                try:
                    return parse(data, 0)[0]
                except Incomplete:
                    data += await line.receive(until)
        except (OSError, ValueError) as error:  # no answer in time, connection closed, or another protocol
            raise ConnectionBroken(f"{self._where}: {error}") from error

    async def heard(self, until: float) -> Any:
        """The next message that the server pushes, or None if none comes until `until`."""
        line = self._line
        if line is None:
            raise ConnectionBroken(f"{self._where}: not connected")
        try:
            while True:
                with contextlib.suppress(Incomplete):
                    message, end = parse(self._said, 0)
                    self._said = self._said[end:]
                    return message
                self._said += await line.receive(until)
        except Late:
            return None
        except (OSError, ValueError) as error:
            raise ConnectionBroken(f"{self._where}: {error}") from error

    def close(self) -> None:
        line, self._line = self._line, None
        self._said = b""
        if line is not None:
            line.close()

    def interrupt(self) -> None:
        """Shut the socket down: a thread that waits for the server wakes and finds it closed. Safe from any thread."""
        if (line := self._line) is not None:
            line.interrupt()
