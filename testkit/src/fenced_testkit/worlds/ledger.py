"""The ledger in a world: its process crashes at any moment, and its disk, which keeps what was synced, may fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fenced.errors import FencedError, Misconfigured, Unavailable
from fenced.leases.rowauthority import Kind, RowAuthority, Work
from fenced.leases.rows import NS, LeaseAlgorithm
from fenced.stores.ledger.authority.authority import LedgerAuthority
from fenced.stores.ledger.authority.changes import Change
from fenced.stores.ledger.authority.journal import Batch
from fenced.stores.ledger.authority.ledger import Ledger
from fenced_testkit.stepped import Stepped
from fenced_testkit.worlds.faults import MessageServer
from fenced_testkit.worlds.memory import MemoryBackend

if TYPE_CHECKING:
    from fenced_testkit.worlds.site import Site

T = TypeVar("T")
SNAPSHOT_CHANGES = 15


class SimulatedDisk:
    """A journal that outlives the process. `fails`: the next write does not reach it."""

    def __init__(self) -> None:
        self.fails = self.finished = False
        self._batches: dict[int, str] = {}
        self._snapshot: tuple[int, str] = (0, "")

    def open(self, create: bool) -> None:
        self.fails = False

    def read(self) -> Iterator[Batch]:
        last, text = self._snapshot
        if text:
            yield Batch(*json.loads(text))
        for number, text in sorted(self._batches.items()):
            if number > last:
                yield Batch(*json.loads(text))

    def clock_ahead(self, clock: int, last: int) -> int:
        return 0

    def append(self, batch: Batch, sync: bool) -> None:
        if self.fails:
            raise Unavailable("the disk failed")
        self.finished = False
        self._batches[batch.number] = json.dumps(batch)

    def save(self, number: int, now: int, changes: Iterable[Change]) -> None:
        self._snapshot = (number, json.dumps([number, now, list(changes)]))

    def trim(self, number: int) -> None:
        for each in [each for each in self._batches if each <= number]:
            del self._batches[each]

    def has_many_segments(self) -> bool:
        return False

    def finish(self, number: int) -> None:
        self.finished = not self.fails

    def close(self) -> None:
        return

    def abandon(self) -> None:
        return


class LedgerStore(RowAuthority):
    """The calls of a world's clients on a ledger. Each returns at once; `due` is the batch that it waits for."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.rows, self.due = ledger.namespace("default", create=True)

    async def _transact(self, work: Work[T], until: float | None, kind: Kind) -> T:
        def done(algorithm: LeaseAlgorithm) -> T:
            answer, heads = work(algorithm)
            self.ledger.wake(heads)
            return answer

        answer, self.due = self.ledger.do(self.rows, done)
        return answer


class LedgerServer(MessageServer):
    """Replies when the batch of a request is on the disk."""

    def __init__(self, backend: LedgerBackend) -> None:
        super().__init__(backend.world, backend.site.network, "authority")
        self._backend = backend
        self._later: list[tuple[int, Callable[[], None]]] = []
        self._syncs = False

    def then(self, call: Callable[[], None]) -> None:
        """Call it when everything so far is on the disk; never, if the process crashes before."""
        store = self._backend.store
        if store.due <= store.ledger.written:
            call()
        else:
            self._later.append((store.due, call))
        if store.ledger.written < store.ledger.collected() and not self._syncs:
            self._syncs = True
            process = self.process
            seconds = self.world.rng.choice((0.0, 0.001, 0.01, 0.1))
            self.world.after(seconds, lambda: process.deliver(self.sync))

    def sync(self) -> None:
        self._syncs = False
        ledger = self._backend.store.ledger
        try:
            ledger.write(ledger.collected())
            if ledger.wants_snapshot():
                ledger.snapshot()
        except FencedError:
            self._backend.restart()
            return
        due, self._later = [call for number, call in self._later if number <= ledger.written], []
        for call in due:
            call()

    def _start(self) -> None:
        super()._start()
        self._later, self._syncs = [], False
        self._backend.start()

    def _serve(self, handle: Callable[[], Any], reply: Callable[[Any], None]) -> None:
        try:
            result = handle()
        except FencedError as error:
            reply(error)
        else:
            self.then(partial(reply, result))


class LedgerBackend(MemoryBackend):
    """The judge sees each decision as soon as it is on the disk."""

    name = "ledger"
    traits = LedgerAuthority.traits
    ledger_type: type[Ledger] = Ledger
    disk_type: type[SimulatedDisk] = SimulatedDisk
    server: LedgerServer
    store: LedgerStore  # type: ignore[assignment]

    def __init__(self, site: Site) -> None:
        self.disk = self.disk_type()
        super().__init__(site)
        self.server = LedgerServer(self)

    def start(self) -> None:
        """A new process reads what the disk has."""
        ledger = self.ledger_type("simulated", self.disk, lambda: int(self.world.now * NS))
        ledger.snapshot_changes = SNAPSHOT_CHANGES
        try:
            ledger.open()
        except Misconfigured as error:
            self.site.judge.broken("I12", f"the ledger cannot be read again: {error}", error)
        self.store = LedgerStore(ledger)
        self.decides = Stepped(self.store)
        ledger.write(self.store.due)
        ledger.listeners.append(self._woken)

    def faults(self) -> Sequence[Callable[[], None]]:
        return (self.restart, self._stop, self._fail)

    def restart(self) -> None:
        self._restart()

    def _stop(self) -> None:
        """As a crash, but the process writes everything and closes its journal: the next one need not skip tokens."""
        if self.server.process.alive:
            self.site.judge.say("the authority is stopped")
            self.server.sync()
        if self.server.process.alive:
            self.store.ledger.close()
            self.restart()

    def jumped(self) -> None:
        """A sweep by the next grant; then a snapshot, and a restart that reads it."""
        if self.server.process.alive:
            super().jumped()
        self.world.after(1.0, self._snapshot_and_restart)

    def raise_floor(self, above: int) -> None:
        self.decides.raise_floor(above)
        self.decided(lambda: None)

    def _snapshot_and_restart(self) -> None:
        if self.server.process.alive:
            self.site.judge.say("a snapshot")
            self.server.sync()  # a snapshot writes what was collected: the judge must know it
            self.store.ledger.snapshot()
        self.restart()

    def _fail(self) -> None:
        self.site.judge.say("the disk of the authority fails")
        self.disk.fails = True

    def decided(self, report: Callable[[], None]) -> None:
        self.server.then(report)
