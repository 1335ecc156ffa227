"""The stamp in the headers of a message, and what a consumer answers to the broker. Pure functions, for any broker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from fenced.client.guarding import Fence, credential
from fenced.errors import (
    AlreadyApplied,
    FencedError,
    ForeignRealm,
    InvalidStamp,
    MissingStamp,
    Misuse,
    Refused,
    Uncovered,
)
from fenced.proofs import Proof
from fenced.values.model import Stamp

STAMP = "fenced-stamp"
PROOF = "fenced-proof"

MessageFence = Stamp | Proof
"""What a message is fenced with; a guard takes it in the place of a lease."""
Headers = Mapping[str, object] | Iterable[tuple[object, object]] | None


class Settlement(StrEnum):
    """What a consumer answers to the broker."""

    ACK = "ack"
    """It was applied, by this delivery or an earlier one."""
    REJECT = "reject"
    """It must never be applied: to the dead letters. Back in the queue it would be refused again, at full speed."""
    RETRY = "retry"
    """It is not known to have been applied: deliver it again, after a delay."""


def headers(fence: Fence) -> dict[str, str]:
    """The headers of one message. A lease makes its next stamp. A message that is sent again has the same headers."""
    carried = credential(fence)
    if len(carried.stamps) != 1:
        raise Misuse(
            "a message carries the stamp of one lease; hold_all() takes one lease over several names"
        )
    found = {STAMP: str(carried.stamps[0])}
    if carried.proofs:
        found[PROOF] = carried.proofs[0]
    return found


def fence_of(headers: Headers) -> MessageFence | None:
    """The stamp in these headers, with its proof if there is one; None without a stamp.

    Headers are a mapping or pairs, and texts are str or bytes. InvalidStamp if it is no stamp, or not exactly one.
    """
    pairs: Iterable[tuple[object, object]] = (
        headers.items() if isinstance(headers, Mapping) else headers or ()
    )
    texts: dict[str, list[str]] = {STAMP: [], PROOF: []}
    for key, value in pairs:
        if (known := _text(key, "the name of a header").lower()) in texts:
            texts[known].append(_text(value, known))
    if any(len(found) > 1 for found in texts.values()):
        raise InvalidStamp(f"a message carries one {STAMP} and at most one {PROOF}, and this one has more")
    if not texts[STAMP]:
        if texts[PROOF]:
            raise InvalidStamp(f"a message with a {PROOF} and no {STAMP}")
        return None
    stamp = Stamp.parse(texts[STAMP][0])
    return Proof(stamp, texts[PROOF][0]) if texts[PROOF] else stamp


def _text(value: object, what: str) -> str:
    if isinstance(value, bytes | bytearray):
        value = value.decode("latin-1")  # a stamp is ASCII; other bytes make it invalid
    if not isinstance(value, str):
        raise InvalidStamp(f"{what} is a text, not a {type(value).__name__}")
    return value


def required_fence_of(headers: Headers) -> MessageFence:
    fence = fence_of(headers)
    if fence is None:
        raise MissingStamp(f"the message has no header {STAMP}, and its consumer requires one")
    return fence


def settlement(error: Exception | None, fence: MessageFence | None) -> Settlement:
    """What to answer after an attempt to apply a message with this fence, by how the attempt ended."""
    if error is None or isinstance(error, AlreadyApplied):
        return Settlement.ACK
    if isinstance(error, Refused) and _is_about_the_message(error, fence):
        return Settlement.REJECT
    return Settlement.RETRY


def _is_about_the_message(error: Refused, fence: MessageFence | None) -> bool:
    """Whether this message was refused for what it is. Otherwise all messages fare like it until somebody acts."""
    stamp = fence.stamp if isinstance(fence, Proof) else fence
    if isinstance(error, ForeignRealm):
        return False  # the guard trusts another authority than the producer's: one of the two is to be moved
    if isinstance(error, MissingStamp):
        return stamp is None  # otherwise the consumer wrote without the stamp that it got
    if isinstance(error, Uncovered):
        return stamp is None or error.name is None or _is_kin(error.name, stamp)
    return error.stamp is None or (stamp is not None and stamp.grant == error.stamp.grant)


def _is_kin(name: str, stamp: Stamp) -> bool:
    """Whether a row wanted a name like those of the message: orders/43 in a message about orders/42, not audit/7.

    If it wanted another kind of name, it is a row of another table, which the consumer must cover by itself.
    """
    kind = name.partition("/")[0]
    return any(kind == own.partition("/")[0] for own in stamp.names)


def stops_the_consumer(error: Exception) -> bool:
    """Whether the next message would fail too: after a bug, or a refusal that is not about the message."""
    return not isinstance(error, FencedError) or error.retry == "no"
