"""The exporter: what it shows is what the stores hold, a store that hangs costs it nothing, promtool accepts it."""

from __future__ import annotations

import os
import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest

import fenced
from fenced.drills.relay.proxy import Proxy
from fenced.metrics.numbers import exposition
from fenced.monitoring.exporter import Exporter
from fenced.monitoring.looks import GuardLooker, Looker, lookers
from fenced.sql import Guard
from fenced.stores.postgresql.guard.engine import ENGINE
from fenced_testkit.servers import PostgresqlServer
from tests.metrics.servers import until
from tests.metrics.test_recorder import samples, value

EVERY = 0.1


@contextmanager
def looking(guards: list[str], authorities: list[str] = []) -> Iterator[Exporter]:  # noqa: B006 - never changed
    exporter = Exporter(lookers(guards, authorities, EVERY), ("127.0.0.1", 0))
    for each in exporter.lookers:
        each.every = EVERY
        each.start()
    yield exporter
    for each in exporter.lookers:
        each.stop()


def test_the_exporter_shows_what_the_stores_hold(tmp_path: Path) -> None:
    authority, guard = f"sqlite:///{tmp_path}/leases.db", f"sqlite:///{tmp_path}/values.db"
    with fenced.Client(authority) as client, fenced.Values(guard) as values:
        with client.hold("a") as old:
            values.write(old, "a", b"1")
            stale = old.bare_stamp()
        with client.hold("a") as new:
            values.write(new, "a", b"2")
            with pytest.raises(fenced.StaleToken):
                values.write(stale, "a", b"late")
            values.set_mode("canary(10%)", "b/*")
            with looking([f"shop={guard}"], [f"leases={authority}"]) as exporter:
                shop, leases = {"target": "shop"}, {"target": "leases"}

                def shown() -> bool:
                    found = samples(exporter.text())
                    return (
                        value(found, "fenced_up", role="guard", **shop)
                        == value(found, "fenced_up", role="authority", **leases)
                        == 1
                    )

                until(shown)
                until(lambda: "\nfenced_mark_above_last_token{" in exporter.text())  # a look of both
                text = exporter.text()
                found = samples(text)
                refusals = {key: n for key, n in found.items() if key[0] == "fenced_refusals_total" and n}
                assert [dict(labels)["kind"] for _, labels in refusals] == ["stale"]
                assert list(refusals.values()) == [1]
                stages = {dict(k[1])["pattern"]: n for k, n in found.items() if k[0] == "fenced_guard_stage"}
                assert stages["b/*"] == 2
                assert value(found, "fenced_guard_highest_token", **shop) == new.token
                assert value(found, "fenced_authority_last_token", **leases) == new.token
                assert value(found, "fenced_held", **leases) == 1
                assert value(found, "fenced_authority_strict", **leases) == 1
                assert value(found, "fenced_mark_above_last_token", **shop) == 0


class HungStore(GuardLooker):
    """A store that answered once, and then no more."""

    looks = 0
    free = threading.Event()

    def look(self) -> list:  # type: ignore[type-arg]
        self.looks += 1
        if self.looks > 1:
            self.free.wait()
        return []


def test_a_hung_store_is_down_and_delays_no_scrape() -> None:
    hung: list[Looker] = [HungStore("hung", "sqlite:////nowhere.db", EVERY)]
    exporter = Exporter(hung, ("127.0.0.1", 0))
    hung[0].start()
    try:
        until(lambda: 'fenced_up{target="hung",role="guard"} 1' in exporter.text())
        until(lambda: 'fenced_up{target="hung",role="guard"} 0' in exporter.text())
    finally:
        HungStore.free.set()
        hung[0].stop()


def test_a_silent_server_is_down_until_it_answers_again(
    postgresql_url: str, postgresql_server: PostgresqlServer
) -> None:
    """The bytes of the look arrive nowhere, and its connection stays open. Meanwhile another store is looked at."""
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
        Guard(table="orders", name="orders/{id}").install(connection, mode="enforce")
    with Proxy(postgresql_server.host, postgresql_server.port) as link:
        silent = postgresql_url.replace(f":{postgresql_server.port}/", f":{link.port}/")
        with looking([f"silent={silent}", f"good={postgresql_url}"]) as exporter:

            def up(target: str) -> float:
                return value(samples(exporter.text()), "fenced_up", role="guard", target=target)

            until(lambda: up("silent") == up("good") == 1)
            assert (shown := 'target="silent",guard="public.orders"') in exporter.text()
            link.black_hole()
            until(lambda: up("silent") == 0)
            assert shown not in exporter.text()
            until(lambda: up("good") == 1)
            link.heal()
            until(lambda: up("silent") == 1)


def test_a_failed_look_shows_no_old_numbers(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/values.db"
    with fenced.Values(url) as values:
        values.set_mode("enforce")
    with looking([f"shop={url}"]) as exporter:
        until(lambda: "fenced_guard_stage{" in exporter.text())
        with closing(sqlite3.connect(tmp_path / "values.db")) as connection:
            connection.execute("DROP TABLE fenced_tally")
        until(lambda: 'fenced_up{target="shop",role="guard"} 0' in exporter.text())
        assert "fenced_guard_stage{" not in exporter.text()


def test_a_refusal_whose_record_follows_is_not_unrecorded() -> None:
    looker = GuardLooker("shop", "sqlite:////nowhere.db", 1.0)
    assert [looker._lasting("g", found) for found in (0, 1, 0, 3, 2, 2, 0)] == [0, 0, 0, 0, 2, 2, 2]


def test_a_look_does_not_count_a_million_marks(postgresql_url: str) -> None:
    """It does not even read the table of the marks."""
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
        Guard(table="orders", name="orders/{id}").install(connection, mode="enforce")
        connection.execute("SELECT pg_stat_force_next_flush()")  # what the installation has read
        looker = GuardLooker("shop", postgresql_url, 1.0)
        looker._extent_at = float("inf")  # not due
        before = connection.execute(_READS).fetchone()
        looker.look()
        looker.disconnect()
        connection.execute("SELECT pg_stat_force_next_flush()")
        assert connection.execute(_READS).fetchone() == before


_READS = "SELECT seq_scan, idx_scan FROM pg_stat_user_tables WHERE schemaname = 'fenced_guard' AND relname = 'mark'"


def test_a_look_does_not_wait_for_hours(postgresql_url: str) -> None:
    """Where the network has forgotten the connection, the system's own limits would be two hours."""
    for url, idle in ((postgresql_url, 10), (f"{postgresql_url}?keepalives_idle=7", 7)):
        with (
            closing(ENGINE.connect(url)) as connection,
            socket.socket(fileno=os.dup(connection.fileno())) as link,
        ):
            assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == idle
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


def test_a_target_has_no_password() -> None:
    (looker,) = lookers(["postgresql://monitor:hush@db/shop"], [], 1.0)
    assert "hush" not in exposition(looker.points()) and "db/shop" in looker.target
