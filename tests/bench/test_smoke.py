"""Every group of the bench runs on this machine. Its figures are for people on quiet machines: none is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import GROUPS

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 600


@pytest.mark.timeout(
    SECONDS_MAX + 20
)  # most of a minute of computing, on a machine that does other things, too
def test_every_group_can_be_measured(tmp_path: Path) -> None:
    """As `make bench ARGS=--smoke`, which installs what is missing; `make test` has done that, too."""
    report = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench", "--smoke", "--json", str(report), "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert {figure["group"] for figure in json.loads(report.read_text())["figures"]} == set(GROUPS)
