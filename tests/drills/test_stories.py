"""Every story: held with the guard, data lost without it, on the embedded default and on PostgreSQL with etcd.

They run in processes of their own, several at a time, as `fenced drill all` runs them, while both cores are busy.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from fenced.drills import network, pauses, tokens
from fenced.drills.catalog import DRILLS, STORIES
from fenced.drills.declared import Drill
from fenced.drills.every import DrillBatch, DrillRow
from fenced.drills.java import JDBC
from fenced.drills.stage import with_rule
from fenced_testkit.servers import EtcdServer, PostgresqlServer

pytestmark = pytest.mark.xdist_group("stories")

JOBS = 9


def _rows(options: list[str], control: list[str] | None) -> dict[str, DrillRow]:
    """Where the machine was too busy for the fault to happen, once more: it may be inconclusive, never wrong."""
    rows = {row.drill.name: row for row in DrillBatch(options, control).run(jobs=JOBS)}
    again = [
        row.drill for row in rows.values() if any(told["verdict"] == "inconclusive" for _, told in row.runs)
    ]
    return rows | {row.drill.name: row for row in DrillBatch(options, control).run(again, JOBS)}


@pytest.fixture(scope="module")
def embedded() -> dict[str, DrillRow]:
    return _rows([], ["--guard", "none"])


@pytest.fixture(scope="module")
def servers(postgresql_server: PostgresqlServer) -> Iterator[dict[str, DrillRow]]:
    with EtcdServer() as etcd:
        guard = postgresql_server.url(postgresql_server.create_database())
        with_rule(guard, "sequenced")
        yield _rows(["--authority", etcd.url(), "--guard", guard], None)


def test_no_story_is_left_out() -> None:
    modules = (network, pauses, tokens)
    declared = {each.name for module in modules for each in vars(module).values() if isinstance(each, Drill)}
    assert declared == {each.name for each in STORIES} == DRILLS.keys() - {"storm", "set"}


def test_the_programs_of_the_stories_are_here() -> None:
    """Else they would be inconclusive, and `make test` installs it."""
    assert shutil.which("javac") and os.path.exists(JDBC)


@pytest.mark.parametrize("name", [each.name for each in STORIES])
def test_a_story_on_the_embedded_default(name: str, embedded: dict[str, DrillRow]) -> None:
    row = embedded[name]
    assert row.told["verdict"] == "held", row.told
    assert row.control is not None
    assert row.control["verdict"] == ("broken" if row.drill.loses else "held"), row.control
    granted = [each["token"] for each in row.told["grants"]]
    assert granted[0] == row.drill.tokens[0], "as in the literature"
    assert row.told["factor"] == row.drill.ttl / row.drill.story_seconds


@pytest.mark.parametrize("name", [each.name for each in STORIES])
def test_a_story_on_postgresql_with_etcd(name: str, servers: dict[str, DrillRow]) -> None:
    assert servers[name].told["verdict"] == "held", servers[name].told
