"""What docs/capacity.md says: what one instance of the service carries, and how often clients ask.

Held leases of one instance over the ledger: memory, grants, renewals, and how long it takes to start after a kill.
Then clients that hold leases: do as many renewals and requests arrive as the formula says? Then stores that each client
asks directly: how many renewals a second do they answer, where no two clients share a request? At the end the figures
on which the page calculates are compared with what was measured; a test finds them on the page.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import math
import multiprocessing
import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fenced
from bench.proxy import cpu_seconds
from fenced.client import registry
from fenced.events import RenewalRound
from fenced.runtime.aio import AioRuntime
from fenced.values import timing
from fenced.values.model import Ask, Granted, Holder, Kept
from fenced_testkit.servers import EtcdServer, PostgresqlServer, RedisServer, ServiceServer

LEASES = 100_000
GRANTS_EACH, RENEWALS_EACH = 1_000, 5_000
ALONE = 2_000
CLIENTS, LEASES_EACH, TTL, WATCHED_SECONDS = 20, 50, 6.0, 60.0
PROCESSES, TASKS, DIRECT_SECONDS = 2, 32, 10.0


RENEWALS_OF_A_LEASE = 3.25
"""In each ttl."""
PAGE = {
    "renewals of a lease in each ttl": RENEWALS_OF_A_LEASE,
    "memory of an instance without leases, MB": 40,
    "memory of a lease, KB": 1,
    "memory of a waiter, KB": 9,
    "seconds to start with a million attempts": 5,
    "renewals a second in requests of 5,000": 50_000,
    "grants a second in batches of 1,000": 30_000,
}
"""On these the page calculates. The last two are rates of an instance that shares two cores with its clients."""
FORMULA_WITHIN = 0.1
EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence"


class Caller:
    """One connection to the service."""

    def __init__(self, server: ServiceServer) -> None:
        self._connection = http.client.HTTPConnection(server.host, server.port, timeout=120)

    def __call__(self, path: str, body: object = None) -> Any:
        method = "GET" if body is None else "POST"
        self._connection.request(method, path, None if body is None else json.dumps(body))
        answer = self._connection.getresponse()
        text = answer.read().decode()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {text[:200]}")
        return text if body is None else json.loads(text)

    def close(self) -> None:
        self._connection.close()


def renewals_a_second(leases: int, ttl: float) -> float:
    """What the page calls 3.25 L / T: each client has a jitter of its own, so this is a mean over all jitters."""
    interval = [timing.renew_after(ttl, each / 1000) for each in range(1000)]
    return leases * sum(1 / each for each in interval) / len(interval)


def _megabytes(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]


def granted(call: Caller, attempts: list[str]) -> None:
    for start in range(0, len(attempts), GRANTS_EACH):
        asks = [
            {"ask": {"attempt": each, "names": [f"jobs/{each}"], "ttl": 600}}
            for each in attempts[start : start + GRANTS_EACH]
        ]
        call("/v1/batch", {"do": asks})


def renewed(call: Caller, attempts: list[str], each: int) -> None:
    for start in range(0, len(attempts), each):
        answers = call("/v1/leases/renew", {"attempts": attempts[start : start + each]})["answers"]
        if lost := [found for found in answers if found["answer"] != "kept"]:
            raise RuntimeError(f"a lease was not kept: {lost[0]}")


def _rate(server: ServiceServer, count: int, work: Callable[[], None]) -> dict[str, int]:
    used, began = cpu_seconds(server.pid), time.perf_counter()
    work()
    took, used = time.perf_counter() - began, cpu_seconds(server.pid) - used
    return {"a second": round(count / took), "for each CPU second of the instance": round(count / used)}


def held(leases: int = LEASES) -> dict[str, Any]:
    """So many leases of one instance over the ledger."""
    attempts = [f"{number:032x}" for number in range(leases)]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        server = ServiceServer(store=f"ledger:///{folder}/leases")
        with server, contextlib.closing(Caller(server)) as call:
            call("/v1/names?limit=1")
            before = _megabytes(server.pid)
            grants = _rate(server, leases, lambda: granted(call, attempts))
            grown = _megabytes(server.pid) - before
            batched = _rate(server, leases, lambda: renewed(call, attempts, RENEWALS_EACH))
            alone = _rate(server, ALONE, lambda: renewed(call, attempts[:ALONE], 1))
            server.kill()
            began = time.perf_counter()
            server.start()
            with contextlib.closing(Caller(server)) as again:
                again("/v1/names?limit=1")
            started = time.perf_counter() - began
    return {
        "leases": leases,
        "memory before, MB": round(before, 1),
        "memory of a lease, KB": round(grown * 1024 / leases, 2),
        f"grants in batches of {GRANTS_EACH:,}": grants,
        f"renewals in requests of {RENEWALS_EACH:,}": batched,
        "renewals, one in a request, one connection": alone,
        "seconds from a start after a kill to an answer": round(started, 2),
    }


class RenewalCount:
    """What the clients say of their renewals: an `on_event` callback, called by a thread of each client."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        """Of each round; appending needs no lock."""

    def __call__(self, event: object) -> None:
        if isinstance(event, RenewalRound):
            self.kept.append(event.kept)


def requests(call: Caller) -> float:
    """Requests for renewals since the instance started."""
    return sum(
        float(each)
        for each in re.findall(
            r'^fenced_requests_total\{route="/v1/leases/renew",status="200"\} (\S+)$',
            call("/metrics"),
            re.MULTILINE,
        )
    )


def asked(
    seconds: float = WATCHED_SECONDS, clients: int = CLIENTS, each: int = LEASES_EACH
) -> dict[str, Any]:
    """Clients that hold leases, and what arrives of their renewals, beside the formula."""
    counted = RenewalCount()
    with ServiceServer() as server, contextlib.ExitStack() as stack:
        made = [stack.enter_context(fenced.Client(server.url(), on_event=counted)) for _ in range(clients)]
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(lambda number: _hold(made[number], number, each), range(clients)))
        call = stack.enter_context(contextlib.closing(Caller(server)))
        time.sleep(TTL)  # the first renewals of all leases of a client come together from now on
        counted.kept.clear()
        before, began = requests(call), time.perf_counter()
        time.sleep(seconds)
        renewals, asks, took = sum(counted.kept), requests(call) - before, time.perf_counter() - began
    expected = renewals_a_second(clients * each, TTL), renewals_a_second(clients, TTL)
    return {
        "clients": clients,
        "leases": clients * each,
        "ttl": TTL,
        "renewals a second": {"measured": round(renewals / took, 1), "by the formula": round(expected[0], 1)},
        "requests a second": {"measured": round(asks / took, 1), "by the formula": round(expected[1], 1)},
    }


def _hold(client: fenced.Client, number: int, each: int) -> None:
    for lease in range(each):
        client.acquire(f"jobs/{number}/{lease}", ttl=TTL)


def direct(seconds: float = DIRECT_SECONDS) -> dict[str, Any]:
    """By store: renewals a second of clients that each renew one lease, in a request of its own."""
    found: dict[str, Any] = {"clients": PROCESSES * TASKS}
    for server in (PostgresqlServer(), EtcdServer(), RedisServer()):
        with server, ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
            jobs = [pool.submit(renewing, server.url(), TASKS, seconds) for _ in range(PROCESSES)]
            name = type(server).__name__.removesuffix("Server").lower()
            found[name] = round(sum(job.result() for job in jobs))
    return found


def renewing(url: str, tasks: int, seconds: float) -> float:
    """Renewals a second of so many tasks; runs in a process of its own."""
    return asyncio.run(_renewing(url, tasks, seconds))


async def _renewing(url: str, tasks: int, seconds: float) -> float:
    runtime = AioRuntime()
    authority = registry.authority(url, runtime)
    await authority.open()
    run, until = runtime.secret(), math.inf

    async def ask() -> str:
        secret = runtime.secret()
        holder = Holder(runtime.secret(), "capacity", "host", 1)
        assert isinstance(await authority.ask(Ask(secret, (f"{run}/{secret}",), 60.0, holder)), Granted)
        return secret

    async def renew(secret: str) -> int:
        count = 0
        while time.perf_counter() < until:
            (answer,) = await authority.renew([secret])
            assert isinstance(answer, Kept)
            count += 1
        return count

    secrets = [await ask() for _ in range(tasks)]
    began = time.perf_counter()
    until = began + seconds
    counts = await asyncio.gather(*(renew(secret) for secret in secrets))
    rate = sum(counts) / (time.perf_counter() - began)
    await authority.close()
    runtime.close()
    return rate


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """The figures on which the page calculates, what was measured, and whether the page may say so."""
    leases, asks = found["held"], found["asked"]["renewals a second"]
    factor = RENEWALS_OF_A_LEASE * asks["measured"] / asks["by the formula"]
    measured = {
        "renewals of a lease in each ttl": round(factor, 2),
        "memory of an instance without leases, MB": leases["memory before, MB"],
        "memory of a lease, KB": leases["memory of a lease, KB"],
        "memory of a waiter, KB": _figure("service_waiters")["waiting"]["a waiter, KB"],
        "seconds to start with a million attempts": _figure("ledger")["restart_unsettled"]["restart_seconds"],
        "renewals a second in requests of 5,000": leases["renewals in requests of 5,000"]["a second"],
        "grants a second in batches of 1,000": leases["grants in batches of 1,000"]["a second"],
    }
    return {
        name: {"says": says, "measured": measured[name], "holds": holds(name, measured[name])}
        for name, says in PAGE.items()
    }


def holds(name: str, measured: float) -> bool:
    says = PAGE[name]
    if name == "renewals of a lease in each ttl":
        return abs(measured / says - 1) <= FORMULA_WITHIN
    return measured >= says if "a second" in name else measured <= says


def _figure(name: str) -> Any:
    """Of another run, which takes longer."""
    return json.loads((EVIDENCE / f"{name}.json").read_text())[name]


def run() -> dict[str, Any]:
    found = {"held": held(), "asked": asked(), "direct": direct()}
    return {**found, "page": compared(found)}
