"""Guards over cells when replies are lost: what happened is found out, and nothing happens twice."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fenced.client.registry import guard as guard_at
from fenced.errors import (
    AlreadyApplied,
    Conflict,
    FencedError,
    Indeterminate,
    Misconfigured,
    Misuse,
    Refused,
    Unavailable,
    Unsupported,
)
from fenced.guards import cellguard
from fenced.guards.cells import KEPT, Cell, Swapped
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.memory.guard import MemoryCells, MemoryValues
from fenced.testing.kit import NAME, by
from fenced.values.contracts import Wakeup
from fenced.values.decision import RULES, Mark, Rule

SEEDS = range(100)


class LossyCells(MemoryCells):
    """Loses the reply of a swap, or the request, or repeats it; others may write in between, and one may come late."""

    def __init__(self, rng: random.Random, others: int) -> None:
        super().__init__()
        self.rng = rng
        self.others = others
        self.happened: list[str] = []
        self._late: list[Sequence[tuple[str, int, bytes | None]]] = []

    async def swap(self, changes: Sequence[tuple[str, int, bytes | None]]) -> Swapped:
        kind = self.rng.choice(("told", "told", "repeated", "reply lost", "request lost", "late"))
        done = await self._apply(changes) if kind in ("told", "repeated", "reply lost") else Swapped(None)
        if kind == "repeated":
            # As nginx does if the store has not answered in time: the second answer comes back.
            await self._meanwhile(min(self.others, KEPT - 1))
            return await self._apply(changes)
        if kind == "late":
            self._late.append(changes)
        if kind != "told":
            await self._meanwhile(self.others)
            raise Indeterminate("no reply")
        return done

    async def _apply(self, changes: Sequence[tuple[str, int, bytes | None]]) -> Swapped:
        done = await super().swap(changes)
        for key, _, blob in changes:
            if done and blob is not None and key == f"n/{NAME}":
                self.happened.append(Cell.unpacked(key, blob).written[-1])
        return done

    async def _meanwhile(self, others: int) -> None:
        for _ in range(self.rng.randrange(others + 1)):
            version, blob = await self.get(f"n/{NAME}")
            cell = Cell.unpacked(NAME, blob)
            mark = Mark(6, "f" * 32) if self.rng.random() < 0.05 else cell.mark  # overtaken
            other = cell.changed(f"other-{self.rng.random()}", mark, b"other")
            await super().swap([(f"n/{NAME}", version, other.packed())])
        while self._late and self.rng.random() < 0.5:
            await self._apply(self._late.pop())


class Hasty(BlockingRuntime):
    """Pauses between tries take no time."""

    async def wait(self, wakeup: Wakeup, until: float | None) -> bool:
        return False


class EveryTryIsNew(MemoryValues):
    """An operation whose reply was lost is made again with a new id: it may happen twice. (Planted.)"""

    async def _operate(self, *arguments: object, **more: object) -> object:  # type: ignore[override]
        while True:
            try:
                return await super()._operate(*arguments, **more)  # type: ignore[arg-type]
            except Indeterminate:
                pass


class RefusalsAreBelieved(MemoryValues):
    """A swap that was refused counts as not done, although its request may have been repeated. (Planted.)"""

    _refused = False

    async def _commit(self, changes: Any, writes: Any) -> Swapped:
        self._refused = False
        swapped = await super()._commit(changes, writes)
        self._refused = not swapped
        return swapped

    async def _look(self, *arguments: Any) -> Any:
        known, this = await super()._look(*arguments)
        if self._refused:
            this.found = {name: (at, replace(cell, written=())) for name, (at, cell) in this.found.items()}
        return known, this


def _story(seed: int, rule: Rule, guard_type: type[MemoryValues], others: int) -> str | None:
    """Many writes of one lease, each with a seq of its own; returns what is wrong."""
    rng = random.Random(f"{seed} {rule}")
    cells = LossyCells(rng, others)
    guard = guard_type(rule=rule, cells=cells, runtime=Hasty())
    for seq in range(1, 8):
        before = len(cells.happened)
        expect = step(guard.peek(NAME)).version if rng.random() < 0.5 else None
        try:
            step(guard.write(by(5, seq), NAME, f"{seq}".encode(), expect=expect))
            outcome = "done"
        except Indeterminate:
            outcome = "unknown"
        except (Refused, AlreadyApplied, Conflict):
            outcome = "refused"
        times = len(cells.happened) - before
        wanted = {"done": (1,), "refused": (0,), "unknown": (0, 1)}[outcome]
        if times not in wanted:
            return f"seed {seed}, {rule}, seq {seq}: {outcome}, but it happened {times} times"
    return None


@pytest.mark.parametrize("rule", RULES)
def test_an_operation_happens_as_often_as_it_says(rule: Rule) -> None:
    for seed in SEEDS:
        for others in (0, 2, 3 * KEPT):
            wrong = _story(seed, rule, MemoryValues, others)
            assert wrong is None, wrong


def test_a_planted_bug_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under retry nothing but the id keeps a write from happening twice."""
    monkeypatch.setattr(cellguard, "TRIES", 3)
    assert any(_story(seed, "retry", EveryTryIsNew, 0) for seed in SEEDS)


