"""The drills with each authority and the SQLite guard: nothing stale is admitted, nothing is lost."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from fenced.drills.command import drill
from fenced.registry import BUILT_IN

pytestmark = pytest.mark.xdist_group("drills")

SERVERS = {"etcd": "etcd_url", "postgresql": "postgresql_url", "redis": "redis_url"}
ELSEWHERE = {"etcds", "memory", "rediss", "sqlite"}
"""The same class as `etcd`; in one process only; the same class as `redis`; the default of every other drill test."""


def test_no_authority_is_left_out() -> None:
    assert BUILT_IN["fenced.authorities"].keys() == SERVERS.keys() | ELSEWHERE


@pytest.mark.parametrize("scenario", ["pause", "late-renewal", "storm"])
@pytest.mark.parametrize("fixture", SERVERS.values())
def test_drills(fixture: str, scenario: str, request: pytest.FixtureRequest) -> None:
    words = [scenario, "--json", "--authority", request.getfixturevalue(fixture), "--seed", "7"]
    if scenario == "storm":
        words += ["--seconds", "4"]
    result = CliRunner().invoke(drill, words)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["verdict"] == "held"
