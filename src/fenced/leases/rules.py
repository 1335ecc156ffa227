"""Rules that are the same on every authority: limits, the sentences of common errors, a holder as JSON."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from fenced.errors import Indeterminate, Misconfigured, Misuse, Unavailable
from fenced.values.contracts import Authority, Trait
from fenced.values.failures import NoNamespace
from fenced.values.model import Ask, AskAnswer, Busy, Holder

QUEUE_MAX = 10_000
"""How many waiters one name may have; the next ask is answered with Busy."""

NOBODY = Holder("", "", "", 0)
"""The holder of a tombstone: an attempt that was withdrawn before its ask arrived."""

NAMESPACE_ORDER = Trait(
    "namespace-order",
    "A token is minted at the grant: it is greater than every token of the namespace that was handed out before the "
    "request that granted it was sent.",
)


async def made_final(answer: AskAnswer, ask: Ask, authority: Authority, until: float) -> AskAnswer:
    """The answer to an ask of which an earlier try had an unknown outcome. Busy ends the attempt.

    The earlier request may still be on its way, and would be granted to nobody: the tombstone stops it.
    """
    if isinstance(answer, Busy):
        try:
            await authority.withdraw(ask.secret, until)
        except Unavailable as error:  # this try did nothing, but the first may still do something
            raise Indeterminate(f"an earlier copy of this ask may still arrive: {error}") from error
    return answer


def reused_attempt() -> Misuse:
    return Misuse("the same attempt was used before with other names or another ttl")


def tokens_used_up() -> Misconfigured:
    return Misconfigured("the tokens of this namespace are used up; start a new namespace")


def no_namespace(where: object, namespace: str) -> NoNamespace:
    return NoNamespace(f"{where} has no namespace {namespace!r}")


def holder_fields(holder: Holder) -> list[str | int]:
    """A holder as a JSON array; `holder_of` reads it."""
    return [holder.id, holder.label, holder.host, holder.pid]


def holder_of(fields: list[Any]) -> Holder:
    return Holder(*fields)


@lru_cache(maxsize=1024)
def holder_text(holder: Holder) -> str:
    return json.dumps(holder_fields(holder), separators=(",", ":"))


@lru_cache(10_000)  # a survey reads the same holders again and again
def holder_from(text: str) -> Holder:
    return holder_of(json.loads(text))
