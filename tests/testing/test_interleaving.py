"""The explorer itself: what it makes of what the server says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from fenced_testkit.interleaving import (
    COMMIT,
    AnyScript,
    Explorer,
    InterleavingProgram,
    Program,
    ScriptEvent,
    ScriptOutcome,
    ScriptStep,
    Trace,
    sql,
)
from fenced_testkit.interleaving.explorer import _Run


class Watch:
    """A server that says twice that A waits for B; while it says so again, A's step ends."""

    def __init__(self, running: Future[ScriptOutcome]) -> None:
        self._running = running
        self.asked = 0

    def blockers(self, pids: list[int]) -> dict[int, frozenset[int]]:
        self.asked += 1
        if self.asked == 2:
            self._running.set_result(ScriptOutcome(tag="COMMIT"))
        return {pid: frozenset({2}) for pid in pids}


def session(name: str, pid: int, event: ScriptEvent | None, running: Future[ScriptOutcome] | None) -> Any:
    return SimpleNamespace(name=name, pid=pid, event=event, running=running, go_on=lambda _: None)


def test_a_step_that_ends_while_the_server_is_asked_is_settled() -> None:
    running: Future[ScriptOutcome] = Future()
    event = ScriptEvent("A", COMMIT, 1)
    sessions = {"A": session("A", 1, event, running), "B": session("B", 2, None, None)}
    watch = Watch(running)
    _Run(Trace("A", "AB"), sessions, watch)._settle()  # type: ignore[arg-type]
    assert event.outcome.tag == "COMMIT"
    assert not event.waited_for, "what was said of it was out of date"
    assert watch.asked == 2


class OneConnection:
    """An engine whose statements return themselves."""

    pid = 1

    def connect(self) -> OneConnection:
        return self

    def take(self, script: AnyScript) -> None:
        self.taken = script.name

    def execute(self, step: ScriptStep) -> ScriptOutcome:
        return ScriptOutcome(tag=step.statement)

    def in_transaction(self) -> bool:
        return False

    def blockers(self, pids: Sequence[int]) -> Mapping[int, frozenset[int]]:
        return {pid: frozenset() for pid in pids}

    def cancel(self, pid: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_program_chooses_its_next_step_by_the_outcome_of_the_last() -> None:
    def counting(end: int) -> Program:
        outcome = yield sql("1")
        while int(outcome.tag) < end:
            outcome = yield sql(str(int(outcome.tag) + 1))

    for end, order in ((1, "AAA"), (3, "AAA"), (5, "AAA")):
        with Explorer(OneConnection()) as explorer:
            trace = explorer.run([InterleavingProgram("A", lambda end=end: counting(end), 3)], order)  # type: ignore[misc]
        assert [event.outcome.tag for event in trace.steps] == [str(n) for n in range(1, end + 1)]
