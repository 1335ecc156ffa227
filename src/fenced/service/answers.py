"""Answers of an authority as bodies, and the status that goes with each."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from fenced import __version__
from fenced.service import bodies
from fenced.service.bodies import (
    Answer,
    BusyAnswer,
    EndedAnswer,
    GoneAnswer,
    GrantedAnswer,
    HeldByView,
    HolderView,
    KeptAnswer,
    NameBody,
    ReleasedAnswer,
    SchemaView,
    StandingBody,
    TraitView,
    UnknownAnswer,
    WaiterView,
    WaitingAnswer,
)
from fenced.service.replies import JSON
from fenced.values.contracts import Authority
from fenced.values.model import (
    NAMES_MAX,
    Ask,
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
    Standing,
    Unknown,
    Waiting,
    grant_id,
    stamp_text,
)


class SentAnswer(NamedTuple):
    """How a kind of answer is sent, and counted."""

    status: int
    headers: tuple[tuple[str, str], ...]
    label: tuple[str, ...]
    """For the counter of answers about attempts; empty: it is none."""


def _sent(kind: type[Struct], status: int, *headers: tuple[str, str]) -> SentAnswer:
    return SentAnswer(status, (*JSON, *headers) if headers else JSON, (str(kind.__struct_config__.tag),))


SENT: dict[type[Struct], SentAnswer] = {
    GrantedAnswer: _sent(GrantedAnswer, 200),
    WaitingAnswer: _sent(WaitingAnswer, 202),
    BusyAnswer: _sent(BusyAnswer, 409, ("retry-after", "1")),
    EndedAnswer: _sent(EndedAnswer, 410),
    ReleasedAnswer: _sent(ReleasedAnswer, 200),
    GoneAnswer: _sent(GoneAnswer, 404),
}
SENT_OTHER = SentAnswer(200, JSON, ())


def holder_view(holder: Holder) -> HolderView:
    return HolderView(holder.id, holder.label, holder.host, holder.pid)


def held_by_view(held: HeldBy | None) -> HeldByView | None:
    if held is None:
        return None
    return HeldByView(holder_view(held.holder), held.token, held.grant, held.remaining)


def waiting(answer: Waiting) -> WaitingAnswer:
    return WaitingAnswer(max(0.0, answer.check_in), answer.ahead, held_by_view(answer.held_by))


def asked(ask: Ask, answer: AskAnswer, realm: str) -> Answer:
    match answer:
        case Granted():
            token, remaining, ttl = answer
            stamp = stamp_text(realm, ask.names, token, None, grant_id(ask.secret))
            return GrantedAnswer(token, remaining, ttl, stamp)
        case Waiting():
            return waiting(answer)
        case Busy():
            return BusyAnswer(answer.ahead, held_by_view(answer.held_by))
        case Ended():
            return EndedAnswer(answer.reason)


def told(answer: RenewAnswer | ReleaseAnswer) -> Answer:
    """What became of an attempt that was renewed, released or withdrawn."""
    match answer:
        case Kept():
            return KeptAnswer(answer.remaining)
        case Released():
            return ReleasedAnswer()
        case Waiting():
            return waiting(answer)
        case Ended():
            return EndedAnswer(answer.reason)
        case Gone():
            return GoneAnswer()
        case Unknown():
            return UnknownAnswer(answer.why)


def name_body(view: NameView) -> NameBody:
    return NameBody(
        view.name,
        held_by_view(view.held_by),
        list(view.names),
        view.ttl,
        view.free_in,
        [WaiterView(holder_view(each.holder), list(each.names), each.remaining) for each in view.waiters],
    )


def standing_body(namespace: str, authority: Authority, standing: Standing) -> StandingBody:
    stored = standing.schema
    return StandingBody(
        namespace=namespace,
        realm=standing.realm,
        last_token=standing.last_token,
        guarantee="best-effort" if standing.doubts else "strict",
        doubts=list(standing.doubts),
        warnings=list(standing.warnings),
        schema=None if stored is None else SchemaView(stored.version, stored.readable_by, stored.release),
        traits=[TraitView(trait.key, trait.sentence) for trait in authority.traits],
        store=authority.url,
        version=__version__,
        limits={"names": NAMES_MAX, "renewals": bodies.RENEWALS_MAX, "batch": bodies.BATCH_MAX},
    )
