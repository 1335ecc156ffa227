"""An uncontended acquire and release, against the two durable commits that nobody could do without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import fenced
from bench.figures import Figure, ratio
from bench.interleaved import WARM_UP, Effort, connect, make_table, medians

ROUNDS = 2000
ASYNC_ROUNDS = 500
AGAINST = "two durable commits of one row"


def run(folder: Path, effort: Effort) -> Iterator[Figure]:
    bare = connect(folder / "bare.db")
    make_table(bare, 1)

    def commit_twice() -> None:
        for _ in range(2):
            bare.execute("BEGIN IMMEDIATE")
            bare.execute("UPDATE orders SET qty = qty + 1 WHERE id = 1")
            bare.execute("COMMIT")

    with fenced.Client(f"sqlite:///{folder}/leases.db") as client:

        def acquire_and_release() -> None:
            client.acquire("orders/42").release()

        def hold() -> None:
            with client.hold("orders/42"):
                pass

        pair, held, theirs = medians(
            acquire_and_release,
            hold,
            commit_twice,
            rounds=effort.of(ROUNDS),
            warm_up=effort.size(WARM_UP),
        )
    yield ratio("pair", "acquire and release", pair, theirs, target=1.5, against=AGAINST)
    yield ratio("hold", "with hold(...)", held, theirs, target=1.5, against=AGAINST)
    pair = asyncio.run(_async_pair(folder, effort.of(ASYNC_ROUNDS)))
    yield ratio("async_pair", "AsyncClient: acquire and release", pair, theirs, against=AGAINST)
    bare.close()


async def _async_pair(folder: Path, rounds: int) -> float:
    """The median of a pair; a loop cannot take turns with blocking code, so it runs on its own."""
    times = []
    async with fenced.AsyncClient(f"sqlite:///{folder}/leases.db") as client:
        for _ in range(rounds):
            began = time.perf_counter()
            lease = await client.acquire("orders/42")
            await lease.release()
            times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]
