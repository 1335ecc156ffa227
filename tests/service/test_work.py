"""What a store is asked at once: requests share a write, ends of leases go first, connections bound the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from fenced.errors import Indeterminate, Unavailable
from fenced.runtime.aio import AioRuntime
from fenced.service.bodies import BatchBody, BatchItem, ReleaseBody, RenewBody
from fenced.service.operations import ENDS, GroupedWork, Work, work_of
from fenced.stores.memory.authority import MemoryStore
from fenced.values.model import (
    Ask,
    BatchAnswer,
    BatchOperation,
    Granted,
    Holder,
    Release,
    Released,
    Withdrawal,
)
from tests.service.test_requests import A, B, C, Gated, until


class Slow:
    """A store whose writes end when the test says so."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.writes = asyncio.Event()
        self.error: Exception | None = None

    async def many(self, operations: Sequence[BatchOperation]) -> list[BatchAnswer]:
        self.batches.append(len(operations))
        await self.writes.wait()
        if self.error is not None:
            raise self.error
        return [Granted(number, 30.0, 30.0) for number, _ in enumerate(operations, 1)]


async def test_requests_during_a_write_share_the_next_one() -> None:
    """A request that comes alone is written at once. An error of a write is the answer of all in it."""
    store: Any = Slow()
    worker = GroupedWork(store, lambda: False, lambda *_: None)
    found: list[Any] = []

    def start(count: int) -> None:
        worker.start(Work([Release(A)] * count, lambda *_: None), found.append)  # type: ignore[arg-type]

    start(1)
    while not store.batches:
        await asyncio.sleep(0)
    for count in (1, 2, 3):
        start(count)
    assert (store.batches, found) == ([1], [])
    store.writes.set()
    while len(found) < 4:
        await asyncio.sleep(0)
    assert store.batches == [1, 6]
    assert [[each.token for each in results] for results in found] == [[1], [1], [2, 3], [4, 5, 6]]
    store.error = Indeterminate("the disk")
    start(1)
    while len(found) < 5:
        await asyncio.sleep(0)
    store.error = None
    start(1)
    while len(found) < 6:
        await asyncio.sleep(0)
    assert isinstance(found[4], Indeterminate) and found[5][0].token == 1


class TwoConnections(Gated):
    """Notes how many asks are under way."""

    connections = 2

    def __init__(self) -> None:
        super().__init__(MemoryStore(lambda: 1000.0), AioRuntime(), "default")
        self.running: list[str] = []
        self.most = 0

    async def ask(self, ask: Ask, until: float | None = None) -> Any:
        self.running.append(ask.secret)
        self.most = max(self.most, len(self.running))
        try:
            return await super().ask(ask, until)
        finally:
            self.running.remove(ask.secret)


class Stepped:
    """A store that carries out one write whenever the test says so."""

    endings_are_quick = True

    def __init__(self) -> None:
        self.batches: list[list[BatchOperation]] = []
        self.steps = asyncio.Semaphore(0)

    async def many(self, operations: Sequence[BatchOperation]) -> list[BatchAnswer]:
        self.batches.append(list(operations))
        await self.steps.acquire()
        return [Released()] * len(operations)


async def test_ends_of_leases_are_answered_before_what_must_be_synced() -> None:
    """The others let them pass once, and share their write with what came meanwhile."""
    store: Any = Stepped()
    worker = GroupedWork(store, lambda: False, lambda *_: None)
    found: list[Any] = []

    def start(*operations: Any) -> None:
        ends = all(isinstance(each, ENDS) for each in operations)
        worker.start(Work(list(operations), lambda *_: None, only_ends=ends), found.append)  # type: ignore[arg-type]

    asks = [Ask(letter * 32, ("a",), 30.0, Holder("h", "", "", 0)) for letter in "abc"]
    ends, mixed = Release("e" * 32), (Release("f" * 32), asks[1])
    released, renewed = BatchItem(release=ReleaseBody(A)), BatchItem(renew=B)
    assert [work_of(BatchBody(items), str).only_ends for items in ([released], [released, renewed])] == [
        True,
        False,
    ]
    start(asks[0])
    await until(lambda: len(store.batches) == 1)
    own = Release(asks[1].secret)  # it must not pass its own ask
    for operations in ((asks[1],), (ends,), mixed, (own,), (Withdrawal("d" * 32),)):
        start(*operations)
    store.steps.release()
    await until(lambda: len(store.batches) == 2)
    start(ends)
    start(asks[2])
    store.steps.release()
    await until(lambda: len(store.batches) == 3)
    start(ends)
    for _ in range(2):
        store.steps.release()
    await until(lambda: len(found) == 9)
    ended, others = [ends, Withdrawal("d" * 32)], [asks[1], *mixed, own, ends, asks[2]]
    assert store.batches == [[asks[0]], ended, others, [ends]]


async def test_a_store_gets_as_many_operations_at_once_as_it_has_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Renewals do not wait for the others. What waited too long is not carried out, and says so."""
    store = TwoConnections()
    worker = GroupedWork(store, lambda: False, lambda *_: None)
    found: dict[str, Any] = {}

    def start(what: str, work: Work) -> None:
        worker.start(work, lambda results: found.__setitem__(what, results[0]))  # type: ignore[index]

    def asking(attempt: str) -> Work:
        ask = Ask(attempt, (f"orders/{attempt}",), 30.0, Holder("h", "", "", 0))
        return Work([ask], lambda *_: None)  # type: ignore[arg-type]

    await store.open()
    store.gate.clear()
    for attempt in (A, B, C):
        start(attempt, asking(attempt))
    with monkeypatch.context() as patched:
        patched.setattr("fenced.values.timing.CALL_SECONDS", -1.0)
        start("late", asking("d" * 32))
    start("renewal", work_of(RenewBody([A]), lambda: ""))
    start("in a batch", work_of(BatchBody([BatchItem(renew=A)]), lambda: ""))
    await until(lambda: len(found) == 2)
    assert (store.running, set(found)) == ([A, B], {"renewal", "in a batch"})
    store.gate.set()
    await until(lambda: len(found) == 6)
    assert {found[each].token for each in (A, B, C)} == {1, 2, 3} and store.most == 2
    assert isinstance(found["late"], Unavailable)
    await until(lambda: not worker._tasks)
