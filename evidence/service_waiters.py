"""Ten thousand waiters of one instance of the service, each with a connection of its own whose answer is held.

What they cost: the memory of the instance, its CPU, and what another client notices while they wait. Clients renew the
places of a hundred waiters by one request, as a Python client does for all of its own. Then five thousand connections
on which a request arrives byte by byte, one a second: how long each lives, and the same costs.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import tempfile
import time
from typing import Any

from fenced_testkit.servers import ServiceServer

WAITERS = 10_000
NAMES = 100
PER_CLIENT = 100
RENEW_SECONDS = 3.3
PAIRS = 500
HANDOVERS = 20
SECONDS = 20.0
SLOW = 5_000


def _request(method: str, path: str, body: object, *headers: str) -> bytes:
    data = json.dumps(body).encode()
    head = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + data


class SlowRequest(asyncio.Protocol):
    """A request that never arrives completely."""

    def __init__(self) -> None:
        self.seconds: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """How long the connection lived."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._began = time.monotonic()
        transport.write(b"GET /healthz HTTP/1.1\r\nX: ")

    def connection_lost(self, error: Exception | None) -> None:
        self.seconds.set_result(time.monotonic() - self._began)


class Caller:
    """One request after the other on one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def __call__(self, path: str, body: object) -> dict[str, Any]:
        self._writer.write(_request("POST", path, body))
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.partition(b"\r\n")[0], head
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        found: dict[str, Any] = json.loads(await self._reader.readexactly(length))
        return found


class HeldWaiter(asyncio.Protocol):
    """A waiter whose answer is held. Told that it may be its turn, it asks again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.attempt = secrets.token_hex(16)
        self.parked = asyncio.get_running_loop().create_future()
        self.granted: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._body = {"attempt": self.attempt, "names": [name], "ttl": 600, "wait": True, "keeps": True}
        self._buffer = b""
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._ask()

    def _ask(self) -> None:
        headers = ("Prefer: wait=30", "Accept: application/x-ndjson")
        self._buffer = b""
        self.transport.write(_request("POST", "/v1/leases", self._body, *headers))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if b'"granted"' in self._buffer:
            if not self.granted.done():
                self.granted.set_result(time.monotonic())
        elif b'"ended"' in self._buffer:
            self.ended = True
        elif b'"waiting"' in self._buffer and not self.parked.done():
            self.parked.set_result(None)
        elif not (self.parked.done() or self._buffer.startswith(b"HTTP/1.1 202 ")):
            self.parked.set_exception(RuntimeError(self._buffer.decode()))
        if self._buffer.endswith(b"0\r\n\r\n"):
            self._ask()


async def _pairs(host: str, port: int, name: str) -> dict[str, float]:
    """How long another client takes for a grant and a release, one after the other."""
    call, times = Caller(*await asyncio.open_connection(host, port)), []
    for number in range(PAIRS):
        attempt, began = secrets.token_hex(16), time.monotonic()
        await call("/v1/leases", {"attempt": attempt, "names": [f"{name}/{number}"], "ttl": 600})
        await call("/v1/leases/release", {"attempt": attempt})
        times.append((time.monotonic() - began) * 1000)
    cut = statistics.quantiles(times, n=100)
    return {"median": round(cut[49], 2), "p99": round(cut[98], 2)}


async def _renew(host: str, port: int, waiters: list[HeldWaiter], took: list[float]) -> None:
    """What the client of these waiters does all the time. How long each renewal took is added to `took`."""
    call = Caller(*await asyncio.open_connection(host, port))
    while True:
        began = time.monotonic()
        await call("/v1/leases/renew", {"attempts": [each.attempt for each in waiters]})
        took.append(time.monotonic() - began)
        await asyncio.sleep(max(0.0, RENEW_SECONDS - took[-1]))


def _memory(pid: int) -> float:
    with open(f"/proc/{pid}/status") as status:
        kilobytes = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return round(kilobytes / 1024, 1)


