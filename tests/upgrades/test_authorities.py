"""Every authority: clients of 0.1 at work, then clients of this version beside them, on what 0.1 has stored."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.upgrades.crew import NEW, Crew, CrewMember, Failed, judge, plant

pytestmark = pytest.mark.xdist_group("upgrades")

ROUNDS = 5
Start = Callable[[Path], CrewMember]


@pytest.fixture(params=["sqlite", "postgresql", "redis", "etcd", "zookeeper"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path}/leases.db"
        case name:
            return str(request.getfixturevalue(f"{name}_url"))


@pytest.fixture
def start(url: str, crew: Crew) -> Start:
    """Start a program of one version, on the authority and in a namespace of this test."""
    namespace = uuid.uuid4().hex
    return lambda code: CrewMember(crew.process(code), url, namespace)


def story(start: Start, old: Path, new: Path, log: Path) -> None:
    """Tokens never fall or repeat, held leases stay held, waiters are granted, and nobody is stopped."""
    holder, worker, waiter = start(old), start(old), start(old)
    assert holder.version == "0.1.0"
    held = holder.call("acquire", "held")["token"]
    ended = holder.call("acquire", "ended")["token"]
    holder.call("release", "ended")
    waiter.call("begin", "acquire", "held")  # an entry in a queue
    worker.call("begin", "work", ["a", "b"], str(log))
    worker.work_on(ROUNDS)

    later, successor = start(new), start(new)  # the first one upgrades
    assert later.version != "0.1.0"
    later.call("begin", "work", ["a", "b"], str(log))
    successor.call("begin", "acquire", "held")  # behind the old waiter
    assert successor.call("fail", "acquire") == {}
    for process in (worker, later):  # old and new clients work side by side
        process.work_on(ROUNDS)
    assert holder.call("check", "held")["token"] == held
    assert later.call("acquire", "ended")["token"] > ended

    late = start(old)  # a client of 0.1 that opens after the upgrade
    assert late.call("acquire", "late")["token"] > ended
    assert late.call("check", "late")
    holder.call("release", "held")
    first = waiter.call("end", "acquire")["token"]
    waiter.call("release", "held")
    second = successor.call("end", "acquire")["token"]
    assert held < first < second, "a queue that old and new clients share"
    for process in (worker, later):
        process.work_on(ROUNDS)
        process.call("stop")
        assert process.call("end", "work")["rounds"] >= ROUNDS
    assert judge(log) >= 4 * ROUNDS


def test_old_and_new_clients_share_an_authority(start: Start, old: Path, tmp_path: Path) -> None:
    story(start, old, NEW, tmp_path / "log")


SCHEMA = "stores/postgresql/authority/schema"
LAST = "VALUES (1, 1, '0.1', '');\n"
WRONG = {
    "starts the counter again": ("tables_2.sql", LAST, LAST + "ALTER SEQUENCE fenced.token RESTART;\n"),
    "deletes who holds a name": (
        "tables_2.sql",
        LAST,
        LAST + "DELETE FROM fenced.attempt; UPDATE fenced.name SET held = false;\n",
    ),
    "is not additive": (
        "tables_2.sql",
        LAST,
        LAST + "ALTER TABLE fenced.attempt RENAME COLUMN holder TO who;\n",
    ),
    "locks old clients out": ("__init__.py", "readable_by=1", "readable_by=2"),
}


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_migration_is_caught(start: Start, old: Path, tmp_path: Path, bug: str) -> None:
    file, right, wrong = WRONG[bug]
    code = plant(tmp_path / "planted", f"{SCHEMA}/{file}", right, wrong)
    with pytest.raises((AssertionError, Failed)) as caught:
        story(start, old, code, tmp_path / "log")
    print(f"{bug}: {caught.value}")
