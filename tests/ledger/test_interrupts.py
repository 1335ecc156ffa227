"""A program is interrupted in the middle of a call, and goes on. Every line of the ledger's code in turn.

An interrupt may leave the state in memory half changed. Then the ledger refuses; it never writes such a state. So
whoever opens the files again finds everything that was acknowledged, and nothing that hangs.
"""

from __future__ import annotations

import itertools
import linecache
import random
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import fenced
from fenced.errors import Unavailable
from fenced.runtime.blocking import step
from fenced.stores.ledger.authority.authority import LedgerAuthority
from fenced.stores.ledger.authority.ledger import Ledger
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced.testing.kit import asking
from fenced.values.model import Ask, Granted, Kept, Released, Waiting
from tests.ledger.test_ledger import RUNTIME, opened

CODE = tuple(str(Path(fenced.__file__).parent / room) for room in ("leases", "stores"))
SERIES = "5" * 32


class Interrupting:
    """Raises KeyboardInterrupt at the line with this number, of the lines of the authorities that this thread runs.

    Each line counts twice in each call of the story: a loop has a first round, and others.
    """

    def __init__(self, line: int) -> None:
        self._left = line
        self._seen: Counter[tuple[str, int]] = Counter()
        self.where = ""

    def __enter__(self) -> Interrupting:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(CODE):
            return None
        if frame.f_back is not None and not frame.f_back.f_code.co_filename.startswith(CODE):
            self._seen.clear()  # another call of the story
        return self._line

    def _line(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if event != "line" or self.where:
            return self._line
        place = frame.f_code.co_filename, frame.f_lineno
        # Python handles signals after calls and at jumps. The line of a `with` counts again at its end, before the lock
        # is left, and a `try` alone is no instruction: no signal is handled at either.
        self._seen[place] += 1
        if self._seen[place] <= 2 and not linecache.getline(*place).lstrip().startswith(("with ", "try:")):
            self._left -= 1
            if self._left < 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


class Story:
    """Calls that grant, queue, hand over, renew, expire, keep, settle, sweep and write a snapshot."""

    def __init__(self, authority: Any, clock: list[int]) -> None:
        self._authority, self._clock = authority, clock
        self.held: dict[str, int] = {}
        """Leases that were granted, and are neither released nor expired: secret and token."""
        self.highest = 0

    def _ask(self, ask: Ask) -> object:
        answer = step(self._authority.ask(ask))
        if isinstance(answer, Granted):
            self.held[ask.secret] = answer.token
            self.highest = max(self.highest, answer.token)
        return answer

    def _release(self, ask: Ask, keep: float = 0.0) -> None:
        self.held.pop(ask.secret, None)  # from now on it may be over
        assert step(self._authority.release(ask.secret, keep=keep)) == Released()

    def run(self) -> None:
        first, waiter, gone = (asking(RUNTIME, "a", "b", ttl=600.0, wait=True) for _ in range(3))
        assert isinstance(self._ask(first), Granted)
        for each in (waiter, gone):
            assert isinstance(self._ask(each), Waiting)
        step(self._authority.withdraw(gone.secret))
        self._release(first)
        assert isinstance(self._ask(waiter), Granted)
        assert step(self._authority.renew([waiter.secret])) == [Kept(600.0)]
        for number in (1, 2, 3):
            ask = asking(RUNTIME, f"n/{number}")._replace(series=SERIES, number=number, settled=number - 1)
            assert isinstance(self._ask(ask), Granted)
            self._release(ask, keep=5.0 if number == 1 else 0.0)
        self._clock[0] += 400 * 10**9
        assert step(self._authority.renew([waiter.secret])) == [Kept(600.0)]
        self._clock[0] += 400 * 10**9
        late = asking(RUNTIME, "a", ttl=600.0, wait=True)
        assert isinstance(self._ask(late), Waiting)  # sweeps
        if isinstance(self._authority, LedgerAuthority):
            assert self._authority._ledger is not None
            self._authority._ledger.snapshot()
        self._ask(asking(RUNTIME, "after", ttl=600.0))


def usable(authority: Any, story: Story) -> None:
    """What was acknowledged is there, and every name has an answer."""
    for secret in story.held:
        assert step(authority.renew([secret])) == [Kept(600.0)]
    for name in ("a", "b", "n/1", "n/2", "n/3", "after"):
        assert isinstance(step(authority.ask(asking(RUNTIME, name, wait=True))), Granted | Waiting)
    fresh = step(authority.ask(asking(RUNTIME, f"fresh/{RUNTIME.secret()}")))
    assert isinstance(fresh, Granted) and fresh.token > story.highest
    assert len(step(authority.survey())) >= 3


def in_time(work: Callable[[], None]) -> None:
    """Fail, and do not hang, if it never ends."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 raised again below, in the thread of the test
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive(), "it hangs"
    if failed:
        raise failed[0]


def used_or_refused(authority: Any, story: Story) -> None:
    """The program goes on with the same object: all is well, or everything is refused."""
    try:
        step(authority.survey())
    except Unavailable:
        with pytest.raises(Unavailable, match=r"interrupted|write failed"):
            step(authority.ask(asking(RUNTIME, "refused")))
    else:
        usable(authority, story)


def interrupted(
    make: Callable[[int, list[int]], Any], after: Callable[[int, Any, Story, list[int]], None], every: int
) -> int:
    """Interrupt one in `every` lines of the story, each in a store of its own; how many there were."""
    first = random.randrange(every)
    for line in itertools.count(first, every):
        clock = [10**15]
        authority = make(line, clock)
        story = Story(authority, clock)
        reached = False
        with Interrupting(line) as interrupt:
            try:
                story.run()
            except KeyboardInterrupt:
                reached = True
        try:
            assert reached == bool(interrupt.where), "the interrupt was swallowed"
            in_time(partial(used_or_refused, authority, story))
            after(line, authority, story, clock)
        except BaseException as error:
            error.add_note(f"interrupted at line {line}, {interrupt.where}")
            raise
        if not reached:
            return line
    raise AssertionError


def interrupted_ledgers(folder: Path, every: int) -> int:
    """Each is then opened again."""

    def path(line: int) -> Path:
        return folder / str(line) / "leases.db"

    def make(line: int, clock: list[int]) -> LedgerAuthority:
        path(line).parent.mkdir()
        return opened(path(line), clock=lambda: clock[0])

    def after(line: int, authority: LedgerAuthority, story: Story, clock: list[int]) -> None:
        authority.abandon()
        again = opened(path(line), clock=lambda: clock[0])
        in_time(partial(usable, again, story))
        again.abandon()
        shutil.rmtree(path(line).parent)

    return interrupted(make, after, every)


def test_a_ledger_that_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample, another one in each run. `make evidence ARGS=ledger` takes every line."""
    monkeypatch.setattr("os.fdatasync", lambda _: None)  # nothing cuts the power here
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr(Ledger, "snapshot_changes", 10**9)
    assert interrupted_ledgers(tmp_path, every=15) > 1000


def test_a_memory_store_that_was_interrupted() -> None:
    def make(_: int, clock: list[int]) -> MemoryAuthority:
        return MemoryAuthority(MemoryStore(lambda: clock[0] / 1e9), RUNTIME)

    assert interrupted(make, lambda *_: None, every=3) > 200
