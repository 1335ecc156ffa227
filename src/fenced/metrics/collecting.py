"""A collector of `prometheus_client`: it reads the numbers when it is scraped, so nothing is counted twice."""

from __future__ import annotations

import os
from collections.abc import Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry

from fenced.errors import Misconfigured
from fenced.metrics.numbers import Histogram, Numbers, Point


def register(numbers: Numbers, registry: CollectorRegistry | None) -> None:
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        raise Misconfigured(
            "prometheus_client asks no collector in its multiprocess mode (PROMETHEUS_MULTIPROC_DIR): give each worker "
            "a port of its own, or push by OpenTelemetry (Recorder.otel)"
        )
    (registry or REGISTRY).register(_Numbers(numbers))


class _Numbers(Collector):
    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[Family]:
        by_metric: dict[str, list[Point]] = {}
        for sample in self._numbers.samples():
            by_metric.setdefault(sample.metric.name, []).append(sample)
        for samples in by_metric.values():
            metric = samples[0].metric
            yield _family(metric.name, 1, samples)
            if metric.also:
                counted = [s for s in samples if metric.also_where is None or metric.also_where in s.labels]
                yield _family(metric.also, metric.also_scale, counted)


def _family(name: str, scale: int, samples: list[Point]) -> Family:
    metric = samples[0].metric if samples else None
    kind = metric.kind if metric else "untyped"
    family = Family(
        name.removesuffix("_total") if kind == "counter" else name, metric.meaning if metric else "", kind
    )
    for _, labels, value in samples:
        if not isinstance(value, Histogram):
            family.add_sample(name, dict(labels), value)
            continue
        total = 0
        assert metric is not None
        for limit, count in zip((*metric.buckets, None), value.buckets, strict=True):
            total += count
            le = "+Inf" if limit is None else str(float(limit * scale))
            family.add_sample(f"{name}_bucket", {**dict(labels), "le": le}, total)
        family.add_sample(f"{name}_sum", dict(labels), value.total * scale)
        family.add_sample(f"{name}_count", dict(labels), total)
    return family
