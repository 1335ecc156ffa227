"""A semaphore of three permits: 64 contenders in processes that are killed, and what a permit costs among 8 and 512.

Every second kill aims at a process that is inside. Looked for: a fourth one inside, and permits that are not granted in
the order of the turns at the gate. The clock is that of the machine, which all processes share; who was killed was
inside until the moment before, so those that were inside together were so indeed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fenced
from evidence.permits import contender
from fenced.recipes.permits import AsyncSemaphore
from fenced.runtime.clocks import now
from fenced_testkit.servers import PostgresqlServer, RedisServer, ServiceServer

LIMIT = 3
PROCESSES, THREADS = 16, 4
TTL = 1.0
KILLS = 40
BETWEEN_SECONDS = 0.5
FEW, MANY = 8, 512
CLIENTS = 4
COST_SECONDS, TURNS = 6.0, 3
STORES: dict[str, Callable[[], Any]] = {
    "redis": RedisServer,
    "postgresql": PostgresqlServer,
    "service": ServiceServer,
}


@dataclass(frozen=True)
class Said:
    what: str
    permit: str
    token: int
    turn: int
    at: float


class Contenders:
    """A process, and what it has said."""

    def __init__(self, url: str, out: Path) -> None:
        self._out = out
        self.killed_at = 0.0
        options = [url, str(LIMIT), str(TTL), str(THREADS)]
        with out.open("wb") as file, out.with_suffix(".errors").open("wb") as errors:
            command = [sys.executable, "-P", contender.__file__, *options]
            self._process = subprocess.Popen(command, stdout=file, stderr=errors)

    def said(self) -> list[Said]:
        text, _, _ = self._out.read_text().rpartition("\n")
        return [Said(*json.loads(line)) for line in text.splitlines()]

    def inside(self) -> bool:
        return Counter(each.what for each in self.said())["in"] > self._left()

    def _left(self) -> int:
        return sum(each.what == "out" for each in self.said())

    def kill(self) -> None:
        self.killed_at = self.killed_at or now()
        self._process.kill()
        self._process.wait()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def errors(self) -> str:
        return self._out.with_suffix(".errors").read_text()[-500:]


def storm(url: str, kills: int = KILLS, processes: int = PROCESSES, seed: int = 1) -> dict[str, Any]:
    rng, pause = random.Random(seed), threading.Event()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        past: list[Contenders] = []

        def start() -> Contenders:
            past.append(Contenders(url, Path(name) / f"{len(past)}.out"))
            stack.callback(past[-1].kill)
            return past[-1]

        living = [start() for _ in range(processes)]
        while not all(each.said() for each in living):
            if ended := [each for each in living if each.ended()]:
                raise RuntimeError(f"a process of contenders did not start: {ended[0].errors()}")
            pause.wait(0.1)
        hit = 0
        for number in range(kills):
            pause.wait(BETWEEN_SECONDS)
            inside = [each for each in living if each.inside()]
            which = living.index(rng.choice(inside if inside and number % 2 == 0 else living))
            living[which].kill()
            hit += living[which].inside()
            living[which] = start()
        pause.wait(2 * TTL)
        ended = [each for each in living if each.ended()]
        for each in living:
            each.kill()
        return {
            "contenders": processes * THREADS,
            "permits": LIMIT,
            "ttl": TTL,
            "kills": kills,
            "killed_inside": hit,
            **judged([(each.said(), each.killed_at) for each in past]),
            "processes_that_ended_by_themselves": len(ended),
        }


def judged(processes: list[tuple[list[Said], float]]) -> dict[str, Any]:
    """What each process has said, and when it was killed."""
    changes: list[tuple[float, int]] = []
    granted: list[Said] = []
    for said, killed_at in processes:
        left = {(each.permit, each.token): each.at for each in said if each.what == "out"}
        for each in said:
            if each.what == "in":
                changes += [(each.at, 1), (left.get((each.permit, each.token), killed_at), -1)]
        granted += [each for each in said if each.what == "granted"]
    most = inside = 0
    for _, change in sorted(changes):  # at the same moment those that leave come first
        inside += change
        most = max(most, inside)
    granted.sort(key=lambda each: each.at)
    late = [
        f"turn {after.turn} was granted {after.permit} after turn {before.turn}"
        for before, after in itertools.pairwise(granted)
        if after.turn <= before.turn
    ]
    broken = [f"{most} were inside at once"] if most > LIMIT else []
    return {"served": len(changes) // 2, "most_inside_at_once": most, "broken": broken + late[:10]}


async def _seconds_of_a_permit(url: str, contenders: int, seconds: float) -> float:
    """While so many ask again and again: the time from one permit to the next."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(fenced.AsyncClient(url, guarantee="best-effort"))
            for _ in range(CLIENTS)
        ]
        served, asked = 0, 0
        pool = f"pool {contenders}"

        async def contend(client: fenced.AsyncClient) -> None:
            nonlocal served, asked
            semaphore = AsyncSemaphore(client, pool, LIMIT)
            asked += 1
            while True:
                async with semaphore.hold():
                    await asyncio.sleep(0)  # leases in memory alone would let nobody else run
                    served += 1

        tasks = [asyncio.create_task(contend(clients[number % CLIENTS])) for number in range(contenders)]
        while asked < contenders or served < contenders // 4:  # all wait in the queue, or came by already
            await asyncio.sleep(0.05)
        before, began = served, now()
        await asyncio.sleep(seconds)
        found = (now() - began) / (served - before)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


def cost(url: str, seconds: float = COST_SECONDS, turns: int = TURNS) -> dict[str, Any]:
    """In turns, so that a slow moment of the machine hits both; of each the middle."""
    found: dict[int, list[float]] = {FEW: [], MANY: []}
    for _ in range(turns):
        for contenders, times in found.items():
            times.append(asyncio.run(_seconds_of_a_permit(url, contenders, seconds)))
    few, many = (sorted(times)[turns // 2] for times in found.values())
    return {
        f"ms among {FEW}": round(1000 * few, 2),
        f"ms among {MANY}": round(1000 * many, 2),
        "ratio": round(many / few, 2),
    }


def _stores() -> Iterator[tuple[str, str]]:
    for name, kind in STORES.items():
        with kind() as server:
            yield name, server.url()


def run() -> dict[str, Any]:
    costs = {"memory": cost("memory://permits")}
    storms: dict[str, Any] = {}
    for name, url in _stores():
        costs[name] = cost(url)
        storms[name] = storm(url)
    return {"storms": storms, "cost_of_a_permit": costs}
