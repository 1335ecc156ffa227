"""What `fenced doctor` concludes from what guards and authorities say: pure rules."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from fenced.diagnosis.findings import Finding, Report, in_order
from fenced.diagnosis.footguns import footguns
from fenced.diagnosis.looks import AuthorityLook, GuardLook, Span
from fenced.diagnosis.verdicts import place, sentence_of, trusted_by, verdicts
from fenced.errors import redacted
from fenced.values.decision import MODES, Mode
from fenced.values.model import TOKEN_MAX
from fenced.values.rollout import GuardStatus, Stage, ago, by_writer

CLOCK_SECONDS = 1.0
"""Clocks that differ by less are called equal."""
TOKENS_LEFT = 2**40
_REMEDY = re.compile(r"\(([^()]*(?:\.conf|\.cnf|ALTER|GRANT|allow|set it)[^()]*)\)[^()]*$")
ENFORCING = MODES.index("enforce")


def diagnosed(
    authorities: Sequence[AuthorityLook], guards: Sequence[GuardLook], writers: frozenset[str] = frozenset()
) -> Report:
    """The report. `writers`: roles of the database that programs use."""
    found = [finding for look in guards for finding in _about_guards(look, writers)]
    found += _about_writers(guards, writers)
    found += [finding for look in authorities for finding in _about_authority(look)]
    found += _about_several(authorities)
    found += [
        finding
        for look in guards
        if look.status
        for guard in look.status.guards
        for finding in _about_pair(look, guard, authorities)
    ]
    if not guards:
        says = "no guard is named, and a lease alone refuses nobody"
        do = "fenced doctor AUTHORITY --guard URL; or say that work done twice does no harm"
        found.append(Finding("weak", "no-guard", "guard", says, do))
    findings = in_order(found)
    facts = dict(_facts(authorities, guards))
    return Report(
        tuple(verdicts(authorities, guards, findings)),
        findings,
        footguns(findings, guards, writers),
        tuple(sorted(_fine(authorities, guards, findings))),
        facts,
    )


# One guard.


def _about_guards(look: GuardLook, writers: frozenset[str]) -> Iterator[Finding]:
    where, status = look.where, look.status
    if status is None:
        yield _unreadable_guard(look)
        return
    if not status.guards:
        install = f"fenced guard install {_quoted(look.url)} --table TABLE --name 'TABLE/{{id}}'"
        yield Finding("broken", "not-guarded", where, "no table is guarded there", install)
    for doubt in status.doubts:
        yield Finding("weak", "marks-could-be-lost", where, doubt, _remedy(doubt))
    for guard in status.guards:
        yield from _about_guard(look, guard, writers)
    if status.failover:
        yield Finding("weak", "replication", where, status.failover, _remedy(status.failover))
    for hidden in status.hidden:
        yield Finding("unknown", "replication", where, f"not to be seen: {hidden}", _remedy(hidden))
    if status.unrecorded:
        says = f"{status.unrecorded} decisions could not be recorded"
        yield Finding("note", "unrecorded", where, says, f"fenced guard tidy {_quoted(look.url)}")
    for name in look.retried:
        says = f"{name}: a program repeats what was refused as stale"
        do = "except fenced.Overtaken: stop, and do not retry"
        yield Finding("weak", "refusal-retried", where, says, do)
    if status.proof and look.keys == 0:
        says = "proofs are required, and no key may sign: every write is refused"
        yield Finding(
            "broken", "proofs-without-key", where, says, f"fenced guard key add {_quoted(look.url)} ID"
        )
    if not status.local_clock:
        yield from _about_clock(where, look.span, status.now.timestamp())


def _unreadable_guard(look: GuardLook) -> Finding:
    says = sentence_of(look.error)
    if "statement mode" in says:
        return Finding("broken", "pooler", look.where, says, "pgbouncer.ini: pool_mode = transaction")
    if "no guard" in says:
        install = f"fenced guard install {_quoted(look.url)} --table TABLE --name 'TABLE/{{id}}'"
        do = install if look.has_tables else "name the address with the options of the program's guard"
        return Finding("broken", "not-guarded", look.where, says, do)
    do = f"fenced guard grant-monitor {_quoted(look.url)} ROLE" if "grant-monitor" in says else ""
    return Finding("unknown", "guard-reachable", look.where, f"cannot be looked at: {says}", do)


def _about_guard(look: GuardLook, guard: GuardStatus, writers: frozenset[str]) -> Iterator[Finding]:
    where, url = place(look, guard), _quoted(look.url)
    table = f" --table {guard.guard}" if look.has_tables else ""
    assert look.status is not None
    for wrong in guard.wrong:
        yield Finding("broken", "guard-wrong", where, wrong, _mend(look, guard, wrong))
    unstamped = by_writer(count for count in guard.counts if count.unstamped and count.recent)
    for override in guard.overrides:
        until = f"until {override.until:%H:%M %Z}, by {override.who}: {override.why}"
        says = f"an override lets {override.pattern} through {until}"
        yield Finding("broken", "override", where, says, f"fenced guard override {url}{table} --end")
    for row in unstamped[:3]:
        says = f"{row.who} writes without a stamp, last {ago(row.last, look.status.now)}"
        yield Finding(
            "weak", "unstamped-writer", where, says, "let it take a lease, and write through fenced.sql"
        )
    for stage in guard.stages:
        yield from _about_stage(where, f"{url}{table}", stage, [row.who for row in unstamped])
    if any(count.verdict == "reused" and count.recent for count in guard.counts):
        says = "a token was used by two grants: the authority has lost its history, or there are two of it"
        yield Finding("broken", "reused-token", where, says, _raise("AUTHORITY", f"--above-guards {url}"))
    yield from _about_bypass(where, guard, writers)
    if not guard.mandatory:
        says = "cooperative: only programs that use the guard are stopped"
        do = "give the data's keys or files to those programs alone, or guard a table of PostgreSQL"
        yield Finding("weak", "cooperative", where, says, do)
    if guard.pending:
        says = f"{len(guard.pending)} transactions are older than the last change of the mode, which does not bind them"
        yield Finding("weak", "pending", where, f"{says}: {guard.pending[0]}", "end them, or wait")


def _mend(look: GuardLook, guard: GuardStatus, wrong: str) -> str:
    if not look.has_tables:
        return "find who wrote it; then fenced guard reset, or write it again through the guard"
    if remedy := _remedy(wrong):
        return remedy
    if "fenced guard upgrade" in wrong:
        return f"fenced guard upgrade {_quoted(look.url)}"
    name = shlex.quote(guard.template)
    return f"fenced guard install {_quoted(look.url)} --table {guard.guard} --name {name} --replace"


def _about_stage(where: str, address: str, stage: Stage, unstamped: Sequence[str]) -> Iterator[Finding]:
    mode = Mode.parse(stage.mode)
    if mode.name == "require":
        return
    names = "" if stage.pattern == "*" else f" --names {shlex.quote(stage.pattern)}"
    to = "'canary(5%)'" if stage.next.stage == "canary" else stage.next.stage or "require"
    do = f"fenced guard mode {address}{names} {to}"
    if unstamped:
        do += f"; before require: {unstamped[0]} still writes without a stamp"
    if MODES.index(mode.name) < ENFORCING:
        says = f"mode {stage.mode} for {stage.pattern}: stale writes are let through"
        yield Finding("broken", "stage", where, says, do)
    else:
        says = f"mode {stage.mode} for {stage.pattern}: a write without a stamp is let through"
        yield Finding("weak", "stage", where, says, do)


def _about_bypass(where: str, guard: GuardStatus, writers: frozenset[str]) -> Iterator[Finding]:
    """Who can switch the guard off: broken if programs write as that role."""
    for who in guard.bypass:
        role = who.partition(" (")[0]
        if any(role == each or role.startswith(f"'{each}'@") for each in writers):
            says = f"programs write as {who}, which can switch the guard off"
            do = f"REVOKE what {role} has, or let programs write as another role"
            yield Finding("broken", "bypass", where, says, do)
        else:
            yield Finding("note", "bypass", where, f"{who} can switch the guard off")


def _about_writers(guards: Sequence[GuardLook], writers: frozenset[str]) -> Iterator[Finding]:
    """A role that is mistyped can do nothing, and would be called harmless."""
    asked = [look.roles for look in guards if look.roles is not None]
    for role in sorted(writers.difference(*asked)) if asked else ():
        says = f"there is no role {role}: whether programs can switch the guard off is not known"
        yield Finding("unknown", "bypass", "--writer", says, "pass the role that programs connect as")


# One authority.


def _about_authority(look: AuthorityLook) -> Iterator[Finding]:
    where, standing = look.where, look.standing
    if standing is None:
        yield Finding(
            "unknown", "authority-reachable", where, f"cannot be looked at: {sentence_of(look.error)}"
        )
        return
    if standing.stopped:
        do = (
            _raise(_quoted(look.url), f"--above {standing.last_token}")
            if "raise" not in standing.stopped
            else ""
        )
        yield Finding("broken", "authority-stopped", where, standing.stopped, do)
    for doubt in standing.doubts:
        yield Finding("weak", "tokens-could-repeat", where, doubt, _remedy(doubt))
    for warning in standing.warnings:
        yield Finding("weak", "known-bug", where, warning, "upgrade the server")
    if (left := TOKEN_MAX - standing.last_token) < TOKENS_LEFT:
        says = f"{left:,} tokens are left"
        yield Finding("weak", "tokens-left", where, says, "fenced authority move OLD NEW --guards URL")
    if standing.clock is not None:
        yield from _about_clock(where, look.span, standing.clock)


def _about_several(authorities: Sequence[AuthorityLook]) -> Iterator[Finding]:
    seen: dict[str, AuthorityLook] = {}
    for look in authorities:
        if look.standing is None:
            continue
        other = seen.setdefault(look.standing.realm, look)
        assert other.standing is not None
        if other is not look and other.standing.last_token != look.standing.last_token:
            says = (
                f"the realm of {other.where}, with last token {look.standing.last_token} and not "
                f"{other.standing.last_token}: unless both lead to one store, one is a copy, and tokens repeat"
            )
            do = "stop the copy; fenced authority raise the one that stays --above-guards every guard"
            yield Finding("broken", "same-realm", look.where, says, do)


def _about_clock(where: str, span: Span, clock: float) -> Iterator[Finding]:
    off, sure = span.ahead(clock)
    if abs(off) - sure > CLOCK_SECONDS:
        says = (
            f"its clock is {off:+.1f} s from this machine's: times in records differ, and a step moves leases"
        )
        yield Finding("weak", "clock", where, says, "chronyc tracking, on both machines")


# A guard and its authority.


def _about_pair(
    look: GuardLook, guard: GuardStatus, authorities: Sequence[AuthorityLook]
) -> Iterator[Finding]:
    assert look.status is not None
    where, realm, jump = place(look, guard), look.status.realm, look.status.max_jump
    known = [each for each in authorities if each.standing is not None]
    trusted = trusted_by(look, known)
    if realm is None and known:
        says = "trusts no authority yet: the first stamped write decides"
        do = f"fenced guard adopt {_quoted(look.url)} {known[0].standing.realm if known[0].standing else 'REALM'}"
        yield Finding("note", "realm", where, says, do)
    elif trusted is None and known:
        realms = ", ".join(each.standing.realm for each in known if each.standing)
        says = f"trusts realm {realm}, and the authority is {realms}: every stamp is refused as foreign"
        do = f"name the right authority, or fenced authority move OLD NEW --guards {_quoted(look.url)}"
        yield Finding("broken", "realm", where, says, do)
    if trusted is None or trusted.standing is None or realm is None:
        return
    last, high = trusted.standing.last_token, guard.highest
    if high > last:
        says = (
            f"has seen token {high}, and the authority's last is {last}: it was restored or reset, or the token was "
            "invented"
        )
        yield Finding(
            "broken", "mark-above-counter", where, says, _raise(_quoted(trusted.url), f"--above {high}")
        )
    elif jump is not None and guard.marks and last - high > jump:
        says = f"the next token is more than max_jump ({jump:,}) above its marks: it would be refused"
        do = f"fenced guard trust {_quoted(look.url)} --max-jump {2 * (last - high)}"
        yield Finding("weak", "jump", where, says, do)


# The rest.


def _facts(
    authorities: Sequence[AuthorityLook], guards: Sequence[GuardLook]
) -> Iterator[tuple[str, float | int | str]]:
    for each in authorities:
        if each.standing is not None:
            yield f"last token, {each.where}", each.standing.last_token
            yield f"seconds to open, {each.where}", round(each.span.ended - each.span.began, 4)
    for look in guards:
        if look.status is not None:
            yield f"seconds to look, {look.where}", round(look.span.ended - look.span.began, 4)


def _fine(
    authorities: Sequence[AuthorityLook], guards: Sequence[GuardLook], findings: Sequence[Finding]
) -> set[str]:
    fine = set()
    if any(each.standing for each in authorities):
        fine |= {
            "authority-reachable",
            "tokens-could-repeat",
            "known-bug",
            "tokens-left",
            "authority-stopped",
        }
    if any(each.status for each in guards):
        fine |= {
            "guard-reachable",
            "guard-wrong",
            "stage",
            "override",
            "unstamped-writer",
            "bypass",
            "pending",
        }
        fine |= {"reused-token", "refusal-retried", "marks-could-be-lost"}
    if any(each.standing for each in authorities) and any(each.status for each in guards):
        fine |= {"realm", "mark-above-counter"}
    if any(each.standing and each.standing.clock for each in authorities):
        fine |= {"clock"}
    return fine - {each.check for each in findings}


def _quoted(url: str) -> str:
    return shlex.quote(str(redacted(url)))


def _raise(authority: str, above: str) -> str:
    return f"stop the writers; fenced authority raise {authority} {above}; start them"


def _remedy(sentence: str) -> str:
    found = _REMEDY.search(sentence)
    return found[1] if found else ""
