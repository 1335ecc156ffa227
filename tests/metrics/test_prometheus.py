"""What a real Prometheus has read is what happened: every counter and histogram, and every gauge, from each source."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from fenced import __version__
from fenced.metrics.alerts import SHORT, rules
from fenced.metrics.table import STAGES, TABLE
from fenced_testkit.servers import PostgresqlServer
from tests.metrics.servers import Alertmanager, Hook, Prometheus, get, promtool, until
from tests.metrics.stories.history import History
from tests.metrics.stories.program import Program
from tests.metrics.stories.proxy import Proxied
from tests.metrics.stories.service import Service
from tests.metrics.stories.stores import GUARD, Exporter, Stores

pytestmark = pytest.mark.xdist_group("monitoring")
SOURCES = {
    "holder": "program",
    "service": "service",
    "proxy": "proxy",
    "guard": "stores",
    "authority": "stores",
}
"""Which job of Prometheus has the numbers of a source."""
OWN = ("job", "instance", "target")
"""Labels that are of the scrape, or the same in the whole story."""


@dataclass
class Told:
    """The server, and what it must have."""

    prometheus: Prometheus
    hook: Hook
    histories: dict[str, History]
    ports: dict[str, int]
    service_text: str
    token: int
    """The last one that was minted in the story of the stores."""

    def series(self, job: str, pattern: str) -> dict[tuple[str, str], float]:
        found = self.prometheus.query(f'{{__name__=~"{pattern}",job="{job}"}}')
        return {_row(each["metric"]): float(each["value"][1]) for each in found}

    def one(self, job: str, name: str, **labels: str) -> float:
        text = ",".join(f'{key}="{value}"' for key, value in {"job": job, **labels}.items())
        found = self.prometheus.query(f"{name}{{{text}}}")
        assert len(found) == 1, (name, labels, found)
        return float(found[0]["value"][1])


def _row(labels: dict[str, str]) -> tuple[str, str]:
    own = sorted(f"{key}={value}" for key, value in labels.items() if key not in (*OWN, "__name__"))
    return labels["__name__"], ",".join(own)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, postgresql_server: PostgresqlServer) -> Iterator[Told]:
    folder, database = tmp_path_factory.mktemp("monitoring"), postgresql_server.create_database()
    with ExitStack() as stack:
        program, service = Program(stack), Service(folder, stack)
        proxied, stores = Proxied(folder / "tls", stack), Stores(postgresql_server.url(database), stack)
        histories = {
            "program": program.play(),
            "service": service.play(),
            "proxy": proxied.play(),
            "stores": stores.play(),
        }
        token = stores.settle()
        exporter = Exporter(stores.url, stack)  # it looks for the highest mark once a minute, beginning now
        ports = {
            "program": program.port, "service": service.server.port, "proxy": proxied.server.admin,
            "stores": exporter.port,
        }  # fmt: skip
        hook = Hook(stack)
        alertmanager = stack.enter_context(Alertmanager(hook.receiver))
        prometheus = stack.enter_context(
            Prometheus(lambda folder: config(folder, ports, service, alertmanager.port))
        )
        found = Told(
            prometheus, hook, {**histories, "collected": histories["program"]}, ports, service.text(), token
        )
        until(lambda: len(prometheus.query("up == 1")) == 5)
        yield found
    postgresql_server.discard_database(database)


def config(folder: Path, ports: dict[str, int], service: Service, alertmanager: int) -> str:
    (folder / "alerts.yml").write_text(rules("https://wiki/runbooks", SHORT))

    def job(name: str, port: int, more: str = "") -> str:
        return f"- job_name: {name}\n  static_configs: [{{targets: ['127.0.0.1:{port}']}}]\n{more}"

    secured = (
        f"  scheme: https\n  authorization: {{credentials_file: {service.token}}}\n"
        f"  tls_config: {{ca_file: {service.folder}/tls/ca.crt}}\n"
    )
    return (
        "global: {scrape_interval: 500ms, evaluation_interval: 500ms}\nrule_files: [alerts.yml]\n"
        f"alerting: {{alertmanagers: [{{static_configs: [{{targets: ['127.0.0.1:{alertmanager}']}}]}}]}}\n"
        "scrape_configs:\n"
        + job("program", ports["program"])
        + job("collected", ports["program"], "  metrics_path: /collected\n")
        + job("service", ports["service"], secured)
        + job("proxy", ports["proxy"])
        + job("stores", ports["stores"])
    )


COUNTED = "fenced_.*(_total|_count)"
SCRAPES = ("fenced_requests_total", "route=/metrics,status=200")
"""What Prometheus itself does."""


@pytest.mark.parametrize("job", ["program", "collected", "service", "proxy", "stores"])
def test_every_count_is_what_happened(told: Told, job: str) -> None:
    """And nothing else was counted: a series that no story made is one too many."""

    def expected() -> dict[tuple[str, str], float]:
        return {key: count for key, count in [*told.histories[job].counts.items()] if count}

    def counted() -> dict[tuple[str, str], float]:
        found = {key: count for key, count in told.series(job, COUNTED).items() if count}
        found.pop(SCRAPES, None)
        return found

    settle(lambda: counted() == expected())
    assert counted() == expected()
    sums, found = told.histories[job].sums, told.series(job, "fenced_.*_sum")
    assert {key: found[key] for key in sums} == {
        key: pytest.approx(value, abs=1e-6) for key, value in sums.items()
    }
    for (name, labels), count in told.series(job, "fenced_.*_count").items():
        buckets = told.series(job, name.removesuffix("_count") + "_bucket")
        (most,) = {n for (_, of), n in buckets.items() if _but_le(of) == labels and "le=+Inf" in of}
        assert most == count


def _but_le(labels: str) -> str:
    return ",".join(each for each in labels.split(",") if not each.startswith("le="))


def settle(condition: Callable[[], bool]) -> None:
    """Until Prometheus has read the last change; what does not settle is compared by the caller."""
    with suppress(AssertionError):
        until(condition, 20.0)


def test_the_gap_of_tokens_has_admitted_ones_and_refused_ones(told: Told) -> None:
    for job, guard in (("program", "memory:"), ("service", "values")):
        found = [
            told.one(job, "token_gap_bucket", guard=guard, le=le) for le in ("-10000", "-1", "0", "5", "+Inf")
        ]
        assert found == [0, 1, 1, 2, 2]


def test_every_row_of_the_table_is_in_the_story(told: Told) -> None:
    """Each counter and histogram of each source has counted something, and each gauge is looked at."""
    missing = []
    for metric in TABLE:
        for source in metric.sources:
            job = SOURCES[source]
            if metric.kind == "gauge":
                if (job, metric.name) not in {(of, name) for of, name, _, _ in gauges(told)}:
                    missing.append((job, metric.name))
                continue
            name = f"{metric.name}_count" if metric.kind == "histogram" else metric.name
            if not any(key[0] == name for key in told.histories[job].counts):
                missing.append((job, name))
    assert not missing


def gauges(told: Told) -> list[tuple[str, str, dict[str, str], Callable[[float], bool]]]:
    """By job and name: the labels, and what the story has made of it."""
    of, day = {"guard": GUARD}, 86_400.0
    one, two_days = (lambda n: n == 1), (lambda n: day < n <= 2 * day)
    shop, leases = {"target": "shop", "role": "guard"}, {"target": "leases", "role": "authority"}
    return [
        ("program", "fenced_held", {}, one),
        ("program", "fenced_waiting", {}, one),
        ("program", "fenced_build_info", {"version": __version__}, one),
        ("service", "fenced_held_requests", {}, one),
        ("service", "fenced_certificate_seconds", {}, two_days),
        ("service", "fenced_build_info", {"version": __version__}, one),
        ("proxy", "fenced_proxy_waiting", {}, one),
        ("proxy", "fenced_proxy_connections", {}, lambda n: n == 2),
        ("proxy", "fenced_proxy_upstream_connections", {}, lambda n: n >= 1),
        ("proxy", "fenced_certificate_seconds", {}, two_days),
        ("proxy", "fenced_build_info", {"version": __version__}, one),
        ("stores", "fenced_guard_stage", {**of, "pattern": "*"}, lambda n: n == STAGES["enforce"]),
        ("stores", "fenced_guard_stage", {**of, "pattern": "orders/6"}, lambda n: n == STAGES["canary"]),
        ("stores", "fenced_guard_stage", {**of, "pattern": "orders/8"}, lambda n: n == STAGES["require"]),
        ("stores", "fenced_guard_stage", {**of, "pattern": "orders/9"}, lambda n: n == STAGES["shadow"]),
        ("stores", "fenced_guard_marks", {}, lambda n: n == 3),
        ("stores", "fenced_guard_highest_token", {}, lambda n: n == told.token - 1),
        ("stores", "fenced_guard_override_age_seconds", {**of, "pattern": "orders/7"}, lambda n: n > 0),
        ("stores", "fenced_guard_wrong", of, one),
        ("stores", "fenced_guard_bypass_roles", of, lambda n: n >= 1),  # the superuser of the tests
        ("stores", "fenced_guard_pending", of, one),
        ("stores", "fenced_key_age_seconds", {"key": "shop-1"}, lambda n: n > 0),
        (
            "stores",
            "fenced_mark_above_last_token",
            {},
            lambda n: n == -1,
        ),  # the lease that is held has not written
        ("stores", "fenced_authority_last_token", {}, lambda n: n == told.token),
        ("stores", "fenced_authority_strict", {}, one),
        ("stores", "fenced_held", {}, one),
        ("stores", "fenced_waiting", {}, one),
        ("stores", "fenced_queue_longest", {}, one),
        ("stores", "fenced_queue_stuck_seconds", {}, lambda n: n > 0),
        *(("stores", "fenced_up", each, one) for each in (shop, leases)),
        *(("stores", "fenced_look_seconds", each, lambda n: n > 0) for each in (shop, leases)),
        *(("stores", "fenced_look_age_seconds", each, lambda n: n >= 0) for each in (shop, leases)),
        ("stores", "fenced_build_info", {"version": __version__}, one),
    ]


def test_every_gauge_has_the_state_that_was_made(told: Told) -> None:
    for job, name, labels, is_right in gauges(told):
        settle(lambda: is_right(told.one(job, name, **labels)))  # noqa: B023 - called in this turn
        assert is_right(told.one(job, name, **labels)), (job, name, labels, told.one(job, name, **labels))


def test_second_names_have_the_same_numbers(told: Told) -> None:
    """Of the literature: they stand beside ours, `lock_acquire_latency_ms` in milliseconds."""
    for metric in filter(lambda each: each.also, TABLE):
        suffixes = ("_count", "_sum") if metric.kind == "histogram" else ("",)
        for job in {SOURCES[source] for source in metric.sources}:
            for suffix in suffixes:
                ours, theirs = (told.series(job, name + suffix) for name in (metric.name, metric.also))
                scale = metric.also_scale if suffix == "_sum" else 1
                where = "=".join(metric.also_where) if metric.also_where else ""
                assert {labels: n for (_, labels), n in theirs.items()} == {
                    labels: pytest.approx(n * scale, abs=0.001)
                    for (_, labels), n in ours.items()
                    if where in labels
                }
                assert theirs, (metric.also, job)


def test_an_alert_goes_out_with_its_runbook(told: Told) -> None:
    """By a real Alertmanager to a webhook. The story has disabled a trigger."""
    found = until(lambda: told.hook.alert("FencedGuardWrong"))
    assert found["labels"]["guard"] == GUARD and found["status"] == "firing"
    assert found["annotations"]["runbook_url"] == "https://wiki/runbooks#fencedguardwrong"


def test_promtool_accepts_every_endpoint(told: Told, tmp_path: Path) -> None:
    pages = [f"http://127.0.0.1:{told.ports[job]}/metrics" for job in ("program", "proxy", "stores")]
    texts = [get(url) for url in (*pages, f"http://127.0.0.1:{told.ports['program']}/collected")]
    for text in (*texts, told.service_text):
        promtool("check", "metrics", text=without_abbreviated_units(text))


def without_abbreviated_units(text: str) -> str:
    """promtool calls `_ms` bad style, and lock_acquire_latency_ms is the name that is asked for."""
    parts = re.split(r"(?=^# HELP )", text, flags=re.MULTILINE)
    return "".join(part for part in parts if not part.startswith("# HELP lock_acquire_latency_ms"))
