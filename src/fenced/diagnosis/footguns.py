"""The footguns of docs/footguns.md: which of them the findings show, and what to ask about the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fenced.diagnosis.findings import Finding, Footgun
from fenced.diagnosis.looks import GuardLook


class _Known(NamedTuple):
    name: str
    shown_by: tuple[str, ...]
    question: str
    asked: bool
    """Whether the question remains where nothing was found: the store shows only a part of it."""


KNOWN = (
    _Known("a lease without fencing", ("no-guard", "not-guarded", "stage", "override"), "", False),
    _Known(
        "the token is ignored downstream",
        ("unstamped-writer", "bypass", "guard-wrong", "cooperative"),
        "Does every program write through this guard, also scripts, and as which roles? Pass them as --writer ROLE",
        True,
    ),
    _Known(
        "the token is checked in the program, not with the write",
        ("cooperative",),
        "Does any program compare tokens itself, or take lease.check() for a guard?",
        True,
    ),
    _Known(
        "the mark is not stored in one step with the write",
        ("cooperative", "marks-could-be-lost"),
        "Does any program keep the last token in another transaction than its data?",
        True,
    ),
    _Known("a timestamp as token", ("mark-above-counter",), "", False),
    _Known(
        "tokens made by clients",
        ("mark-above-counter", "reused-token", "realm"),
        "May a role that writes set a stamp by hand? Proofs would stop it (fenced guard key)",
        True,
    ),
    _Known(
        "a lease is taken for exclusion",
        ("tokens-could-repeat", "same-realm", "authority-stopped", "replication"),
        "",
        False,
    ),
    _Known(
        "a refusal is retried",
        ("refusal-retried",),
        "Does a retry loop catch Exception around a guarded block?",
        True,
    ),
    _Known(
        "the last call goes to a system that cannot refuse",
        (),
        "Which calls leave the system while a lease is held (mails, payments), and what refuses a late one?",
        True,
    ),
)


def footguns(
    findings: Sequence[Finding], guards: Sequence[GuardLook], writers: frozenset[str]
) -> tuple[Footgun, ...]:
    """All of them. What proofs exclude is not asked, and neither is what nobody has looked at called clear."""
    above = {each.check for each in findings if each.level != "note"}
    proven = bool(guards) and all(look.status is not None and look.status.proof for look in guards)
    looked = bool(guards) and all(look.status is not None for look in guards)
    found = []
    for known in KNOWN:
        checks = tuple(check for check in known.shown_by if check in above)
        excluded = proven and known.name == "tokens made by clients"
        if checks:
            state = "found"
        elif (known.asked and not excluded) or not looked:
            state = "ask"
        else:
            state = "clear"
        question = known.question or "Look at the guards, too: fenced doctor AUTHORITY --guard URL"
        found.append(Footgun(known.name, state, checks, question))  # type: ignore[arg-type]
    return tuple(found)
