"""What a Recorder counts is what its own history says, in each form in which it is shown."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import fenced
from fenced import events
from fenced.metrics import Recorder
from fenced.metrics.hot import HALVED_SECONDS, NAMES_MAX, HotNames
from fenced.metrics.table import TABLE
from tests.forking import said_by_child

Row = tuple[str, frozenset[tuple[str, str]]]


def samples(text: str) -> dict[Row, float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: dict[Row, float], name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def a_history(recorder: Recorder, url: str) -> None:
    """Three grants, of which one is lost and one queued; a call that is busy, one that times out; three decisions."""
    stop = recorder.observe_guards()
    values = fenced.Values(f"memory://{url.rpartition('/')[2]}")
    with fenced.Client(url, on_event=recorder) as client, fenced.Client(url) as other:
        first = client.acquire("orders/1", ttl=0.3, max_hold=0.1)
        values.write(first, "orders/1", b"1")
        assert first.wait_lost(timeout=10)
        taken = other.acquire("orders/1")
        values.write(taken, "orders/1", b"2")
        with pytest.raises(fenced.StaleToken):
            values.write(first, "orders/1", b"late")
        with pytest.raises(fenced.LeaseLost):
            first.release()
        with client.try_hold("orders/1") as nothing:
            assert nothing is None
        with pytest.raises(fenced.NotGranted):
            client.acquire("orders/1", wait=0.01)
        waiter = threading.Thread(target=lambda: client.acquire("orders/1").release())
        waiter.start()
        while value(samples(recorder.text()), "fenced_waiting") != 1:
            pass
        taken.release()
        waiter.join()
        held = client.acquire("billing/7")
        assert value(samples(recorder.text()), "fenced_held") == 1
        held.release()
    values.close()
    stop()


def check(found: dict[Row, float], prefix: str = "") -> None:
    orders, other = {"pattern": "orders/*"}, {"pattern": "other"}
    for name, labels, expected in (
        ("fenced_grants_total", orders, 2),
        ("fenced_grants_total", other, 1),
        ("fenced_acquire_seconds_count", orders, 2),
        ("fenced_contended_total", orders, 2),
        ("fenced_not_granted_total", {**orders, "why": "busy"}, 1),
        ("fenced_not_granted_total", {**orders, "why": "timeout"}, 1),
        ("fenced_lost_total", {**orders, "reason": "max_hold"}, 1),
        ("fenced_lost_total", {**orders, "reason": "expired"}, 0),
        ("fenced_hold_seconds_count", orders, 2),
        ("fenced_held", {}, 0),
        ("fenced_waiting", {}, 0),
        ("fenced_refusals_total", {"guard": "memory:", "kind": "stale", "source": "holder"}, 1),
        ("fenced_admitted_total", {"guard": "memory:"}, 2),
        ("fenced_token_gap_count", {"guard": "memory:", "source": "holder"}, 2),
        (
            "fenced_token_gap_sum",
            {"guard": "memory:", "source": "holder"},
            0,
        ),  # one step up, one refused below
        ("fenced_token_gap_bucket", {"guard": "memory:", "source": "holder", "le": "-1"}, 1),
    ):
        if "le" in labels:
            assert {
                value for (n, of), value in found.items() if n == name and ("le", "-1") in _whole(of)
            } == {1}
        else:
            assert value(found, name, **labels) == expected, (name, labels)


def _whole(labels: frozenset[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(key, value.removesuffix(".0")) for key, value in labels}


def test_every_form_shows_the_history(tmp_path: Path) -> None:
    recorder, registry, reader = Recorder(["orders/*"]), CollectorRegistry(), InMemoryMetricReader()
    recorder.prometheus(registry)
    recorder.otel(MeterProvider(metric_readers=[reader]).get_meter("test"))
    a_history(recorder, f"sqlite:///{tmp_path}/leases.db")
    check(samples(recorder.text()))
    check(samples(generate_latest(registry).decode()))
    data = reader.get_metrics_data()
    assert data is not None
    exported: dict[Row, float] = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            assert isinstance(point, NumberDataPoint)
            labels = frozenset((key, str(value)) for key, value in (point.attributes or {}).items())
            exported[metric.name, labels] = point.value
    check(exported)
    also = samples(recorder.text())
    assert value(also, "lock_acquire_success_total", pattern="orders/*") == 2
    assert value(also, "lock_acquire_latency_ms_count", pattern="orders/*") == 2
    assert value(also, "lock_acquire_latency_ms_sum", pattern="orders/*") == pytest.approx(
        1000 * value(also, "fenced_acquire_seconds_sum", pattern="orders/*"), abs=0.01
    )
    assert [each.name for each in recorder.hot()] == ["orders/1"]


def test_every_row_of_the_table_has_a_consumer() -> None:
    """Each metric of a holder is in the text of a recorder from the start, or after the first event of a guard."""
    recorder = Recorder()
    for verdict, ruling in (("stale", "refuse"), ("missing", "refuse"), ("admit", "admit")):
        recorder(events.GuardDecided("shop", "n", 2, 1, verdict, ruling))
    shown = recorder.text()
    missing = [
        each.name for each in TABLE if "holder" in each.sources and f"# TYPE {each.name} " not in shown
    ]
    assert not missing
    assert not [each.also for each in TABLE if each.also and f"# TYPE {each.also} " not in shown]


def test_an_event_feeds_every_row_of_the_table() -> None:
    """No metric of a holder stays at 0 whatever happens."""
    recorder, lease = Recorder(), (("a",), 1, "g")
    for event in (
        events.AskQueued(("a",), "held"),
        events.AskQueued(("b",), "held"),
        events.LeaseGranted(*lease, 0.1, queued=True),
        events.LeaseGranted(("b",), 2, "h", 0.1),
        events.LeaseGranted(("d",), 3, "i", 0.1),
        events.LeaseGranted(("e",), 4, "j", 0.1),
        events.AskEnded(("c",), 0.0, "busy", queued=False),
        events.RenewalRound(2, 1, 1, 0.4),
        events.LeaseInJeopardy(*lease, 1.0, "silent"),
        events.LeaseSaved(*lease),
        events.LeaseEnded(*lease, "expired", 1.0, 0.5, 2.0),
        events.ReleaseFailed(("b",), 2, "h", "silent", 1.0),
        events.KeeperFailed("a bug"),
        events.ConnectionFailed("silent"),
        events.GuardDecided("shop", "a", 1, 2, "stale", "refuse"),
        events.GuardDecided("shop", "a", 7, 2, "admit", "admit"),
        events.GuardDecided("shop", "a", None, None, "missing", "refuse"),
    ):
        recorder(event)
    found = samples(recorder.text())
    fed = {name for (name, _), value in found.items() if value}
    assert not [
        each.name for each in TABLE if "holder" in each.sources and not {each.name, f"{each.name}_sum"} & fed
    ]
    for name, labels, expected in (
        ("fenced_renewals_total", {"outcome": "kept"}, 2),
        ("fenced_renewals_total", {"outcome": "unknown"}, 1),
        ("fenced_renewals_total", {"outcome": "ended"}, 1),
        ("fenced_renewal_used_ratio_sum", {}, 0.4),
        ("fenced_saved_total", {}, 1),
        ("fenced_loss_noticed_seconds_sum", {}, 0.5),
        ("fenced_loss_pause_seconds_sum", {}, 2),
    ):
        assert value(found, name, **labels) == expected, name


def test_a_span_for_each_hold_and_no_name_in_it(tmp_path: Path) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    recorder = Recorder(spans=tracer)
    with (
        fenced.Client(f"sqlite:///{tmp_path}/leases.db", on_event=recorder) as client,
        tracer.start_as_current_span("job") as job,
    ):
        with client.hold("orders/secret-name") as lease:
            pass
        lost = client.acquire("b", max_hold=0.1)
        assert lost.wait_lost(timeout=10)
    released, ended, _ = exporter.get_finished_spans()
    assert released.name == ended.name == "fenced.hold"
    assert released.parent is not None and released.parent.span_id == job.get_span_context().span_id
    assert released.attributes is not None and ended.attributes is not None
    assert released.attributes["fenced.token"] == lease.token
    assert released.attributes["fenced.outcome"] == "released" and released.status.is_ok
    assert ended.attributes["fenced.lost_reason"] == "max_hold" and not ended.status.is_ok
    assert "secret-name" not in str(released.to_json())


def test_a_forked_child_begins_at_zero(tmp_path: Path) -> None:
    recorder = Recorder()
    with (
        fenced.Client(f"sqlite:///{tmp_path}/leases.db", on_event=recorder) as client,
        client.hold("a"),
        recorder.numbers.lock,  # as a thread that the child does not have
    ):
        assert said_by_child(lambda: "fenced_grants_total 0\n" in recorder.text())
    assert "fenced_grants_total 1\n" in recorder.text()


def test_nothing_is_lost_between_threads() -> None:
    recorder, event = Recorder(), events.LeaseGranted(("a",), 1, "g", 0.01)

    def grant() -> None:
        for _ in range(5000):
            recorder(event)

    threads = [threading.Thread(target=grant) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert "fenced_grants_total 20000\n" in recorder.text()


def test_patterns_are_bounded() -> None:
    with pytest.raises(fenced.Misuse, match="at most 50"):
        Recorder([f"a{number}/*" for number in range(51)])
    with pytest.raises(fenced.Misuse):
        Recorder("orders/*")


@pytest.mark.parametrize("skew", [1.5, 1.2, 1.0])
def test_hot_names_are_the_true_top_ten(skew: float) -> None:
    rng, names = random.Random(7), [f"orders/{number}" for number in range(10_000)]
    stream = rng.choices(names, [1 / (rank + 1) ** skew for rank in range(len(names))], k=60_000)
    hot = HotNames()
    for name in stream:
        hot.add(name, 0.0)
    best = [name for name, _ in Counter(stream).most_common(10)]
    assert {each.name for each in hot.top(0.0)} == set(best)
    assert len(hot._counts) == len(hot._errors) == NAMES_MAX


def test_even_traffic_has_no_hot_names() -> None:
    rng, hot = random.Random(7), HotNames()
    for _ in range(60_000):
        hot.add(f"orders/{rng.randrange(10_000)}", 0.0)
    assert hot.top(0.0) == []
    assert len(hot._counts) == NAMES_MAX


def test_hot_names_cool_down() -> None:
    hot = HotNames()
    for _ in range(8):
        hot.add("a", 0.0)
    assert [each.count for each in hot.top(HALVED_SECONDS)] == [4]
    hot.add("b", 2 * HALVED_SECONDS)
    assert [(each.name, each.count) for each in hot.top(2 * HALVED_SECONDS)] == [("a", 2), ("b", 1)]
    assert hot.top(100 * HALVED_SECONDS) == []
