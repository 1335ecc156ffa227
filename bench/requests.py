"""What a server is asked: while a queue drains, while leases are held, and while waiters wait."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fenced
from bench.contending import SPREAD_SECONDS, Drain
from bench.figures import Figure
from bench.interleaved import Effort
from bench.peers import Leased
from fenced.client.faces import Guarantee

WAITERS = 64
WAITING_SECONDS = 10.0
SETTLE_SECONDS = 1.0
"""A client that begins to listen may look once for each of its waiters; that is not what waiting costs."""

LEASES = 1000
TTL_SECONDS = 10.0
HOLDING_SECONDS = 12.0

Count = Callable[[], int]
"""How many requests the server got from clients so far."""


def run(
    key: str,
    url: str,
    count: Count,
    effort: Effort,
    *,
    settle: float = 0.0,
    hand_over: float = 2.1,
    guarantee: Guarantee = "strict",
) -> Iterator[Figure]:
    """`settle`: so long after leases were granted a client may still do something once for each of them.

    `hand_over`: how many requests a hand-over may take.
    """
    with fenced.Client(url, guarantee=guarantee) as client:
        yield from _queue(key, client, count, effort, hand_over)
    with fenced.Client(url, guarantee=guarantee) as client:
        yield from _leases(key, client, count, settle, effort)


def _queue(
    key: str, client: fenced.Client, count: Count, effort: Effort, hand_over: float
) -> Iterator[Figure]:
    waiters, seconds = effort.size(WAITERS), effort.seconds(WAITING_SECONDS)
    drain = Drain([Leased(client) for _ in range(waiters + 1)], SPREAD_SECONDS, random.Random(11))
    drain.queue_up()
    time.sleep(effort.seconds(SETTLE_SECONDS))
    idle = _rate(count, seconds)
    before = count()
    drained = len(drain.run())
    asked = count() - before
    yield Figure(
        f"{key}.requests.drain",
        f"requests a hand-over, {waiters} waiters",
        asked / drained,
        "",
        hand_over,
        f"{asked} requests for {drained} hand-overs",
    )
    what = f"requests a second, {waiters} waiters of one client"
    yield Figure(f"{key}.requests.waiting", what, idle, "", 1.0, f"over {seconds:g} s")


def _leases(key: str, client: fenced.Client, count: Count, settle: float, effort: Effort) -> Iterator[Figure]:
    many, seconds = effort.size(LEASES), effort.seconds(HOLDING_SECONDS)
    leases = [client.acquire(f"orders/{number}", ttl=TTL_SECONDS) for number in range(many)]
    time.sleep(effort.seconds(settle))
    with _timed_renewals(client) as batches:
        kept = _rate(count, seconds)
        while not (times := [seconds for size, seconds in batches if size > many / 2]):
            time.sleep(0.05)
    for lease in leases:
        lease.check()
    what = f"requests a second, {many:,} leases of one client"
    detail = f"over {seconds:g} s, ttl {TTL_SECONDS:g} s"
    yield Figure(f"{key}.requests.leases", what, kept, "", 1.0, detail)
    what = f"one renewal of {many:,} leases"
    detail = f"median of {len(times)} batches"
    yield Figure(f"{key}.renewal", what, statistics.median(times) * 1e3, "ms", None, detail)


def _rate(count: Count, seconds: float) -> float:
    before = count()
    time.sleep(seconds)
    return (count() - before) / seconds


@contextlib.contextmanager
def _timed_renewals(client: fenced.Client) -> Iterator[list[tuple[int, float]]]:
    """Size and seconds of every batch that is renewed meanwhile."""
    authority: Any = client._authority
    renew = authority.renew
    batches: list[tuple[int, float]] = []

    async def timed(secrets: Sequence[str], until: float) -> object:
        began = time.perf_counter()
        answers = await renew(secrets, until)
        batches.append((len(secrets), time.perf_counter() - began))
        return answers

    authority.renew = timed
    try:
        yield batches
    finally:
        authority.renew = renew
