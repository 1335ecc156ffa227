"""Parses the texts that the schema's functions return, and formats their arguments."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from fenced.errors import InvariantBroken
from fenced.leases.rules import holder_from, reused_attempt
from fenced.values.model import (
    AskAnswer,
    Busy,
    Ended,
    Gone,
    Granted,
    HeldBy,
    Kept,
    NameView,
    ReleaseAnswer,
    Released,
    RenewAnswer,
    Unknown,
    Waiter,
    Waiting,
)
from fenced.values.past import PastLease


def asked(text: str, ttl: float) -> AskAnswer:
    kind, _, rest = text.partition(" ")
    if kind == "granted":
        token, _, remaining = rest.partition(" ")
        return Granted(int(token), float(remaining) if remaining else ttl, ttl)
    if kind in ("waiting", "busy"):
        check_in, ahead, *held_by = rest.split(" ", 2)
        holder = _held_by(json.loads(held_by[0])) if held_by else None
        if kind == "busy":
            return Busy(int(ahead), holder)
        return Waiting(float(check_in), int(ahead), holder)
    if kind == "misuse":
        raise reused_attempt()
    if kind == "ended":
        return Ended(rest)
    raise InvariantBroken(f"the authority answered {text!r}")


def released(text: str) -> ReleaseAnswer:
    if text == "released":
        return Released()
    return Gone() if text == "gone" else Ended(text.removeprefix("ended "))


def renewed(text: str | None) -> RenewAnswer:
    kind, _, rest = (text or "").partition(" ")
    match kind:
        case "kept":
            return Kept(float(rest))
        case "waiting":
            return Waiting(float(rest))
        case "ended":
            return Ended(rest)
        case "unknown":
            return Unknown("its row was locked")
        case _:
            return Gone()


def viewed(text: str) -> NameView:
    found = json.loads(text)
    waiters = tuple(
        Waiter(holder_from(holder), tuple(names), float(remaining))
        for holder, names, remaining in found["waiters"] or ()
    )
    if found["claim"] is None:
        return NameView(found["name"], None, (), None, 0.0, waiters)
    live, *claim, names, ttl, free_in = found["claim"]
    if not live:
        return NameView(found["name"], None, (), None, float(free_in), waiters)
    return NameView(found["name"], _held_by(claim), tuple(names), float(ttl), float(free_in), waiters)


def remembered(text: str) -> list[PastLease]:
    return [
        PastLease(tuple(names), holder_from(holder), *rest)
        for names, holder, *rest in (json.loads(text) if text else ())
    ]


def _held_by(found: list[Any]) -> HeldBy:
    holder, token, grant, remaining = found
    return HeldBy(holder_from(holder), token, grant, float(remaining))


@lru_cache(maxsize=1024)
def names_text(names: tuple[str, ...]) -> bytes:
    return array(name.replace("\\", "\\\\").replace('"', '\\"') for name in names)


def array(items: Iterable[str]) -> bytes:
    """A PostgreSQL array of texts that contain no bare quote."""
    return ("{" + ",".join(f'"{item}"' for item in items) + "}").encode()


@lru_cache(maxsize=256)
def interval(seconds: float) -> bytes:
    return b"%d us" % round(seconds * 1e6)
