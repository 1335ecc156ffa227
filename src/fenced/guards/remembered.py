"""What a guard over cells has decided, kept in cells beside its marks: others see it, and it survives its process.

Each guard object has one cell of its own, which it alone writes: a refusal contends with nobody. It is written after an
operation that was refused or let through, at most once a second: by that operation, or if the last write is younger, by
a task that waits for the rest of the second; over a client that belongs to the program, by its next operation.
Cells are found in a directory, without a look at the marks.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter, deque
from collections.abc import Callable
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, NamedTuple

from fenced.errors import Contended, FencedError, Misconfigured
from fenced.guards.cells import Cell, Cells, key_of
from fenced.values.contracts import Runtime, Task, Trait
from fenced.values.decision import Ruling
from fenced.values.rollout import Decision

AUDIT_LAGS = Trait(
    "audit-lags",
    "Decisions are counted and recorded in a cell of each guard object, written at most once a second: others see them "
    "late, and a killed process loses those since its last write.",
)
AUDIT = "\x01audit"
"""The directory, and the beginning of the cells' names. No lease has such a name, because it is not printable."""
EVERY_SECONDS = 1.0
RECORDS_KEPT = 50
"""How many records of one guard object are kept."""
CELLS_MAX = 100
"""How many cells the directory lists. At more, those that are idle for longest are folded."""
IDLE_SECONDS = 86_400.0
TRIES = 10
Kind = tuple[str, str, str]
"""Verdict, ruling and mode."""


class DecisionsKept(NamedTuple):
    """The contents of a cell: how many decisions of each kind, the newest records, and when it was written."""

    counts: Counter[Kind]
    records: list[list[Any]]
    at: float

    def packed(self) -> bytes:
        return json.dumps([[[*kind, n] for kind, n in self.counts.items()], self.records, self.at]).encode()

    @classmethod
    def unpacked(cls, value: bytes | None) -> DecisionsKept:
        try:
            counts, records, at = json.loads(value or b"[[], [], 0]")
            return cls(Counter({(v, r, m): n for v, r, m, n in counts}), records, at)
        except (ValueError, TypeError) as error:
            raise Misconfigured("the decisions are not a guard's: something else wrote to them") from error


