"""Changes of the leader on each authority, in processes: by a kill, and by a stop past the ttl. And workers of uvicorn.

How soon the next one leads is measured by `make evidence` and not here, where cores are busy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evidence.authority_storms.weather import Log, SqliteStore
from evidence.elections import Camp, broken_promises, workers
from fenced_testkit.servers import ServiceServer

TTL = 1.0
CHANGES = 2


@pytest.fixture(params=["sqlite", "postgresql", "redis", "etcd", "zookeeper", "service"])
def authority(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Its address, and whether a stopped process keeps others from writing."""
    if request.param == "sqlite":
        with contextlib.closing(Log(tmp_path / "storm.jsonl")) as log:
            store = SqliteStore(tmp_path, log)
            yield store.url, store.blocked
    elif request.param == "service":
        with ServiceServer() as server:
            yield server.url(), lambda: False
    else:
        yield request.getfixturevalue(f"{request.param}_url"), lambda: False


def test_a_leader_that_is_killed_or_stopped_is_followed_by_a_later_term(
    authority: tuple[str, Callable[[], bool]], tmp_path: Path
) -> None:
    url, blocked = authority
    found = Camp(url, tmp_path, TTL, TTL + 1, blocked).run(CHANGES)
    assert found["broken"] == []
    assert found["changes"] == {"killed": 1, "stopped": 1}
    assert found["terms"] >= CHANGES + 1


def test_one_of_four_workers_of_uvicorn_leads_and_is_followed_when_it_is_killed() -> None:
    found = workers.run(kills=2, ttl=TTL)
    assert found["broken"] == []
    assert (found["killed"], found["terms"]) == (2, 3)


@pytest.mark.parametrize(
    "obeyed, said",
    [
        ([(0, 5, "a", 1.0), (0, 4, "b", 2.0)], "follower 0 obeyed term 4 of b after 5"),
        ([(0, 5, "a", 1.0), (1, 5, "b", 2.0)], "term 5 has two leaders, a and b"),
    ],
)
def test_a_broken_promise_is_found(obeyed: list[tuple[int, int, str, float]], said: str) -> None:
    assert broken_promises(obeyed) == [said]


def test_orderly_terms_are_not_broken() -> None:
    assert broken_promises([(0, 1, "a", 1.0), (1, 1, "a", 1.0), (0, 2, "b", 2.0), (1, 2, "b", 2.0)]) == []
