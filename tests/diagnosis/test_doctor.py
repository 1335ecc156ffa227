"""`fenced doctor` names what is broken in its first two lines, finds nothing on sound set-ups, and changes nothing."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

from fenced.client import registry
from fenced.diagnosis.conformance import failures
from fenced.diagnosis.runbooks import PAGES
from fenced.guards.cellguard import CellGuard
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.testing import AUTHORITY_CHECKS, AuthorityHarness, Check, CheckFailed
from fenced_testkit.servers import EtcdServer, Pgbouncer, PostgresqlServer, RedisServer
from tests.conftest import NewDatabase
from tests.diagnosis.setups import BROKEN, READER, SOUND, Servers, Setup, opened

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"


@pytest.fixture
def servers(
    postgresql_server: PostgresqlServer, redis_server: RedisServer, new_database: NewDatabase, tmp_path: Path
) -> Iterator[Servers]:
    with contextlib.suppress(psycopg.errors.DuplicateObject):
        postgresql_server.execute(f"CREATE ROLE {READER} LOGIN")
        postgresql_server.execute(f"ALTER ROLE {READER} SET default_transaction_read_only = on")
    made = Servers(postgresql_server, redis_server, tmp_path, new_database)
    with made.undo:
        yield made


@pytest.mark.parametrize("name", SOUND)
def test_sound(name: str, servers: Servers) -> None:
    """No finding above a note, and the letter A."""
    setup = SOUND[name](servers)
    status, text = setup.doctor()
    assert (status, text[:2]) == (0, "A "), text
    assert not {"BROKEN", "UNKNOWN", "WEAK"} & {line.split(" ")[0] for line in text.splitlines()}


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name: str, servers: Servers) -> None:
    """The finding comes first, and says what to do; the letter is that of the pair."""
    check, letter, make = BROKEN[name]
    setup = make(servers)
    found = setup.report()
    first = found["findings"][0]
    assert (first["check"], found["class"]) == (check, letter), found
    assert first["level"] in ("broken", "weak", "unknown")
    status, text = setup.doctor()
    assert status == {"broken": 2, "unknown": 3, "weak": 1}[first["level"]]
    lines = text.splitlines()
    shown = next(line for line in lines[:2] if line.startswith(first["level"].upper()))
    assert first["says"] in shown
    assert bool(first["runbook"]) == (check in PAGES)


def test_a_role_without_triggers_has_its_remedy(servers: Servers) -> None:
    first = BROKEN["no_trigger_fires_for_a_role"][2](servers).report()["findings"][0]
    role = first["says"].split()[1]
    assert first["do"] == f"ALTER ROLE {role} RESET session_replication_role"


def test_there_is_a_page_for_each_finding_that_names_one() -> None:
    assert {each for each in PAGES if not (RUNBOOKS / f"{each}.md").is_file()} == set()


def test_broken_etcd(etcd_server: EtcdServer, servers: Servers) -> None:
    """A version whose tokens could repeat, and a key of a cooperative guard that somebody has overwritten."""
    setup = Setup(servers, [etcd_server.url()])
    with setup.client():
        pass
    setup.table()
    found = setup.report()
    assert (found["class"], found["findings"][0]["check"]) == ("C", "tokens-could-repeat")
    assert _revision(setup.report()) == _revision(found)  # it has written nothing
    values = Setup(servers).leases().values(f"{etcd_server.url()}?prefix=doctor&mode=require")
    guard = cast("CellGuard", registry.guard(values.guards[0], BlockingRuntime()))
    version, _ = step(guard.cells.get("n/orders/1"))
    assert step(guard.cells.swap([("n/orders/1", version, b"by hand")]))
    step(guard.close())
    first = values.report()["findings"][0]
    assert first["check"] == "guard-wrong" and "orders/1 was written without the guard" in first["says"]


def _revision(report: dict[str, Any]) -> list[int]:
    """Of etcd: the last token is the revision, which every write raises."""
    return [fact for name, fact in report["facts"].items() if name.startswith("last token")]


def test_poolers(servers: Servers) -> None:
    """Transaction mode is sound; in statement mode no guarded write works."""
    setup = Setup(servers).leases().table()
    database = setup.guards[0].rpartition("/")[2]
    with Pgbouncer(servers.postgresql, "transaction") as pooler:
        setup.guards = [pooler.url(database, READER)]
        assert setup.doctor()[0] == 0
    with Pgbouncer(servers.postgresql, "statement") as pooler:
        setup.guards = [pooler.url(database, READER)]
        found = setup.report()
        assert (found["class"], found["findings"][0]["check"]) == ("D", "pooler")


def test_a_clock_that_is_an_hour_off(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(servers).leases().table()
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 3600)
    found = setup.report()
    assert {each["check"] for each in found["findings"] if each["level"] == "weak"} == {"clock"}
    assert "-3600" in found["findings"][0]["says"]


@pytest.mark.xdist_group("doctor")  # servers of its own
def test_an_asynchronous_standby_and_a_server_that_does_not_sync(servers: Servers) -> None:
    """Also for a role that may not see which standbys are asynchronous: it says which right it lacks."""
    with PostgresqlServer({"fsync": "off"}) as server:
        server.execute(f"CREATE ROLE {READER} LOGIN")
        away = Servers(server, servers.redis, servers.folder, lambda prepare=None: _made(server, prepare))
        setup = Setup(away).leases().table()
        found = setup.report()
        checks = {each["check"]: each["do"] for each in found["findings"] if each["level"] == "weak"}
        fix = "postgresql.conf: fsync = on"
        assert (found["class"], checks) == ("C", {"marks-could-be-lost": fix, "tokens-could-repeat": fix})
        sound = Setup(servers).leases()
        sound.guards = setup.guards
        realm = opened(servers.owner(servers.authority), sound.namespace).realm
        sound.fenced("guard", "adopt", setup.guard, realm)
        url = servers.owner(servers.authority)
        sound.fenced("authority", "raise", url, "--namespace", sound.namespace, "--above-guards", setup.guard)
        with server.standby():
            hidden = {each["says"] for each in sound.report()["findings"] if each["check"] == "replication"}
            assert len(hidden) == 1 and "GRANT pg_read_all_stats" in hidden.pop()
            server.execute(f"GRANT pg_read_all_stats TO {READER}")
            found = sound.report()
            assert "asynchronous" in str(found["findings"]) and found["class"] == "C"


def _made(server: PostgresqlServer, prepare: object) -> str:
    url = server.url(server.create_database())
    if callable(prepare):
        with psycopg.connect(url, autocommit=True) as db:
            prepare(db)
    return url


def test_it_changes_nothing(servers: Servers) -> None:
    """PostgreSQL: the role of every test here may not write. Elsewhere all that is stored stays the same."""
    setup = Setup(servers).file().rows()
    files = [Path(url.removeprefix("sqlite:///")) for url in (*setup.authorities, *setup.guards)]
    floor = files[0].with_name(files[0].name + ".floor")
    before = [_rows(path) for path in files], floor.read_bytes()
    assert setup.doctor()[0] == 0
    assert ([_rows(path) for path in files], floor.read_bytes()) == before
    folder = servers.folder / "guarded"
    folder.mkdir()
    setup = SOUND["ledger_and_table"](servers).values(f"file://{folder}?mode=require")
    kept = (folder, Path(setup.authorities[0].removeprefix("ledger:///")).parent)
    stored = [_bytes(each) for each in kept]
    assert (setup.doctor()[0], [_bytes(each) for each in kept]) == (1, stored)


def test_it_changes_nothing_in_redis(servers: Servers) -> None:
    setup = SOUND["leases_in_redis"](servers).values(f"{servers.redis.url()}?tag=unchanged&mode=require")
    stored = _keys(servers.redis)
    assert (setup.doctor()[0], _keys(servers.redis)) == (1, stored)
    setup.namespace = "mistyped"
    assert (setup.doctor()[0], _keys(servers.redis)) == (3, stored)  # and it makes none


def _bytes(folder: Path) -> dict[Path, bytes]:
    """Of all files but SQLite's, whose pages move when a log is checkpointed."""
    files = [path for path in folder.rglob("*") if path.is_file() and ".db" not in path.name]
    return {path: path.read_bytes() for path in files}


def _keys(server: RedisServer) -> dict[bytes, bytes]:
    return {key: server.execute("DUMP", key) for key in server.execute("KEYS", "*")}


def _rows(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return list(db.iterdump())


def test_conformance_runs_the_kit_in_namespaces_of_its_own(servers: Servers) -> None:
    """On a live authority, whose leases stay as they are. What would need a restart or an hour is left out."""

    async def fails(h: AuthorityHarness) -> None:
        raise CheckFailed("planted")

    async def waits(h: AuthorityHarness) -> None:
        await h.pass_time(3600)
        raise CheckFailed("nobody waits for that long")

    planted = [Check("planted", "", fails), Check("long", "", waits)]
    setup = Setup(servers).leases()
    url = servers.owner(servers.authority)
    with setup.client() as client, client.hold("orders/1") as lease:
        assert failures(url, [*AUTHORITY_CHECKS[:4], *planted]) == ["conformance: planted failed: planted"]
        lease.check()
