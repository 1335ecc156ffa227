"""What a story did, in the words of the table of metrics."""

from __future__ import annotations

from collections import Counter


class History:
    """What one source must show: counters, and how many numbers each histogram has; sums where they are known."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.sums: dict[tuple[str, str], float] = {}

    def note(self, metric: str, by: float = 1, /, **labels: str) -> None:
        self.counts[f"fenced_{metric}", _labels(labels)] += by  # type: ignore[assignment]

    def observed(self, metric: str, number: float, /, **labels: str) -> None:
        """A number in a histogram."""
        key = f"fenced_{metric}_sum", _labels(labels)
        self.note(f"{metric}_count", **labels)
        self.sums[key] = self.sums.get(key, 0.0) + number


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
