"""What a guard over etcd costs: a put behind the fence against a bare put on the same kind of connection."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

from bench.figures import Figure, ratio
from bench.interleaved import Effort, loaded_medians, medians
from bench.on_etcd import DEFAULTS
from fenced.client.values import Values
from fenced.etcd import AsyncEtcdClient, AsyncEtcdGuard, EtcdClient, EtcdGuard
from fenced.runtime.aio import AioRuntime
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.etcd.address import EtcdAddress
from fenced.stores.etcd.wire.cluster import EtcdWire
from fenced.stores.etcd.wire.protobuf import data
from fenced.values.model import Stamp
from fenced_testkit.servers import EtcdServer

ROUNDS = 1000
TASKS = 32
BODY = b"x" * 100
PUT = "/etcdserverpb.KV/Put"
AGAINST = "a bare put of 100 bytes"


def run(_: Path, effort: Effort) -> Iterator[Figure]:
    with EtcdServer(DEFAULTS) as server:
        status = server.status()
        version = status.version if status else ""
        name, old = f"etcd {version}", version.startswith("3.4.")
        yield from _alone(name, server.url(), 1.3 if old else 1.2, effort)
        bare, ours = asyncio.run(_loaded(server.url(), effort))
        what = f"{name}: fenced put, {TASKS} at once"
        yield ratio("guards_etcd.loaded", what, ours, bare, target=1.9 if old else 1.2, against=AGAINST)


def _alone(name: str, url: str, most: float, effort: Effort) -> Iterator[Figure]:
    runtime = BlockingRuntime()
    wire = EtcdWire(EtcdAddress(url), runtime)
    etcd, guard, values = EtcdClient(url), EtcdGuard(prefix="bench"), Values(f"{url}?prefix=values")
    tokens, same = itertools.count(2), _stamp("same", 1)

    def bare() -> None:
        step(wire.call(PUT, data(1, b"bare") + data(2, BODY), runtime.now() + 5))

    def fenced(stamp: Stamp = same) -> None:
        with guard.transaction(etcd, stamp) as tx:
            tx.put(b"ours", BODY)

    for key, what, action, target in (
        ("put", "fenced put", fenced, most),
        (
            "new",
            "... a new token each: announced, then put",
            lambda: fenced(_stamp("new", next(tokens))),
            None,
        ),
        ("value", "write of a value under a name", lambda: values.write(_stamp("v", 1), "v", BODY), None),
    ):
        theirs, ours = medians(bare, action, rounds=effort.of(ROUNDS), warm_up=effort.size(50))
        yield ratio(f"guards_etcd.{key}", f"{name}: {what}", ours, theirs, target=target, against=AGAINST)
    wire.close()
    etcd.close()
    values.close()


async def _loaded(url: str, effort: Effort) -> tuple[float, float]:
    """Seconds for each put if many tasks put, by turns with the guard and without."""
    runtime = AioRuntime()
    wire, etcd = EtcdWire(EtcdAddress(url), runtime), AsyncEtcdClient(url)
    guard = AsyncEtcdGuard(prefix="loaded")

    async def bare(task: int) -> None:
        await wire.call(PUT, data(1, b"bare/%d" % task) + data(2, BODY), runtime.now() + 5)

    stamps = [_stamp(f"name/{task}", 1) for task in range(TASKS)]

    async def fenced(task: int) -> None:
        async with guard.transaction(etcd, stamps[task]) as tx:
            tx.put(b"ours/%d" % task, BODY)

    theirs, ours = await loaded_medians(bare, fenced, tasks=TASKS, count=20, rounds=effort.of(20))
    wire.close()
    await etcd.close()
    runtime.close()
    return theirs, ours


def _stamp(name: str, token: int) -> Stamp:
    return Stamp("00000000000000aa", (name,), token, None, f"{token:032x}")
