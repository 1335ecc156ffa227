"""Instruments of OpenTelemetry that are asked when it exports: a lease pays for our own counters alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from fenced.metrics.numbers import Histogram, Labels, Numbers
from fenced.metrics.table import TABLE, Metric

Read = Callable[[CallbackOptions], Iterable[Observation]]


def observe(numbers: Numbers, meter: Meter) -> None:
    for metric in TABLE:
        if numbers.source not in metric.sources:
            continue
        match metric.kind:
            case "counter":
                meter.create_observable_counter(
                    metric.name, [_plain(numbers, metric)], description=metric.meaning
                )
            case "gauge":
                meter.create_observable_gauge(
                    metric.name, [_plain(numbers, metric)], description=metric.meaning
                )
            case "histogram":
                _histogram(numbers, metric, meter)


def _histogram(numbers: Numbers, metric: Metric, meter: Meter) -> None:
    counter, says = meter.create_observable_counter, metric.meaning
    counter(f"{metric.name}_bucket", [_parts(numbers, metric, _buckets)], description=says)
    counter(f"{metric.name}_count", [_parts(numbers, metric, _count)], description=says)
    falls = min(metric.buckets) < 0  # its sum may fall, so it is no counter
    total = meter.create_observable_up_down_counter if falls else counter
    total(f"{metric.name}_sum", [_parts(numbers, metric, _sum)], description=says)


def _plain(numbers: Numbers, metric: Metric) -> Read:
    def read(_: CallbackOptions) -> list[Observation]:
        return [Observation(value, dict(labels)) for labels, value in _of(numbers, metric)]

    return read


def _parts(
    numbers: Numbers, metric: Metric, parts: Callable[[Metric, Labels, Histogram], Sequence[Observation]]
) -> Read:
    def read(_: CallbackOptions) -> list[Observation]:
        return [each for labels, value in _of(numbers, metric) for each in parts(metric, labels, value)]

    return read


def _of(numbers: Numbers, metric: Metric) -> list[tuple[Labels, Any]]:
    return [(labels, value) for found, labels, value in numbers.samples(of=metric.name)]


def _buckets(metric: Metric, labels: Labels, value: Histogram) -> list[Observation]:
    found, total = [], 0
    for limit, count in zip((*metric.buckets, None), value.buckets, strict=True):
        total += count
        le = "+Inf" if limit is None else f"{limit:g}"
        found.append(Observation(total, {**dict(labels), "le": le}))
    return found


def _count(metric: Metric, labels: Labels, value: Histogram) -> list[Observation]:
    return [Observation(sum(value.buckets), dict(labels))]


def _sum(metric: Metric, labels: Labels, value: Histogram) -> list[Observation]:
    return [Observation(value.total, dict(labels))]
