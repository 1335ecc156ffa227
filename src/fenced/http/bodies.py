"""The body of a request, as far as it was read: a kept reply is bound to it. No framework."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from typing import Any

BODY_BYTES_MAX = 65_536
"""How long the body of a request may be whose reply is kept."""
TOO_LONG = "too long"
READ_BYTES = 16_384


class RememberedBody:
    """Remembers what is read of a body, up to BODY_BYTES_MAX. A subclass knows how it is read."""

    def __init__(self) -> None:
        self.ended = False
        """Everything was read."""
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > BODY_BYTES_MAX:
            self._parts.clear()
        elif data:
            self._parts.append(bytes(data))

    def digest(self) -> str | None:
        """The digest of the whole body, or TOO_LONG; None if it was not read to its end."""
        if self._size > BODY_BYTES_MAX:
            return TOO_LONG
        if not self.ended:
            return None
        return hashlib.sha256(b"".join(self._parts)).hexdigest()

    async def read_digest(self) -> str | None:
        """Read what the program has not read, unless that is too long; then the digest."""
        while not self.ended and self._size <= BODY_BYTES_MAX and await self.read_more():
            pass
        return self.digest()

    async def read_more(self) -> bool:
        """Read a part. False: no more will come."""
        raise NotImplementedError


class AsgiBody(RememberedBody):
    """The body of a request to an ASGI app, whose program gets `receive`."""

    def __init__(
        self,
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        headers: Iterable[tuple[bytes, bytes]],
        version: str,
    ) -> None:
        super().__init__()
        self._receive = receive
        self._headers = headers
        self._version = version

    async def receive(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        if message["type"] == "http.request":
            self.add(message.get("body", b""))
            self.ended = self.ended or not message.get("more_body", False)
        return message

    def digest(self) -> str | None:
        if not self._size and not self.ended:
            lengths = [
                value for name, value in self._headers if name in (b"content-length", b"transfer-encoding")
            ]
            # Over HTTP/2 a body without a length has no header that says so.
            self.ended = lengths == [b"0"] or (not lengths and self._version.startswith("1"))
        return super().digest()

    async def read_more(self) -> bool:
        return bool((await self.receive())["type"] == "http.request")


class WsgiBody(RememberedBody):
    """The body of a request to a WSGI app, whose program reads this instead of `wsgi.input`."""

    def __init__(self, environ: MutableMapping[str, Any]) -> None:
        super().__init__()
        self._stream = environ.get("wsgi.input")
        length = environ.get("CONTENT_LENGTH") or ""
        self._left: int | None = int(length) if length.isdecimal() else 0
        """None: until the end of the stream."""
        if not length and environ.get("wsgi.input_terminated"):
            self._left = None
        self.ended = self._left == 0 or self._stream is None

    def _took(self, data: bytes, *, at_end: bool) -> bytes:
        self.add(data)
        if self._left is not None:
            self._left -= len(data)
            at_end = at_end or self._left <= 0
        self.ended = self.ended or at_end
        return data

    def read(self, size: int | None = None) -> bytes:
        if self._stream is None:
            return b""
        whole = size is None or size < 0
        data: bytes = self._stream.read() if whole else self._stream.read(size)
        return self._took(data, at_end=whole or (not data and bool(size)))

    def readline(self, size: int | None = None) -> bytes:
        if self._stream is None:
            return b""
        data: bytes = self._stream.readline() if size is None else self._stream.readline(size)
        return self._took(data, at_end=not data and size != 0)

    def readlines(self, hint: int | None = None) -> list[bytes]:
        return list(self)

    def __iter__(self) -> Iterator[bytes]:
        while line := self.readline():
            yield line

    async def read_more(self) -> bool:
        left = READ_BYTES if self._left is None else self._left
        return bool(self.read(min(READ_BYTES, left)))
