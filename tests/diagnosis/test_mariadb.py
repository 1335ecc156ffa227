"""What operators ask of MariaDB and MySQL, by the commands that know nothing of either."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from click.testing import CliRunner

import fenced
from fenced.cli import app
from fenced.metrics.numbers import exposition
from fenced.monitoring.looks import AuthorityLooker, GuardLooker
from fenced_testkit.servers import MariadbServer
from tests.metrics.test_recorder import samples, value

pytestmark = pytest.mark.xdist_group("mariadb")
NAME = "orders/42"


@pytest.fixture
def url(mariadb_url: str) -> str:
    """A database with leases and values, in which one holder was late."""
    with fenced.Client(mariadb_url, label="billing") as client, fenced.Values(mariadb_url) as values:
        values.set_mode("require")
        with client.hold(NAME) as lease:
            late = lease.bare_stamp()
        with client.hold(NAME) as lease:
            values.write(lease, NAME, b"2")
        with pytest.raises(fenced.StaleToken):
            values.write(late, NAME, b"late")
    return mariadb_url


def run(*words: str) -> Any:
    ended = CliRunner().invoke(app, [*words, "--json"], standalone_mode=False)
    assert ended.exception is None, ended.output
    return json.loads(ended.output)


def test_doctor(url: str, mariadb_server: MariadbServer) -> None:
    """Strict; not if the server does not sync, nor if programs write as an administrator."""
    found = run("doctor", url, "--guard", url)
    assert (found["class"], {each["level"] for each in found["findings"]}) == ("A", {"note"})
    first = run("doctor", url, "--guard", url, "--writer", "root")["findings"][0]
    assert (first["level"], first["check"]) == ("broken", "bypass")
    mariadb_server.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 0")
    with contextlib.ExitStack() as undo:
        undo.callback(mariadb_server.execute, "SET GLOBAL innodb_flush_log_at_trx_commit = 1")
        found = run("doctor", url, "--guard", url)
    weak = {each["check"]: each["do"] for each in found["findings"] if each["level"] == "weak"}
    assert found["class"] == "C" and weak.keys() == {"marks-could-be-lost", "tokens-could-repeat"}
    assert weak["marks-could-be-lost"] == "my.cnf: innodb_flush_log_at_trx_commit = 1"


def test_audit_and_explain(url: str) -> None:
    (row,) = run("audit", url)
    assert (row["name"], row["verdict"], row["token"], row["mark"]) == (NAME, "stale", 1, 2)
    found = run("explain", NAME, "--authority", url, "--guard", url)
    assert [each["kind"] for each in found["events"] if each["source"] == "authority"] == [
        "held",
        "released",
    ] * 2
    assert "(token 1) was late" in found["concluded"][0] and "The guard refused it" in found["concluded"][0]


def test_the_exporter(url: str) -> None:
    guard = GuardLooker("shop", url, 1.0)
    points = guard.look()
    authority = AuthorityLooker("leases", url, 1.0, [guard])
    found = samples(exposition([*points, *authority.look()]))
    guard.disconnect()
    authority.disconnect()
    shop, leases = {"target": "shop"}, {"target": "leases"}
    refused = {dict(key[1])["kind"]: n for key, n in found.items() if key[0] == "fenced_refusals_total" and n}
    assert refused == {"stale": 1}
    assert (
        value(found, "fenced_guard_highest_token", **shop)
        == value(found, "fenced_authority_last_token", **leases)
        == 2
    )
    assert value(found, "fenced_mark_above_last_token", **shop) == 0
    assert value(found, "fenced_authority_strict", **leases) == 1
