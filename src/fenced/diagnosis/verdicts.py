"""One verdict for each guard with its authority.

An authority that is strict protects nothing by itself, and a guard refuses by tokens that are only as good as the
authority that makes them. So the verdict is about the pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fenced.diagnosis.findings import Finding, PairVerdict
from fenced.diagnosis.looks import AuthorityLook, GuardLook
from fenced.errors import FencedError
from fenced.values.decision import Mode
from fenced.values.rollout import GuardStatus


def verdicts(
    authorities: Sequence[AuthorityLook], guards: Sequence[GuardLook], findings: Sequence[Finding]
) -> Iterator[PairVerdict]:
    if not guards:
        kinds = {each.standing is None or bool(each.standing.doubts) for each in authorities}
        kind = "best-effort or unknown" if True in kinds else "strict"
        yield PairVerdict(
            "D", "guard", f"Efficiency lock: the authority is {kind}, and nothing refuses a stale holder."
        )
    for look in guards:
        if look.status is None or not look.status.guards:
            yield _unread(look, findings)
            continue
        for guard in look.status.guards:
            yield _verdict(look, guard, authorities, findings)


def _unread(look: GuardLook, findings: Sequence[Finding]) -> PairVerdict:
    for each in findings:
        if each.where == look.where and each.check == "pooler":
            return PairVerdict("D", look.where, f"Nothing can be guarded through this address: {each.says}.")
        if each.where == look.where and each.check == "not-guarded":
            return PairVerdict(
                "D", look.where, f"Efficiency lock: nothing refuses a stale holder ({each.says})."
            )
    return PairVerdict(
        "?", look.where, f"Not known: the guard could not be looked at ({sentence_of(look.error)})."
    )


def _verdict(
    look: GuardLook, guard: GuardStatus, authorities: Sequence[AuthorityLook], findings: Sequence[Finding]
) -> PairVerdict:
    assert look.status is not None
    where = place(look, guard)
    mine = [each for each in findings if each.where in (where, look.where)]
    broken = {each.check: each.says for each in mine if each.level == "broken"}
    for check in ("guard-wrong", "override", "stage", "proofs-without-key"):
        if check in broken:
            return PairVerdict(
                "D",
                where,
                f"Best-effort: stale writes can be admitted today, or none at all ({broken[check]}).",
            )
    if "realm" in broken:
        return PairVerdict("D", where, f"No pair: it {broken['realm']}.")
    for check in ("mark-above-counter", "reused-token"):
        if check in broken:
            return PairVerdict("D", where, f"Best-effort until the floor is raised: it {broken[check]}.")
    trusted = trusted_by(look, authorities)
    if trusted is None or trusted.standing is None:
        why = next((sentence_of(each.error) for each in authorities if each.error), "no authority is named")
        return PairVerdict(
            "?", where, f"Not known: the guard refuses lower tokens, but who makes them? ({why})"
        )
    weak = _weaker(look, guard, trusted, mine, findings)
    if weak is not None:
        return PairVerdict("C", where, f"Best-effort: {weak}.{_switchers(guard)}")
    if any(Mode.parse(stage.mode).name != "require" for stage in guard.stages):
        return PairVerdict("B", where, _STAMPERS + _switchers(guard))
    return PairVerdict("A", where, _STRICT + _switchers(guard))


_STAMPERS = (
    "Strict for every program that sends its token; a write that carries none is let through (mode enforce)."
)
_STRICT = (
    "Strict: tokens cannot repeat, and the guard refuses lower ones, and writes without one, in the transaction of the "
    "write."
)


def _weaker(
    look: GuardLook,
    guard: GuardStatus,
    trusted: AuthorityLook,
    mine: Sequence[Finding],
    findings: Sequence[Finding],
) -> str | None:
    """Why lower tokens are refused, and the pair is nevertheless no more than best-effort."""
    assert trusted.standing is not None
    above = {each.check: each.says for each in mine if each.level != "note"}
    if any(each.check == "same-realm" for each in findings):
        return "there may be two of the authority, with the same tokens"
    if trusted.standing.doubts:
        return f"lower tokens are refused, but the authority could repeat them ({'; '.join(trusted.standing.doubts)})"
    if "bypass" in above:
        return f"{above['bypass']}"
    if not guard.mandatory:
        return "the guard is cooperative, and a program that does not use it is not stopped"
    if "marks-could-be-lost" in above:
        return f"lower tokens are refused until marks are lost ({above['marks-could-be-lost']})"
    if "replication" in above:
        when = "until a fail-over of the guarded database, and from then on best-effort until the floor is raised"
        return f"strict {when} ({above['replication']})"
    return None


def _switchers(guard: GuardStatus) -> str:
    """Nobody switches off a guard that binds only those who use it."""
    who = ", ".join(guard.bypass) or "nobody that can be seen from here"
    return f" Who can switch it off: {who}." if guard.mandatory else ""


def place(look: GuardLook, guard: GuardStatus) -> str:
    """Where a guard is, for people."""
    return f"{look.where} {guard.guard}" if look.has_tables else look.where


def trusted_by(look: GuardLook, authorities: Sequence[AuthorityLook]) -> AuthorityLook | None:
    """The authority that a guard trusts; the first one if it trusts nobody yet."""
    assert look.status is not None
    realm = look.status.realm
    for each in authorities:
        if each.standing is not None and realm in (None, each.standing.realm):
            return each
    return None


def sentence_of(error: FencedError | None) -> str:
    return "not asked" if error is None else " ".join(str(error).split())
