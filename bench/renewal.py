"""What it costs to keep a thousand leases: the write transactions of each round of the keeper."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import fenced
from bench.figures import Figure
from bench.interleaved import Effort
from fenced.events import Event, RenewalRound

LEASES = 1000
TTL = 6.0
ROUNDS = 3


def run(folder: Path, effort: Effort) -> Iterator[Figure]:
    wanted, count = effort.of(ROUNDS), effort.size(LEASES)
    batches: list[int] = []

    def note(event: Event) -> None:
        if isinstance(event, RenewalRound):
            batches.append(event.kept)

    with fenced.Client(f"sqlite:///{folder}/many.db", on_event=note) as client:
        leases = [client.acquire(f"orders/{number}", ttl=TTL) for number in range(count)]
        give_up = time.monotonic() + wanted * TTL
        while sum(batches) < wanted * count and time.monotonic() < give_up:
            time.sleep(0.05)
        for lease in leases:
            lease.check()
    rounds = sum(batches) / count
    detail = f"{len(batches)} transactions in {rounds:g} rounds"
    what = f"renewal transactions a round, {count:,} leases"
    yield Figure("renewals", what, len(batches) / rounds, "", 1.0, detail)