@pytest.mark.parametrize("rule", RULES)
def test_a_refusal_that_is_believed_is_caught(rule: Rule) -> None:
    assert any(_story(seed, rule, RefusalsAreBelieved, 2) for seed in SEEDS)


@pytest.mark.parametrize("error", [Unavailable, Misconfigured])
def test_an_error_after_a_lost_reply_is_unknown(error: type[FencedError]) -> None:
    """The store does the swap, its reply is lost, and then the guard may not read any more."""

    class Denied(MemoryCells):
        lost = False

        async def get(self, key: str) -> tuple[int, bytes | None]:
            if self.lost:
                raise error("denied")
            return await super().get(key)

        async def get_many(self, keys: Sequence[str]) -> list[tuple[int, bytes | None]]:
            return [await self.get(key) for key in keys]

        async def swap(self, changes: Sequence[tuple[str, int, bytes | None]]) -> Swapped:
            await super().swap(changes)
            self.lost = True
            raise Indeterminate("no reply")

    guard = MemoryValues(cells=Denied(), runtime=Hasty())
    with pytest.raises(Indeterminate):
        step(guard.write(by(5), NAME, b"one"))


def test_an_address_says_rule_and_mode() -> None:
    guard = guard_at("memory:strict?rule=once&mode=require", BlockingRuntime())
    assert step(guard.modes()) == {"*": "require"}
    assert step(guard.operate(lambda operator: operator.status())).guards[0].rule == "once"
    for wrong in ("memory:a?rule=twice", "memory:a?mode=strict", "memory:a?color=red"):
        with pytest.raises(Misuse):
            guard_at(wrong, BlockingRuntime())


def test_operators_of_cells() -> None:
    guard = MemoryValues(mode="shadow")
    step(guard.set_mode("enforce", "a/*"))
    step(guard.write(by(5), NAME, b"A"))
    step(guard.write(by(4), NAME, b"B"))
    status = step(guard.operate(lambda operator: operator.status()))
    (found,) = status.guards
    assert (found.marks, found.highest, [stage.mode for stage in found.stages]) == (
        1,
        5,
        ["shadow", "enforce"],
    )
    assert [(count.verdict, count.count) for count in found.counts] == [("stale", 1)]
    assert step(guard.operate(lambda operator: operator.unset_mode(None, "a/*")))
    assert not step(guard.operate(lambda operator: operator.unset_mode(None, "a/*")))
    with pytest.raises(Unsupported, match="a memory guard has no overrides"):
        step(guard.operate(lambda operator: operator.override("t", "*", 60, "why")))