class RememberedDecisions:
    """The decisions of one guard object, and those that it finds of others."""

    def __init__(
        self, cells: Cells, runtime: Runtime, clock: Callable[[], float], url: str, *, alone: bool = True
    ) -> None:
        """`alone`: nobody else closes the connections, so a task may write. Else a later operation does."""
        self._alone = alone
        self._cells = cells
        self._runtime = runtime
        self._clock = clock
        self._url = url
        self._counts: Counter[Kind] = Counter()
        self._records: deque[list[Any]] = deque(maxlen=RECORDS_KEPT)
        self._written: Counter[Kind] = Counter()
        """What the own cell has, as far as is known."""
        self._unwritten = 0
        """How many of the newest records the own cell does not have."""
        self._name: str | None = None
        self._seen: tuple[Any, Cell] | None = None
        self.dirty = False
        self._at = float("-inf")
        self._later: Task | None = None
        self._closing = runtime.wakeup()
        self._process = os.getpid()

    def note(self, decision: Decision) -> None:
        if self._process != os.getpid():
            self._forked()
        self._counts[decision.verdict.value, decision.ruling.value, decision.mode] += 1
        if decision.ruling is not Ruling.COUNT:
            self._records.append(_row(decision))
            self._unwritten = min(self._unwritten + 1, RECORDS_KEPT)
        self.dirty = True

    def _forked(self) -> None:
        """In a forked child, which has none of the parent's tasks. The cell, and what it counts, are the parent's."""
        self._process, self._later, self._name, self._seen = os.getpid(), None, None, None
        self._counts, self._written, self._unwritten = Counter(), Counter(), 0
        self._records.clear()

    async def write(self) -> None:
        """Write the own cell now, or in the rest of the second since it was last written."""
        if not self.dirty:
            return
        if self._runtime.now() - self._at >= EVERY_SECONDS:
            await self._write_now()
        elif self._alone and self._later is None:
            # Two threads that come here at once start two tasks: the second one finds nothing to write.
            self._later = self._runtime.spawn(self._wait, "fenced-decisions")

    async def _wait(self) -> None:
        try:
            await self._runtime.wait(self._closing, self._at + EVERY_SECONDS)
        finally:
            # Before the write: what is noted from here on starts another task, or is in this write.
            self._later = None
        # A program may have closed its own client meanwhile, whose errors are not ours.
        with contextlib.suppress(Exception):
            await self._write_now()

    async def close(self) -> None:
        """Write what is left."""
        self._closing.set()
        if (later := self._later) is not None and self._process == os.getpid():
            await later.join()
        await self._write_now()

    async def _write_now(self) -> None:
        """A store that fails is asked again with the next decision: what was decided does not depend on it."""
        if not self.dirty or self._process != os.getpid():
            return
        # Before anything is awaited: another task or thread that comes meanwhile finds that this second has its write.
        self._at, self.dirty = self._runtime.now(), False
        try:
            await self._write()
        except FencedError:
            self._seen, self.dirty = None, True
        except BaseException:
            self._seen, self.dirty = None, True
            raise

    async def _write(self) -> None:
        if self._name is None:
            self._name = (
                f"{AUDIT}/{self._runtime.secret()[:16]}"  # before it is listed: nobody folds his own cell
            )
            try:
                await self._list(self._name)
            except BaseException:
                self._name = None
                raise
        version, cell = self._seen or await self._cell(self._name)
        if self._written and not cell.value:
            # It was idle, and an operator has folded what it had: another one begins with what came since then.
            self._counts -= self._written
            for _ in range(len(self._records) - self._unwritten):
                self._records.popleft()
            self._name, self._seen, self.dirty, self._written = None, None, True, Counter()
            return
        counts, unwritten = Counter(self._counts), self._unwritten
        kept = DecisionsKept(counts, list(self._records), self._clock())
        new = cell.changed(self._runtime.secret(), None, kept.packed())
        swapped = await self._cells.swap([(key_of(self._name), version, new.packed())])
        if swapped.versions is None:  # another thread of this object, or an operator
            self._seen, self.dirty = None, True
        else:
            self._seen, self._written = (swapped.versions[0], new), counts
            self._unwritten -= unwritten

    async def read(self) -> tuple[Counter[Kind], list[Decision]]:
        """All that is known: of this object as it is now, of others as they wrote it, and what was folded."""
        listed, folded = _directory((await self._cell(AUDIT))[1])
        counts, records = folded.counts + self._counts, [*folded.records, *self._records]
        for name in listed:
            if name != self._name:
                kept = DecisionsKept.unpacked((await self._cell(name))[1].value)
                counts += kept.counts
                records += kept.records
        return counts, sorted((self._decision(row) for row in records), key=lambda decision: decision.at)

    async def fold(self, idle: float = IDLE_SECONDS) -> int:
        """Add up the cells that nobody has written for so long; returns how many."""
        folded = 0
        for name in _directory((await self._cell(AUDIT))[1])[0]:
            version, cell = await self._cell(name)
            kept = DecisionsKept.unpacked(cell.value)
            if name != self._name and self._clock() - kept.at >= idle:
                # The directory first: from then on nobody counts the cell, so nothing is counted twice. Its owner
                # finds it empty at its next write.
                await self._list(name, kept)
                await self._cells.swap(
                    [(key_of(name), version, cell.changed(self._runtime.secret(), None, b"").packed())]
                )
                folded += 1
        return folded

    async def _list(self, name: str, folded: DecisionsKept | None = None) -> None:
        """Put a cell on the directory; or take it off, and add what it had."""
        for _ in range(TRIES):
            version, cell = await self._cell(AUDIT)
            names, before = _directory(cell)
            if folded is not None:
                names = [each for each in names if each != name]
                rows = sorted([*before.records, *folded.records], key=itemgetter(0))[-RECORDS_KEPT:]
                before = DecisionsKept(before.counts + folded.counts, rows, self._clock())
            elif name not in names:
                names = [*names, name]
            new = cell.changed(
                self._runtime.secret(), None, json.dumps([names, before.packed().decode()]).encode()
            )
            if await self._cells.swap([(key_of(AUDIT), version, new.packed())]):
                break
        else:
            raise Contended(f"{self._url}: others changed the directory of decisions {TRIES} times")
        if folded is None and len(names) > CELLS_MAX:
            await self.fold(0.0 if len(names) > 2 * CELLS_MAX else EVERY_SECONDS * 60)

    async def _cell(self, name: str) -> tuple[Any, Cell]:
        version, blob = await self._cells.get(key_of(name))
        return version, Cell.unpacked("the decisions", blob)

    def _decision(self, row: list[Any]) -> Decision:
        at, *rest = row
        return Decision.of((datetime.fromtimestamp(at, UTC), self._url, *rest))


def _row(decision: Decision) -> list[Any]:
    """Without the guard, whose cell it is."""
    mark = decision.mark, decision.mark_grant, decision.mark_seq
    words = decision.verdict.value, decision.ruling.value, decision.mode
    return [decision.at.timestamp(), decision.name, decision.stamp, *mark, *words]


def _directory(cell: Cell) -> tuple[list[str], DecisionsKept]:
    names, folded = json.loads(cell.value or b'[[], "[[], [], 0]"]')
    return names, DecisionsKept.unpacked(folded.encode())
