"""The state of a ledger in memory, and its way to the journal.

Every call changes the state at once, under a lock, and appends what changed to the batch that is being collected. It
is answered when that batch is written: no answer describes a state that a crash could undo. One thread at a time
writes. What is collected while it syncs shares the next batch; a batch never waits for more.

If a write fails, or a call is interrupted in the middle of a change, the state in memory is not that of the journal.
Then nothing more is written, and everything is refused until the ledger is opened again.
"""

from __future__ import annotations

import gc
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

from fenced.errors import FencedError, Indeterminate, Misconfigured, Unavailable
from fenced.leases.rows import AttemptRow, LeaseAlgorithm
from fenced.leases.rules import no_namespace
from fenced.stores.ledger.authority.changes import Change, RecordedRows, only_ends
from fenced.stores.ledger.authority.journal import Batch, Journal
from fenced.values.model import TOKEN_MAX, Ask, AskAnswer, Busy, Ended, series_id

T = TypeVar("T")

QUICK_NS = 1_000_000
OPERATIONS_MAX = 2**16
"""How many operations one call may have, and how many changes a batch may have before a further call is refused."""
BATCH_TOKENS_MAX = 2 * OPERATIONS_MAX
"""No batch grants more tokens than this: an operation grants one at most, and records a change for it."""


class BatchFull(Unavailable):
    """The batch that is being collected has as many changes as it may have. Nothing happened."""


class CountingAlgorithm(LeaseAlgorithm):
    """Also forgets what a holder says that it will never ask again."""

    __slots__ = ()
    rows: RecordedRows

    def _ask_first(self, public: str, ask: Ask, wake: str) -> AskAnswer:
        if not ask.series:
            return super()._ask_first(public, ask, wake)
        series = series_id(ask.series)
        if self.rows.is_settled(series, ask.number):
            return Ended("settled")
        answer = super()._ask_first(public, ask, wake)
        if type(answer) is not Busy:
            self.rows.count(series, ask.number, ask.settled, public, self.now)
        return answer


