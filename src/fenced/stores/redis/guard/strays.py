"""Marks and values that were not written by the guard, as far as the server shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fenced.stores.redis.guard.marks import RedisMarks, mark_in
from fenced.stores.redis.wire.resp import ErrorReply

LOOKED_AT = 1000
"""How many names are compared: those with the highest tokens."""


async def strays(marks: RedisMarks) -> tuple[str, ...]:
    """One sentence for each name whose mark or value does not fit what the guard has written."""
    tokens = await _newest(marks)
    if not tokens:
        return ()
    keys = [marks.key("mark", name) for name in tokens]
    values = [("HMGET", marks.key("value", name), "value", "version") for name in tokens]
    (found, *hashes) = await marks.channel.ask([("MGET", *keys), *values], marks.key("config"))
    if isinstance(found, ErrorReply):
        raise marks.channel.refused(found)
    rows = zip(tokens.items(), found, hashes, strict=True)
    return tuple(says for (name, token), mark, value in rows for says in _about(name, token, mark, value))


async def _newest(marks: RedisMarks) -> dict[str, int]:
    """The names with the highest tokens, from the set that the guard keeps beside the marks."""
    question = ("ZRANGE", marks.key("tokens"), -LOOKED_AT, -1, "WITHSCORES")
    (flat,) = await marks.channel.ask([question], marks.key("config"))
    if isinstance(flat, ErrorReply):
        raise marks.channel.refused(flat)
    if flat and isinstance(flat[0], list | tuple):  # RESP3 nests pairs
        flat = [item for pair in flat for item in pair]
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return {_text(name): int(float(token)) for name, token in pairs}


def _about(name: str, token: int, mark: Any, value: Any) -> Iterator[str]:
    if mark is None:
        yield f"the mark of {name} was deleted; token {token} is still known, and older ones are refused"
    else:
        try:
            seen = mark_in(_text(mark)).token
        except ValueError:
            seen = -1
        if seen != token:
            yield f"the mark of {name} was written without the guard: it is not token {token}"
    if isinstance(value, ErrorReply) or (value[0] is not None and value[1] is None):
        yield f"the value of {name} was written without the guard: it has no version"


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
