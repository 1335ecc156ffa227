"""The ledger: leases in the memory of one process, with a journal on its disk. For a process that serves others."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, TypeVar

from fenced.errors import FencedError, Indeterminate, Misuse, Unavailable
from fenced.leases.batches import carry_out
from fenced.leases.local_wakeups import LocalWakeups
from fenced.leases.rowauthority import Kind, RowAuthority, Work
from fenced.leases.rows import AttemptRow, LeaseAlgorithm
from fenced.leases.rules import NAMESPACE_ORDER
from fenced.net.filesystem import doubts_about, machine_clock, path_of
from fenced.runtime import forking
from fenced.stores.ledger.authority.changes import RecordedRows
from fenced.stores.ledger.authority.journal import SCHEMA_VERSION, FileJournal
from fenced.stores.ledger.authority.ledger import OPERATIONS_MAX, BatchFull, Ledger
from fenced.values import timing
from fenced.values.contracts import Runtime, Trait
from fenced.values.model import BatchAnswer, BatchOperation, Standing, check_floor, check_name
from fenced.values.schema import Schema

T = TypeVar("T")

AT_ONCE_SECONDS = 0.02
"""For how long a loop waits for a disk that has been quick so far."""

ABANDON_SECONDS = 2.0

_ledgers: dict[tuple[int, Path], tuple[Ledger, int]] = {}
"""The open ledgers of this process and how many authorities use them. A forked child finds none of its parent's."""
_opening = threading.Lock()
"""Held while a ledger is opened or closed: clients that open one file at the same time get the same ledger."""


def _acquire(path: Path, create: bool, clock: Callable[[], int]) -> Ledger:
    forking.enter()  # a fork waits until the lock is free again
    try:
        with _opening:
            key = (os.getpid(), path)
            ledger, users = _ledgers.get(key, (None, 0))
            if ledger is None:
                ledger = Ledger(path, FileJournal(path), clock)
                ledger.open(create)
                forking.register(ledger)
            _ledgers[key] = (ledger, users + 1)
            return ledger
    finally:
        forking.leave()


def _release(path: Path) -> None:
    with _opening:
        key = (os.getpid(), path)
        ledger, users = _ledgers.get(key, (None, 0))
        if ledger is None:
            return  # in a forked child, whose parent has the ledger
        if users > 1:
            _ledgers[key] = (ledger, users - 1)
        else:
            ledger.close()
            # After it: if closing is interrupted, the next client of this process finds the ledger.
            del _ledgers[key]