class Ledger:
    """All namespaces of one journal. Safe to use from many threads."""

    algorithm: type[LeaseAlgorithm] = CountingAlgorithm
    rows_type: type[RecordedRows] = RecordedRows
    snapshot_changes = 100_000
    """A snapshot is due after this many changes, or after a third as many as there are rows, if those are more."""

    def __init__(self, where: object, journal: Journal, clock: Callable[[], int]) -> None:
        self.where = where
        self.listeners: list[Callable[[str], None]] = []
        self.written = 0
        """The last batch that is on the disk."""
        self._journal = journal
        self._clock = clock
        self._ahead = 0
        self._namespaces: list[RecordedRows] = []
        self._numbers: dict[str, int] = {}
        self._next = 1
        """The number of the batch that is being collected. Numbers never restart."""
        self._changes: list[Change] = []
        self._heads: list[AttemptRow] = []
        """Waiters to notify as soon as the lock on the state is free."""
        self._since_snapshot = 0
        self.refusal: FencedError | None = None
        self._write_ns = 0.0
        """How long a write with a sync takes, as a mean over the last ones."""
        self._state = threading.Lock()
        """Held for one operation, or for copying what was collected: nothing under it waits."""
        self._writing = threading.Lock()
        """Held for one write to the disk. A thread that holds it may take `_state`, never the other way round."""
        self._snapshotting = threading.Lock()
        """Held while a snapshot is written, and taken by `close`: a snapshot must not outlive the lock on the file."""
        self._closing = False

    # Opening.

    def open(self, create: bool = True) -> None:
        self._journal.open(create)
        collects = gc.isenabled()
        gc.disable()  # it would look at all rows again and again while they are read, and find nothing
        try:
            last = self._replay()
            self._ahead = self._journal.clock_ahead(self._clock(), last)
            if not self._journal.finished:
                self._skip_tokens()
        except BaseException:
            self._journal.close()
            raise
        finally:
            if collects:
                gc.enable()

    def _replay(self) -> int:
        now = 0
        for batch in self._journal.read():
            if batch.number != self.written:
                self._since_snapshot += len(batch.changes)
            self.written, now = batch.number, batch.now
            try:
                self._redo(batch)
            except (LookupError, TypeError, ValueError) as error:
                raise Misconfigured(
                    f"{self.where}: batch {batch.number} does not follow from the one before it ({error!r}). Restore "
                    "all files of the ledger from one backup, then run `fenced authority raise`"
                ) from error
        self._next = self.written + 1
        if self._journal.has_many_segments():
            self._since_snapshot = max(self._since_snapshot, self._snapshot_after())
        return now

    def _skip_tokens(self) -> None:
        """The last process did not close the journal, and nothing vouches for the last batch that it wrote.

        If that one is lost, nobody can tell. So counting goes on above every token that it can have granted. This is a
        batch of its own: one that also granted something could be lost in turn, and then its tokens would repeat.
        """
        for rows in self._namespaces:
            rows.token = min(rows.token + BATCH_TOKENS_MAX, TOKEN_MAX)
            rows.record_token()
        if self._changes:
            self._write(lambda: None)

    def _redo(self, batch: Batch) -> None:
        for number, verb, *arguments in batch.changes:
            if verb == "namespace":
                self._add(number, *arguments)
            else:
                self._namespaces[number].redo(verb, arguments)

    def _add(self, number: int, name: str, realm: str) -> None:
        self._namespaces.append(self.rows_type(name, realm, number, self._changes))
        self._numbers[name] = number

    def namespace(self, name: str, create: bool) -> tuple[RecordedRows, int]:
        """The rows of a namespace, and the batch in which it is created."""
        with self._state:
            self.refuse_if_failed()
            if name not in self._numbers:
                if not create:
                    raise no_namespace(self.where, name)
                number, realm = len(self._namespaces), secrets.token_hex(8)
                try:
                    self._add(number, name, realm)
                    self._changes.append([number, "namespace", name, realm])
                except BaseException as error:
                    self._refuse("a change was interrupted", error)
                    raise
            return self._namespaces[self._numbers[name]], self._due()

    # Operations.

    def do(self, rows: RecordedRows, work: Callable[[LeaseAlgorithm], T]) -> tuple[T, int]:
        """Run `work` on the state. Its result is valid when the batch with the number that is returned is written."""
        with self._state:
            self.refuse_if_failed()
            if len(self._changes) >= OPERATIONS_MAX:
                raise BatchFull(f"{self.where}: the disk is slower than what is asked for; nothing happened")
            try:
                result = work(self.algorithm(rows, self._now()))
                if rows.token != rows.recorded_token:
                    rows.record_token()
                due = self._due()
                heads, self._heads = self._heads, []
            except FencedError:
                raise  # an answer: whatever was changed for it is recorded, too
            except BaseException as error:  # in the middle of a change: memory and record may differ
                self._refuse("a change was interrupted", error)
                raise
        # Before the write: a notification is a hint, and what a notified waiter is granted is answered after a batch
        # that follows this one, or is this one.
        for head in heads:
            for listener in list(self.listeners):
                listener(head.id)
        return result, due

    def _now(self) -> int:
        return self._clock() + self._ahead

    def _due(self) -> int:
        """The batch that has everything so far. Without own changes a result still shows those of others."""
        return self._next if self._changes else self._next - 1

    def collected(self) -> int:
        """The batch that must be written before everything so far is on the disk."""
        with self._state:
            return self._due()

    def wake(self, heads: Sequence[AttemptRow]) -> None:
        """Called by `work`: notify these waiters when it has ended."""
        self._heads += heads

    def refuse_if_failed(self) -> None:
        if self.refusal is not None:
            raise type(self.refusal)(str(self.refusal))  # a new one: an error that is raised again grows

    # Writing.

    def write(self, due: int) -> None:
        """Return when batch `due` is on the disk.

        A thread that waits for the lock while another one syncs finds its changes in the batch that comes next, which
        it writes itself unless a third thread was faster.
        """
        with self._writing:
            if self.written < due:  # the one before has most likely written this batch, too
                self._write(lambda: None)

    def is_quick(self) -> bool:
        """Whether a write takes hardly longer than it would take to start one in another thread."""
        return self._write_ns < QUICK_NS and not self._snapshotting.locked()

    def _write(self, look: Callable[[], T]) -> T:
        """Write what was collected. `look` looks at the state that has exactly the changes up to this batch."""
        # A refusal begins under `_writing`, which the caller holds, or under `_state`: it is looked for under both.
        try:
            with self._state:
                self.refuse_if_failed()
                seen = look()
                batch = Batch(self._next, self._now(), self._changes.copy())
                self._changes.clear()  # the rows append to this very list
                self._next += 1
            sync, began = not only_ends(batch.changes), self._clock()
            self._journal.append(batch, sync)
            if sync:
                self._write_ns += (self._clock() - began - self._write_ns) / 16
            self.written = batch.number
            self._since_snapshot += len(batch.changes)
        except BaseException as error:  # an interrupt, too: the changes may be gone from memory
            self._refuse("a write failed", error)
            if not isinstance(error, Exception):
                raise  # it is the program's, and those who wait for this batch find the refusal
            raise Indeterminate(f"{self.where}: a write failed: {error}") from error
        return seen

    def _refuse(self, why: str, error: BaseException) -> None:
        # Set before the lock is left under which it happened: whoever gets that lock next finds it.
        self.refusal = self.refusal or Unavailable(
            f"{self.where}: nothing is granted, renewed or released since {why} ({error!r}). Memory differs from the "
            "disk: restart the process when the disk works"
        )

    # Snapshots.

    def wants_snapshot(self) -> bool:
        return self._is_snapshot_due() and not self._snapshotting.locked()

    def _is_snapshot_due(self) -> bool:
        return self._since_snapshot >= self._snapshot_after()

    def _snapshot_after(self) -> int:
        """After how many changes a snapshot is due."""
        return max(self.snapshot_changes, sum(map(len, self._namespaces)) // 3)

    def snapshot_if_due(self) -> None:
        """Several callers may have found that one is due: the first one makes it, and the others find it made."""
        with self._snapshotting:
            if self._is_snapshot_due():
                self._save()

    def snapshot(self) -> None:
        """Write a snapshot and delete the batches that it replaces. Batches are written meanwhile."""
        with self._snapshotting:
            self._save()

    def _save(self) -> None:
        try:
            with self._writing:
                # Everything up to this batch, and nothing of the next one: no call gets in between.
                number, now, changes = self._write(self._copied)
                self._since_snapshot = 0
            self._journal.save(number, now, self._unless_closing(changes))
            self._journal.trim(number)
        except (OSError, FencedError, _Closing):
            return  # the journal still has everything; the next snapshot is due after as many changes

    def _copied(self) -> tuple[int, int, Iterator[Change]]:
        copies = [rows.copied() for rows in self._namespaces]
        return self._next, self._now(), chain.from_iterable(copies)

    def _unless_closing(self, changes: Iterator[Change]) -> Iterator[Change]:
        for change in changes:
            if self._closing:
                raise _Closing
            yield change

    # Closing.

    def close(self) -> None:
        """Write what was collected by calls that nobody waits for any more, and release the file."""
        self._closing = True
        # In the order in which `snapshot` takes them, so neither waits for the other for ever.
        with self._snapshotting, self._writing:
            try:
                if self._changes and self.refusal is None:
                    self._write(lambda: None)
                if self.refusal is None:
                    self._journal.finish(self.written)
            except (OSError, FencedError):
                pass  # nobody waits for these changes; the next process finds a journal that was not finished
            finally:
                self.refusal = self.refusal or Unavailable(f"{self.where} is closed")
                self._journal.close()

    def _forked(self) -> None:
        """In a child: the file belongs to the parent. No lock is taken, since a thread of the parent may hold it."""
        self.refusal = Misconfigured(
            f"{self.where} belongs to the process that opened it, not to this forked child; a ledger is for one process"
        )
        self._journal.abandon()

    def _before_fork(self) -> None:
        return


class _Closing(Exception):
    """The ledger is being closed: a snapshot that is not complete is not needed."""
