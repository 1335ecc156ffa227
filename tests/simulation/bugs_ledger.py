"""Planted bugs that a world of the ledger must find: in its numbers, its syncs, its snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from fenced.errors import Indeterminate
from fenced.leases.rows import LeaseAlgorithm
from fenced.stores.ledger.authority.changes import Change, RecordedRows
from fenced.stores.ledger.authority.journal import Batch
from fenced.stores.ledger.authority.ledger import CountingAlgorithm, Ledger
from fenced_testkit.worlds.faults import Faults
from fenced_testkit.worlds.ledger import LedgerBackend, SimulatedDisk
from fenced_testkit.worlds.site import Site
from tests.planted import bugs
from tests.simulation.bugs_memory import Restarts
from tests.simulation.planting import over, with_backend

T = TypeVar("T")


class NumbersRestart(SimulatedDisk):
    """The journal numbers its batches itself, from 1 again after a snapshot emptied it: a restart skips those."""

    def append(self, batch: Batch, sync: bool) -> None:
        super().append(batch._replace(number=max(self._batches, default=0) + 1), sync)


class AnsweredBeforeTheSync(Ledger):
    """A batch is acknowledged before it is on the disk."""

    def do(self, rows: RecordedRows, work: Callable[[LeaseAlgorithm], T]) -> tuple[T, int]:
        return super().do(rows, work)[0], self.written


class GoesOnAfterAFailedWrite(Ledger):
    """A write fails, and the ledger goes on with a memory that is ahead of the disk."""

    def write(self, due: int) -> None:
        try:
            super().write(due)
        except Indeterminate:
            self.refusal, self.written = None, self._next - 1


class SnapshotForgetsTheCounter(Ledger):
    """A snapshot has the attempts, but not the last token."""

    def _copied(self) -> tuple[int, int, Iterator[Change]]:
        number, now, changes = super()._copied()
        return number, now, (change for change in changes if change[1] != "token")


class RestartForgetsTheToken(RecordedRows):
    """A grant in the journal has its token, and redoing it does not raise the counter."""

    def redo(self, verb: str, arguments: list[Any]) -> None:
        token = self.token
        super().redo(verb, arguments)
        if verb == "grant":
            self.token = token


class SettledIsForgotten(RecordedRows):
    """What a holder has settled is forgotten, and a late copy of its ask is granted again."""

    def is_settled(self, holder: str, number: int) -> bool:
        return False


class BargingAlgorithm(bugs.Barging, CountingAlgorithm):
    pass


class BargingLedger(Ledger):
    algorithm = BargingAlgorithm


class Barging(LedgerBackend):
    """A free name goes to whoever asks next, not to the head of the queue."""

    ledger_type = BargingLedger


def with_ledger(bug: type[Ledger], site_type: type[Site] = Site) -> type[Site]:
    backend = type(bug.__name__, (LedgerBackend,), {"ledger_type": bug})
    return type(bug.__name__, (site_type,), {"backend_type": backend, "__doc__": bug.__doc__})


def with_rows(bug: type[RecordedRows], site_type: type[Site] = Site) -> type[Site]:
    ledger = type(bug.__name__, (Ledger,), {"rows_type": bug, "__doc__": bug.__doc__})
    return with_ledger(ledger, site_type)


class Copies(Site):
    """Messages are doubled, and their copies late."""

    def draw_faults(self) -> Faults:
        return replace(super().draw_faults(), double=0.3, delay_max=4.0)


class CopiesBeforeALongTime(Copies):
    """Then everything stands still, so that the store forgets."""

    def draw_faults(self) -> Faults:
        return replace(super().draw_faults(), jump_at=6.0)


PLANTED: list[type[Site]] = [
    with_backend(
        NumbersRestart, type(NumbersRestart.__name__, (LedgerBackend,), {"disk_type": NumbersRestart})
    ),
    with_ledger(AnsweredBeforeTheSync),
    with_ledger(GoesOnAfterAFailedWrite),
    with_ledger(SnapshotForgetsTheCounter),
    over(bugs.Barging, Barging),
    with_rows(RestartForgetsTheToken, Restarts),
    with_rows(SettledIsForgotten, Copies),
    with_rows(bugs.SettledFreesTheName),
    with_rows(bugs.SweptTwice, CopiesBeforeALongTime),
]
