"""Recorder: the callback that counts the events of a program, and what Prometheus and OpenTelemetry read of it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from fenced import __version__, events
from fenced.errors import REFUSALS, Misuse, shown
from fenced.metrics.hot import HotName, HotNames
from fenced.metrics.numbers import Numbers, exposition
from fenced.runtime import clocks, forking

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Tracer
    from prometheus_client.registry import CollectorRegistry

    from fenced.metrics.spans import HoldSpans

PATTERNS_MAX = 50
OTHER = "other"
WHY_NOT = ("busy", "timeout", "unavailable", "indeterminate", "cancelled", "error")
REASONS = ("expired", "revoked", "gone", "max_hold", "keeper", "closed", "abandoned")


class Recorder:
    """Counts what happens to the leases of a program: `Client(url, on_event=recorder)`; several clients may share it.

    With `patterns`, such as `["orders/*"]`, most numbers have a label `pattern`: the first one that matches the
    first name of the lease, else `other`. No label ever holds a name. `spans` gets a span for each hold.
    """

    def __init__(self, patterns: Sequence[str] = (), *, spans: Tracer | None = None) -> None:
        if len(patterns) > PATTERNS_MAX:
            raise Misuse(f"at most {PATTERNS_MAX} patterns, not {len(patterns)}: each is a series of its own")
        if not all(isinstance(each, str) for each in patterns) or isinstance(patterns, str):
            raise Misuse(f"patterns are a list of names with * for any characters, not {shown(patterns)}")
        self.numbers = Numbers("holder")
        self._hot = HotNames()
        self._pattern = _matcher(patterns)
        self._spans: HoldSpans | None = None
        if spans is not None:
            from fenced.metrics.spans import HoldSpans

            self._spans = HoldSpans(spans, self._pattern)
        self._start([*patterns, OTHER] if patterns else [""])
        self._calls: dict[type, Callable[..., None]] = {
            events.LeaseGranted: self._granted,
            events.LeaseReleased: self._released,
            events.LeaseEnded: self._lost,
            events.LeaseInJeopardy: self._jeopardy,
            events.LeaseSaved: self._saved,
            events.RenewalRound: self._renewed,
            events.AskQueued: self._queued,
            events.AskEnded: self._not_granted,
            events.GuardDecided: self._decided,
            events.ReleaseFailed: self._unreleased,
            events.KeeperFailed: lambda _: self.numbers.add("fenced_keeper_failures_total"),
            events.ConnectionFailed: lambda _: self.numbers.add("fenced_connection_failures_total"),
        }
        forking.register(self)

    def __call__(self, event: events.Event) -> None:
        call = self._calls.get(type(event))
        if call is not None:
            with self.numbers.lock:
                call(event)

    def text(self) -> str:
        """All numbers in the text format of Prometheus, for programs that have an HTTP server of their own."""
        return exposition(self.numbers.samples())

    def hot(self) -> list[HotName]:
        """The names that most often had to be waited for, or were refused, in the last minutes."""
        with self.numbers.lock:
            return self._hot.top(clocks.now())

    def prometheus(self, registry: CollectorRegistry | None = None) -> None:
        """Let `prometheus_client` show the numbers; default: in its own registry."""
        from fenced.metrics.collecting import register

        register(self.numbers, registry)

    def otel(self, meter: Meter) -> None:
        """Let OpenTelemetry read the numbers whenever it exports.

        It has no histogram that can be read, so the buckets are counters `..._bucket` with an attribute `le`.
        """
        from fenced.metrics.otel import observe

        observe(self.numbers, meter)

    def observe_guards(self) -> Callable[[], None]:
        """Count what the guard objects of this process decide, too; the function that is returned ends it."""
        return events.observe_guards(self)

    # At a fork. The child begins anew, and a thread that it does not have may hold the lock.

    def _before_fork(self) -> None:
        return

    def _forked(self) -> None:
        patterns = self._patterns
        self.numbers.reset()
        self._hot = HotNames()
        self._start(patterns)

    # Events. Under the lock.

    def _start(self, patterns: list[str]) -> None:
        self._patterns, start = patterns, self.numbers.start
        for metric in ("grants", "contended", "jeopardy", "saved"):
            start(f"fenced_{metric}_total", *((each,) for each in patterns))
        for metric in ("acquire", "hold"):
            start(f"fenced_{metric}_seconds", *((each,) for each in patterns))
        start("fenced_not_granted_total", *((each, why) for each in patterns for why in WHY_NOT))
        start("fenced_lost_total", *((each, reason) for each in patterns for reason in REASONS))
        start("fenced_renewals_total", ("kept",), ("unknown",), ("ended",))
        for metric in ("release_failed_total", "keeper_failures_total", "connection_failures_total"):
            start(f"fenced_{metric}")
        for metric in ("held", "waiting"):
            start(f"fenced_{metric}")
        for metric in ("renewal_used_ratio", "loss_noticed_seconds", "loss_pause_seconds"):
            start(f"fenced_{metric}")
        self.numbers.set("fenced_build_info", 1, __version__)

    def _granted(self, event: events.LeaseGranted) -> None:
        numbers, pattern = self.numbers, self._pattern(event.names)
        numbers.counts("fenced_grants_total")[pattern,] += 1
        numbers.counts("fenced_held")[()] += 1
        numbers.observe("fenced_acquire_seconds", event.waited_seconds, pattern)
        if event.queued:
            numbers.counts("fenced_waiting")[()] -= 1
        if self._spans is not None:
            self._spans.begin(event)

    def _released(self, event: events.LeaseReleased) -> None:
        self._end(event.names, event.held_seconds)
        if self._spans is not None:
            self._spans.end(event.grant, "released")

    def _unreleased(self, event: events.ReleaseFailed) -> None:
        self._end(event.names, event.held_seconds)
        self.numbers.add("fenced_release_failed_total")
        if self._spans is not None:
            self._spans.end(event.grant, "unreleased")

    def _lost(self, event: events.LeaseEnded) -> None:
        pattern, numbers = self._pattern(event.names), self.numbers
        self._end(event.names, event.held_seconds)
        numbers.counts("fenced_lost_total")[pattern, event.reason] += 1
        if event.reason == "expired":
            numbers.observe("fenced_loss_noticed_seconds", event.late_seconds)
            numbers.observe("fenced_loss_pause_seconds", event.paused_seconds)
        if self._spans is not None:
            self._spans.end(event.grant, "lost", event.reason)

    def _end(self, names: tuple[str, ...], held_seconds: float) -> None:
        self.numbers.counts("fenced_held")[()] -= 1
        self.numbers.observe("fenced_hold_seconds", held_seconds, self._pattern(names))

    def _jeopardy(self, event: events.LeaseInJeopardy) -> None:
        self.numbers.add("fenced_jeopardy_total", self._pattern(event.names))

    def _saved(self, event: events.LeaseSaved) -> None:
        self.numbers.add("fenced_saved_total", self._pattern(event.names))

    def _renewed(self, event: events.RenewalRound) -> None:
        for outcome in ("kept", "unknown", "ended"):
            self.numbers.add("fenced_renewals_total", outcome, by=getattr(event, outcome))
        if event.used_ratio is not None:
            self.numbers.observe("fenced_renewal_used_ratio", event.used_ratio)

    def _queued(self, event: events.AskQueued) -> None:
        self.numbers.add("fenced_contended_total", self._pattern(event.names))
        self.numbers.add("fenced_waiting")
        for name in event.names:
            self._hot.add(name, clocks.now())

    def _not_granted(self, event: events.AskEnded) -> None:
        self.numbers.add("fenced_not_granted_total", self._pattern(event.names), event.why)
        if event.queued:
            self.numbers.add("fenced_waiting", by=-1)
        elif event.why == "busy":
            for name in event.names:
                self._hot.add(name, clocks.now())

    def _decided(self, event: events.GuardDecided) -> None:
        numbers, guard = self.numbers, event.guard
        if (guard, "stale") not in numbers.counts("fenced_refusals_total"):
            numbers.start("fenced_refusals_total", *((guard, kind) for kind in REFUSALS))
        if event.verdict == "admit":
            numbers.add("fenced_admitted_total", guard)
        elif event.ruling == "refuse":
            numbers.add("fenced_refusals_total", guard, event.verdict)
            if event.name is not None:
                self._hot.add(event.name, clocks.now())
        if event.verdict == "missing":
            numbers.add("fenced_unstamped_total", guard, event.ruling)
        if event.token is not None and event.mark is not None:
            numbers.observe("fenced_token_gap", event.token - event.mark, guard)


def _matcher(patterns: Sequence[str]) -> Callable[[tuple[str, ...]], str]:
    """The label of a lease: the first pattern that matches its first name."""
    if not patterns:
        return lambda _: ""
    compiled = [(each, re.compile(re.escape(each).replace(r"\*", ".*"), re.DOTALL)) for each in patterns]

    @lru_cache(maxsize=1024)
    def label(name: str) -> str:
        return next((pattern for pattern, matches in compiled if matches.fullmatch(name)), OTHER)

    return lambda names: label(sys.intern(names[0]))
