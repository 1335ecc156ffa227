"""What counting adds to an acquire and release, in CPU of the calling thread; and what looks and scrapes take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from prometheus_client import CollectorRegistry

import fenced
from bench.figures import Figure, ratio
from bench.interleaved import Effort
from fenced.events import Event
from fenced.metrics import Recorder
from fenced.monitoring.exporter import Exporter
from fenced.monitoring.looks import GuardLooker
from fenced_testkit.servers import PostgresqlServer

ROUNDS = 15
PAIRS = 1000
MARKS = 1_000_000
COLLECTOR, OTEL, SPANS = 10.0, 15.0, 15.0
LOOK_MS, SCRAPE_MS = 100.0, 10.0


def run(folder: Path, effort: Effort) -> Iterator[Figure]:
    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    counting, collected, exported = Recorder(), Recorder(), Recorder()
    collected.prometheus(registry)
    exported.otel(MeterProvider(metric_readers=[reader]).get_meter("bench"))
    tracer = TracerProvider(sampler=TraceIdRatioBased(0.01)).get_tracer("bench")
    spans = Recorder(spans=tracer)
    costs = _costs((None, counting, collected, exported, spans), "memory:", effort)
    detail = f"{costs[0]:.0f} µs without; the 10th percentile of rounds in turns, in memory"
    for key, cost, target in zip(
        (
            "own counters",
            "with the Prometheus collector",
            "with OpenTelemetry",
            "with spans, one in a hundred sampled",
        ),
        costs[1:],
        (COLLECTOR, COLLECTOR, OTEL, SPANS),
        strict=True,
    ):
        yield Figure(
            key.replace(" ", "_"), f"CPU added to a pair: {key}", cost - costs[0], "µs", target, detail
        )
    bare, counted = _costs((None, collected), f"sqlite:///{folder}/leases.db", effort)
    yield ratio(
        "sqlite", "the same on SQLite, counted", counted / 1e6, bare / 1e6, against="without a callback"
    )
    yield from _looks(effort)


def _costs(callbacks: tuple[Callable[[Event], None] | None, ...], url: str, effort: Effort) -> list[float]:
    """CPU of the thread for one pair, in µs, for each callback in turns."""
    found: list[list[float]] = [[] for _ in callbacks]
    for _ in range(effort.of(ROUNDS)):
        for callback, times in zip(callbacks, found, strict=True):
            with fenced.Client(url, on_event=callback) as client:
                client.acquire("orders/42").release()
                began, pairs = time.thread_time(), effort.size(PAIRS)
                for _ in range(pairs):
                    client.acquire("orders/42").release()
                times.append((time.thread_time() - began) / pairs * 1e6)
    return [sorted(times)[len(times) // 10] for times in found]


def _looks(effort: Effort) -> Iterator[Figure]:
    import psycopg

    from fenced.sql import Guard

    with PostgresqlServer() as server:
        url, marks = server.url(server.create_database()), effort.size(MARKS)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
            Guard(table="orders", name="orders/{id}").install(connection, mode="enforce")
            connection.execute(
                "INSERT INTO fenced_guard.mark (name, token, grant_id, seq) "
                "SELECT 'orders/' || n, n, md5(n::text), 0 FROM generate_series(1, %s) n",
                [marks],
            )
            connection.execute("ANALYZE fenced_guard.mark")
        looker = GuardLooker("shop", url, 1.0)
        first = _least(looker.look, 1)
        look = _least(looker.look, 7)
        looker.start()
        exporter = Exporter([looker], ("127.0.0.1", 0))
        while "fenced_guard_stage{" not in exporter.text():
            time.sleep(0.01)
        scrape = _least(exporter.text, 50)
        looker.stop()
        yield Figure("look", f"a look at {marks:,} marks", look * 1e3, "ms", LOOK_MS,
                     f"{first * 1e3:.0f} ms once a minute, when the highest mark is looked for")  # fmt: skip
        yield Figure(
            "scrape",
            "a scrape of it",
            scrape * 1e3,
            "ms",
            SCRAPE_MS,
            "reads the last look",
        )


def _least(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
