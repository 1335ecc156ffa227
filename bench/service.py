"""The service beside etcd's lock: durable grants and releases of 64 clients and of one, and what a program pays for it.

All of them keep their data in one folder, and one generator makes the load (load.c), so the client costs the same on
both sides. They take turns, three times, and of each the middle run counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from statistics import median, median_low
from typing import Any, NamedTuple

import fenced
from bench import handover
from bench.figures import Figure
from bench.interleaved import Effort, medians
from bench.proxy import cpu_seconds
from fenced.client import registry
from fenced.runtime.aio import AioRuntime
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.etcd.address import EtcdAddress
from fenced.stores.etcd.wire import messages
from fenced.stores.etcd.wire.cluster import EtcdWire
from fenced.stores.etcd.wire.protobuf import integer
from fenced.values.model import Ask, Granted, Holder
from fenced_testkit.servers import EtcdServer, PostgresqlServer, ServiceServer
from fenced_testkit.servers.base import MissingProgram

CLIENTS = 64
BATCH = 8
"""Operations in a request: eight connections act for eight clients each."""
SECONDS = 3.0
WARM_UP_SECONDS = 0.5
TURNS = 3
ALONE_SECONDS = 2.0
PROCESSES_MAX = 2
PROGRAM_PAIRS = 1000
HANDOVERS = 300
TTL_SECONDS = 600
DEFAULTS = {"heartbeat-interval": "100", "election-timeout": "1000"}
DIRECT_SHARE = 0.8


class Load(NamedTuple):
    """What the generator found: pairs a second, and microseconds of a pair; and the CPU of the server for each."""

    pairs: float
    p50: float
    p99: float
    cpu: float

    def __str__(self) -> str:
        pair = f"{self.p50 / 1e3:.1f} (99 %: {self.p99 / 1e3:.1f}) ms, {self.cpu:.0f} µs of CPU"
        return f"{self.pairs:,.0f} a second, each {pair}"


class Generator:
    """load.c, compiled."""

    def __init__(self, folder: Path, effort: Effort) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            raise MissingProgram("the load generator is a C program, and there is no cc; gcc has it")
        self._program = folder / "load"
        source = Path(__file__).with_name("load.c")
        command = [compiler, "-O2", "-D_GNU_SOURCE", "-o", str(self._program), str(source)]
        subprocess.run(command, check=True)
        self._effort = effort

    def __call__(
        self, kind: str, server: EtcdServer | ServiceServer, connections: int, each: int = 1
    ) -> Load:
        seconds = self._effort.share * (ALONE_SECONDS if connections == 1 else SECONDS)
        run, lease = secrets.token_hex(8), 1 + secrets.randbits(40)
        if isinstance(server, EtcdServer):
            _grant_leases(server, range(lease, lease + connections * each))
        arguments = [kind, server.host, server.port, connections, each, seconds, run, lease]
        arguments.append(self._effort.seconds(WARM_UP_SECONDS))
        command = [str(self._program), *map(str, arguments)]
        before = cpu_seconds(server.pid)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        return Load(cpu=(cpu_seconds(server.pid) - before) / found.pop("all") * 1e6, **found)


def _grant_leases(server: EtcdServer, ids: range) -> None:
    """An etcd lease for each client, which outlives the run."""
    runtime = BlockingRuntime()
    with contextlib.closing(EtcdWire(EtcdAddress(server.url()), runtime)) as wire:
        for each in ids:
            request = integer(1, TTL_SECONDS) + integer(2, each)
            step(wire.call(messages.LEASE_GRANT, request, runtime.now() + 30))


def run(folder: Path, effort: Effort) -> Iterator[Figure]:
    try:
        load = Generator(folder, effort)
    except MissingProgram as missing:
        sys.stderr.write(f"service: {missing}. Only what a Python program pays is measured\n")
        yield from _programs(folder, effort)
        return
    with EtcdServer(DEFAULTS, folder=folder / "etcd") as etcd:
        yield from _against_v3lock(folder, load, etcd, effort.size(TURNS))
        yield from _against_direct("etcd", etcd.url(), folder, load, effort)
    with PostgresqlServer() as postgresql:
        yield from _against_direct("PostgreSQL", postgresql.url(), folder, load, effort)
    yield from _programs(folder, effort)


# Beside etcd's lock.


def _against_v3lock(folder: Path, load: Generator, etcd: EtcdServer, count: int) -> Iterator[Figure]:
    stores = {"ledger": _embedded("ledger", folder), "sqlite": _embedded("sqlite", folder)}
    with contextlib.ExitStack() as stack:
        ledger, sqlite = (stack.enter_context(_serving(folder, store)) for store in stores.values())
        turns = [
            (
                load("v3lock", etcd, CLIENTS),
                load("lease", ledger, CLIENTS),
                load("batch", ledger, CLIENTS // BATCH, BATCH),
                load("lease", sqlite, CLIENTS),
                load("v3lock", etcd, 1).p50,
                load("lease", ledger, 1).p50,
            )
            for _ in range(count)
        ]
    theirs, single, batch, over_sqlite, alone_theirs, alone = zip(*turns, strict=True)
    peer = median_low(theirs)

    def figure(key: str, what: str, runs: Sequence[Load], target: float | None) -> Figure:
        ours = median_low(runs)
        detail = f"{ours}; v3lock {peer}"
        return Figure(f"service.{key}", what, ours.pairs / peer.pairs, "x", target, detail, "at least")

    yield figure("single", f"service over the ledger, {CLIENTS} clients, against v3lock", single, 3.0)
    yield figure("batch", f"the same in batches of {BATCH}", batch, 5.0)
    yield figure("sqlite", f"service over SQLite, {CLIENTS} clients, against v3lock", over_sqlite, None)
    ours, v3lock = median(alone), median(alone_theirs)
    detail = f"{ours:,.0f} against {v3lock:,.0f} µs of v3lock, median"
    yield Figure("service.alone", "one client: a pair, ledger", ours / v3lock, "x", 1.0, detail)


def _embedded(kind: str, folder: Path) -> str:
    return f"{kind}:///{folder}/{kind}-{secrets.token_hex(4)}.db"


def _serving(folder: Path, store: str, *options: str) -> ServiceServer:
    return ServiceServer(folder / f"service-{secrets.token_hex(4)}", store=store, options=options)


# Beside programs that use the store directly.


def _against_direct(name: str, store: str, folder: Path, load: Generator, effort: Effort) -> Iterator[Figure]:
    """The best of 64 clients with one instance or two, and of 64 tasks that use the store in one process or two."""
    ours, direct, most = [], [], effort.size(PROCESSES_MAX)
    with contextlib.ExitStack() as stack:
        services = [
            stack.enter_context(_serving(folder, store, "--guarantee", "best-effort")) for _ in range(most)
        ]
        for processes in range(1, most + 1):
            direct.append(_direct(store, processes, effort))
            ours.append(_served(load, services[:processes]))
    what = f"service over {name}, against direct access"
    detail = f"{_rates(ours)} against {_rates(direct)} pairs a second, with 1 to {most} processes"
    ratio = max(ours) / max(direct)
    yield Figure(f"service.over_{name.lower()}", what, ratio, "x", DIRECT_SHARE, detail, "at least")


def _rates(found: list[float]) -> str:
    return " / ".join(f"{each:,.0f}" for each in found)


def _served(load: Generator, services: list[ServiceServer]) -> float:
    with ThreadPoolExecutor(len(services)) as pool:
        jobs = [pool.submit(load, "lease", each, CLIENTS // len(services)) for each in services]
        return sum(job.result().pairs for job in jobs)


def _direct(store: str, processes: int, effort: Effort) -> float:
    lengths = effort.seconds(WARM_UP_SECONDS), effort.share * SECONDS
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        jobs = [pool.submit(pairs_of_tasks, store, CLIENTS // processes, lengths) for _ in range(processes)]
        return sum(job.result() for job in jobs)


def pairs_of_tasks(store: str, tasks: int, lengths: tuple[float, float]) -> float:
    """Pairs a second of so many tasks with one authority object, in the second length; runs in a process of its own."""
    return asyncio.run(_pairs_of_tasks(store, tasks, lengths))


async def _pairs_of_tasks(store: str, tasks: int, lengths: tuple[float, float]) -> float:
    runtime = AioRuntime()
    authority = registry.authority(store, runtime)
    await authority.open()
    run, until = runtime.secret(), 0.0

    async def work(task: int) -> int:
        holder = Holder(runtime.secret(), "bench", "host", 1)
        count = 0
        while not count or time.perf_counter() < until:
            ask = Ask(runtime.secret(), (f"{run}/{task}",), 30.0, holder)
            assert isinstance(await authority.ask(ask), Granted)
            await authority.release(ask.secret)
            count += 1
        return count

    for length in lengths:  # the first one warms up
        began = time.perf_counter()
        until = began + length
        counts = await asyncio.gather(*(work(task) for task in range(tasks)))
        rate = sum(counts) / (time.perf_counter() - began)
    await authority.close()
    runtime.close()
    return rate


# What a program pays.


def _programs(folder: Path, effort: Effort) -> Iterator[Figure]:
    rounds = effort.of(PROGRAM_PAIRS)
    with (
        _serving(folder, _embedded("ledger", folder)) as over_ledger,
        _serving(folder, _embedded("sqlite", folder)) as over_sqlite,
        contextlib.ExitStack() as stack,
    ):
        urls = [over_ledger.url(), over_sqlite.url(), _embedded("sqlite", folder)]
        clients = [stack.enter_context(fenced.Client(url)) for url in urls]
        ledger, sqlite, direct = medians(*map(_pair, clients), rounds=rounds, warm_up=effort.size(200))
        beside = f"over SQLite {sqlite * 1e3:.2f} ms; SQLite itself {direct * 1e3:.2f} ms"
        yield Figure("service.pair", "a Python program's pair", ledger * 1e3, "ms", 1.2, beside)
        times = handover.measure(
            over_ledger.url(), [(max(handover.TURNS_MIN, effort.of(HANDOVERS // 2)), 1)] * 2
        )
        detail = f"median of {len(times)}, two processes"
        yield Figure("service.handover", "hand-over between clients", median(times) * 1e3, "ms", 2.0, detail)


def _pair(client: Any) -> Callable[[], None]:
    return lambda: client.acquire("orders/42").release()
