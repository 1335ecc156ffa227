"""What has happened in this instance, in the text format of Prometheus. No label holds a name: there are too many."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

BUCKETS_MS = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 5000)

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


class Metrics:
    """Counters of one instance. Used in the loop's thread only."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in _HELP}
        self._buckets = [0] * (len(BUCKETS_MS) + 1)
        self._sum_ms = 0.0

    def count(self, metric: str, **labels: str) -> None:
        self._counts[metric][labels_text(**labels)] += 1

    def by_labels(self, metric: str) -> Counter[str]:
        """The counts of a metric by the text of their labels, for callers that have it at hand."""
        return self._counts[metric]

    def granted(self, seconds: float, count: int) -> None:
        """This many asks of a request were granted; the store took this long."""
        ms = seconds * 1000
        self._sum_ms += ms * count
        self._buckets[bisect_left(BUCKETS_MS, ms)] += count

    def text(self, held: int) -> str:
        lines = []
        for metric, help_text in _HELP.items():
            lines += [f"# HELP {metric} {help_text}", f"# TYPE {metric} counter"]
            for labels, count in sorted(self._counts[metric].items()):
                lines.append(f"{metric}{labels} {count}")
        lines += [
            "# HELP fenced_held_requests Requests of waiters that are held.",
            "# TYPE fenced_held_requests gauge",
        ]
        lines += [f"fenced_held_requests {held}"]
        lines += ["# HELP lock_acquire_success_total Grants.", "# TYPE lock_acquire_success_total counter"]
        lines += [f"lock_acquire_success_total {sum(self._buckets)}"]
        lines += ["# HELP lock_acquire_latency_ms How long the store took for a grant."]
        lines += ["# TYPE lock_acquire_latency_ms histogram"]
        total = 0
        for limit, count in zip((*map(str, BUCKETS_MS), "+Inf"), self._buckets, strict=True):
            total += count
            lines.append(f'lock_acquire_latency_ms_bucket{{le="{limit}"}} {total}')
        lines += [f"lock_acquire_latency_ms_sum {self._sum_ms:.3f}", f"lock_acquire_latency_ms_count {total}"]
        return "\n".join(lines) + "\n"
