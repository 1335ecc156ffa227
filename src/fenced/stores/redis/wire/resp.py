"""The Redis protocol (RESP2): requests to bytes, replies from bytes. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LINE_BYTES_MAX = 2**16
"""Redis sends no longer line: an error or a status is a sentence, a length is a number."""
BULK_BYTES_MAX = 2**29
"""The longest value that Redis stores."""
REPLY_BYTES_MAX = 2**26
ELEMENTS_MAX = 2**20
"""Of one reply. A survey of many names with long queues is the largest of ours."""
DEPTH_MAX = 32

_BULK, _ARRAY, _NUMBER, _STATUS, _ERROR = b"$*:+-"


class Incomplete(Exception):
    """More bytes are needed."""


class MalformedResp(ValueError):
    """These bytes are not from a Redis server."""


class ErrorReply(str):
    """An error reply: the server's text, whose first word is a code."""

    __slots__ = ()

    @property
    def code(self) -> str:
        return self.partition(" ")[0]


# Requests.


def bulks(words: Iterable[str | bytes | int]) -> bytes:
    """The arguments of a request."""
    raw = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in raw])


def command(*words: str | bytes | int) -> bytes:
    return b"*%d\r\n%b" % (len(words), bulks(words))


# Replies.


class RespReader:
    """Parses replies from bytes that arrive in any pieces. No byte is read twice, except in an unfinished line."""

    def __init__(self) -> None:
        self._data: bytes | bytearray = b""
        self._at = 0
        self._arrays: list[tuple[list[Any], int]] = []
        """Unfinished arrays, from the outermost, each with the number of items that it will have."""
        self._bytes = self._elements = 0
        """Of the reply that is not complete yet: received, and finished."""

    def feed(self, data: bytes) -> None:
        if self._at == len(self._data):
            self._data = data  # as it is: nearly all replies come in one piece
        else:
            # A bytearray grows without being copied each time, so a long reply in many pieces costs linear time.
            if isinstance(self._data, bytes):
                self._data = bytearray(self._data)
            del self._data[: self._at]
            self._data += data
        self._at = 0
        self._bytes += len(data)

    @property
    def has_bytes(self) -> bool:
        """Whether there are bytes that `next` has not returned as a reply."""
        return len(self._data) > self._at or bool(self._arrays)

    def next(self) -> Any:
        """The next reply. Raises Incomplete if more bytes are needed: feed them and call again."""
        while True:
            try:
                value = self._element()
            except Incomplete:
                if self._bytes > REPLY_BYTES_MAX:
                    raise MalformedResp(f"a reply of more than {REPLY_BYTES_MAX} bytes") from None
                raise
            self._elements += 1
            if self._elements > ELEMENTS_MAX:
                raise MalformedResp(f"a reply of more than {ELEMENTS_MAX} elements")
            if value is _OPENED:
                continue
            while self._arrays:
                items, count = self._arrays[-1]
                items.append(value)
                if len(items) < count:
                    break
                self._arrays.pop()
                value = items
            else:
                self._elements, self._bytes = 0, len(self._data) - self._at
                return value

    def _element(self) -> Any:
        """The next value that is no array, or _OPENED: an array begins, and its items follow."""
        data, at = self._data, self._at
        end = data.find(b"\r\n", at)
        if end < 0 or end - at > LINE_BYTES_MAX:
            if len(data) - at > LINE_BYTES_MAX:
                raise MalformedResp("this is not a Redis server: it sends a line without an end")
            raise Incomplete
        kind = data[at]
        value: Any
        if kind == _BULK:
            return self._bulk(_count(data[at + 1 : end]), end + 2)
        if kind == _NUMBER:
            value = _number(data[at + 1 : end])
        elif kind == _ARRAY:
            value = self._array(_count(data[at + 1 : end]))
        elif kind == _STATUS:
            value = bytes(data[at + 1 : end])
        elif kind == _ERROR:
            value = ErrorReply(data[at + 1 : end].decode("utf-8", "replace"))
        else:
            raise MalformedResp("this is not a Redis server: it answers in another protocol")
        self._at = end + 2
        return value

    def _bulk(self, size: int, at: int) -> bytes | None:
        if size < 0:
            self._at = at
            return None
        data, end = self._data, at + size
        if len(data) < end + 2:
            raise Incomplete
        if data[end : end + 2] != b"\r\n":
            raise MalformedResp("this is not a Redis server: a value has another length than it says")
        self._at = end + 2
        return bytes(data[at:end])

    def _array(self, count: int) -> Any:
        if count <= 0:
            return None if count < 0 else []
        if len(self._arrays) >= DEPTH_MAX:
            raise MalformedResp("this is not a Redis server: its replies have no end")
        self._arrays.append(([], count))
        return _OPENED


_OPENED = object()


def _number(line: bytes | bytearray) -> int:
    try:
        return int(line)
    except ValueError:
        raise MalformedResp("this is not a Redis server: a number that is none") from None


def _count(line: bytes | bytearray) -> int:
    """A length; -1 stands for nil."""
    count = _number(line)
    if not -1 <= count <= BULK_BYTES_MAX:
        raise MalformedResp("this is not a Redis server: a length that cannot be")
    return count
