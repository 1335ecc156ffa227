"""Planted bugs that a world of the memory authority must find: in the store, the guard, the core, the servers."""

from __future__ import annotations

from dataclasses import replace

from fenced.core.acquiring import LeaseEngine
from fenced.core.holding import GrantState
from fenced.leases.dictionaries import MemoryRows
from fenced.leases.rows import LeaseAlgorithm
from fenced.stores.memory.guard import MemoryValues
from fenced_testkit.worlds.faults import Faults, MessageServer
from fenced_testkit.worlds.memory import MemoryBackend
from fenced_testkit.worlds.site import Site
from tests.planted import bugs
from tests.simulation.planting import with_backend


class Restarts(Site):
    """A site whose servers restart often, for bugs that show only then."""

    def draw_faults(self) -> Faults:
        return replace(super().draw_faults(), server_fault_every=1.0)


class ForgetfulServer(MessageServer):
    """Loses what it should have had on its disk."""

    def __init__(self, origin: MessageServer, forget: object) -> None:
        super().__init__(origin.world, origin.network, origin.name)
        self._forget = forget

    def _start(self) -> None:
        super()._start()
        self._forget()  # type: ignore[operator]


class ForgetfulBackend(MemoryBackend):
    """After a restart the tokens begin again."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.server = ForgetfulServer(self.server, self._forget)

    def _forget(self) -> None:
        self.store.rows.token = 0


class CounterIsNotDurable(Restarts):
    """After a restart the tokens begin again."""

    backend_type = ForgetfulBackend


class MarksAreNotDurable(Restarts):
    """After a restart the guard starts with no marks."""

    def __init__(self, seed: int | str, *, keep_log: bool = False) -> None:
        super().__init__(seed, keep_log=keep_log)
        self.resource = ForgetfulServer(self.resource, self._forget)

    def _forget(self) -> None:
        for name in self.resource_names:
            if f"n/{name}" in self.guard.cells.blobs:
                bugs.put(self.guard, name, mark=None)


class CheckThenApply(Site):
    """The guard looks at the mark, and applies the write a little later."""

    def write(self, stamp, name, value):  # type: ignore[no-untyped-def]
        result = super().write(stamp, name, value)
        delay = self.world.rng.uniform(0.0, 0.5)
        self.world.after(delay, lambda: self._apply(name, value))
        return result

    def _apply(self, name: str, value: str) -> None:
        bugs.put(self.guard, name, value=value.encode())


class NothingAnnounced(Site):
    """Writes are fenced, reads are not: the textbook guard."""

    announces = False


class LosingAnswers(MemoryBackend):
    """An ask is tried again after a second. So if an answer was lost, the next one tells of a quarter of the ttl."""

    ttls = (1.3,)


class Losing(Site):
    """Many messages are lost, and none is late."""

    backend_type = LosingAnswers
    waits = (None,)

    def draw_faults(self) -> Faults:
        return replace(super().draw_faults(), loss=0.3, delay_max=0.002)


def with_store(bug: type[LeaseAlgorithm] | type[MemoryRows]) -> type[Site]:
    return with_backend(bug, type(bug.__name__, (MemoryBackend,), {"store_type": bugs.store_with(bug)}))


def with_guard(bug: type[MemoryValues]) -> type[Site]:
    return type(bug.__name__, (Site,), {"guard_type": bug, "__doc__": bug.__doc__})


def with_engine(bug: type[LeaseEngine]) -> type[Site]:
    return type(bug.__name__, (Site,), {"engine_type": bug, "__doc__": bug.__doc__})


def with_hold(bug: type[GrantState], site_type: type[Site] = Site) -> type[Site]:
    return type(bug.__name__, (site_type,), {"engine_type": bugs.engine_with(bug), "__doc__": bug.__doc__})


PLANTED: list[type[Site]] = [
    with_guard(bugs.NoFence),
    with_guard(bugs.StrictlyGreater),
    with_guard(bugs.MarkIsOnlyRead),
    with_guard(bugs.AnnouncingDoesNothing),
    NothingAnnounced,
    CheckThenApply,
    MarksAreNotDurable,
    CounterIsNotDurable,
    with_store(bugs.ReleaseDeletesTheCounter),
    with_store(bugs.RenewalRevives),
    with_store(bugs.AnybodyReleases),
    with_store(bugs.EveryAskIsNew),
    with_store(bugs.NoTombstone),
    with_store(bugs.LapsedWaitersAreGranted),
    with_store(bugs.DeadWaitersBlock),
    with_store(bugs.Barging),
    with_store(bugs.KeptNamesAreFreed),
    with_store(bugs.LockDelayIsIgnored),
    with_hold(bugs.DeadlineFromTheReply),
    with_hold(bugs.LossIsNotFinal),
    with_hold(bugs.NoMargin),
    with_hold(bugs.MaxHoldIsForgotten),
    with_hold(bugs.RenewedByTheWholeTtl, Losing),
    with_engine(bugs.AtLeastForIsForgotten),
    with_engine(bugs.InterruptedIsForgotten),
    with_engine(bugs.InterruptedWaitsForTheServer),
    with_engine(bugs.RenewalIsTriedOnce),
    with_engine(bugs.CrossedRenewalDropsTheLease),
    with_engine(bugs.TheLoopRenews),
    with_engine(bugs.UnavailableIsBelieved),
    with_engine(bugs.KeeperStumbles),
    with_engine(bugs.NewAttemptEachTime),
    with_engine(bugs.GivenUpIsForgotten),
    with_engine(bugs.WithdrawalIsWaitedFor),
]