class LedgerAuthority(RowAuthority):
    """One client's access to the ledger of its process."""

    traits: ClassVar[tuple[Trait, ...]] = (
        NAMESPACE_ORDER,
        Trait(
            "one-owner", "One process has the file; its clients share it, and every other process is refused."
        ),
        Trait(
            "shared-syncs",
            "Grants and renewals are on the disk before they are answered; one sync serves all who came meanwhile.",
        ),
        Trait(
            "failed-write-refuses",
            "After a failed write, or an interrupt in the middle of a change, nothing is granted or renewed until the "
            "ledger is opened again.",
        ),
        Trait(
            "reboot-keeps", "Leases outlive a reboot, which counts as no time: they end later, never earlier."
        ),
        Trait(
            "settled-forgotten",
            "An ended attempt is forgotten once its own client says that it is settled, and otherwise after ten "
            "minutes. What keeps its names taken stays.",
        ),
        Trait(
            "damage-noticed",
            "A batch of the journal that was synced and is damaged is refused. Nothing vouches for the last one: if it "
            "is lost, its tokens are skipped.",
        ),
        Trait(
            "restore-unnoticed",
            "Files that were restored from one backup look like the original: raise the floor.",
        ),
    )

    endings_are_quick: ClassVar[bool] = True

    def __init__(
        self,
        path: Path,
        runtime: Runtime,
        *,
        namespace: str = "default",
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.url = f"ledger:///{path}"
        self._path = path
        self._runtime = runtime
        self._name = check_name(namespace)
        self._clock = clock or machine_clock()
        self._wakeups = LocalWakeups(runtime)
        self._ledger: Ledger | None = None
        self._joining = threading.Lock()
        self._rows: RecordedRows | None = None
        self._doubts: tuple[str, ...] = ()
        self._writes = False
        self._writer: ThreadPoolExecutor | None = None
        self._round = runtime.wakeup()
        """Set when the batch that is being collected now has been written."""

    @classmethod
    def at(cls, url: str, runtime: Runtime, namespace: str) -> LedgerAuthority:
        return cls(path_of(url, "ledger", "the address of a ledger"), runtime, namespace=namespace)

    # Opening and closing.

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        ledger = self._ledger
        if ledger is None:
            ledger = await self._runtime.call(self._join, create)
        self._rows, due = ledger.namespace(self._name, create)
        await self._written(ledger, due, until)
        schema = Schema(SCHEMA_VERSION, SCHEMA_VERSION)
        return Standing(self._rows.realm, self._rows.token, self._doubts, schema=schema)

    def _join(self, create: bool) -> Ledger:
        """Runs in the thread that opens: a caller that is cancelled meanwhile leaves nothing open for ever."""
        # Of several callers that open at the same time one joins, and the others wait for it.
        with self._joining:
            if self._ledger is None:
                self._doubts = doubts_about(self._path)
                ledger = _acquire(self._path, create, self._clock)
                ledger.listeners.append(self._wakeups.add)
                self._ledger = ledger
            return self._ledger

    async def close(self) -> None:
        if self._leave():
            _release(self._path)

    def abandon(self) -> None:
        """The garbage collector may call this in any thread, also in one that holds a lock of the ledger: it may run
        at any moment. So another thread closes the ledger, and this one waits for it, but not for ever."""
        if self._leave():
            closing = threading.Thread(target=_release, args=(self._path,), name="fenced-ledger-close")
            closing.start()
            closing.join(ABANDON_SECONDS)

    def _leave(self) -> bool:
        """Let go of the ledger; returns whether there was one."""
        # Writes that are on their way have the ledger themselves, and its `close` waits for their lock.
        ledger, self._ledger = self._ledger, None
        if self._writer is not None:
            self._writer.shutdown(wait=False)
            self._writer = None
        if ledger is not None:
            ledger.listeners.remove(self._wakeups.add)
        return ledger is not None

    def before_fork(self) -> None:
        return

    def forked(self) -> None:
        """The ledger itself refuses from now on; a new ledger of this process finds that the parent has the file."""
        self._writer = None

    @property
    def refusal(self) -> FencedError | None:
        """Why nothing is carried out until the ledger is opened again; None: it is carried out."""
        return None if self._ledger is None else self._ledger.refusal

    # Doing.

    async def _do(
        self,
        work: Callable[[LeaseAlgorithm], T],
        until: float | None,
        *,
        at_once: bool = False,
    ) -> T:
        ledger, rows = self._ledger, self._rows
        if ledger is None or rows is None:
            raise Unavailable(f"{self.url} is not open")
        try:
            result, due = ledger.do(rows, work)
        except BatchFull:
            await self._written(ledger, ledger.collected(), until)  # nobody else may be waiting for it
            raise
        if at_once and not self._writes and ledger.written < due and ledger.is_quick():
            self._write_at_once(ledger, due)
        await self._written(ledger, due, until)
        return result

    def _write_at_once(self, ledger: Ledger, due: int) -> None:
        """Let another thread write and wait for it here, which costs less than to be notified by it through the loop.

        Not for long: if the disk hangs, the loop goes on, and the batch is awaited like every other one. Waiting is
        safe, because that thread needs nothing of this one.
        """
        if self._runtime.colour == "blocking":
            return
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "fenced-ledger")
        with contextlib.suppress(TimeoutError):
            self._writer.submit(ledger.write, due).result(AT_ONCE_SECONDS)

    async def _written(self, ledger: Ledger, due: int, until: float | None) -> None:
        """Return when the batch `due` is on the disk. Indeterminate at the deadline: it may still get there."""
        if ledger.written < due:
            if self._runtime.colour == "blocking":
                ledger.write(due)
            else:
                await self._written_by_task(ledger, due, until)
        if ledger.wants_snapshot():
            self._runtime.spawn(self._snapshot, "fenced-ledger-snapshot")

    async def _written_by_task(self, ledger: Ledger, due: int, until: float | None) -> None:
        written = self._round  # of the batch that is being collected: taken before anything is awaited
        if not self._writes:
            # One task writes for all callers of this loop, so a caller that is cancelled takes no write with it.
            self._writes = True
            self._runtime.spawn(self._write, "fenced-ledger-write")
        in_time = await self._runtime.wait(written, timing.call_until(self._runtime.now(), until))
        if ledger.written < due:
            why = str(ledger.refusal) if in_time else "the disk did not finish before the deadline"
            raise Indeterminate(f"{self.url}: {why}")

    async def _write(self) -> None:
        """Write until nothing is left. What is collected during one write belongs to the next round."""
        ledger = self._ledger
        try:
            while ledger is not None and ledger.written < (due := ledger.collected()):
                # In one step of the loop with `collected`: a caller that took the old flag has its changes in `due`.
                written, self._round = self._round, self._runtime.wakeup()
                try:
                    await self._runtime.call(ledger.write, due)
                finally:
                    written.set()
        except FencedError:
            return  # those who wait find that their batch is not written
        finally:
            # No await in here: no caller comes in between, takes the flag and finds that nobody writes. After a failure
            # those of the next round are woken, too, and find the refusal.
            self._writes = False
            self._round.set()
            self._round = self._runtime.wakeup()

    async def _snapshot(self) -> None:
        if (ledger := self._ledger) is not None:
            # Not behind the writes, which go on meanwhile.
            await self._runtime.call(ledger.snapshot_if_due, urgent=True)

    # The contract.

    async def _transact(self, work: Work[T], until: float | None, kind: Kind) -> T:
        return await self._do(lambda algorithm: self._waking(work(algorithm)), until)

    def _waking(self, ended: tuple[T, Sequence[AttemptRow]]) -> T:
        answer, heads = ended
        if heads and self._ledger is not None:
            self._ledger.wake(heads)
        return answer

    async def many(
        self, operations: Sequence[BatchOperation], until: float | None = None
    ) -> list[BatchAnswer]:
        """The loop waits for the write while the disk is quick.

        The caller has collected what came meanwhile, so nothing could share this write.
        """
        if len(operations) > OPERATIONS_MAX:
            raise Misuse(f"at most {OPERATIONS_MAX} operations at once, not {len(operations)}")
        return await self._do(
            lambda algorithm: self._waking(carry_out(algorithm, operations)), until, at_once=True
        )

    async def next_wakeups(self, until: float) -> list[str]:
        return await self._wakeups.next(until)

    def interrupt(self) -> None:
        self._wakeups.interrupt()

    async def raise_floor(self, above: int, until: float | None = None) -> int:
        above = check_floor(above)
        # After a crash the last batch may be lost, and the next process skips only what one batch can grant. So the
        # floor is on the disk before anything is granted above it.
        await self._do(lambda _: self._rows.record_floor(above) if self._rows is not None else None, until)
        return await super().raise_floor(above, until)
