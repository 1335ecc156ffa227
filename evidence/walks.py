"""Six walks through the code: which files somebody opens who follows one operation (record 0089).

A walk is run under a profiler. A file counts if one of its functions ran, and not only a constructor. Values, errors,
clocks and runtimes do not count. Each walk runs in a process of its own, so none finds what another one has loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import multiprocessing
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import psycopg
import redis

import fenced
import fenced_testkit
from fenced.errors import StaleToken
from fenced.redis import RedisGuard
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.memory.authority import MemoryAuthority
from fenced_testkit.servers import EtcdServer, PostgresqlServer, RedisServer
from release.lines import younger

PACKAGE, TESTKIT = (Path(package.__path__[0]) for package in (fenced, fenced_testkit))
LEFT_OUT = ("values/", "errors.py", "events.py", "runtime/clocks.py", "runtime/blocking.py", "runtime/aio.py")
FUNCTIONS_SHOWN = 4
NAME = "orders/42"


class Walk:
    """The functions that run, by file, in the order in which each was entered first."""

    def __init__(self) -> None:
        self._ran: dict[Path, dict[str, None]] = {}
        self._walking = False
        threading.setprofile(self._see)  # in every thread that is started from now on
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # A coroutine that goes on was not entered here. The body of a class is no function, nor is a comprehension.
        entered = self._walking and event == "call" and frame.f_lasti <= 0
        if entered and code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<"):
            path = Path(code.co_filename)
            if path.is_relative_to(PACKAGE) or path.is_relative_to(TESTKIT):
                self._ran.setdefault(path, {})[code.co_name] = None

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """What runs meanwhile is the walk."""
        self._walking = True
        try:
            yield
        finally:
            self._walking = False

    def files(self) -> dict[str, list[str]]:
        found = {}
        for path, ran in self._ran.items():
            inside = path.is_relative_to(PACKAGE)
            name = str(path.relative_to(PACKAGE)) if inside else f"kit/{path.relative_to(TESTKIT)}"
            functions = [each for each in ran if each not in ("__init__", "__new__", "__post_init__")]
            if functions and not name.startswith(LEFT_OUT):
                found[name] = functions[:FUNCTIONS_SHOWN]
        return found


def stale_write(walk: Walk) -> None:
    """A stale write to a guarded PostgreSQL table."""
    orders = fenced.sql.Guard(table="orders", name="orders/{id}")
    with PostgresqlServer() as server, psycopg.connect(server.url(), autocommit=True) as db:
        db.execute("CREATE TABLE orders (id int PRIMARY KEY, qty int)")
        orders.install(db, mode="require")
        with fenced.Client("memory:walk") as one, fenced.Client("memory:walk") as two:
            late = one.acquire(NAME)
            authority = MemoryAuthority.at("memory:walk", BlockingRuntime(), "default")
            step(authority.force_release(NAME, late.token))
            with two.hold(NAME) as newer, orders.transaction(db, newer) as tx:
                tx.execute("INSERT INTO orders VALUES (42, 1)")
            with walk.here(), contextlib.suppress(StaleToken), orders.transaction(db, late):
                raise AssertionError("it was admitted")


def contended_acquire(walk: Walk) -> None:
    """A contended acquire with etcd, by a new client."""
    with EtcdServer() as server, fenced.Client(server.url(), guarantee="best-effort") as one:
        lease = one.acquire(NAME)

        def release() -> None:
            sys.setprofile(None)  # it is not the walk of the other client
            lease.release()

        timer = threading.Timer(1.0, release)
        timer.start()
        with fenced.Client(server.url(), guarantee="best-effort") as two:
            with walk.here():
                mine = two.acquire(NAME, wait=30)
            mine.release()
        timer.join()


def request_to_the_service(walk: Walk) -> None:
    """POST /v1/leases over the ledger: once whole, and once with its body in two pieces."""
    from fenced.http1.server import ListenOptions
    from fenced.service.api import Api
    from fenced.service.server import RunningInstance
    from fenced.stores.ledger.authority.authority import LedgerAuthority

    async def post(port: int, attempt: str, pieces: int) -> bytes:
        body = json.dumps({"attempt": attempt, "names": [NAME + attempt], "ttl": 30}).encode()
        head = f"POST /v1/leases HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body if pieces == 1 else head + body[:9])
        if pieces == 2:
            await asyncio.sleep(0.2)  # so that it is read in two pieces
            writer.write(body[9:])
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        return answer

    async def story(folder: str) -> None:
        api = Api(lambda runtime, name: LedgerAuthority.at(f"ledger:///{folder}/leases", runtime, name))
        await api.namespaces.opened("default", create=True)
        link = socket.create_server(("127.0.0.1", 0))
        instance = RunningInstance(api, ListenOptions(link.getsockname()))
        serving = asyncio.create_task(instance.serve([link]))
        await instance.started.wait()
        with walk.here():
            for pieces in (1, 2):
                assert b" 200 " in await post(link.getsockname()[1], str(pieces) * 32, pieces)
        instance.stop()
        await serving

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(story(folder))


def redis_set(walk: Walk) -> None:
    """A SET behind the Redis guard, on a new client."""
    guard = RedisGuard(tag="walk", name="stock/{tag}")
    with (
        RedisServer() as server,
        redis.Redis.from_url(server.url()) as db,
        fenced.Client("memory:") as leases,
        leases.hold("stock/walk") as lease,
        walk.here(),
        guard.transaction(db, lease) as tx,
    ):
        tx.set("{walk}:42", "1")


def proxied_request(walk: Walk) -> None:
    """A request through the proxy, whose marks are in SQLite."""
    from fenced.proxy.server import FencingProxy, ProxyOptions

    async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            await reader.read()  # until the proxy closes it

    async def story(folder: str) -> None:
        server = await asyncio.start_server(upstream, "127.0.0.1", 0)
        where = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        names = ("/orders/{id} = orders/{path.id}",)
        proxy = FencingProxy(ProxyOptions(where, names, f"sqlite:///{folder}/marks.db", ("127.0.0.1", 0)))
        _, port = await proxy.start()
        async with fenced.AsyncClient("memory:") as leases, leases.hold(NAME) as lease:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with walk.here():
                stamp = f'Fenced-Stamp: "{lease.next_stamp()}"\r\n'
                writer.write(
                    f"PUT /orders/42 HTTP/1.1\r\nHost: a\r\n{stamp}Content-Length: 0\r\n\r\n".encode()
                )
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            writer.close()
            await writer.wait_closed()
        await proxy.stop()
        server.close()
        await server.wait_closed()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(story(folder))


def world_of_zookeeper(walk: Walk) -> None:
    """One world of ZooKeeper."""
    from fenced_testkit.simulation import simulate, site_of

    site = site_of("zookeeper")
    with walk.here():
        simulate(1, site)


WALKS: dict[str, Callable[[Walk], None]] = {
    "a": stale_write,
    "b": contended_acquire,
    "c": request_to_the_service,
    "d": redis_set,
    "e": proxied_request,
    "f": world_of_zookeeper,
}


def walked(which: str) -> dict[str, Any]:
    walk = Walk()
    try:
        WALKS[which](walk)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    functions = walk.files()
    younger_files = [name for name in functions if younger("src/fenced", Path(name))]
    return {
        "what": (WALKS[which].__doc__ or "").rstrip("."),
        "files": len(functions),
        "of_younger_capabilities": len(younger_files),
        "functions": functions,
    }


def run() -> dict[str, Any]:
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        return dict(zip(WALKS, pool.map(walked, WALKS), strict=True))
