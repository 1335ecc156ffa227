"""What it costs to keep a thousand leases: the write transactions of each round of the keeper."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fenced
from bench.figures import Figure, microseconds
from bench.interleaved import Effort

LEASES = 1000
TTL = 6.0
ROUNDS = 3


def run(folder: Path, effort: Effort) -> Iterator[Figure]:
    wanted, count = effort.of(ROUNDS), effort.size(LEASES)
    batches: list[int] = []
    spent: list[float] = []
    with fenced.Client(f"sqlite:///{folder}/many.db") as client:
        store: Any = client._authority
        renew = store._store.renew

        def counted(secrets: Sequence[str], timeout: float) -> object:
            began = time.perf_counter()
            answers = renew(secrets, timeout)
            spent.append(time.perf_counter() - began)
            batches.append(len(secrets))
            return answers

        store._store.renew = counted
        leases = [client.acquire(f"orders/{number}", ttl=TTL) for number in range(count)]
        give_up = time.monotonic() + wanted * TTL
        while sum(batches) < wanted * count and time.monotonic() < give_up:
            time.sleep(0.05)
        for lease in leases:
            lease.check()
    rounds = sum(batches) / count
    detail = f"{len(batches)} transactions in {rounds:g} rounds, {microseconds(max(spent))} at most"
    what = f"renewal transactions a round, {count:,} leases"
    yield Figure("renewals", what, len(batches) / rounds, "", 1.0, detail)
