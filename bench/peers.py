"""fenced beside what a user would pick instead, on one server in one run: alone, and with a queue."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import fenced
from bench.contending import WARM_UP, AsyncLock, Kind, Lock, async_drains, async_pairs, drains, pairs
from bench.figures import Cell, Figure, advantage
from bench.interleaved import Effort
from fenced.client.faces import Guarantee

NAME = "baton"
PAIR = "pair"
CYCLES = {2: 100, 16: 16, 64: 5}
"""Drains by the number of waiters: some hundreds of hand-overs each."""

PAIRS = 2000
ASYNC_PAIRS = 1000


class Leased:
    """One contender among those who share a client."""

    def __init__(self, client: fenced.Client, name: str = NAME) -> None:
        self._client = client
        self._name = name

    def acquire(self) -> None:
        self._lease = self._client.acquire(self._name)

    def release(self) -> None:
        self._lease.release()


class AsyncLeased:
    """The same under asyncio."""

    def __init__(self, client: fenced.AsyncClient) -> None:
        self._client = client

    async def acquire(self) -> None:
        self._lease = await self._client.acquire(NAME)

    async def release(self) -> None:
        await self._lease.release()


def ourselves(url: str, guarantee: Guarantee = "strict") -> Kind:
    """Leases of one client that all contenders share."""

    def crew(stack: contextlib.ExitStack, count: int) -> list[Lock]:
        client = stack.enter_context(fenced.Client(url, guarantee=guarantee))
        return [Leased(client) for _ in range(count)]

    async def async_crew(stack: contextlib.AsyncExitStack, count: int) -> list[AsyncLock]:
        client = await stack.enter_async_context(fenced.AsyncClient(url, guarantee=guarantee))
        return [AsyncLeased(client) for _ in range(count)]

    return Kind("fenced", "fenced", crew, async_crew)


def ourselves_apart(url: str, guarantee: Guarantee = "strict") -> Kind:
    """Leases of a client for each contender, as in as many processes."""

    def crew(stack: contextlib.ExitStack, count: int) -> list[Lock]:
        return [Leased(stack.enter_context(fenced.Client(url, guarantee=guarantee))) for _ in range(count)]

    return Kind("apart", "fenced, a client each", crew)


@dataclass(frozen=True)
class Contest:
    """Ours and the peers that have the same form, on one server."""

    server: str
    key: str
    form: str
    ours: Kind
    peers: Sequence[Kind]

    @property
    def kinds(self) -> list[Kind]:
        return [self.ours, *self.peers]

    def figures(self, column: str, medians: Sequence[float], counts: Sequence[int]) -> Iterator[Figure]:
        ours, *others = zip(medians, counts, strict=True)
        for peer, theirs in zip(self.peers, others, strict=True):
            note = f"medians of {theirs[1]} and {ours[1]}"
            yield advantage(
                Cell(self.form, f"{self.server} / {peer.label}", column),
                ".".join((self.key, peer.key, self.form, column.replace(" ", "_"))),
                theirs=theirs[0],
                ours=ours[0],
                target=peer.targets.get(column),
                note=f"{note}; {peer.note}" if peer.note else note,
            )

    def of_pairs(self, medians: Sequence[float], rounds: int) -> Iterator[Figure]:
        return self.figures(PAIR, medians, [rounds] * len(medians))

    def of_drains(self, waiters: int, times: Sequence[list[float]]) -> Iterator[Figure]:
        return self.figures(f"{waiters} waiters", list(map(statistics.median, times)), list(map(len, times)))


def compare(server: str, key: str, ours: Kind, peers: Sequence[Kind], effort: Effort) -> Iterator[Figure]:
    """The peers that have a form for threads, then those that have one for asyncio, with tasks."""
    contest = Contest(server, key, "blocking", ours, [peer for peer in peers if peer.crew is not None])
    rounds, warm_up = effort.of(PAIRS), effort.size(WARM_UP)
    crowds = list(CYCLES.items())[: effort.size(len(CYCLES))]
    yield from contest.of_pairs(pairs(contest.kinds, rounds, warm_up), rounds)
    for waiters, cycles in crowds:
        yield from contest.of_drains(waiters, drains(contest.kinds, waiters, effort.of(cycles)))
    contest = Contest(server, key, "asyncio", ours, [peer for peer in peers if peer.async_crew is not None])
    rounds = effort.of(ASYNC_PAIRS)
    yield from contest.of_pairs(asyncio.run(async_pairs(contest.kinds, rounds, warm_up)), rounds)
    for waiters, cycles in crowds:
        times = asyncio.run(async_drains(contest.kinds, waiters, effort.of(cycles)))
        yield from contest.of_drains(waiters, times)
