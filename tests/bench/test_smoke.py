"""The groups of the bench run on this machine. Their figures are for people on quiet machines: none is judged here."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import GROUPS
from tests.codebase import ROOT, digest

SECONDS_MAX = 600
DRAWN = sorted(GROUPS, key=lambda group: hashlib.sha256(digest() + group.encode()).digest())[:5]
"""Any change of the code draws other groups. `make bench ARGS=--smoke` runs all of them."""


@pytest.mark.timeout(SECONDS_MAX + 20)
def test_groups_can_be_measured(tmp_path: Path) -> None:
    """As `make bench ARGS=--smoke`, which installs what is missing; `make test` has done that, too."""
    report = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench", "--smoke", "--json", str(report), "--folder", str(tmp_path)]
    done = subprocess.run([*command, *DRAWN], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert {figure["group"] for figure in json.loads(report.read_text())["figures"]} == set(DRAWN)


def test_every_group_is_there() -> None:
    for module in GROUPS.values():
        assert "\ndef run(" in (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(), module
