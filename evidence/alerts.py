"""A real Prometheus and Alertmanager: every alert fires in its scenario, none in honest traffic, promtool agrees.

One story with windows of seconds: honest traffic first, then all scenarios at once. It needs a machine that is not
overloaded: in honest traffic a holder that gets no CPU for half a second loses its lease, as it should.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg

import fenced
from fenced.metrics.alerts import ALERTS, SHORT, rules
from fenced.metrics.dashboard import panel_expression, panels
from fenced.proofs import HmacKey
from fenced.runtime.blocking import step
from fenced.sql import Guard
from fenced.stores.postgresql.guard.engine import ENGINE
from fenced.values.model import Stamp
from fenced_testkit.servers import PostgresqlServer, ServiceServer
from tests.metrics.servers import Alertmanager, Hook, Prometheus, get, promtool, until

ROOT = Path(__file__).parents[1]
QUIET_SECONDS = 60.0
"""Of honest traffic, before which nothing may fire."""


class Stage:
    """Authority, guard in PostgreSQL, two programs, a service, the exporter, Prometheus, Alertmanager."""

    def __init__(self, folder: Path, database: str, stack: ExitStack) -> None:
        self.folder, self.database, self._stack = folder, database, stack
        self.authority = f"sqlite:///{folder}/leases.db"
        self.values = f"sqlite:///{folder}/values.db"
        self.guard = Guard(table="orders", name="orders/{id}")
        self.sql = stack.enter_context(psycopg.connect(database, autocommit=True))
        self.sql.execute("CREATE TABLE orders (id bigint PRIMARY KEY, qty int)")
        self.guard.install(self.sql, mode="enforce")
        self.client = stack.enter_context(fenced.Client(self.authority))
        self.write(1)
        self.service = stack.enter_context(ServiceServer())
        self.holders = [self.holder("jobs/1", "0.3") for _ in range(2)]
        self.exporter = self.export(
            "--guard", f"shop={database}", "--guard", f"values={self.values}", "--authority", f"leases={self.authority}"
        )  # fmt: skip

    def write(self, row: int) -> None:
        with self.client.hold(f"orders/{row}") as lease, self.guard.transaction(self.sql, lease) as tx:
            self.realm = lease.realm
            tx.execute("INSERT INTO orders VALUES (%s, 1)", [row])

    def holder(self, name: str, seconds: str) -> tuple[subprocess.Popen[str], int]:
        process = self._start("tests.metrics.holder", self.authority, self.values, name, seconds, out=True)
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    def _start(self, module: str, *arguments: str, out: bool = False) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], cwd=ROOT, text=True,
            stdout=subprocess.PIPE if out else None, stderr=None if out else subprocess.PIPE,
        )  # fmt: skip
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        return process

    def export(self, *stores: str) -> int:
        process = self._start("fenced", "exporter", "--every", "0.5", "--listen", "127.0.0.1:0", *stores)
        assert process.stderr is not None
        found = re.search(r"127\.0\.0\.1:(\d+)/metrics", process.stderr.readline())
        assert found is not None
        threading.Thread(target=process.stderr.read, daemon=True).start()
        return int(found[1])

    def targets(self) -> dict[str, list[int]]:
        return {
            "fenced-exporter": [self.exporter],
            "fenced-service": [self.service.port],
            "fenced-programs": [port for _, port in self.holders],
        }

    def config(self, alertmanager: str) -> Any:
        def write(folder: Path) -> str:
            (folder / "alerts.yml").write_text(rules("https://wiki/runbooks", SHORT))
            jobs = "".join(
                f"- job_name: {job}\n  static_configs: [{{targets: {[f'127.0.0.1:{port}' for port in ports]}}}]\n"
                for job, ports in self.targets().items()
            )
            return (
                "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [alerts.yml]\n"
                f"alerting: {{alertmanagers: [{{static_configs: [{{targets: ['{alertmanager}']}}]}}]}}\n"
                f"scrape_configs:\n{jobs}"
            )

        return write


def break_the_guard(stage: Stage) -> None:
    """Scenarios of the guarded table, and of a program."""
    stage.sql.execute("UPDATE orders SET qty = 2")  # FencedUnstampedWrite, FencedNotRequired
    operator = ENGINE.operator(stage.sql)
    step(operator.add_key(HmacKey("shop-1", b"k" * 32)))  # FencedKeyOld
    step(operator.override("orders", "orders/9*", 60.0, "to see the alert"))  # FencedOverrideLeftOn
    unknown = Stamp(stage.realm, ("orders/1",), 1_000_000, 1, "e" * 32)
    with stage.guard.transaction(stage.sql, unknown) as tx:  # FencedFloorMustBeRaised
        tx.execute("UPDATE orders SET qty = 3 WHERE id = 1")
    stage.sql.execute("ALTER TABLE orders DISABLE TRIGGER USER")  # FencedGuardWrong
    get(f"http://127.0.0.1:{stage.holders[0][1]}/keeper")  # FencedKeeperFailed


def run() -> dict[str, Any]:
    """The story once; raises if an alert does not fire, or one fires in honest traffic."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, PostgresqlServer() as server:
        play(Path(folder), server.url(server.create_database()))
    return {
        "alerts that fired, each in its scenario": len(ALERTS),
        "seconds of honest traffic, in which none fired": QUIET_SECONDS,
        "seconds": round(time.monotonic() - began),
    }


