"""What the live page gets: the state of a namespace, then its changes. The OpenAPI document has these classes."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from fenced.service.answers import held_by_view, holder_view
from fenced.service.bodies import HeldByView, HolderView, HotView
from fenced.values.model import Holder, NameView

WAITERS_SHOWN = 20

EventKind = Literal["granted", "released", "lost", "ended", "refused", "taken"]
"""`lost`: while its holder may still have been working. `ended`: somewhere else, and nobody here knows how."""


class LiveName(Struct):
    """A name that is held or waited for."""

    name: str
    held_by: HeldByView | None
    names: list[str]
    ttl: float | None
    free_in: float
    waiting: int
    waiters: list[HolderView]
    """The first ones of the queue."""
    since: float | None
    """When this instance first saw the lease: seconds since 1970."""
    waiting_since: float | None
    """Since when the oldest waiter waits, of those that asked this instance: seconds since 1970."""


class LiveEvent(Struct, omit_defaults=True):
    """Something that happened, in the order in which this instance saw it."""

    number: int
    at: float
    """Seconds since 1970."""
    kind: EventKind
    names: tuple[str, ...] = ()
    token: int | None = None
    grant: str = ""
    holder: HolderView | None = None
    why: str = ""
    mark: int | None = None
    """Of a refusal: the highest token that the guard had seen."""
    mark_holder: HolderView | None = None
    guard: str = ""
    mode: str = ""


class StageView(Struct):
    """The stage of the names that match a pattern, and what speaks against the next one."""

    pattern: str
    mode: str
    next: str | None
    reasons: list[str]


class ClaimedRowView(Struct):
    """A row that a worker has claimed."""

    name: str
    worker: str
    """Its label, host and process, where the leases are in the same database; else the end of its lease's name."""
    since: float
    """Seconds since 1970, by the clock of the database."""
    attempt: int


class WorkView(Struct):
    """The rows of a table with claims."""

    ready: int
    next: str | None
    """The row that would be claimed next: the oldest, in the order of the claims."""
    later: int
    claimed: int
    dead: int
    """Dead letters: rows whose attempts are used up."""
    claims: list[ClaimedRowView]
    """The oldest claims."""


class UnstampedView(Struct):
    """A writer without a stamp, and how many of its writes were seen, admitted or not."""

    who: str
    count: int
    last: float | None
    """When the last one was: seconds since 1970."""


class OverrideView(Struct):
    """Names that are let through, for a while."""

    pattern: str
    until: float
    """Seconds since 1970."""
    who: str
    why: str


class GuardTableView(Struct):
    """One guarded table, or a guard without tables."""

    guard: str
    rule: str
    stages: list[StageView]
    marks: int
    highest: int
    refused: int | None
    wrong: list[str]
    work: WorkView | None = None
    """Of a table with claims."""
    unstamped: list[UnstampedView] = []
    """The writers without a stamp that wrote last."""
    overrides: list[OverrideView] = []


class GuardView(Struct):
    """A guard of `--guard`."""

    url: str
    tables: list[GuardTableView]
    problem: str = ""
    """Why it cannot be looked at; empty: it can."""
    realm: str | None = None
    """The one that it trusts; None: none yet."""


class Sample(Struct):
    """Numbers of one look. The last three count since this instance started: what it has granted, refusals that it has
    seen, and leases that had expired when their holder came to renew or release them, as in `/metrics`."""

    held: int
    waiting: int
    granted: int
    refused: int
    lost: int


class HourView(Struct):
    """Counts of the last sixty minutes, the current one at the end: of what a Sample counts since the start."""

    granted: list[int] = []
    refused: list[int] = []
    lost: list[int] = []


class LiveState(Struct, kw_only=True):
    """Everything, as it is now: the first event `state` of a stream."""

    namespace: str
    namespaces: list[str]
    """Those that clients of this instance have used, and that the credential of this stream may read."""
    realm: str
    store: str
    guarantee: Literal["strict", "best-effort"]
    doubts: list[str]
    version: str
    last_token: int
    now: float
    """By the clock of the service, in seconds since 1970."""
    may_operate: bool
    """Whether the credential of this stream may force-release."""
    names: list[LiveName]
    """Together with those of the events `names` before it, which come if there are many."""
    more: bool
    """Whether there are more names than an instance looks at."""
    guards: list[GuardView]
    events: list[LiveEvent]
    samples: list[Sample]
    hot: list[HotView]
    """The names that were most often waited for in the last minutes, as in `GET /v1/hot`."""
    hour: HourView
    alerts: list[str]
    """What this instance knows of itself that needs attention: a certificate that ends soon, values without a stamp."""


class LiveChange(Struct, kw_only=True, omit_defaults=True):
    """Every other event of a stream: what has changed since the one before."""

    names: list[LiveName] = []
    gone: list[str] = []
    more: bool = False
    last_token: int = 0
    namespaces: list[str] | None = None
    guards: list[GuardView] | None = None
    events: list[LiveEvent] = []
    sample: Sample | None = None
    hot: list[HotView] | None = None
    hour: HourView | None = None
    alerts: list[str] | None = None
    problem: str = ""
    """Why the store could not be looked at."""


def live_name(view: NameView, since: float | None, waiting_since: float | None) -> LiveName:
    return LiveName(
        view.name,
        held_by_view(view.held_by),
        list(view.names),
        view.ttl,
        view.free_in,
        len(view.waiters),
        [holder_view(waiter.holder) for waiter in view.waiters[:WAITERS_SHOWN]],
        since,
        waiting_since,
    )


def shown_holder(holder: Holder | None) -> HolderView | None:
    return None if holder is None else holder_view(holder)