def _cpu(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _waited(host: str, port: int, pid: int) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    call = Caller(*await asyncio.open_connection(host, port))
    holders = {f"name/{number}": secrets.token_hex(16) for number in range(NAMES)}
    for name, attempt in holders.items():
        await call("/v1/leases", {"attempt": attempt, "names": [name], "ttl": 600})
    alone = await _pairs(host, port, "alone")
    before = _memory(pid)
    waiters: dict[str, list[HeldWaiter]] = {name: [] for name in holders}
    keepers, took = [], [0.0]
    for _ in range(WAITERS // PER_CLIENT):
        made = [HeldWaiter(f"name/{number % NAMES}") for number in range(PER_CLIENT)]
        await asyncio.gather(*(loop.create_connection(lambda each=each: each, host, port) for each in made))  # type: ignore[misc]
        for each in made:
            waiters[each.name].append(each)
        await asyncio.gather(*(each.parked for each in made))
        keepers.append(asyncio.create_task(_renew(host, port, made, took)))
    after, used = _memory(pid), _cpu(pid)
    await asyncio.sleep(SECONDS)
    used = _cpu(pid) - used
    crowded = await _pairs(host, port, "crowded")
    handovers = []
    call = Caller(*await asyncio.open_connection(host, port))  # an idle one has been closed
    for name, attempt in list(holders.items())[:HANDOVERS]:
        began = time.monotonic()
        await call("/v1/leases/release", {"attempt": attempt})
        done, _ = await asyncio.wait(
            [each.granted for each in waiters[name]], timeout=60, return_when=asyncio.FIRST_COMPLETED
        )
        handovers += [(each.result() - began) * 1000 for each in done]
    lost = sum(each.ended for group in waiters.values() for each in group)
    assert not any(keeper.done() for keeper in keepers)
    for keeper in keepers:
        keeper.cancel()
    for group in waiters.values():
        for each in group:
            each.transport.abort()
    return {
        "waiters": WAITERS,
        "names": NAMES,
        "waiters that lost their place": lost,
        "longest renewal of a hundred places, ms": round(max(took) * 1000, 1),
        "memory before, MB": before,
        "memory with them, MB": after,
        "a waiter, KB": round((after - before) * 1024 / WAITERS, 1),
        "CPU of the instance while they wait, share of a core": round(used / SECONDS, 2),
        "grant and release of another client, ms": {"without them": alone, "with them": crowded},
        "hand-over to a waiter, ms": {
            "count": len(handovers),
            "median": round(statistics.median(handovers), 1),
            "longest": round(max(handovers), 1),
        },
    }


async def _slow(host: str, port: int, pid: int) -> dict[str, Any]:
    alone, before = await _pairs(host, port, "alone"), _memory(pid)
    loop = asyncio.get_running_loop()
    slow = [(await loop.create_connection(SlowRequest, host, port))[1] for _ in range(SLOW)]

    async def trickle() -> None:
        while True:
            for each in slow:
                if not each.transport.is_closing():
                    each.transport.write(b"x")
            await asyncio.sleep(1.0)

    trickling = asyncio.create_task(trickle())
    after, crowded = _memory(pid), await _pairs(host, port, "crowded")
    lived = await asyncio.gather(*(each.seconds for each in slow))
    trickling.cancel()
    return {
        "slow requests": SLOW,
        "closed after, s": {"first": round(min(lived), 1), "last": round(max(lived), 1)},
        "memory before, MB": before,
        "memory with them, MB": after,
        "grant and release of another client, ms": {"without them": alone, "with them": crowded},
    }


def run() -> dict[str, Any]:
    figures: dict[str, Any] = {"store": "ledger"}
    for what, story in (("waiting", _waited), ("slow requests", _slow)):
        with (
            tempfile.TemporaryDirectory() as folder,
            ServiceServer(store=f"ledger:///{folder}/leases") as server,
        ):
            figures[what] = asyncio.run(story(server.host, server.port, server.pid))
    return figures
