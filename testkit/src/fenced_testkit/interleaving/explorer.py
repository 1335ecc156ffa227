"""Runs scripts on a database, and asks its server which session waits for which."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from fenced_testkit.interleaving.scripts import (
    NOTHING,
    ROLLBACK,
    AnyScript,
    InterleavingScript,
    Orders,
    ScriptEvent,
    ScriptOutcome,
    ScriptStep,
    Trace,
    interleavings,
)

PATIENCE_SECONDS = 30.0
"""How long a step may run without finishing or waiting for another session of the run."""
LOOK_SECONDS = 0.002
"""How long to wait for a step before the server is asked whether it waits for a lock; then twice as long, and so on."""
LOOK_SECONDS_MAX = 0.016


class StoryBroken(AssertionError):
    """An interleaving that the judge refused; the message shows it, and how to run it again."""


class Stuck(RuntimeError):
    """A step neither finished nor waited for a session of the run. The explorer cannot be used afterwards."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was explored: the merges that were run, and how many different traces they gave."""

    orders: Orders
    different: int

    def __str__(self) -> str:
        return f"{self.orders}, {self.different} different"


def _foreseen(order: str, waiting: Mapping[str, frozenset[str]]) -> tuple[str, str] | None:
    """The sessions of the steps that this merge would begin, and of those it would hold back; None if unknown.

    A step has ended or waits before the next begins, so steps that begin in the same order make the same run.
    """
    begun, owed = "", ""
    for name in order:
        owed += name
        while (free := next((n for n in owed if n not in waiting[begun]), None)) is not None:
            owed = owed.replace(free, "", 1)
            begun += free
            if begun not in waiting:
                return None
    return begun, owed


class EngineSession(Protocol):
    """One connection. `execute` runs in a thread of its own, and at most one statement at a time."""

    pid: int
    """How the server calls this session."""

    def take(self, script: AnyScript) -> None:
        """Be in the isolation level of this script from now on; no transaction is open."""

    def execute(self, step: ScriptStep) -> ScriptOutcome:
        """Run it. An error of the server is an outcome; a lost connection is raised."""

    def in_transaction(self) -> bool: ...

    def close(self) -> None: ...


class Engine(Protocol):
    """A database in which sessions are opened and looked at."""

    def connect(self) -> EngineSession: ...

    def blockers(self, pids: Sequence[int]) -> Mapping[int, frozenset[int]]:
        """For those of these sessions that wait for a lock now, the sessions that they wait for.

        A session that continues by itself is not in it, or waits for nobody.
        """

    def cancel(self, pid: int) -> None:
        """End the statement that this session runs, if any."""

    def close(self) -> None: ...


class _Session:
    """A session of the engine and the thread that waits for it."""

    def __init__(self, session: EngineSession) -> None:
        self._session = session
        self.pid = session.pid
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._program = InterleavingScript("", ()).begin()
        self._next: ScriptStep | None = None
        self.name = ""
        self.running: Future[ScriptOutcome] | None = None
        self.event: ScriptEvent | None = None

    def take(self, script: AnyScript) -> None:
        self.name = script.name
        self._session.take(script)
        self._program = script.begin()
        self._next = next(self._program, None)

    def start(self, event: ScriptEvent) -> None:
        self.event = event
        self.running = self._thread.submit(self._session.execute, event.step)

    def next_step(self) -> ScriptStep:
        return self._next or NOTHING

    def go_on(self, outcome: ScriptOutcome) -> None:
        """Give the program this outcome; it says what comes next."""
        try:
            self._next = self._program.send(outcome) if self._next else None
        except StopIteration:
            self._next = None

    @property
    def in_transaction(self) -> bool:
        return self._session.in_transaction()

    def close(self) -> None:
        self._thread.shutdown()
        self._session.close()


def _newest_first(session: _Session) -> int:
    return -session.event.began if session.event else 0


