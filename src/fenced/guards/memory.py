"""The reference guard: named values in a dictionary, decided by the pure function alone."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TypeVar

from fenced.contracts import MANY_NAMES, Operator, Runtime, Trait, Versioned
from fenced.decision import Mark, Mode, Rule, Ruling, Verdict, judge, rule_on
from fenced.errors import Conflict, Contended
from fenced.guards.shared.answers import (
    RECORDS_MAX,
    check_pattern,
    check_value,
    error_for,
    mode_of,
    one_stamp,
)
from fenced.model import Credential, Stamp, check_name
from fenced.rollout import Decision, DecisionCount

T = TypeVar("T")


class MemoryGuard:
    """Values under names, in one process."""

    traits: tuple[Trait, ...] = (
        MANY_NAMES,
        Trait("one-process", "Values and marks live in one process; nothing survives it."),
        Trait("mandatory", "Every write goes through the guard; there is no other door."),
    )
    url = "memory:"

    def __init__(
        self, *, rule: Rule = "retry", mode: str = "enforce", clock: Callable[[], float] = time.time
    ) -> None:
        self.rule: Rule = rule
        self.values: dict[str, Versioned] = {}
        self.marks: dict[str, Mark] = {}
        self.realm: str | None = None
        self._modes: dict[str, Mode] = {"*": Mode.parse(mode)}
        self._records: deque[Decision] = deque(maxlen=RECORDS_MAX)
        self._tally: Counter[tuple[str, str, str]] = Counter()
        self._clock = clock
        self._operations = 0
        self._lock = threading.Lock()

    @classmethod
    def at(cls, url: str, runtime: Runtime) -> MemoryGuard:
        return cls()

    async def open(self) -> None:
        return

    async def announce(self, credential: Credential) -> None:
        stamp = one_stamp(credential, "a memory guard")
        with self._lock:
            self._admit(stamp, credential.names or stamp.names, announce=True)

    async def read(self, credential: Credential, name: str) -> Versioned:
        stamp = one_stamp(credential, "a memory guard")
        with self._lock:
            self._admit(stamp, (name,), announce=True)
            return self._value(name)

    async def peek(self, name: str, at_least: int = 0) -> Versioned:
        check_name(name)
        with self._lock:
            mark = self.marks.get(name)
            if at_least and (mark is None or mark.token < at_least):
                raise Contended(f"{name}: token {at_least} has not been seen here yet; look again")
            return self._value(name)

    async def write(
        self, credential: Credential | None, name: str, value: bytes, *, expect: int | None = None
    ) -> int:
        check_name(name)
        check_value(value)
        stamp = one_stamp(credential, "a memory guard") if credential else None
        with self._lock:
            before = self._value(name)
            risen = self._judge(stamp, (name,), announce=False)
            if expect is not None and before.version != expect:
                raise Conflict(f"{name}: version {before.version}, not {expect}")
            self._raise_marks(stamp, risen)
            self.values[name] = Versioned(value, before.version + 1)
            return before.version + 1

    async def write_many(self, credential: Credential | None, values: dict[str, bytes]) -> None:
        stamp = one_stamp(credential, "a memory guard") if credential else None
        with self._lock:
            self._admit(stamp, tuple(values), announce=False)
            for name, value in values.items():
                self.values[name] = Versioned(check_value(value), self._value(name).version + 1)

    def _value(self, name: str) -> Versioned:
        return self.values.get(check_name(name), Versioned(None, 0))

    def _admit(self, stamp: Stamp | None, names: tuple[str, ...], *, announce: bool) -> None:
        self._raise_marks(stamp, self._judge(stamp, names, announce=announce))

    def _judge(self, stamp: Stamp | None, names: tuple[str, ...], *, announce: bool) -> dict[str, Mark]:
        """The marks that the operation raises; raises the refusal instead if there is one."""
        risen: dict[str, Mark] = {}
        self._operations += 1
        for name in names:
            before = self.marks.get(name)
            judgement = judge(
                before,
                stamp,
                name=name,
                rule=self.rule,
                realm=self.realm,
                announce=announce,
                operation=str(self._operations),
            )
            mode = mode_of(name, self._modes.items())
            ruling = rule_on(judgement.verdict, mode, name)
            if judgement.verdict is Verdict.ADMIT and judgement.mark is not None:
                risen[name] = judgement.mark
                continue
            if judgement.verdict is not Verdict.APPLIED:
                self._note(name, stamp, before, judgement.verdict, ruling, mode)
            if ruling is Ruling.REFUSE or judgement.verdict is Verdict.APPLIED:
                raise error_for(judgement.verdict, name=name, stamp=stamp, mark=before)
        return risen

    def _raise_marks(self, stamp: Stamp | None, risen: dict[str, Mark]) -> None:
        self.marks.update(risen)
        if risen and stamp is not None and self.realm is None:
            self.realm = stamp.realm

    def _note(
        self,
        name: str,
        stamp: Stamp | None,
        mark: Mark | None,
        verdict: Verdict,
        ruling: Ruling,
        mode: Mode,
    ) -> None:
        self._tally[verdict.value, ruling.value, str(mode)] += 1
        at = datetime.fromtimestamp(self._clock(), UTC)
        text, token = str(stamp) if stamp else None, mark.token if mark else None
        if ruling is not Ruling.COUNT:
            self._records.append(Decision(at, self.url, name, text, token, verdict, ruling, str(mode)))

    async def set_mode(self, mode: str, pattern: str = "*") -> None:
        parsed, checked = Mode.parse(mode), check_pattern(pattern)
        with self._lock:
            self._modes[checked] = parsed

    async def adopt(self, realm: str) -> None:
        with self._lock:
            self.realm = realm

    async def mark(self, name: str) -> Mark | None:
        return self.marks.get(name)

    async def highest(self) -> int:
        with self._lock:
            return max((mark.token for mark in self.marks.values()), default=0)

    async def modes(self) -> dict[str, str]:
        with self._lock:
            return {pattern: str(mode) for pattern, mode in self._modes.items()}

    async def operate(self, work: Callable[[Operator], Awaitable[T]]) -> T:
        return await work(MemoryOperator(self))

    async def close(self) -> None:
        return


class MemoryOperator(Operator):
    """What operators do with a memory guard."""

    kind = "a memory guard"

    def __init__(self, guard: MemoryGuard) -> None:
        self._guard = guard

    async def records(self, table: str | None = None, limit: int = 100) -> list[Decision]:
        return list(self._guard._records)[-limit:]

    async def counts(self, table: str | None = None) -> list[DecisionCount]:
        return [
            DecisionCount(verdict, ruling, mode, count, count)
            for (verdict, ruling, mode), count in self._guard._tally.items()
        ]
