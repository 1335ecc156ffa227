"""The pause meter sees pauses, and what `fenced tune` predicts from them happens to the client that ships."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from evidence.pauses.replay import HERE, KINDS, compared
from fenced.cli import app
from fenced.diagnosis import tune
from fenced.errors import Misuse
from fenced.pauses import PauseMeter, Recording

METERED = """
import sys
from fenced.pauses import PauseMeter
with PauseMeter(sys.argv[1]):
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_the_meter_sees_that_its_process_was_stopped(tmp_path: Path) -> None:
    path = tmp_path / "pauses.jsonl"
    command = [sys.executable, "-c", METERED, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        stopped = time.monotonic()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.5)
        lasted = time.monotonic() - stopped
        os.kill(process.pid, signal.SIGCONT)
        process.communicate("\n")
    recording = Recording.read(path)
    assert max(length for _, length in recording.pauses) >= lasted - PauseMeter().every
    assert recording.seconds > lasted - 0.001 and sum(recording.counts.values()) > 0


def test_a_recording_of_a_meter_that_was_killed_counts_as_far_as_it_was_noted(tmp_path: Path) -> None:
    """What came after the last note is dropped, because nobody knows how long the meter ran after it."""
    path = tmp_path / "pauses.jsonl"
    first: list[dict[str, Any]] = [
        {"fenced": "pauses 1", "began": 0.0, "every": 0.05},
        {"at": 10.0, "after": 10.0, "seconds": 2.0},
        {"ran": 60.0, "counts": {"3": 1000}},
        {"at": 70.0, "after": 70.0, "seconds": 5.0},
    ]
    second: list[dict[str, Any]] = [first[0], {"ran": 40.0, "counts": {"3": 1, "4": 2}}]
    text = "\n".join(json.dumps(line) for line in (*first, *second))
    path.write_text(text + '\n{"at": 1')
    assert Recording.read(path) == Recording(100.0, ((8.0, 2.0),), Counter({3: 1001, 4: 2}))
    path.write_text("nothing\n" + text)
    with pytest.raises(Misuse, match="line 1: this is no recording"):
        Recording.read(path)
    path.write_text(json.dumps(first[0]))
    with pytest.raises(Misuse, match="nothing was recorded yet"):
        Recording.read(path)


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_come_true_in_the_simulated_runtime(kind: str) -> None:
    """`python -m evidence.pauses.replay` does it for every ttl, with more losses."""
    found = compared(Recording.read(HERE / f"{kind}.jsonl"), 1.0, events=80)
    assert found is not None and found.expected >= 20
    assert 0.8 <= found.ratio <= 1.25


def test_a_longer_ttl_never_loses_more() -> None:
    """And it notices: a client that believed for longer than its deadline would be predicted to lose less."""
    for kind in KINDS:
        rates = [tune.expiries(Recording.read(HERE / f"{kind}.jsonl"), ttl, 0.002) for ttl in tune.TTLS]
        assert rates == sorted(rates, reverse=True) and rates[0] > 0 and rates[-1] == 0


def test_tune_advises(tmp_path: Path) -> None:
    """By the longest pause and by the rate, for a lease that is renewed; by the section for one that is not."""
    file, page = HERE / "stops.jsonl", tmp_path / "pauses.html"
    words = ["tune", "--from", str(file), "--section", "20s", "--ttl", "4s", "--html", str(page)]
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    advice, rows = found["advice"], {row["ttl"]: row for row in found["ttls"]}
    assert advice["by_pause"] == pytest.approx(1.5 * advice["longest"] + 0.1)
    assert advice["ttl"] >= max(advice["by_pause"], advice["by_rate"])
    assert advice["by_section"] == pytest.approx(20.1 + advice["longest"])
    assert rows[60.0]["expiries"] == 0 and rows[60.0]["at_most"] == pytest.approx(
        3 * 86_400 / found["seconds"]
    )
    assert 4.0 in rows
    text = CliRunner().invoke(app, words).output
    assert "never whether" in text and "record for days" in text
    assert "<svg" in page.read_text() and "never whether" in page.read_text()
    assert CliRunner().invoke(app, ["tune"]).exit_code == 2
