"""What the workflows run is named by a commit, which nobody can move."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
USES = re.compile(r"^\s*- uses: (\S+)(.*)$", re.MULTILINE)
PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}")
BY_BRANCH = {"pypa/gh-action-pypi-publish@release/v1"}
"""Whose commit could not be read from its repository; the workflow says so."""


def test_every_action_is_named_by_its_commit_and_its_version() -> None:
    found = [
        uses
        for path in sorted((ROOT / ".github" / "workflows").iterdir())
        for uses in USES.findall(path.read_text())
        if uses[0] not in BY_BRANCH
    ]
    assert found
    assert [
        action
        for action, comment in found
        if not PINNED.fullmatch(action) or not re.fullmatch(r" # v\d+\.\d+\.\d+", comment)
    ] == []
