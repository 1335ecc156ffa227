"""Replies of the Redis protocol (RESP2), read from bytes."""

from __future__ import annotations

from typing import Any

from fenced.wire.pool import ConnectionBroken


class Incomplete(Exception):
    """More bytes are needed."""


class ErrorReply(str):
    """What the server refuses, in its own words; the first of them is a code."""

    __slots__ = ()

    @property
    def code(self) -> str:
        return self.partition(" ")[0]


def parse(data: bytes, at: int) -> tuple[Any, int]:
    """The reply that begins at `at`, and where it ends."""
    end = data.find(b"\r\n", at)
    if end < 0:
        raise Incomplete
    kind, line, at = data[at : at + 1], data[at + 1 : end], end + 2
    if kind == b":":
        return int(line), at
    if kind == b"$":
        end = at + int(line)
        if line == b"-1":
            return None, at
        if len(data) < end + 2:
            raise Incomplete
        return data[at:end], end + 2
    if kind == b"*":
        items = []
        for _ in range(int(line)):
            item, at = parse(data, at)
            items.append(item)
        return None if line == b"-1" else items, at
    if kind == b"+":
        return line, at
    if kind == b"-":
        return ErrorReply(line.decode("utf-8", "replace")), at
    raise ConnectionBroken("this is not a Redis server: it answers in another protocol")
