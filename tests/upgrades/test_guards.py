"""The guards of tables: installed by 0.1 with data in them, upgraded while clients of both versions write."""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.upgrades.crew import NEW, Crew, CrewMember, Failed, Process, plant
from tests.upgrades.program import connected

pytestmark = pytest.mark.xdist_group("upgrades")

ROUNDS = 3
IN_THE_WAY = re.compile("lock timeout|in use|deadlock")
"""In the errors of 0.1 and of this version, while a writer holds a lock that an installation needs."""
KEPT = {
    "sqlite": {
        "marks": "SELECT name, token FROM fenced_mark WHERE name IN ('orders/3', 'orders/4') ORDER BY 1",
        "modes": "SELECT guard, pattern, mode FROM fenced_mode ORDER BY 1, 2",
        "records": "SELECT guard, name, stamp, verdict, mode FROM fenced_record ORDER BY id LIMIT 1",
    },
    "postgresql": {
        "marks": "SELECT name, token FROM fenced_guard.mark WHERE name IN ('orders/3', 'orders/4') ORDER BY 1",
        "modes": "SELECT guard, pattern, mode FROM fenced_guard.mode ORDER BY 1, 2",
        "records": "SELECT guard, name, stamp, verdict, mode FROM fenced_guard.record ORDER BY id LIMIT 1",
        "keys": "SELECT id, kind FROM fenced_guard.key ORDER BY id",
        "trust": "SELECT realm, proof, max_jump FROM fenced_guard.trust",
        "values": "SELECT count(*) FROM fenced_guard.value",
    },
}


class Shop:
    """A guarded database that 0.1 made, and its programs."""

    def __init__(self, kind: str, url: str, authority: str, old: Path, crew: Crew) -> None:
        self.kind, self.url = kind, url
        self._authority, self._crew = authority, crew
        self.start(old).call("prepare", url, "enforce")
        if kind == "postgresql":
            self.run("SELECT fenced_guard.add_key('first', 'hmac', repeat('k', 32)::bytea)")
        self.before = self.kept()

    def start(self, code: Path) -> CrewMember:
        return CrewMember(self._crew.process(code), self._authority, "default")

    def run(self, sql: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(connected(self.url)) as db:
            return list(db.execute(sql).fetchall())

    def kept(self) -> dict[str, list[tuple[Any, ...]]]:
        return {what: self.run(sql) for what, sql in KEPT[self.kind].items()}

    def announcement(self) -> str:
        """The announcement of the holder that has the mark of the third row."""
        ((realm, token, grant, name),) = self.run(
            "SELECT realm, token, grant_id, name FROM fenced_guard.mark, fenced_guard.trust WHERE name = 'orders/3'"
        )
        return f"SELECT fenced_guard.announce('1:{realm}:{token}:-:{grant}:{name}', NULL, 'public.orders')"

    def status(self) -> str:
        return str(self._crew.process(NEW).call("command", "guard", "status", self.url)["printed"])

    def install(self, code: Path) -> None:
        """As a program of this version does it, again while a writer's lock is in the way."""
        program = self.start(code)
        while True:
            try:
                program.call("install", self.url)
                return
            except Failed as error:
                if not IN_THE_WAY.search(str(error)):
                    raise

    def upgrade(self, code: Path) -> None:
        upgrade(self._crew.process(code), self.url)


def upgrade(process: Process, url: str) -> None:
    """As an operator does it, again while a writer's lock is in the way."""
    while refused := refusal_of_upgrade(process, url):
        if not IN_THE_WAY.search(refused):
            raise Failed(refused)


def refusal_of_upgrade(process: Process, url: str) -> str:
    """What the command printed, if it failed."""
    done = process.call("command", "guard", "upgrade", url)
    return str(done["printed"]) if done["status"] else ""


@pytest.fixture(params=["sqlite", "postgresql"])
def shop(request: pytest.FixtureRequest, tmp_path: Path, old: Path, crew: Crew) -> Shop:
    if request.param == "sqlite":
        urls = f"sqlite:///{tmp_path}/shop.db", f"sqlite:///{tmp_path}/leases.db"
    else:
        urls = (request.getfixturevalue("postgresql_url"),) * 2
    return Shop(request.param, *urls, old, crew)


def judge(shop: Shop, writers: list[CrewMember]) -> None:
    """Stop them. No write was lost, and each late holder was refused."""
    for writer in writers:
        writer.call("stop")
    ends = [writer.call("end", "write") for writer in writers]
    rounds = sum(end["rounds"] for end in ends)
    assert shop.run("SELECT qty FROM orders WHERE id < 3 ORDER BY id") == [(rounds,), (rounds,)]
    assert [end["refused"] for end in ends] == [end["rounds"] - 1 for end in ends], (
        "late holders were refused"
    )
    assert shop.kept() == shop.before


def story(shop: Shop, old: Path, new: Path) -> None:
    """Marks, modes, records and keys stay; no write is lost or let through by mistake; nobody is stopped."""
    writers = [shop.start(old)]
    writers[0].call("begin", "write", shop.url)
    writers[0].work_on(ROUNDS)
    shop.upgrade(new)
    assert shop.kept() == shop.before
    writers.append(shop.start(new))
    writers[1].call("begin", "write", shop.url)
    for writer in writers:
        writer.work_on(ROUNDS)
    judge(shop, writers)


def test_the_other_order(shop: Shop, old: Path) -> None:
    """A new program writes before the upgrade; after it an old one installs the triggers of 0.1 again."""
    writers = [shop.start(NEW), shop.start(old)]
    for writer in writers:
        writer.call("begin", "write", shop.url)
        writer.work_on(ROUNDS)
    shop.upgrade(NEW)
    shop.install(old)
    for writer in writers:
        writer.work_on(ROUNDS)
    shop.upgrade(NEW)
    judge(shop, writers)


def test_a_guard_is_upgraded_under_load(shop: Shop, old: Path) -> None:
    story(shop, old, NEW)
    shop.upgrade(NEW)  # harmless


@pytest.mark.parametrize("shop", ["postgresql"], indirect=True)
def test_upgrades_at_the_same_time_do_not_meet(shop: Shop) -> None:
    """One of them upgrades; the others wait for it, look again, and find nothing to do."""
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(contextlib.closing(Process(NEW))) for _ in range(4)]
        threads = stack.enter_context(ThreadPoolExecutor(4))
        for done in [threads.submit(upgrade, process, shop.url) for process in processes]:
            done.result()
    assert shop.run("SELECT version, functions <> '' FROM fenced_guard.schema") == [(4, True)]
    assert shop.run("SELECT DISTINCT address, pid FROM fenced_guard.record") == [(None, None)], "old records"
    assert shop.kept() == shop.before


