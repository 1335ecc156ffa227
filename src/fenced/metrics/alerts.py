"""The alerts as one table, and the rules of Prometheus that are made of it.

Each condition has windows in braces, so that tests can shorten them. A condition names metrics of the table alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Severity = Literal["critical", "warning", "info"]
WINDOWS = {
    "recent": "5m",
    "hour": "1h",
    "day": "1d",
    "quarter": "15m",
    "before": "1h",
    "offset": "10m",
    "few": "2",
    "trickle": "0.02",
    "key_age": "7776000",
    "certificate": "1209600",
    "override": "7200",
    "stuck": "600",
    "at_once": "0m",
    "minute": "1m",
    "minutes": "5m",
}
"""The windows and limits in production: 90 days for a key, 14 for a certificate, two hours for an override."""
SHORT = {
    **WINDOWS,
    "recent": "8s",
    "hour": "12s",
    "day": "12s",
    "quarter": "20s",
    "before": "25s",
    "offset": "10s",
    "key_age": "4",
    "override": "4",
    "stuck": "5",
    "minute": "1s",
    "minutes": "2s",
}
"""For tests and for trying the rules."""

_STALE = 'fenced_refusals_total{{kind="stale",source=~"guard|service|proxy"}}'


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule. `lasts`: the window for which its condition must hold."""

    name: str
    severity: Severity
    summary: str
    condition: str
    lasts: str = "at_once"


def _p99(window: str, offset: str = "") -> str:
    return f"histogram_quantile(0.99, sum by (le) (rate(fenced_acquire_seconds_bucket[{window}]{offset})))"


ALERTS = (
    Alert(
        "FencedRefusalsWithLatency",
        "warning",
        "Stale writes are refused and leases take long to get: a pause or a network event. The guard held.",
        # Both sides are summed: `A and B` with different labels matches nothing. A baseline that is missing, or NaN
        # because nothing was acquired, is a small constant: else a burst in the first hour would not be seen.
        f"(sum(rate({_STALE}[{{recent}}])) > {{trickle}} + 3 * (sum(rate({_STALE}[{{before}}] offset {{offset}}))"
        " or vector(0))) and on () "
        f"({_p99('{recent}')} > 2 * ({_p99('{before}', ' offset {offset}')} >= 0 or vector(0.05)))",
    ),
    Alert(
        "FencedUnstampedWrite",
        "critical",
        "A program wrote, or tried to write, without a stamp.",
        # A refused write that no wrapper saw is rolled back with its record: the store's own count alone knows it.
        "sum by (guard, target, instance) (increase(fenced_unstamped_total[{hour}])) > 0 or sum by (guard, target, "
        'instance) (increase(fenced_refusals_total{{kind="unrecorded"}}[{hour}])) > 0',
    ),
    Alert(
        "FencedExpiryRepeats",
        "warning",
        "Leases expire again and again while their holder works: it is paused, overloaded or cut off.",
        'sum by (job, instance) (increase(fenced_lost_total{{reason="expired"}}[{quarter}])) > {few}',
    ),
    Alert(
        "FencedFloorMustBeRaised",
        "critical",
        "The authority has lost its last tokens: stop the writers, raise the floor, start them.",
        # After a restore the first tokens are stale, not reused, and it heals by itself: the gauge sees it at once.
        'sum by (guard, target, instance) (increase(fenced_refusals_total{{kind="reused"}}[{hour}])) > 0 or '
        "max by (guard, target, instance) (fenced_mark_above_last_token) > 0",
    ),
    Alert(
        "FencedOverrideLeftOn",
        "warning",
        "An override lets writes through for longer than planned.",
        "max by (guard, pattern, target) (fenced_guard_override_age_seconds) > {override}",
    ),
    Alert(
        "FencedQueueDoesNotMove",
        "warning",
        "A name is waited for, and its holder has not changed.",
        "max by (target) (fenced_queue_stuck_seconds) > {stuck}",
        "minute",
    ),
    Alert(
        "FencedNotRequired",
        "info",
        "Programs write without stamps, and the guard lets them.",
        "min by (guard, target) (fenced_guard_stage) < 4 and on (guard, target) "
        'sum by (guard, target) (increase(fenced_unstamped_total{{ruling!="refuse"}}[{day}])) > 0',
        "minutes",
    ),
    Alert(
        "FencedKeyOld",
        "warning",
        "A key that signs stamps must be replaced, or a certificate ends soon.",
        "fenced_key_age_seconds > {key_age} or fenced_certificate_seconds < {certificate}",
    ),
    Alert(
        "FencedKeeperFailed",
        "critical",
        "The renewing loop of a program failed: all its leases are lost.",
        "sum by (job, instance) (increase(fenced_keeper_failures_total[{hour}])) > 0",
    ),
    Alert(
        "FencedGuardWrong",
        "critical",
        "A trigger is missing or disabled: the guard does not see every write.",
        "max by (guard, target) (fenced_guard_wrong) > 0",
    ),
    Alert(
        "FencedCannotLook",
        "warning",
        "The exporter cannot read a store, or Prometheus cannot read a process of fenced.",
        'fenced_up == 0 or up{{job=~"fenced.*"}} == 0',
        "minutes",
    ),
    Alert(
        "FencedBestEffort",
        "info",
        "Tokens could repeat on this store.",
        "fenced_authority_strict == 0",
        "minutes",
    ),
)


def expression(alert: Alert, windows: Mapping[str, str] = WINDOWS) -> str:
    return alert.condition.format(**windows)


def rules(runbooks: str, windows: Mapping[str, str] = WINDOWS) -> str:
    """A file of rules for Prometheus. `runbooks`: the page with a section for each alert."""
    return "\n".join(_rules(runbooks, windows)) + "\n"


def _rules(runbooks: str, windows: Mapping[str, str]) -> Iterator[str]:
    yield from ("groups:", "- name: fenced", "  rules:")
    for alert in ALERTS:
        yield f"  - alert: {alert.name}"
        yield f"    expr: |-\n      {expression(alert, windows)}"
        yield f"    for: {windows[alert.lasts]}"
        yield f"    labels: {{severity: {alert.severity}}}"
        yield "    annotations:"
        yield f'      summary: "{alert.summary}"'
        yield f'      runbook_url: "{runbooks}#{alert.name.lower()}"'
