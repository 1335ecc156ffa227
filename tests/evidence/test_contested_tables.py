"""Contested writes to a guarded row of MariaDB: some hundred of the 5,000 of `make evidence`."""

from __future__ import annotations

import pytest

from evidence.contested_tables import LEVELS, contend
from fenced_testkit.servers import MariadbServer


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_stale_is_admitted_and_nothing_is_lost(level: str, mariadb_server: MariadbServer) -> None:
    found = contend(mariadb_server, level, 400, guarded=True)
    assert (found["attempts"], found["lost"], found["admitted_after_a_newer_one"]) == (400, 0, 0), found
    assert found.keys() <= {
        "attempts",
        "acknowledged",
        "refused_as_stale",
        "lost",
        "admitted_after_a_newer_one",
    }
    assert found["acknowledged"] > 0


def test_without_a_guard_writes_are_lost(mariadb_server: MariadbServer) -> None:
    found = contend(mariadb_server, "REPEATABLE READ", 400, guarded=False)
    assert found["lost"] > 0.05 * found["acknowledged"], found
