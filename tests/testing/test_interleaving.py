"""The explorer itself: what it makes of what the server says."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from fenced_testkit.interleaving import COMMIT, ScriptEvent, ScriptOutcome, Trace, _Run


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
    return SimpleNamespace(name=name, pid=pid, event=event, running=running)


def test_a_step_that_ends_while_the_server_is_asked_is_settled() -> None:
    running: Future[ScriptOutcome] = Future()
    event = ScriptEvent("A", COMMIT, 1)
    sessions = {"A": session("A", 1, event, running), "B": session("B", 2, None, None)}
    watch = Watch(running)
    _Run(Trace("A", "AB"), sessions, watch)._settle()  # type: ignore[arg-type]
    assert event.outcome.tag == "COMMIT"
    assert not event.waited_for, "what was said of it was out of date"
    assert watch.asked == 2
