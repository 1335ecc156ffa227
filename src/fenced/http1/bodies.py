"""The bodies of HTTP/1.1 messages: of a length, in chunks, or as long as the connection. Pure."""

from __future__ import annotations

import re
from typing import Protocol

from fenced.http1.heads import CHUNKED, BadMessage

Data = bytes | bytearray | memoryview
LAST_CHUNK = b"0\r\n\r\n"
COPIED_BYTES = 4096
"""A slice of so much is cheaper as a copy than as a view."""
HELD_BYTES_MAX = 4096
"""How long the line before a chunk may be, the trailers, and all extensions of chunks together."""

_SIZE = rb"([0-9A-Fa-f]{1,15})([ \t]*+;[\t\x20-\x7e\x80-\xff]*+)?\r\n"
_FIRST_SIZE = re.compile(_SIZE)
_NEXT_SIZE = re.compile(rb"\r\n" + _SIZE)
_TRAILERS = re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t\x20-\x7e\x80-\xff]*+\r\n)*\r\n")


def after(data: bytes, start: int) -> Data:
    """What follows `start`."""
    return data[start:] if len(data) - start <= COPIED_BYTES else memoryview(data)[start:]


def chunk(data: Data) -> tuple[Data, ...]:
    """One chunk, in parts if it is long. Not for empty data, which would end the body."""
    parts = b"%x\r\n" % len(data), data, b"\r\n"
    return (b"".join(parts),) if len(data) <= COPIED_BYTES else parts


class Body(Protocol):
    """Decodes one body, which comes in any pieces."""

    def feed(self, data: Data) -> tuple[list[Data], Data | None]:
        """The pieces of the body in `data`; and what follows the body, None if that is not complete. Or BadMessage."""


def body_of(length: int) -> Body:
    """For the length that a head says: bytes, CHUNKED or UNTIL_CLOSE."""
    return Chunks() if length == CHUNKED else Sized(length)


class Sized:
    """A body with a length; a negative one is as long as the connection."""

    __slots__ = ("_left",)

    def __init__(self, length: int) -> None:
        self._left = length

    def feed(self, data: Data) -> tuple[list[Data], Data | None]:
        if self._left < 0 or len(data) < self._left:
            if self._left > 0:
                self._left -= len(data)
            return [data], None
        left, self._left = self._left, 0
        return [data[:left]], data[left:]


class Chunks:
    """A body in chunks. Extensions and trailers are read, and dropped."""

    __slots__ = ("_extensions", "_held", "_left", "_line")

    def __init__(self) -> None:
        self._held = b""
        """What has come of a line that is not complete."""
        self._left = 0
        """Of the current chunk."""
        self._line = _FIRST_SIZE
        """What comes after the chunk."""
        self._extensions = 0
        """How many bytes of them have come."""

    def feed(self, data: Data) -> tuple[list[Data], Data | None]:
        if self._held:
            data, self._held = self._held + data, b""
        pieces: list[Data] = []
        at = 0
        while True:
            if self._left:
                piece = data[at : at + self._left]
                if piece:
                    _add(pieces, piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    return pieces, None
            found = self._line.match(data, at)
            if found is None:
                self._hold(bytes(data[at : at + HELD_BYTES_MAX + 1]))
                return pieces, None
            at = found.end()
            if self._line is _TRAILERS:
                return pieces, data[at:]
            self._extensions += len(found[2] or b"")
            if self._extensions > HELD_BYTES_MAX:
                raise BadMessage(400, "a body with more extensions than chunks")
            self._left = int(found[1], 16)
            self._line = _NEXT_SIZE if self._left else _TRAILERS

    def _hold(self, data: bytes) -> None:
        """Wait for the rest of a line, unless this cannot become one."""
        if self._line is _TRAILERS:
            bad = b"\r\n\r\n" in data
        else:
            start = 2 if self._line is _NEXT_SIZE else 0
            bad = b"\n" in data[start:] or not b"\r\n".startswith(data[:start])
        if bad or len(data) > HELD_BYTES_MAX:
            raise BadMessage(400, "a body that is not in chunks")
        self._held = data


def _add(pieces: list[Data], piece: Data) -> None:
    """Add a piece. Short ones become one: as an object of its own, a byte costs a hundred bytes of memory."""
    if len(piece) > COPIED_BYTES:
        pieces.append(piece)
    elif pieces and isinstance(last := pieces[-1], bytearray):
        last += piece
    else:
        pieces.append(bytearray(piece))
