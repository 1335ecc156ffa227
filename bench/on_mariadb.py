"""MariaDB and MySQL: our pair beside the two commits that it cannot do without, and beside GET_LOCK."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncmy
import pymysql

import fenced
from bench.contending import WARM_UP
from bench.figures import Figure, ratio
from bench.interleaved import Effort, async_medians, medians
from bench.peers import NAME
from fenced_testkit.servers import MariadbServer, mariadb_or_mysql

PAIRS = 1000
WAITS = 40
TARGET = 2.5
SETTINGS = {"innodb_buffer_pool_size": "128M", "innodb_log_file_size": "96M"}
"""The servers of the tests have less."""
BARE = "UPDATE bare SET count = count + 1 WHERE id = 1"
AGAINST = "two durable commits of one row, each by autocommit"


def run(_: Path, effort: Effort) -> Iterator[Figure]:
    with mariadb_or_mysql(SETTINGS) as server:
        database = server.create_database("leases")
        server.execute("CREATE TABLE bare (id int PRIMARY KEY, count int NOT NULL)", database)
        server.execute("INSERT INTO bare VALUES (1, 0)", database)
        url = server.url(database)
        place: dict[str, Any] = {
            "host": server.host,
            "port": server.port,
            "user": "root",
            "database": database,
            "autocommit": True,
        }
        yield from _alone(server, url, place, effort)
        yield from asyncio.run(_in_a_loop(url, place, effort))
        yield _hand_over(url, effort)


def _alone(server: MariadbServer, url: str, place: dict[str, Any], effort: Effort) -> Iterator[Figure]:
    by_socket = f"{url}?unix_socket={server.socket}".replace(f"{server.host}:{server.port}", "")
    with (
        fenced.Client(url) as client,
        fenced.Client(by_socket) as near,
        contextlib.closing(pymysql.connect(**place)) as bare,
        contextlib.closing(
            pymysql.connect(**{**place, "host": None, "unix_socket": str(server.socket)})
        ) as near_bare,
    ):

        def statement(connection: Any, *texts: str) -> None:
            with connection.cursor() as cursor:
                for text in texts:
                    cursor.execute(text)

        pair, socket_pair, commits, socket_commits, lock = medians(
            lambda: client.acquire(NAME).release(),
            lambda: near.acquire(NAME).release(),
            lambda: statement(bare, BARE, BARE),
            lambda: statement(near_bare, BARE, BARE),
            lambda: statement(bare, "SELECT GET_LOCK('baton', 1)", "SELECT RELEASE_LOCK('baton')"),
            rounds=effort.of(PAIRS),
            warm_up=effort.size(WARM_UP),
        )
    yield ratio("mariadb.bare", "acquire and release", pair, commits, target=TARGET, against=AGAINST)
    what = "the same by a Unix socket"
    yield ratio("mariadb.socket", what, socket_pair, socket_commits, target=TARGET, against=AGAINST)
    yield ratio("mariadb.get_lock", "against GET_LOCK", pair, lock, against="no lease, no token, no commit")


async def _in_a_loop(url: str, place: dict[str, Any], effort: Effort) -> list[Figure]:
    bare = await asyncmy.connect(**place)
    async with fenced.AsyncClient(url) as client:

        async def pair() -> None:
            await (await client.acquire(NAME)).release()

        async def commits() -> None:
            async with bare.cursor() as cursor:
                await cursor.execute(BARE)
                await cursor.execute(BARE)

        ours, theirs = await async_medians(
            pair, commits, rounds=effort.of(PAIRS), warm_up=effort.size(WARM_UP)
        )
    bare.close()
    return [ratio("mariadb.asyncio", "with asyncio", ours, theirs, target=TARGET, against=AGAINST)]


def _hand_over(url: str, effort: Effort) -> Figure:
    """From a release to the grant of a waiter that has waited for as long as a short piece of work takes."""
    times = []
    with fenced.Client(url) as one, fenced.Client(url) as two:
        for _ in range(effort.size(WAITS)):
            held = one.acquire(NAME)
            granted: list[float] = []

            def wait(granted: list[float] = granted) -> None:
                lease = two.acquire(NAME, wait=20)
                granted.append(time.perf_counter())
                lease.release()

            waiter = threading.Thread(target=wait)
            waiter.start()
            time.sleep(0.05)
            released = time.perf_counter()
            held.release()
            waiter.join()
            times.append(granted[0] - released)
    middle = sorted(times)[len(times) // 2]
    return Figure(
        "mariadb.handover", "release to grant, after 50 ms", middle * 1e3, "ms", None, f"{len(times)} times"
    )
