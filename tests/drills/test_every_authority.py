"""The drills with each authority and each guard: nothing stale is admitted, nothing is lost."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from fenced.client.registry import one_per_class
from fenced.drills.command import drill
from fenced_testkit.servers import PostgresqlServer, ServiceServer

pytestmark = pytest.mark.xdist_group("drills")

SERVERS = {
    "etcd": "etcd_url",
    "http": "service_url",
    "mariadb": "mariadb_url",
    "postgresql": "postgresql_url",
    "redis": "redis_url",
    "zookeeper": "zookeeper_url",
}
STORM = ("--seconds", "5", "--holders", "2", "--names", "1")
"""One holder works while the other is stopped. Long enough for etcd, which grants a second at least."""
ELSEWHERE = {"ledger", "memory", "sqlite"}
"""Two in one process only; the default of every other drill test."""


@pytest.fixture(scope="module")
def service_url() -> Iterator[str]:
    with ServiceServer() as server:
        yield server.url()


def test_no_authority_is_left_out() -> None:
    schemes = {scheme for kind, scheme in one_per_class() if kind == "fenced.authorities"}
    assert schemes == SERVERS.keys() | ELSEWHERE


@pytest.mark.parametrize("scenario", ["sigstop", "late-renewal", "storm"])
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
    words = [scenario, "--seed", "7"]
    words += ["--authority", request.getfixturevalue(fixture)] if fixture else []
    words += ["--guard", postgresql_server.url(postgresql_server.create_database())] if guard else []
    words += STORM if scenario == "storm" else ["--ttl", "0.7"]
    found = _json(words, status=0)
    assert found["verdict"] == "held"
    assert found["overtaken"] > 0
    if scenario == "late-renewal":
        assert found["grants"][1]["time"] < found["renewals"][0]["began"]


def test_a_storm_on_redis(redis_url: str) -> None:
    """Its guard decides in a script; the other scenarios ask it nothing else."""
    words = ["storm", "--seed", "7", "--guard", f"{redis_url}?tag={secrets.token_hex(8)}", *STORM]
    found = _json(words, status=0)
    assert found["verdict"] == "held"
    assert found["overtaken"] > 0


def _json(words: list[str], *, status: int) -> dict[str, Any]:
    result = CliRunner().invoke(drill, [*words, "--json"])
    for seconds in ("40", "120"):
        if result.exit_code == 2 and words[0] == "storm":  # a busy machine: nobody was overtaken in that time
            result = CliRunner().invoke(drill, [*words, "--seconds", seconds, "--json"])
    assert result.exit_code == status, result.output + result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_storm_measures_its_pauses_by_the_ttl_that_was_granted(etcd_url: str) -> None:
    """etcd grants whole seconds: in pauses of two or three times 0.3 s nobody would be overtaken."""
    found = _json(["storm", "--authority", etcd_url, "--guard", "none", *STORM], status=1)
    assert found["ttl_asked"] == 0.3
    assert found["ttl"] >= 1
    assert found["overtaken"] > 0


def test_the_story_is_in_order_where_the_time_of_an_expiry_is_not_known(zookeeper_url: str) -> None:
    """ZooKeeper says only when a lease ends at the latest. B was granted before that, and the lines were exchanged."""
    words = ["late-renewal", "--authority", zookeeper_url, "--ttl", "0.7"]
    result = CliRunner().invoke(drill, words)
    assert result.exit_code == 0, result.output
    times = [float(found) for found in re.findall(r"^ *(\d+\.\d\d) s ", result.stdout, re.MULTILINE)]
    assert len(times) > 10
    assert times == sorted(times)
