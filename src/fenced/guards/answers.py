"""What guards share: checks of their arguments, and the errors for verdicts."""

from __future__ import annotations

from fenced import events
from fenced.errors import (
    REFUSALS,
    AlreadyApplied,
    FencedError,
    InvalidStamp,
    Misconfigured,
    Misuse,
    Unsupported,
    shown,
)
from fenced.values.decision import RULES, Mark, Rule, Ruling, Verdict
from fenced.values.model import Credential, Stamp

RECORDS_MAX = 10_000
"""How many audit records a guard keeps; the oldest go first."""


DEFAULT_RULE: Rule = "retry"
"""Of a guard that is installed by whoever names none."""


def check_rule(rule: object) -> None:
    """Misuse unless it is one of the rules."""
    if rule not in RULES:
        raise Misuse(f"a rule is {', '.join(RULES)}, not {shown(rule)}")


def expect_rule(where: str, installed: str, asked: Rule | None) -> None:
    """Misconfigured if the program names another rule than the installed one: it relies on what it names."""
    if asked not in (None, installed):
        raise Misconfigured(
            f"{where}: the guard is installed with rule {installed}, and this program says {asked}; by the installed "
            "rule a repeat would be judged in another way. Name that one or none, or use a guard with the other rule"
        )


def check_pattern(pattern: object) -> str:
    """A name in which `*` stands for any run of characters."""
    if not isinstance(pattern, str) or not 1 <= len(pattern) <= 200 or not pattern.isprintable():
        raise Misuse(f"a pattern is a name with * for any characters, not {shown(pattern)}")
    return pattern


_SAYS = {
    Verdict.STALE: "token {token} is stale: {mark} has been seen",
    Verdict.DUPLICATE: "this grant has made its one operation (rule once)",
    Verdict.OUT_OF_ORDER: "a later operation of the same lease was applied before (rule sequenced)",
    Verdict.REUSED: "token {token} was seen from another grant: the authority lost its history; "
    "raise its floor",
    Verdict.UNCOVERED: "not covered by the lease of {names} (token {token})",
    Verdict.FOREIGN: "the stamp is of realm {stamped}, and this guard trusts {trusted}. Point the program at the "
    "authority of that realm (fenced authority show URL prints it), or move the guard: fenced authority move OLD NEW "
    "--guards URL",
    Verdict.MISSING: "the write carries no stamp, and the mode is require",
    Verdict.INVALID: "not a stamp that this rule can use",
    Verdict.FORGED: "the proof does not verify",
}


def error_for(
    verdict: Verdict,
    *,
    name: str | None,
    stamp: Stamp | None = None,
    mark: Mark | None = None,
    table: str | None = None,
    realm: str | None = None,
    says: str | None = None,
    guard: str | None = None,
    tells: bool = True,
) -> FencedError:
    """The typed error for a verdict. `realm`: the one that the guard trusts; `says`: the guard's own sentence.

    Observers are told of the refusal, unless the caller `tells` them by itself. `guard`: without a table, its address.
    """
    where = name or (f"a row of {table}" if table else "a row")
    if verdict is Verdict.APPLIED:
        return AlreadyApplied(f"{where}: this operation was applied before; nothing was done")
    says = (
        says
        or _uncovered(verdict, name, stamp)
        or _SAYS[verdict].format(
            token=stamp.token if stamp else "?",
            mark=mark.token if mark else "a newer one",
            names=", ".join(stamp.names) if stamp else "its stamp",
            stamped=stamp.realm if stamp else "another authority",
            trusted=f"realm {realm}" if realm else "another one",
        )
    )
    if tells and events.is_observed():
        token, seen = stamp.token if stamp else None, mark.token if mark else None
        events.tell_observers(
            events.GuardDecided(table or guard or "", name or None, token, seen, verdict.value, "refuse")
        )
    return REFUSALS[verdict.value](
        f"{where}: {says}",
        name=name or None,
        stamp=stamp,
        mark=mark.token if mark else None,
        holder=mark.grant if mark else None,
    )


def tell_raised(guard: str, name: str, before: Mark | None, after: Mark | None) -> None:
    """Tell observers that an operation has raised the mark of a name."""
    if events.is_observed() and after is not None and after.token > (before.token if before else 0):
        seen = before.token if before else None
        events.tell_observers(
            events.GuardDecided(guard, name, after.token, seen, Verdict.ADMIT.value, Ruling.ADMIT.value)
        )


def _uncovered(verdict: Verdict, name: str | None, stamp: Stamp | None) -> str | None:
    """The sentence for a name that no lease can have, or that is covered and was not announced in this transaction."""
    if verdict is not Verdict.UNCOVERED or stamp is None:
        return None
    if name is not None and "" in name.split("/"):
        return "no lease can cover it: a column of its name is NULL or empty"
    if name in stamp.names:
        return f"covered by the lease (token {stamp.token}), but not announced in this transaction; announce it too"
    return None


def stamp_in(text: str | None) -> Stamp | None:
    """A recorded stamp; None if the recorded text is not a stamp (it was refused as invalid)."""
    try:
        return Stamp.parse(text) if text else None
    except InvalidStamp:
        return None


def one_stamp(credential: Credential, guard: str) -> Stamp:
    """The stamp of a credential, for a guard that takes one lease at a time and cannot check anything else."""
    if len(credential.stamps) != 1:
        raise Unsupported(f"{guard} takes one lease at a time; hold_all() takes one lease over several names")
    if credential.still_held:
        raise Unsupported(f"{guard} has no still_held: it cannot ask the authority in the same step")
    if credential.proofs:
        raise Unsupported(f"{guard} has no proofs: it cannot check one, and does not ignore it")
    stamp = credential.stamps[0]
    if not stamp.names:  # an operation about no name would be compared with no mark, and admitted
        raise InvalidStamp(f"a stamp covers at least one name, and {shown(stamp)} none")
    return stamp


def entered_again() -> Misuse:
    return Misuse(
        "a guarded transaction is entered once: call the method that made it again for the next block"
    )


def check_value(value: object) -> bytes:
    """Misuse unless the value is bytes. The program must encode a text, because only it knows the encoding."""
    if not isinstance(value, bytes):
        raise Misuse(f"a value is bytes, such as text.encode(), not {shown(value)}")
    return value
