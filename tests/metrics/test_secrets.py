"""Nothing that must stay secret is in what is shown to people: attempts, passwords, keys of proofs."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import fenced
from fenced import events
from fenced.metrics import Recorder
from fenced.metrics.numbers import exposition
from fenced.monitoring.looks import GuardLooker, lookers
from fenced.proofs import HmacKey
from fenced.runtime.blocking import step
from fenced.sql import Guard
from fenced.stores.postgresql.guard.engine import ENGINE

PASSWORD = "hush-hush-password"
KEY = b"a key that signs stamps, 32 byte"


def test_no_secret_is_shown(
    tmp_path: Path, postgresql_url: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[events.Event] = []
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    recorder = Recorder(spans=provider.get_tracer("test"))
    shown: list[str] = []

    def both(event: events.Event) -> None:
        seen.append(event)
        recorder(event)

    stop = events.observe_guards(both)
    with (
        caplog.at_level(logging.DEBUG, "fenced"),
        psycopg.connect(postgresql_url, autocommit=True) as db,
        fenced.Client(f"sqlite:///{tmp_path}/leases.db", on_event=both) as client,
    ):
        db.execute("CREATE TABLE orders (id int PRIMARY KEY)")
        guard = Guard(table="orders", name="orders/{id}")
        guard.install(db, mode="enforce")
        operator = ENGINE.operator(db)
        step(operator.add_key(HmacKey("shop-1", KEY)))
        old = client.acquire("orders/1", ttl=0.3, max_hold=0.1)
        attempts = [old._grant.secret]
        stale = old.bare_stamp()
        assert old.wait_lost(timeout=30)
        with client.hold("orders/1") as lease:
            attempts.append(lease._grant.secret)
            with guard.transaction(db, lease) as tx:
                tx.execute("INSERT INTO orders VALUES (1)")
            with pytest.raises(fenced.StaleToken) as refused, guard.transaction(db, stale):
                pass
        shown += [
            repr(refused.value),
            str(vars(refused.value)),
            repr(step(operator.records())),
            repr(step(operator.keys())),
        ]
        shown += [repr(step(operator.status())), repr(step(operator.history()))]
        looker = GuardLooker("shop", postgresql_url, 1.0)
        shown.append(exposition(looker.look()))
        looker.disconnect()
    stop()
    with pytest.raises(fenced.FencedError) as failed:
        fenced.Client(f"postgresql://app:{PASSWORD}@127.0.0.1:1/x?connect_timeout=1").acquire("a", wait=0)
    (unreachable,) = lookers([f"postgresql://app:{PASSWORD}@127.0.0.1:1/x?connect_timeout=1"], [], 1.0)
    with pytest.raises(fenced.FencedError) as not_seen:
        unreachable.look()
    shown += [str(failed.value), str(not_seen.value), exposition(unreachable.points())]
    shown += [recorder.text(), repr(recorder.hot()), repr(seen), caplog.text, *capsys.readouterr()]
    shown += [span.to_json() for span in spans.get_finished_spans()]
    assert seen and spans.get_finished_spans() and caplog.text, "there was something to see"
    for secret in (*attempts, PASSWORD, KEY.hex(), KEY.decode()):
        assert not [text for text in shown if secret in text]


def test_a_command_does_not_show_the_attempt_or_the_stamp_of_its_child_in_ps(tmp_path: Path) -> None:
    """They are in the environment, which only the same user and root can read."""
    script = (
        "import os, pathlib, time; pathlib.Path('stamp').write_text(os.environ['FENCED_STAMP']); "
        "pathlib.Path('ready').touch(); time.sleep(60)"
    )
    command = [sys.executable, "-m", "fenced", "run", "n", "--authority", f"sqlite:///{tmp_path}/l.db", "--"]
    process = subprocess.Popen([*command, sys.executable, "-c", script], cwd=tmp_path)
    try:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
        stamp = (tmp_path / "stamp").read_text()
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended
                lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        assert stamp and not [line for line in lines if stamp in line or stamp.split(":")[4] in line]
    finally:
        process.terminate()
        process.wait()