def test_status_shows_the_versions(shop: Shop) -> None:
    if shop.kind == "postgresql":
        assert "run `fenced guard upgrade` as the role that owns the schema fenced_guard" in shop.status()
    else:
        assert "schema 1, installed by fenced 0.1" in shop.status()
    shop.upgrade(NEW)
    assert f"schema {4 if shop.kind == 'postgresql' else 2}, installed by fenced" in shop.status()
    assert "readable by clients that know 1 or later" in shop.status()


TABLES = "stores/postgresql/guard/schema/tables_2.sql"
LAST = "-- CREATE OR REPLACE cannot rename a parameter.\n"
WRONG = {
    "resets a mark": "UPDATE fenced_guard.mark SET token = 1;\n",
    "forgets a mode": "DELETE FROM fenced_guard.mode WHERE pattern <> '*';\n",
    "is not additive": "ALTER TABLE fenced_guard.mark RENAME COLUMN seq TO number;\n",
}


@pytest.mark.parametrize("shop", ["postgresql"], indirect=True)
@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_migration_is_caught(shop: Shop, old: Path, tmp_path: Path, bug: str) -> None:
    code = plant(tmp_path / "planted", TABLES, LAST, WRONG[bug] + LAST)
    with pytest.raises((AssertionError, Failed)) as caught:
        story(shop, old, code)
    print(f"{bug}: {caught.value}")


@pytest.mark.parametrize("shop", ["postgresql"], indirect=True)
def test_an_upgrade_that_waits_too_long_changes_nothing(shop: Shop, crew: Crew) -> None:
    """A transaction that has written keeps its locks. The upgrade gives up, and works once that has ended."""
    with contextlib.closing(connected(shop.url)) as db:
        db.execute("BEGIN")
        db.execute(shop.announcement())
        db.execute("UPDATE orders SET qty = 30 WHERE id = 3")
        assert "in use by process" in refusal_of_upgrade(crew.process(NEW), shop.url)
        assert shop.run("SELECT fenced_guard.version(), to_regclass('fenced_guard.schema')") == [(1, None)]
        db.execute("COMMIT")
    shop.upgrade(NEW)
    assert shop.run("SELECT qty FROM orders WHERE id = 3") == [(30,)]


@pytest.mark.parametrize("shop", ["postgresql"], indirect=True)
def test_a_transaction_may_announce_before_the_upgrade_and_write_after_it(shop: Shop) -> None:
    with contextlib.closing(connected(shop.url)) as db:
        db.execute("BEGIN")
        db.execute(shop.announcement())
        shop.upgrade(NEW)
        db.execute("UPDATE orders SET qty = 31 WHERE id = 3")
        with pytest.raises(psycopg.DatabaseError, match="not covered by the lease"):
            db.execute("UPDATE orders SET qty = 31 WHERE id = 2")
        db.execute("ROLLBACK")
        db.execute("BEGIN")
        db.execute(shop.announcement())
        db.execute("UPDATE orders SET qty = 32 WHERE id = 3")
        db.execute("COMMIT")
    assert shop.run("SELECT qty FROM orders WHERE id = 3") == [(32,)]


@pytest.mark.parametrize("shop", ["postgresql"], indirect=True)
def test_values_under_names_become_bytes_and_stop_clients_of_0_1(shop: Shop) -> None:
    """The one thing that does not overlap: a text of 0.1 would be taken for an encoding of other bytes."""
    shop.run("INSERT INTO fenced_guard.value (name, value, version) VALUES ('a', 'caf\u00e9', 1) RETURNING 1")
    shop.upgrade(NEW)
    assert shop.run("SELECT value, version FROM fenced_guard.value") == [("caf\u00e9".encode(), 1)]
    with pytest.raises(psycopg.errors.NotNullViolation):
        shop.run(
            "INSERT INTO fenced_guard.value AS v (name, value, version) VALUES ('a', '\\x41', 1) ON CONFLICT (name) "
            "DO UPDATE SET value = excluded.value, version = v.version + 1 RETURNING version"
        )
