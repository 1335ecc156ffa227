"""Metrics of a program, for Prometheus and OpenTelemetry: `fenced.Client(url, on_event=Recorder())`."""

from __future__ import annotations

from fenced.metrics.recorder import Recorder

__all__ = ["Recorder"]


def __dir__() -> list[str]:
    return __all__
