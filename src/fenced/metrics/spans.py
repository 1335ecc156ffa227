"""A span of OpenTelemetry for each hold, made when it ends: a program that never ends its holds makes none."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from opentelemetry import context, trace

from fenced.events import LeaseGranted

OPEN_MAX = 100_000
"""How many holds are remembered; more at the same time get no span."""


class HoldSpans:
    """Children of the span in which the lease was granted. Used under the lock of the recorder."""

    def __init__(self, tracer: trace.Tracer, pattern: Callable[[tuple[str, ...]], str]) -> None:
        self._tracer = tracer
        self._pattern = pattern
        self._open: dict[str, tuple[int, Any, LeaseGranted]] = {}

    def begin(self, event: LeaseGranted) -> None:
        if len(self._open) < OPEN_MAX:
            self._open[event.grant] = time.time_ns(), context.get_current(), event

    def end(self, grant: str, outcome: str, reason: str = "") -> None:
        found = self._open.pop(grant, None)
        if found is None:
            return
        began, parent, event = found
        span = self._tracer.start_span("fenced.hold", parent, start_time=began)
        if span.is_recording():
            # Names are not among them: there may be millions. The grant is in every stamp and record.
            span.set_attributes(
                {
                    "fenced.pattern": self._pattern(event.names),
                    "fenced.token": event.token,
                    "fenced.grant": event.grant,
                    "fenced.waited": event.waited_seconds,
                    "fenced.outcome": outcome,
                }
            )
            if reason:
                span.set_attribute("fenced.lost_reason", reason)
                span.set_status(trace.StatusCode.ERROR, f"lost: {reason}")
        span.end()
