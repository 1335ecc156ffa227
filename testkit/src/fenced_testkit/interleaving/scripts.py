"""What sessions do, in which orders, and what came of it."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

OUTCOME_LENGTH_MAX = 48
"""How much of an outcome is printed."""


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
NOTHING = ScriptStep("", "")
"""In place of a step of a program that has ended; it is not sent."""


Program = Generator[ScriptStep, "ScriptOutcome", Any]
"""Yields one step after the other, and gets the outcome of each."""


@dataclass(frozen=True, slots=True)
class InterleavingScript:
    """What one session does, in order. `name` is one letter: the session's in an order such as "AABAB"."""

    name: str
    steps: tuple[ScriptStep, ...]
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED
    autocommit: bool = False
    """Each statement is a transaction."""

    @property
    def length(self) -> int:
        return len(self.steps)

    def begin(self) -> Program:
        for step in self.steps:  # noqa: UP028  # `yield from` would send the outcomes to a tuple
            yield step


@dataclass(frozen=True, slots=True)
class InterleavingProgram:
    """A session whose next step depends on the outcomes of those before, such as code that talks to a database.

    It has `length` places in an order. If it ends earlier, nothing happens at the other places; what it does beyond
    them comes last.
    """

    name: str
    make: Callable[[], Program]
    length: int
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED
    autocommit: bool = True

    def begin(self) -> Program:
        return self.make()


AnyScript = InterleavingScript | InterleavingProgram


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


def interleavings(scripts: Sequence[AnyScript], limit: int | None = None, seed: int = 0) -> Orders:
    """Every merge that keeps the order of each script; above `limit` that many, drawn by `seed`."""
    counts = {script.name: script.length for script in scripts}
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
    def steps(self) -> list[ScriptEvent]:
        """What was sent."""
        return [event for event in self.events if event.step is not NOTHING]

    @property
    def executed(self) -> tuple[tuple[str, str], ...]:
        """What distinguishes this run from others: the order of begins and ends, and the outcomes."""
        moments = [(event.began, event.session, event.step.label) for event in self.steps]
        moments += [(event.ended, event.session, str(event.outcome)) for event in self.steps]
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
        for event in self.steps:
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