class Explorer:
    """Runs scripts on a database, each in a session that stays open for the next run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sessions: list[_Session] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for session in self._sessions:
            self._engine.cancel(session.pid)
            session.close()
        self._engine.close()

    def explore(
        self,
        scripts: Sequence[AnyScript],
        *,
        reset: Callable[[], object],
        judge: Callable[[Trace], None],
        limit: int | None = None,
        seed: int = 0,
    ) -> Report:
        """Run every merge, each after a `reset`, and let `judge` raise AssertionError: that is `StoryBroken`.

        A merge that would be the same run as an earlier one, because a session that waits is held back, is left out.
        """
        orders = interleavings(scripts, limit, seed)
        waiting: dict[str, frozenset[str]] = {"": frozenset()}
        done, seen = set(), set()
        for order in orders.chosen:
            if _foreseen(order, waiting) in done:
                continue
            reset()
            trace = self.run(scripts, order)
            try:
                judge(trace)
            except AssertionError as error:
                raise StoryBroken(f"{error}\n{trace}") from error
            waiting |= trace.waiting()
            done.add(_foreseen(order, waiting))
            seen.add(trace.executed)
        return Report(orders, len(seen))

    def run(self, scripts: Sequence[AnyScript], order: str) -> Trace:
        """Run one merge, given by the letters of its sessions. It ends with no transaction open."""
        if Counter(order) != Counter({script.name: script.length for script in scripts}):
            raise ValueError(f"{order!r} is no merge of these scripts")
        while len(self._sessions) < len(scripts):
            self._sessions.append(_Session(self._engine.connect()))
        sessions = {s.name: session for s, session in zip(scripts, self._sessions, strict=False)}
        for script in scripts:
            sessions[script.name].take(script)
        run = _Run(Trace(order, "".join(sessions)), sessions, self._engine)
        for name in order:
            run.owe(name)
        run.end()
        return run.trace


class _Run:
    """One merge while it runs."""

    def __init__(self, trace: Trace, sessions: dict[str, _Session], engine: Engine) -> None:
        self.trace = trace
        self._sessions = sessions
        self._by_pid = {session.pid: session for session in sessions.values()}
        self._engine = engine
        self._owed: list[str] = []
        self._places = itertools.count(1)

    def owe(self, name: str) -> None:
        """Queue the next step of this session, and run all queued steps whose session is free."""
        self._owed.append(name)
        self._go_on()

    def end(self) -> None:
        """Let programs end, and roll back what is left open. Sessions that waited for it finish first."""
        while rest := [
            s.name for s in self._sessions.values() if not s.running and s.next_step() is not NOTHING
        ]:
            self.owe(rest[0])
        while left := [s for s in self._sessions.values() if s.running or s.in_transaction]:
            idle = next((session for session in left if not session.running), None)
            if idle is None:
                raise Stuck(f"no transaction holds what they wait for\n{self.trace}")
            self._do(idle.name, ROLLBACK)
            self._go_on()

    def _go_on(self) -> None:
        while (free := next((n for n in self._owed if not self._sessions[n].running), None)) is not None:
            self._owed.remove(free)
            self._do(free, self._sessions[free].next_step())

    def _do(self, name: str, step: ScriptStep) -> None:
        event = ScriptEvent(name, step, next(self._places))
        self.trace.events.append(event)
        if step is NOTHING:
            event.ended = next(self._places)
        else:
            self._sessions[name].start(event)
            self._settle()

    def _settle(self) -> None:
        """Return when every session is idle, or waits for one that is, directly or not.

        Two looks must agree: between the readings of one look a session may go from one lock to the next.
        """
        limit = time.monotonic() + PATIENCE_SECONDS
        patience = LOOK_SECONDS
        before: Mapping[int, frozenset[int]] = {}
        while busy := sorted((s for s in self._sessions.values() if s.event), key=_newest_first):
            wait([s.running for s in busy if s.running], patience, FIRST_COMPLETED)
            patience = min(2 * patience, LOOK_SECONDS_MAX)
            running = [s.pid for s in busy if s.running and not s.running.done()]
            found = self._engine.blockers(running) if running else {}
            for session in busy:
                if not self._collect(session) and not found.get(session.pid):
                    break  # it still runs, and its end may free the others: collect it first
            if found and found == before and self._all_held(found):
                return
            before = found
            if time.monotonic() > limit:
                raise Stuck(f"{', '.join(s.name for s in busy)}: neither done nor waiting\n{self.trace}")

    def _collect(self, session: _Session) -> bool:
        """Store the outcome of the session's step, if it has finished."""
        if session.running is None or session.event is None or not session.running.done():
            return False
        event = session.event
        event.outcome = session.running.result()
        event.ended = next(self._places)
        session.running = session.event = None
        session.go_on(event.outcome)
        return True

    def _all_held(self, blockers: Mapping[int, frozenset[int]]) -> bool:
        """Whether no session can continue. Sessions in a deadlock can: the server breaks it.

        If a blocker's step has ended since the server was asked, the answer is out of date: that session blocks nobody
        now, and others may continue. Then this is False, and the server is asked again.
        """
        if any(self._by_pid[pid].event is None for pid in blockers):
            return False
        standing = self._by_pid.keys() - blockers.keys()
        waiting = dict(blockers)
        while held := [pid for pid, others in waiting.items() if others and others <= standing]:
            standing = standing | set(held)
            for pid in held:
                names = " ".join(sorted(self._by_pid[p].name for p in waiting.pop(pid)))
                if (event := self._by_pid[pid].event) is not None:
                    event.waited_for = names
        return not waiting
