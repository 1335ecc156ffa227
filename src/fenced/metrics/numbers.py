"""Counts and histograms of one process by the table, and their text for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from threading import RLock
from typing import NamedTuple

from fenced.metrics.table import BY_NAME, Metric, Source

TEXT = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[tuple[str, str], ...]


class Histogram:
    """How many numbers there were up to each limit."""

    __slots__ = ("buckets", "total")

    def __init__(self, limits: int) -> None:
        self.buckets = [0] * (limits + 1)
        self.total = 0.0

    def copied(self) -> Histogram:
        copy = Histogram(0)
        copy.buckets, copy.total = [*self.buckets], self.total
        return copy


class Point(NamedTuple):
    """One series as it is now."""

    metric: Metric
    labels: Labels
    value: float | Histogram


class Numbers:
    """The numbers of one source. Any thread may add to them.

    The lock is re-entrant: a finalizer may run in the thread that holds it, and report the end of a lease.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.reset()

    def reset(self) -> None:
        """Begin anew, in a forked child."""
        self.lock = RLock()
        self._values: dict[str, Counter[tuple[str, ...]]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], Histogram]] = {}

    def counts(self, metric: str) -> Counter[tuple[str, ...]]:
        """The values of a metric by its labels but `source`, in their order. For callers that count in one thread."""
        found = self._values.get(metric)
        if found is None:
            self._check(metric)
            found = self._values.setdefault(metric, Counter())
        return found

    def start(self, metric: str, *labels: tuple[str, ...]) -> None:
        """Give a counter samples with 0: `increase()` sees no first event of a series that begins with it."""
        for each in labels or ((),):
            if BY_NAME[metric].kind == "histogram":
                self._histogram(metric, each)
            else:
                self.counts(metric)[each] += 0

    def add(self, metric: str, *labels: str, by: float = 1) -> None:
        with self.lock:
            self.counts(metric)[labels] += by  # type: ignore[assignment]

    def set(self, metric: str, value: float, *labels: str) -> None:
        with self.lock:
            self.counts(metric)[labels] = value  # type: ignore[assignment]

    def observe(self, metric: str, number: float, *labels: str, times: int = 1) -> None:
        with self.lock:
            found = self._histogram(metric, labels)
            found.buckets[bisect_left(BY_NAME[metric].buckets, number)] += times
            found.total += number * times

    def _histogram(self, metric: str, labels: tuple[str, ...]) -> Histogram:
        series = self._histograms.get(metric)
        if series is None:
            self._check(metric)
            series = self._histograms[metric] = {}
        found = series.get(labels)
        if found is None:
            found = series[labels] = Histogram(len(BY_NAME[metric].buckets))
        return found

    def _check(self, metric: str) -> None:
        if self.source not in BY_NAME[metric].sources:
            raise ValueError(f"the table does not say that {self.source} has {metric}")

    def samples(self, *constant: tuple[str, str], of: str | None = None) -> list[Point]:
        """All series, or those of one metric, as they are now, each with these labels in front."""
        found: list[Point] = []
        with self.lock:
            for name in (*self._values, *self._histograms) if of is None else (of,):
                metric = BY_NAME[name]
                for key, value in self._values.get(name, {}).items():
                    found.append(Point(metric, self._labels(metric, key, constant), value))
                for key, one in self._histograms.get(name, {}).items():
                    found.append(Point(metric, self._labels(metric, key, constant), one.copied()))
        return found

    def _labels(self, metric: Metric, key: tuple[str, ...], constant: Labels) -> Labels:
        names = [label for label in metric.labels if label != "source"]
        found = [*constant, *((n, v) for n, v in zip(names, key, strict=True) if v)]
        return (*found, ("source", self.source)) if "source" in metric.labels else tuple(found)


def exposition(samples: Iterable[Point]) -> str:
    """The text that Prometheus reads, with both names of what has two. HELP and TYPE stand once for each metric."""
    by_metric: dict[Metric, list[Point]] = {}
    for sample in samples:
        by_metric.setdefault(sample.metric, []).append(sample)
    lines: list[str] = []
    for metric, found in by_metric.items():
        lines += _metric_lines(metric, metric.name, 1, found)
        if metric.also:
            counted = [
                each for each in found if metric.also_where is None or metric.also_where in each.labels
            ]
            lines += _metric_lines(metric, metric.also, metric.also_scale, counted)
    return "\n".join(lines) + "\n"


def _metric_lines(metric: Metric, name: str, scale: int, samples: list[Point]) -> Iterator[str]:
    yield f"# HELP {name} {metric.meaning}"
    yield f"# TYPE {name} {metric.kind}"
    for _, labels, value in samples:
        if not isinstance(value, Histogram):
            yield f"{name}{labels_text(labels)} {_number(value)}"
            continue
        total = 0
        for limit, count in zip((*metric.buckets, None), value.buckets, strict=True):
            total += count
            le = "+Inf" if limit is None else _number(limit * scale)
            yield f"{name}_bucket{labels_text((*labels, ('le', le)))} {total}"
        yield f"{name}_sum{labels_text(labels)} {_number(value.total * scale)}"
        yield f"{name}_count{labels_text(labels)} {total}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.6f}".rstrip("0")


def labels_text(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
