"""The bodies of requests and answers. Requests are checked by these classes, and the OpenAPI document has them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from fenced.values import timing
from fenced.values.model import NAME_BYTES_MAX, NAMES_MAX, TOKEN_MAX

RENEWALS_MAX = 5000
BATCH_MAX = 1000
LABEL_LENGTH_MAX = 200

Attempt = Annotated[
    str,
    Meta(
        pattern="^[0-9a-f]{32}$",
        max_length=32,
        description="32 random hexadecimal digits, new for each attempt. A secret: whoever knows it can end the lease.",
    ),
]
Name = Annotated[str, Meta(min_length=1, max_length=NAME_BYTES_MAX)]
Names = Annotated[list[Name], Meta(min_length=1, max_length=NAMES_MAX)]
Token = Annotated[int, Meta(ge=0, le=TOKEN_MAX)]
Seconds = Annotated[float, Meta(ge=0)]
Label = Annotated[str, Meta(max_length=LABEL_LENGTH_MAX)]


# Requests. An unknown field is refused: it could be a misspelled one.


class RequestBody(Struct, forbid_unknown_fields=True):
    """A body that a client sends."""


class HolderBody(RequestBody):
    """Who asks, shown to people. An empty id is replaced by a random one."""

    id: Label = ""
    label: Label = ""
    host: Label = ""
    pid: Annotated[int, Meta(ge=0, le=2**31)] = 0


class AskBody(RequestBody):
    """Ask for a lease. Sent again with the same attempt, it gets the same lease."""

    attempt: Attempt
    names: Names
    ttl: Annotated[float, Meta(ge=timing.TTL_MIN, le=timing.TTL_MAX)] = timing.TTL_DEFAULT
    wait: bool = False
    """Take a place in the queue if the names are not free."""
    lock_delay: Annotated[float, Meta(ge=0, le=timing.LOCK_DELAY_MAX)] = 0.0
    holder: HolderBody = msgspec.field(default_factory=HolderBody)
    keeps: bool = False
    """The client renews its place itself while its request is held."""
    series: Annotated[str, Meta(pattern="^([0-9a-f]{32})?$", max_length=32)] = ""
    """32 random hexadecimal digits, the same for all attempts of a client that counts them. A secret."""
    number: Annotated[int, Meta(ge=0, le=TOKEN_MAX)] = 0
    """Counts the attempts of this series from 1."""
    settled: Annotated[int, Meta(ge=0, le=TOKEN_MAX)] = 0
    """The attempts of this series up to this number are over, and never sent again: a store may forget them."""


class RenewBody(RequestBody):
    """Renew leases and places in queues."""

    attempts: Annotated[list[Attempt], Meta(max_length=RENEWALS_MAX)]
    timeout: Annotated[float, Meta(ge=0, le=60)] = timing.CALL_SECONDS
    """How many seconds the client waits for the answer."""


class ReleaseBody(RequestBody):
    """End a lease. With `keep` nobody is granted its names for that many seconds."""

    attempt: Attempt
    keep: Annotated[float, Meta(ge=0, le=timing.AT_LEAST_FOR_MAX)] = 0.0


class WithdrawBody(RequestBody):
    """End an attempt, granted or not. An ask of it that arrives later is refused."""

    attempt: Attempt


class BatchItem(RequestBody):
    """One of the four operations."""

    ask: AskBody | None = None
    renew: Attempt | None = None
    release: ReleaseBody | None = None
    withdraw: WithdrawBody | None = None


class BatchBody(RequestBody):
    """Operations that are carried out side by side, in no order."""

    do: Annotated[list[BatchItem], Meta(max_length=BATCH_MAX)]


class NamespaceBody(RequestBody):
    """Create a namespace, or open the one that exists."""

    namespace: Name


class ForceReleaseBody(RequestBody):
    """Take a name from the holder that has this token."""

    token: Token
    reason: Annotated[str, Meta(max_length=1000)] = ""


class FloorBody(RequestBody):
    """Make every later token greater than `above`."""

    above: Annotated[int, Meta(ge=0, lt=TOKEN_MAX)]


class TidyBody(RequestBody):
    """Forget attempts that ended long ago."""


# Answers.


class HolderView(Struct):
    id: str
    label: str
    host: str
    pid: int


class HeldByView(Struct):
    holder: HolderView
    token: Token
    grant: str
    remaining: float


class WaiterView(Struct):
    holder: HolderView
    names: list[str]
    remaining: float


class Answer(Struct, tag_field="answer", tag=lambda name: name.removesuffix("Answer").lower()):
    """What became of an attempt; the field `answer` says which one it is."""


class GrantedAnswer(Answer):
    """`remaining` counts from the instant before the request was sent."""

    token: Token
    remaining: Seconds
    ttl: Seconds
    stamp: str
    """For guards with the rule `retry`: what a request to a resource carries."""


class WaitingAnswer(Answer):
    """In the queue. Ask again with the same attempt after `check_in` seconds at the latest."""

    check_in: Seconds
    ahead: int | None
    held_by: HeldByView | None


class BusyAnswer(Answer):
    ahead: int
    held_by: HeldByView | None


class EndedAnswer(Answer):
    reason: str


class KeptAnswer(Answer):
    remaining: Seconds


class UnknownAnswer(Answer):
    """It may have been carried out or not. Repeat it."""

    why: str


class ReleasedAnswer(Answer):
    """Released, by this request or an earlier one."""


class GoneAnswer(Answer):
    """The store does not know this attempt, or no longer knows it."""


class FailedAnswer(Answer):
    """An operation of a batch that was answered by a problem document."""

    problem: ProblemView


class ProblemView(Struct, omit_defaults=True):
    """RFC 9457, with `retry`: no, later (nothing happened), same-attempt (unknown), transaction."""

    type: str
    title: str
    status: int
    detail: str = ""
    retry: str = ""


class Turn(Struct):
    """The second line of a held answer: ask again, because it may be your turn (true) or to be held again (false)."""

    turn: bool


class RenewedAnswers(Struct):
    answers: list[RenewedAnswer]


class BatchAnswers(Struct):
    answers: list[BatchAnswer]


class NameBody(Struct):
    name: str
    held_by: HeldByView | None
    names: list[str]
    ttl: float | None
    free_in: float
    waiters: list[WaiterView]


class NamesBody(Struct):
    names: list[NameBody]


class MintedBody(Struct):
    """A token above that of the holder; null: that grant does not hold the name, so nothing was done."""

    token: int | None


class FloorAnswer(Struct):
    floor: Token


class TidyAnswer(Struct):
    forgotten: int


class WrittenBody(Struct):
    """The version that the value has now; also in the ETag."""

    version: int


class MarkBody(Struct):
    """The highest token that was admitted for this name; 0: none yet."""

    name: str
    token: Token


HOT_SHOWN = 10


class HotView(Struct):
    """A name that had to be waited for."""

    name: str
    count: int
    error: int
    """By how much the count may be too high."""


class HotBody(Struct):
    """The hottest name comes first; none if no name stands out. Counts are halved every five minutes."""

    hot: list[HotView]


class TraitView(Struct):
    key: str
    sentence: str


class SchemaView(Struct):
    version: int
    readable_by: int
    release: str


class StandingBody(Struct, kw_only=True):
    namespace: str
    realm: str
    last_token: Token
    guarantee: Literal["strict", "best-effort"]
    doubts: list[str]
    warnings: list[str]
    schema: SchemaView | None
    traits: list[TraitView]
    store: str
    version: str
    limits: dict[str, int]


RenewedAnswer = KeptAnswer | WaitingAnswer | EndedAnswer | GoneAnswer | UnknownAnswer
BatchAnswer = (
    GrantedAnswer
    | WaitingAnswer
    | BusyAnswer
    | EndedAnswer
    | KeptAnswer
    | GoneAnswer
    | UnknownAnswer
    | ReleasedAnswer
    | FailedAnswer
)
