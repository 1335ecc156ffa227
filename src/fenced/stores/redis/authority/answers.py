"""Parses the scripts' answers, and turns refusals of the server into errors.

A refusal is definite: the server did nothing. Each error says what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from fenced.errors import FencedError, Indeterminate, Misconfigured, Unavailable
from fenced.leases.rules import holder_from, holder_text, tokens_used_up
from fenced.stores.redis.wire import refusals
from fenced.stores.redis.wire.resp import ErrorReply
from fenced.values.model import (
    AskAnswer,
    Busy,
    Ended,
    Gone,
    Granted,
    HeldBy,
    Holder,
    Kept,
    NameView,
    ReleaseAnswer,
    Released,
    RenewAnswer,
    Waiter,
    Waiting,
)

_US = 1e6
_ENDS = {b"r": "released", b"d": "withdrawn", b"e": "expired", b"v": "revoked"}
_GONE = b"-"

RIGHTS = (
    "~fenced:* &fenced:* +evalsha +eval +time +info +type +hget +hmget +hset +hsetnx +hincrby +hdel "
    "+zadd +zrem +zrangebylex +zrevrangebylex +zlexcount +zrangebyscore +publish +subscribe +ping +wait +select "
    "+config|get"
)
"""What an ACL user needs, as ACL SETUSER takes it."""

_NEEDED = f"{RIGHTS} (CONFIG GET may be denied: then the guarantee is best-effort)"


def refused(error: ErrorReply, where: str) -> FencedError:
    """The exception for an error reply."""
    return refusals.refused(error, where, _NEEDED)


def weakened(doubts: Sequence[str], where: str) -> Misconfigured:
    return Misconfigured(
        f"{where}: tokens could not repeat when this client was opened, and now they could: {'; '.join(doubts)}. "
        "Nothing is granted until the settings are corrected; or open a new client with guarantee='best-effort' "
        "(fenced run: --guarantee best-effort)"
    )


def denied(reply: Sequence[Any], where: str) -> FencedError:
    """Why a script minted nothing."""
    kind = reply[0]
    if kind == b"replica":
        return Unavailable(f"{where}: this is a replica; leases are granted by the primary")
    if kind == b"used up":
        return tokens_used_up()
    if kind == b"lineage":
        before, now = reply[1].decode(), reply[2].decode()
        return Misconfigured(
            f"{where}: the last token was minted under replication id {before}, and this server goes on under "
            f"{now}: a replica was promoted, or a snapshot loaded, and tokens may be missing here. Nothing is granted "
            "until `fenced authority raise --above N`, with N above every token that a guard has seen"
        )
    found = f"realm {reply[1].decode()}" if reply[1] else "nothing"
    return Misconfigured(
        f"{where}: the counting state of this namespace was deleted or replaced under a running client (there is "
        f"{found} now); restart the client, and look for FLUSHDB, eviction or a restored backup"
    )


def unconfirmed(where: str) -> Indeterminate:
    return Indeterminate(f"{where}: granted, but no replica confirmed it in time")


# Answers.


@lru_cache(maxsize=1024)
def _about(about: bytes) -> tuple[tuple[str, ...], Holder]:
    names, _, holder = about.decode().split("\1", 2)
    return tuple(names.split("\0")), holder_from(holder)


def about(names: tuple[str, ...], address: str, holder: Holder) -> str:
    """An attempt as the server stores it for other clients: its names, its client's wake-up channel, its holder."""
    return "\1".join(("\0".join(names), address, holder_text(holder)))


def held_by(parts: Sequence[Any]) -> HeldBy | None:
    if not parts:
        return None
    return HeldBy(_about(parts[0])[1], parts[1], parts[2].decode(), parts[3] / _US)


def asked(reply: Sequence[Any], ttl: float) -> AskAnswer | None:
    """The answer to an ask; None if nothing was minted: `denied` says why."""
    match reply[0]:
        case b"granted":
            return Granted(reply[1], reply[2] / _US, ttl)
        case b"waiting":
            return Waiting(reply[1] / _US, reply[2], held_by(reply[3:]))
        case b"busy":
            return Busy(reply[1], held_by(reply[2:]))
        case b"ended":
            return Ended(_ENDS[reply[1]])
        case _:
            return None


def renewed(reply: Any) -> RenewAnswer:
    if isinstance(reply, int):
        return Kept(reply / _US) if reply >= 0 else Waiting((-1 - reply) / _US)
    return Gone() if reply == _GONE else Ended(_ENDS[reply])


def released(reply: Any) -> ReleaseAnswer:
    if reply == 1:
        return Released()
    return Gone() if reply == _GONE else Ended(_ENDS[reply])


def view(parts: Sequence[Any]) -> NameView:
    name, free, waiting = parts[0].decode(), parts[1] / _US, parts[2]
    waiters = []
    for packed, left in zip(waiting[::2], waiting[1::2], strict=True):
        names, holder = _about(packed)
        waiters.append(Waiter(holder, names, left / _US))
    held = parts[3:]
    return NameView(
        name,
        held_by(held),
        _about(held[0])[0] if held else (),
        held[4] / _US if held else None,
        free,
        tuple(waiters),
    )
