"""What has happened in this instance, in the text format of Prometheus. No label holds a name: there are too many."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from fenced.errors import REFUSALS, Refused, StaleToken
from fenced.net.problems import PROBLEM_TYPES

BUCKETS_MS = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 5000)
BUCKETS_GAP = (-10_000, -1000, -100, -20, -10, -5, -4, -3, -2, -1)

_HELP = {
    "fenced_requests_total": "Requests by route and status.",
    "fenced_answers_total": "Answers about attempts, by kind.",
    "fenced_errors_total": "Problem documents by type.",
    "fencing_reject_total": "Operations on values that their guard refused, by kind.",
    "critical_write_without_token_total": "Writes to values without a stamp, refused or not.",
}


def labels_text(**labels: str) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _known_labels(metric: str) -> list[str]:
    """Labels that have a sample from the start: `increase()` sees no first event of one that begins with it."""
    match metric:
        case "fencing_reject_total":
            return [labels_text(kind=kind) for kind in REFUSALS]
        case "fenced_errors_total":
            return [labels_text(type=each.kind) for each in PROBLEM_TYPES] + [labels_text(type="blank")]
        case "critical_write_without_token_total":
            return [labels_text()]
    return []


class Histogram:
    """How many numbers there were up to each limit."""

    def __init__(self, name: str, help_text: str, limits: tuple[int, ...]) -> None:
        self._name = name
        self._help = help_text
        self._limits = limits
        self._buckets = [0] * (len(limits) + 1)
        self._sum = 0.0

    def add(self, number: float, count: int = 1) -> None:
        self._sum += number * count
        self._buckets[bisect_left(self._limits, number)] += count

    @property
    def count(self) -> int:
        return sum(self._buckets)

    def lines(self) -> list[str]:
        name, total = self._name, 0
        lines = [f"# HELP {name} {self._help}", f"# TYPE {name} histogram"]
        for limit, count in zip((*map(str, self._limits), "+Inf"), self._buckets, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{limit}"}} {total}')
        return [*lines, f"{name}_sum {self._sum:.3f}", f"{name}_count {total}"]


class Metrics:
    """Counters of one instance. Used in the loop's thread only."""

    def __init__(self) -> None:
        self._counts = {name: Counter(dict.fromkeys(_known_labels(name), 0)) for name in _HELP}
        self._latency = Histogram(
            "lock_acquire_latency_ms",
            "How long a grant took, from the first request that shared its write.",
            BUCKETS_MS,
        )
        self._gap = Histogram(
            "token_gap",
            "The token of an operation on values that was refused as stale, minus the highest that its guard had seen.",
            BUCKETS_GAP,
        )

    def count(self, metric: str, **labels: str) -> None:
        self._counts[metric][labels_text(**labels)] += 1

    def by_labels(self, metric: str) -> Counter[str]:
        """The counts of a metric by the text of their labels, for callers that have it at hand."""
        return self._counts[metric]

    def granted(self, seconds: float, count: int) -> None:
        """This many asks of a request were granted; the store took this long."""
        self._latency.add(seconds * 1000, count)

    def refused(self, error: Refused) -> None:
        """The guard of the values has refused an operation."""
        self.count("fencing_reject_total", kind=error.kind)
        if isinstance(error, StaleToken) and error.stamp is not None and error.mark is not None:
            self._gap.add(error.stamp.token - error.mark)

    def text(self, held: int, expired: int) -> str:
        """`held` requests are held now; `expired` leases have expired while they were used."""
        lines = []
        for metric, help_text in _HELP.items():
            lines += [f"# HELP {metric} {help_text}", f"# TYPE {metric} counter"]
            for labels, count in sorted(self._counts[metric].items()):
                lines.append(f"{metric}{labels} {count}")
        lines += _plain("fenced_held_requests", "gauge", "Requests of waiters that are held.", held)
        came_late = (
            "Leases of this instance that had expired when their holder came to renew or release them."
        )
        lines += _plain("lease_expired_while_executing_total", "counter", came_late, expired)
        lines += _plain("lock_acquire_success_total", "counter", "Grants.", self._latency.count)
        lines += [*self._latency.lines(), *self._gap.lines()]
        return "\n".join(lines) + "\n"


def _plain(name: str, kind: str, help_text: str, value: int) -> list[str]:
    return [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", f"{name} {value}"]
