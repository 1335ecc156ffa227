"""The decisions that a guard over cells keeps: one write a second, folded when idle, and never an obstacle."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fenced.errors import StaleToken, Unavailable
from fenced.guards.cells import Swapped, key_of
from fenced.guards.remembered import AUDIT, CELLS_MAX, IDLE_SECONDS, RECORDS_KEPT
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.memory.guard import MemoryCells, MemoryValues
from fenced.testing.kit import NAME, by
from fenced.values.contracts import Runtime, Task
from tests.forking import said_by_child


class Counting(MemoryCells):
    """Counts the swaps of decisions; `broken`: they fail."""

    writes = 0
    broken = False

    async def swap(self, changes: Sequence[tuple[str, int, bytes | None]]) -> Swapped:
        if changes[0][0].startswith(key_of(AUDIT)):
            self.writes += 1
            if self.broken:
                raise Unavailable("no")
        return await super().swap(changes)


class Timed(BlockingRuntime):
    """Its clock is moved by the test, and it starts no task."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 1000.0
        self.spawned: list[str] = []

    def now(self) -> float:
        return self.at

    def spawn(self, work: object, name: str) -> Task:
        self.spawned.append(name)
        return super().spawn(_nothing, name)


async def _nothing() -> None:
    return


def made(cells: MemoryCells, runtime: Runtime, clock: float = 0.0) -> MemoryValues:
    return MemoryValues(cells=cells, runtime=runtime, clock=lambda: clock)


def refuse(guard: MemoryValues, times: int) -> None:
    for _ in range(times):
        with pytest.raises(StaleToken):
            step(guard.write(by(4), NAME, b"late"))


def counted(guard: MemoryValues) -> int:
    return sum(step(guard.decisions.read())[0].values())


def test_one_write_a_second_and_none_without_a_refusal() -> None:
    cells, runtime = Counting(), Timed()
    guard = made(cells, runtime)
    step(guard.write(by(5), NAME, b"1"))
    assert cells.writes == 0, "admitted operations write nothing"
    refuse(guard, 300)
    assert cells.writes == 2, "the directory, and the cell"
    assert runtime.spawned == ["fenced-decisions"], "one task waits for the rest of the second"
    runtime.at += 1
    refuse(guard, 300)
    assert cells.writes == 3
    step(guard.close())
    assert counted(made(cells, runtime)) == 600
    records = step(made(cells, runtime).decisions.read())[1]
    assert len(records) == RECORDS_KEPT


def test_the_task_writes_what_came_in_the_same_second() -> None:
    cells = Counting()
    guard = made(cells, BlockingRuntime())
    step(guard.write(by(5), NAME, b"1"))
    refuse(guard, 3)
    other = made(cells, BlockingRuntime())
    while counted(other) != 3:
        pass


def test_a_store_that_fails_delays_the_counts_and_refuses_all_the_same() -> None:
    cells, runtime = Counting(), Timed()
    guard = made(cells, runtime)
    step(guard.write(by(5), NAME, b"1"))
    cells.broken = True
    refuse(guard, 2)
    cells.broken = False
    runtime.at += 1
    refuse(guard, 1)
    assert counted(made(cells, runtime)) == 3


def test_idle_cells_are_folded_and_their_owners_go_on() -> None:
    cells, runtime = Counting(), Timed()
    guards = [made(cells, runtime, number) for number in range(3)]
    step(guards[0].write(by(5), NAME, b"1"))
    for _ in range(2):
        runtime.at += 1
        for guard in guards:
            refuse(guard, 1)
    operator = made(cells, runtime, IDLE_SECONDS + 1.5)
    assert step(operator.decisions.fold()) == 2, "the third is not idle for long enough"
    assert counted(operator) == 6
    for _ in range(2):
        runtime.at += 1
        refuse(guards[0], 1)
    step(guards[0].close())
    step(guards[0].close())
    assert counted(operator) == 8, "nothing is counted twice, and nothing is lost"
    assert len(step(operator.decisions.read())[1]) == 8


def test_the_directory_is_bounded() -> None:
    cells, runtime = Counting(), Timed()
    step(made(cells, runtime).write(by(5), NAME, b"1"))
    for number in range(CELLS_MAX + 20):
        guard = made(cells, runtime, number * 100.0)
        refuse(guard, 1)
    listed = [key for key in cells.blobs if key.startswith(key_of(AUDIT) + "/")]
    assert len(listed) == CELLS_MAX + 20
    assert counted(made(cells, runtime)) == CELLS_MAX + 20
    _, blob = step(cells.get(key_of(AUDIT)))
    assert blob is not None and blob.count(b'", "') < CELLS_MAX + 5


def test_a_forked_child_has_a_cell_of_its_own() -> None:
    cells, runtime = Counting(), Timed()
    guard = made(cells, runtime)
    step(guard.write(by(5), NAME, b"1"))
    refuse(guard, 1)

    def child() -> list[int]:
        runtime.at += 1
        refuse(guard, 1)
        listed = [key for key in cells.blobs if key.startswith(key_of(AUDIT) + "/")]
        return [len(listed), counted(made(cells, runtime))]

    assert said_by_child(child) == [2, 2]


def test_no_lease_can_have_the_name_of_a_decision() -> None:
    with pytest.raises(ValueError, match="control"):
        step(MemoryValues().write(None, f"{AUDIT}/1", b"x"))