def play(tmp_path: Path, postgresql_url: str) -> None:
    with ExitStack() as stack:
        hook = Hook(stack)
        stage = Stage(tmp_path, postgresql_url, stack)
        for ports in stage.targets().values():
            for port in ports:
                promtool(
                    "check", "metrics", text=without_second_names(get(f"http://127.0.0.1:{port}/metrics"))
                )
        alertmanager = stack.enter_context(Alertmanager(hook.receiver))
        prometheus = stack.enter_context(Prometheus(stage.config(f"127.0.0.1:{alertmanager.port}")))
        until(lambda: len(prometheus.query("up == 1")) == 4)
        honest = time.monotonic() + QUIET_SECONDS
        while time.monotonic() < honest:
            stage.write(int(time.monotonic() * 1000))
            assert prometheus.firing() == set()
            time.sleep(0.2)
        assert prometheus.value('fenced_refusals_total{kind="stale",target="shop"}') == 0
        break_it(stage, prometheus, stack)
        check_panels(prometheus)
        told = until(lambda: hook.alert("FencedGuardWrong"))
        assert told["annotations"]["runbook_url"] == "https://wiki/runbooks#fencedguardwrong"


def break_it(stage: Stage, prometheus: Prometheus, stack: ExitStack) -> None:
    blocker = stack.enter_context(fenced.Client(stage.authority))
    blocked = stack.enter_context(fenced.Client(stage.authority))
    held = blocker.acquire("blocked")  # FencedQueueDoesNotMove
    waiter = threading.Thread(target=lambda: blocked.acquire("blocked").release())
    waiter.start()
    break_the_guard(stage)
    forgets = f"ledger:///dev/shm/fenced-{os.getpid()}.ledger"  # FencedBestEffort
    weak = stack.enter_context(ServiceServer(store=forgets, options=("--guarantee", "best-effort")))
    missing = f"sqlite:///{stage.folder}/missing.db"  # FencedCannotLook
    port = stage.export("--authority", f"weak={weak.url()}", "--guard", f"missing={missing}")
    config = Path(prometheus.folder / "prometheus.yml")
    more = f"- job_name: fenced-more\n  static_configs: [{{targets: ['127.0.0.1:{port}']}}]\n"
    config.write_text(config.read_text() + more)
    os.kill(prometheus.pid, signal.SIGHUP)
    wanted, seen = {alert.name for alert in ALERTS}, set[str]()

    def all_fired() -> bool:
        for process, _ in stage.holders:  # FencedExpiryRepeats, and refusals with latency, when they wake
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.9)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.3)
        seen.update(prometheus.firing())
        return seen >= wanted

    try:
        until(all_fired)
    finally:
        print("did not fire:", wanted - seen)  # shown if it fails
        held.release()
        waiter.join()


def check_panels(prometheus: Prometheus) -> None:
    """Each panel of the dashboard is a query that the server runs; those of what was in the story have series."""
    empty = [metric.name for _, metric in panels() if not prometheus.query(panel_expression(metric))]
    assert set(empty) <= {
        "fenced_proxy_own_answers_total",
        "fenced_proxy_waiting",
        "fenced_certificate_seconds",
    }


def without_second_names(text: str) -> str:
    """promtool calls `_ms` bad style, and lock_acquire_latency_ms is the name that is asked for."""
    parts = re.split(r"(?=^# HELP )", text, flags=re.MULTILINE)
    return "".join(part for part in parts if not part.startswith("# HELP lock_acquire_latency_ms"))
