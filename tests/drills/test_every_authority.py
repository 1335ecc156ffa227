"""The drills with each authority and each guard: nothing stale is admitted, nothing is lost."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from fenced.drills.command import drill
from fenced.registry import one_per_class
from fenced.testing.servers import PostgresqlServer

pytestmark = pytest.mark.xdist_group("drills")

SERVERS = {
    "etcd": "etcd_url",
    "postgresql": "postgresql_url",
    "redis": "redis_url",
    "zookeeper": "zookeeper_url",
}
ELSEWHERE = {"memory", "sqlite"}
"""In one process only; the default of every other drill test."""


def test_no_authority_is_left_out() -> None:
    schemes = {scheme for kind, scheme in one_per_class() if kind == "fenced.authorities"}
    assert schemes == SERVERS.keys() | ELSEWHERE


@pytest.mark.parametrize("scenario", ["pause", "late-renewal", "storm"])
@pytest.mark.parametrize(
    # No guard knows its authority: each authority with one guard, and each guard with one authority, are enough.
    ("guard", "fixture"),
    [*((None, fixture) for fixture in SERVERS.values()), ("postgresql", None)],
)
def test_drills(
    guard: str | None,
    fixture: str | None,
    scenario: str,
    postgresql_server: PostgresqlServer,
    request: pytest.FixtureRequest,
) -> None:
    """Without a fixture, or a guard, it is a fresh SQLite file."""
    words = [scenario, "--json", "--seed", "7"]
    words += ["--authority", request.getfixturevalue(fixture)] if fixture else []
    words += ["--guard", postgresql_server.url(postgresql_server.create_database())] if guard else []
    words += ["--seconds", "4"] if scenario == "storm" else ["--ttl", "0.7"]
    result = CliRunner().invoke(drill, words)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["verdict"] == "held"
