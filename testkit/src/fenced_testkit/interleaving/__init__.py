"""Real sessions of a database, stepped through every order of their statements.

A simulation cannot see the bugs of SQL: what a statement does when it wakes up from a lock, what a snapshot
hides, which of two transactions is the deadlock's victim. So each session has a script and its own
connection, every merge of the scripts is run on a real server, and a judge checks the outcome:

    explorer = Explorer(PostgresqlEngine(url))
    a = Script("A", (sql("UPDATE t SET n = n + 1"), COMMIT))
    b = Script("B", (sql("UPDATE t SET n = n + 1"), COMMIT))
    explorer.explore([a, b], reset=fill, judge=look)   # AABB, ABAB, ABBA, BAAB, BABA, BBAA

A transaction begins with the first statement after the previous one has ended, or each statement is one. The explorer
asks the server whether a step waits for a lock; it does not guess from the time that the step takes. The steps of a
session that waits are held back until it is free. Errors are outcomes, and go into the trace; the server chooses which
of two deadlocked transactions gets one.

The explorer is one for all databases. An `Engine` connects, runs a statement, and knows how its server says who waits:
`interleaving.postgresql`, `interleaving.mariadb`.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any, Protocol, Self

PATIENCE_SECONDS = 30.0
"""How long a step may run without finishing or waiting for another session of the run."""
LOOK_SECONDS = 0.002
"""How long to wait for a step before the server is asked whether it waits for a lock; then twice as long, and so on."""
LOOK_SECONDS_MAX = 0.016
OUTCOME_LENGTH_MAX = 48
"""How much of an outcome is printed."""


class StoryBroken(AssertionError):
    """An interleaving that the judge refused; the message shows it, and how to run it again."""


class Stuck(RuntimeError):
    """A step neither finished nor waited for a session of the run. The explorer cannot be used afterwards."""


class IsolationLevel(Enum):
    """As SQL calls it."""

    READ_COMMITTED = "READ COMMITTED"
    REPEATABLE_READ = "REPEATABLE READ"
    SERIALIZABLE = "SERIALIZABLE"


@dataclass(frozen=True, slots=True)
class ScriptStep:
    """One thing that a session does: a statement with parameters, in the form of its driver (`$1`, `%s`)."""

    label: str
    statement: str
    parameters: tuple[object, ...] = ()
    about: Any = None
    """Free data for the judge."""


def sql(statement: str, *parameters: object, label: str | None = None, about: Any = None) -> ScriptStep:
    return ScriptStep(label or " ".join(statement.split()), statement, parameters, about)


COMMIT = sql("COMMIT")
ROLLBACK = sql("ROLLBACK")


@dataclass(frozen=True, slots=True)
class InterleavingScript:
    """What one session does, in order. `name` is one letter: the session's in an order such as "AABAB"."""

    name: str
    steps: tuple[ScriptStep, ...]
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED
    autocommit: bool = False
    """Each statement is a transaction."""


@dataclass(frozen=True, slots=True)
class Orders:
    """The merges to run. When they are a sample, `str` says so."""

    chosen: tuple[str, ...]
    total: int
    seed: int | None = None

    def __str__(self) -> str:
        if self.seed is None:
            return f"all {self.total} interleavings"
        return f"{len(self.chosen)} of {self.total} interleavings, drawn by seed {self.seed}"


def interleavings(scripts: Sequence[InterleavingScript], limit: int | None = None, seed: int = 0) -> Orders:
    """Every merge that keeps the order of each script; above `limit` that many, drawn by `seed`."""
    counts = {script.name: len(script.steps) for script in scripts}
    if len(counts) != len(scripts) or any(len(name) != 1 for name in counts):
        raise ValueError("every session needs a letter of its own")
    total = math.factorial(sum(counts.values()))
    for count in counts.values():
        total //= math.factorial(count)
    if limit is None or total <= limit:
        return Orders(tuple(_merges(counts)), total)
    letters = list(Counter(counts).elements())
    rng = random.Random(seed)
    drawn: dict[str, None] = {}
    while len(drawn) < limit:
        rng.shuffle(letters)
        drawn["".join(letters)] = None
    return Orders(tuple(drawn), total, seed)


def _merges(counts: dict[str, int]) -> Iterator[str]:
    if not any(counts.values()):
        yield ""
    for name, count in counts.items():
        if count:
            for rest in _merges({**counts, name: count - 1}):
                yield name + rest


