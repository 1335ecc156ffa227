"""What happened to a name, from what authority and guards have kept: sentences, each with its source.

Nothing is claimed that no record shows. What is concluded from records says so, and what they cannot show is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any, Literal

from fenced.diagnosis.records import Audit
from fenced.errors import InvalidStamp
from fenced.values.model import Holder, Stamp
from fenced.values.past import PastLease
from fenced.values.rollout import Change, Decision

Kind = Literal["held", "waited", "released", "expired", "revoked", "refused", "let_through", "changed"]
AUTHORITY, GUARD = "authority", "guard"


@dataclass(frozen=True, slots=True)
class Event:
    """One sentence."""

    at: datetime
    kind: Kind
    token: int | None
    says: str
    source: str


@dataclass(frozen=True, slots=True)
class Account:
    """What is known of a name in a time."""

    name: str
    since: datetime
    until: datetime
    events: tuple[Event, ...]
    leases: tuple[PastLease, ...]
    concluded: tuple[str, ...]
    unknown: tuple[str, ...]
    """What the records cannot show."""

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "since": self.since.isoformat(),
            "until": self.until.isoformat(),
            "events": [{**asdict(each), "at": each.at.isoformat()} for each in self.events],
            "leases": [asdict(each) for each in self.leases],
            "concluded": list(self.concluded),
            "unknown": list(self.unknown),
        }

    def lines(self) -> Iterator[str]:
        yield f"{self.name}, {self.since.astimezone():%Y-%m-%d %H:%M:%S} to {self.until.astimezone():%H:%M:%S %Z}"
        yield ""
        for each in self.events:
            yield f"  {clock(each.at)}  {each.says}   [{each.source}]"
        if not self.events:
            yield "  no record of this name"
        yield ""
        yield from (f"  {sentence}" for sentence in (*self.concluded, *self.unknown))


def explained(
    name: str,
    since: datetime,
    until: datetime,
    leases: Sequence[PastLease] | None,
    audits: Sequence[Audit],
) -> Account:
    """`leases`: None if no authority was asked, or it remembers nothing."""
    known = list(leases or ())
    decisions = [each for audit in audits for each in audit.decisions if each.name == name]
    events = [event for lease in known for event in _of_lease(lease, since)]
    events += [_of_decision(each, known) for each in decisions]
    events += [event for audit in audits for event in _of_changes(audit.changes, name)]
    chosen = sorted((each for each in events if since <= each.at <= until), key=lambda each: each.at)
    shown = [each for each in decisions if since <= each.at <= until]
    return Account(
        name,
        since,
        until,
        tuple(chosen),
        tuple(each for each in known if each.token),
        tuple(_concluded(shown, known)),
        tuple(_unknown(shown, leases, audits)),
    )


# The events.


def _of_lease(lease: PastLease, since: datetime) -> Iterator[Event]:
    zone, token = since.tzinfo, lease.token
    who = of(lease.holder)
    confirmed = None if lease.confirmed is None else datetime.fromtimestamp(lease.confirmed, zone)
    ended = None if lease.ended is None else datetime.fromtimestamp(lease.ended, zone)
    if not token:
        if confirmed is not None:
            yield Event(confirmed, "waited", None, f"{who} waits for it, or waits again", AUTHORITY)
        if ended is not None and lease.state in ("withdrawn", "expired"):
            how = "gives up" if lease.state == "withdrawn" else "is forgotten, because it did not ask again"
            yield Event(ended, "waited", None, f"{who} {how}", AUTHORITY)
        return
    if confirmed is not None:
        says = f"{who} is granted the lease with token {token}, or has renewed it here for the last time"
        yield Event(confirmed, "held", token, says, AUTHORITY)
    if ended is None:
        return
    match lease.state:
        case "released":
            yield Event(ended, "released", token, f"{who} releases it (token {token})", AUTHORITY)
        case "withdrawn":
            says = f"{who} withdraws its attempt (token {token})"
            yield Event(ended, "released", token, says, AUTHORITY)
        case "revoked":
            says = f"an operator takes it away from {who} (token {token})"
            yield Event(ended, "revoked", token, says, AUTHORITY)
        case _:
            says = f"the lease of {who} (token {token}) ends: it was not renewed for {lease.ttl:g} s"
            yield Event(ended, "expired", token, says, AUTHORITY)


def _of_decision(each: Decision, known: Sequence[PastLease]) -> Event:
    refused = each.ruling.value == "refuse"
    what = (
        "a write without a stamp"
        if each.token is None
        else f"a write of {_whose(each, known)} with token {each.token}"
    )
    seen = f"token {each.mark}" + (f" of {_marked(each, known)}" if _marked(each, known) else "")
    why = {
        "stale": f"{seen} has been seen",
        "reused": f"{seen} belongs to another grant: the authority has lost its history, or there are two",
        "missing": "it carries no stamp",
        "foreign": "its stamp is of another authority",
        "uncovered": "its lease does not cover this name",
        "forged": "its proof is missing or wrong",
    }.get(each.verdict.value, each.verdict.value.replace("_", " "))
    where = [
        f"role {each.who}" if each.who else "",
        each.application or "",
        f"from {each.address}" if each.address else "",
    ]
    by = ", ".join(filter(None, where))
    done = "REFUSES" if refused else "lets through"
    says = f"{each.guard} {done} {what}: {why}" + (f" ({by})" if by else "")
    return Event(each.at, "refused" if refused else "let_through", each.token, says, GUARD)


def _of_changes(changes: Iterable[Change], name: str) -> Iterator[Event]:
    for each in changes:
        about = [each.detail.get(key) for key in ("name", "names", "pattern")]
        if any(isinstance(pattern, str) and not fnmatchcase(name, pattern) for pattern in about):
            continue
        detail = ", ".join(f"{key} {value}" for key, value in each.detail.items() if value is not None)
        says = f"{each.who} changes {each.guard or 'the guards'}: {each.what}" + (
            f" ({detail})" if detail else ""
        )
        yield Event(each.at, "changed", None, says, GUARD)


# The conclusions.


def _concluded(decisions: Sequence[Decision], known: Sequence[PastLease]) -> Iterator[str]:
    for each in _first_of_each(decisions):
        refused = each.ruling.value == "refuse"
        late = _lease(each, known)
        if each.verdict.value == "stale" and late is not None:
            over = _lateness(each.at, late)
            then = "The guard refused it" if refused else "The guard LET IT THROUGH, as its mode says"
            yield f"{of(late.holder)} (token {late.token}) was late{over}. {then}."
        elif each.verdict.value == "stale":
            then = "was refused" if refused else "was LET THROUGH"
            yield f"A write with token {each.token}, older than {each.mark}, {then}. Nobody remembers who had it."
        elif not refused:
            yield "A write was let through that a later stage refuses: look at the value."
    if not decisions:
        yield "No guard has recorded a refusal for it in this time, nor that it let something through."


def _first_of_each(decisions: Sequence[Decision]) -> list[Decision]:
    """One decision for each grant and outcome: a program that repeats what was refused is one story."""
    first: dict[tuple[object, ...], Decision] = {}
    for each in sorted(decisions, key=lambda each: each.at):
        first.setdefault((each.token, each.verdict, each.ruling), each)
    return list(first.values())


def _lateness(at: datetime, late: PastLease) -> str:
    if late.ended is None:
        return ""
    over = at.timestamp() - late.ended
    how = {"released": "after it had released the lease", "revoked": "after an operator had taken the lease"}
    after = how.get(late.state, "after its lease had ended, unrenewed")
    return f": its write came {over:.2f} s {after}" if over > 0 else ""


def _unknown(
    decisions: Sequence[Decision], leases: Sequence[PastLease] | None, audits: Sequence[Audit]
) -> Iterator[str]:
    if leases is None:
        yield "Who held the lease is not known: no authority was asked, or it keeps no history."
    else:
        yield "Authorities forget an attempt ten minutes after its end. They keep its last renewal, and neither its"
        yield "grant before that, nor how long its holder had waited."
    if any(each.verdict.value == "stale" for each in decisions):
        yield "Why it was late (pause, network, overload) is not in these records; the holder's own log may say it."
    if audits:
        yield "Admitted writes are not recorded, so none is shown, and that none is shown means nothing."
    for audit in audits:
        if audit.lags:
            yield f"{audit.where}: decisions arrive up to a second late, and only the newest of each process are kept."
        if audit.ahead is not None:
            yield f"The clock of {audit.where} is {audit.ahead:+.2f} s from this machine's."


# Who.


def _lease(each: Decision, known: Sequence[PastLease]) -> PastLease | None:
    """The lease of a decision's stamp, by its grant: a token alone could be another's."""
    try:
        grant = Stamp.parse(each.stamp).grant
    except InvalidStamp:
        return None
    return next((lease for lease in known if lease.grant == grant), None)


def _whose(each: Decision, known: Sequence[PastLease]) -> str:
    found = _lease(each, known)
    return of(found.holder) if found else "somebody"


def _marked(each: Decision, known: Sequence[PastLease]) -> str:
    found = next((lease for lease in known if lease.grant == each.mark_grant), None)
    return of(found.holder) if found else ""


def of(holder: Holder) -> str:
    """A holder, for people."""
    return f"{holder.label or 'a client without a label'} ({holder.host}:{holder.pid})"


def clock(at: datetime) -> str:
    return f"{at.astimezone():%H:%M:%S.%f}"[:-4]


def around(at: datetime, seconds: float = 300.0) -> tuple[datetime, datetime]:
    return at - timedelta(seconds=seconds), at + timedelta(seconds=seconds)
