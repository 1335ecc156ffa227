"""The one table of metrics. What counts, exports, draws or alerts takes its names, labels and meanings from here.

Names are `fenced_*`, in seconds; `also` is the name that the literature on fencing gives the same number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Source = Literal["holder", "service", "proxy", "guard", "authority"]

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
GAP = (-10_000, -1000, -100, -20, -10, -5, -4, -3, -2, -1, 0, 1, 2, 5, 10, 100)
SHARE = (0.05, 0.1, 0.2, 0.34, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One row. A label without a value is left out of a sample."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    sources: tuple[Source, ...]
    meaning: str
    buckets: tuple[float, ...] = ()
    also: str = ""
    also_where: tuple[str, str] | None = None
    """A label, and its only value that counts under the other name."""

    @property
    def also_scale(self) -> int:
        return 1000 if self.also.endswith("_ms") else 1


def _counter(
    name: str, labels: str, sources: str, meaning: str, also: str = "", **more: tuple[str, str]
) -> Metric:
    return _metric(name, "counter", "1", labels, sources, meaning, also=also, **more)


def _gauge(name: str, unit: str, labels: str, sources: str, meaning: str) -> Metric:
    return _metric(name, "gauge", unit, labels, sources, meaning)


def _histogram(
    name: str, unit: str, labels: str, sources: str, meaning: str, buckets: tuple[float, ...], also: str = ""
) -> Metric:
    return _metric(name, "histogram", unit, labels, sources, meaning, buckets=buckets, also=also)


def _metric(
    name: str, kind: Kind, unit: str, labels: str, sources: str, meaning: str, **more: object
) -> Metric:
    where: tuple[Source, ...] = tuple(sources.split())  # type: ignore[arg-type]
    return Metric(f"fenced_{name}", kind, unit, tuple(labels.split()), where, meaning, **more)  # type: ignore[arg-type]


TABLE = (
    # Leases.
    _counter(
        "grants_total", "pattern", "holder service", "Leases that were granted.", "lock_acquire_success_total"
    ),
    _histogram(
        "acquire_seconds",
        "seconds",
        "pattern",
        "holder service",
        "From the first ask to the grant, with the time in the queue.",
        SECONDS,
        "lock_acquire_latency_ms",
    ),
    _histogram("store_seconds", "seconds", "", "service", "How long the store took for a grant.", SECONDS),
    _counter(
        "not_granted_total",
        "pattern why",
        "holder",
        "Calls that ended without a lease, by why: busy, timeout, unavailable, indeterminate, cancelled, error.",
    ),
    _counter("contended_total", "pattern", "holder service", "Asks that had to queue behind somebody."),
    _gauge("held", "1", "", "holder authority", "Leases (holder) or names (authority) that are held now."),
    _gauge("waiting", "1", "", "holder authority", "Asks that wait in a queue now."),
    _histogram(
        "hold_seconds", "seconds", "pattern", "holder", "From the grant to the release or the loss.", SECONDS
    ),
    _counter(
        "renewals_total",
        "outcome",
        "holder",
        "Renewals of leases by outcome: kept, unknown (no answer: tried again), ended (lost, or released meanwhile).",
    ),
    _histogram(
        "renewal_used_ratio",
        "ratio",
        "",
        "holder",
        "The largest share of a ttl that had passed when a round of renewals was confirmed: 1/3 is on time, 1 is lost.",
        SHARE,
    ),
    _counter("jeopardy_total", "pattern", "holder", "Leases that were in doubt because a renewal failed."),
    _counter("saved_total", "pattern", "holder", "Leases that were in doubt, and were renewed in time."),
    _counter(
        "lost_total",
        "pattern reason",
        "holder service",
        "Leases that were lost while somebody may have worked, by reason.",
        "lease_expired_while_executing_total",
        also_where=("reason", "expired"),
    ),
    _histogram(
        "loss_noticed_seconds",
        "seconds",
        "",
        "holder",
        "How late a holder noticed that its lease had expired.",
        SECONDS,
    ),
    _histogram(
        "loss_pause_seconds",
        "seconds",
        "",
        "holder",
        "For how long, of leases that expired, the process did not run since the last renewal; 0: none was noticed.",
        SECONDS,
    ),
    _counter("release_failed_total", "", "holder", "Releases that the authority did not confirm."),
    _counter(
        "keeper_failures_total", "", "holder", "Failures of the renewing loop, which lose all its leases."
    ),
    _counter(
        "connection_failures_total", "", "holder", "Times that the authority could no longer be reached."
    ),
    # Guards.
    _counter(
        "refusals_total",
        "guard kind source",
        "holder service proxy guard",
        "Operations that a guard refused, by kind; unrecorded: the store counted it and has no record of it.",
        "fencing_reject_total",
    ),
    _counter(
        "let_through_total",
        "guard kind",
        "guard",
        "Stamped operations that a later stage of the rollout would refuse.",
    ),
    _counter(
        "admitted_total",
        "guard",
        "holder",
        "Operations that raised a mark, at guards over cells and in SQLite.",
    ),
    _histogram(
        "token_gap",
        "tokens",
        "guard source",
        "holder service",
        "The token of an operation minus the mark of its name: below 0 it was stale, above 0 it raised the mark.",
        GAP,
        "token_gap",
    ),
    _counter(
        "unstamped_total",
        "guard ruling source",
        "holder service proxy guard",
        "Writes without a stamp, refused or not.",
        "critical_write_without_token_total",
    ),
    _gauge(
        "guard_stage", "1", "guard pattern", "guard", "0 observe, 1 shadow, 2 canary, 3 enforce, 4 require."
    ),
    _gauge("guard_marks", "1", "guard", "guard", "Names that have a mark, as of the last minute."),
    _gauge("guard_highest_token", "tokens", "guard", "guard", "The highest token that was seen."),
    _gauge(
        "guard_override_age_seconds",
        "seconds",
        "guard pattern",
        "guard",
        "How long names have been let through by overrides, without a break that the exporter saw.",
    ),
    _gauge("guard_wrong", "1", "guard", "guard", "Things that keep the guard from seeing every write."),
    _gauge("guard_bypass_roles", "1", "guard", "guard", "Roles that can log in and disable the guard."),
    _gauge(
        "guard_pending", "1", "guard", "guard", "Transactions that the last change of a stage does not bind."
    ),
    _counter("guard_unrecorded_total", "", "guard", "Decisions that could not be written down."),
    _gauge("key_age_seconds", "seconds", "key", "guard", "Age of a key that may sign stamps."),
    _gauge(
        "mark_above_last_token",
        "tokens",
        "guard",
        "guard",
        "Highest mark minus the authority's last token; above 0 the authority has lost its history.",
    ),
    # Authorities.
    _gauge("authority_last_token", "tokens", "", "authority", "The last token that was minted."),
    _gauge("authority_strict", "1", "", "authority", "1: tokens cannot repeat; 0: there are doubts."),
    _gauge("queue_longest", "1", "", "authority", "Waiters of the name that most wait for."),
    _gauge(
        "queue_stuck_seconds",
        "seconds",
        "",
        "authority",
        "Longest time in which a name was waited for and its holder did not change, as far as the exporter saw.",
    ),
    # Looks of the exporter.
    _gauge(
        "up", "1", "role", "guard authority", "Whether the last look at the store succeeded, and is not old."
    ),
    _gauge("look_seconds", "seconds", "role", "guard authority", "How long the last look took."),
    _gauge("look_age_seconds", "seconds", "role", "guard authority", "How long ago the last look ended."),
    # Service and proxy.
    _gauge("certificate_seconds", "seconds", "file", "service proxy", "Time until the certificate ends."),
    _counter("requests_total", "route status", "service", "Requests by route and status."),
    _counter("answers_total", "answer", "service", "Answers about attempts, by kind."),
    _counter("errors_total", "type", "service", "Problem documents by type."),
    _gauge("held_requests", "1", "", "service", "Requests of waiters that are held."),
    _counter("proxy_requests_total", "", "proxy", "Requests of clients."),
    _counter(
        "proxy_upstream_answers_total",
        "class",
        "proxy",
        "Answers of the upstream by the class of their status.",
    ),
    _counter("proxy_own_answers_total", "status", "proxy", "Answers of the proxy itself by status."),
    _counter("proxy_unknown_total", "", "proxy", "Requests whose outcome is unknown."),
    _gauge("proxy_waiting", "1", "", "proxy", "Requests that wait for older ones."),
    _gauge("proxy_connections", "1", "", "proxy", "Connections of clients."),
    _gauge("proxy_upstream_connections", "1", "", "proxy", "Connections to the upstream."),
    _gauge(
        "build_info", "1", "version", "holder service proxy guard authority", "1; the version is a label."
    ),
)
BY_NAME = {metric.name: metric for metric in TABLE}
STAGES = {"observe": 0, "shadow": 1, "canary": 2, "enforce": 3, "require": 4}
"""The values of `fenced_guard_stage`."""