@dataclass(frozen=True, slots=True)
class ScriptOutcome:
    """The outcome of a step: rows and the command's tag, or an error's code and its message.

    The code is an SQLSTATE of PostgreSQL, or an error number of MariaDB.
    """

    rows: tuple[tuple[Any, ...], ...] = ()
    tag: str = ""
    code: str = ""
    message: str = ""

    def __str__(self) -> str:
        if self.code:
            return f"{self.code} {self.message}"
        if not self.rows:
            return self.tag
        return "; ".join(", ".join(map(str, row)) for row in self.rows)


@dataclass(slots=True)
class ScriptEvent:
    """One step of a run. `began` and `ended` are places on one line, on which no two are equal."""

    session: str
    step: ScriptStep
    began: int
    ended: int = 0
    waited_for: str = ""
    """The sessions that it waited for, if any."""
    outcome: ScriptOutcome = field(default_factory=ScriptOutcome)


@dataclass(slots=True)
class Trace:
    """What happened in one run, in the order in which the steps began. Prints as a table."""

    order: str
    sessions: str
    events: list[ScriptEvent] = field(default_factory=list)

    @property
    def executed(self) -> tuple[tuple[str, str], ...]:
        """What distinguishes this run from others: the order of begins and ends, and the outcomes."""
        moments = [(event.began, event.session, event.step.label) for event in self.events]
        moments += [(event.ended, event.session, str(event.outcome)) for event in self.events]
        return tuple((session, text) for _, session, text in sorted(moments))

    def waiting(self) -> dict[str, frozenset[str]]:
        """The sessions that waited when the next step began, by the sessions of all steps until then."""
        found, begun = {}, ""
        for number, event in enumerate(self.events, 1):
            begun += event.session
            following = self.events[number].began if number < len(self.events) else math.inf
            found[begun] = frozenset(e.session for e in self.events[:number] if e.ended > following)
        return found

    def __str__(self) -> str:
        lines: list[tuple[int, str, str]] = []
        for event in self.events:
            label, outcome = event.step.label, str(event.outcome)
            if len(outcome) > OUTCOME_LENGTH_MAX:
                outcome = outcome[:OUTCOME_LENGTH_MAX] + "..."
            if event.waited_for:
                lines.append((event.began, event.session, f"{label} ... waits for {event.waited_for}"))
                lines.append((event.ended, event.session, f"... {label} -> {outcome}"))
            else:
                text = label if label == outcome else f"{label} -> {outcome}"
                lines.append((event.began, event.session, text))
        lines.sort()
        widths = {s: max([len(s), *(len(text) for _, who, text in lines if who == s)]) for s in self.sessions}
        rows = [{s: s for s in self.sessions}, *({who: text} for _, who, text in lines)]
        table = ["  ".join(row.get(s, "").ljust(widths[s]) for s in self.sessions).rstrip() for row in rows]
        return "\n".join([f"order {self.order!r}", *(f"  {line}" for line in table)])


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

    def take(self, script: InterleavingScript) -> None:
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
        self.steps: list[ScriptStep] = []
        self.name = ""
        self.running: Future[ScriptOutcome] | None = None
        self.event: ScriptEvent | None = None

    def take(self, script: InterleavingScript) -> None:
        self.name = script.name
        self.steps = list(script.steps)
        self._session.take(script)

    def start(self, event: ScriptEvent) -> None:
        self.event = event
        self.running = self._thread.submit(self._session.execute, event.step)

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
        scripts: Sequence[InterleavingScript],
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

    def run(self, scripts: Sequence[InterleavingScript], order: str) -> Trace:
        """Run one merge, given by the letters of its sessions. It ends with no transaction open."""
        if Counter(order) != Counter({script.name: len(script.steps) for script in scripts}):
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
        """Roll back what the scripts left open. Sessions that waited for it finish first."""
        while left := [s for s in self._sessions.values() if s.running or s.in_transaction]:
            idle = next((session for session in left if not session.running), None)
            if idle is None:
                raise Stuck(f"no transaction holds what they wait for\n{self.trace}")
            self._do(idle.name, ROLLBACK)
            self._go_on()

    def _go_on(self) -> None:
        while (free := next((n for n in self._owed if not self._sessions[n].running), None)) is not None:
            self._owed.remove(free)
            self._do(free, self._sessions[free].steps.pop(0))

    def _do(self, name: str, step: ScriptStep) -> None:
        event = ScriptEvent(name, step, next(self._places))
        self.trace.events.append(event)
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
        session.event.outcome = session.running.result()
        session.event.ended = next(self._places)
        session.running = session.event = None
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
