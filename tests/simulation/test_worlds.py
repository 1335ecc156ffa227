"""The worlds: thousands without a broken promise, each the same every time, and every planted bug found."""

import pytest

from fenced.authorities.memory import MemoryStore
from fenced.core.holding import GrantState
from fenced.guards.memory import MemoryGuard
from fenced.testing.judging import PromiseBroken
from fenced.testing.simulation import SimulatedServer, Site, seeds_of, simulate
from tests.planted import bugs

SEEDS = 5000
CHUNK = 250


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_promise_is_broken(first: int) -> None:
    for seed in range(first, first + CHUNK):
        simulate(seed)


def test_faults_are_strong_enough() -> None:
    """A run in which nobody was overtaken, refused or cut off would prove nothing."""
    counts: dict[str, int] = {}
    for seed in range(150):
        for what, count in simulate(seed).counts.items():
            counts[what] = counts.get(what, 0) + count
    for what in ("acknowledged", "refused", "overtaken", "unavailable", "not granted", "applied already"):
        assert counts.get(what, 0) >= 10, (what, counts)


@pytest.mark.parametrize("seed", range(20))
def test_one_seed_one_world(seed: int) -> None:
    first, second = simulate(seed, tell=True), simulate(seed, tell=True)
    assert first.log == second.log
    assert first.log


def test_seeds_are_read() -> None:
    assert seeds_of("7") == [7]
    assert seeds_of("1-3,9") == [1, 2, 3, 9]


class Restarts(Site):
    """A site whose servers restart often, for bugs that show only then."""

    def __init__(self, seed: int | str, *, tell: bool = False) -> None:
        super().__init__(seed, tell=tell)
        self.faults.server_restart_every = 3.0


class ForgetfulServer(SimulatedServer):
    """Loses what it should have had on its disk."""

    def __init__(self, origin: SimulatedServer, forget: object) -> None:
        super().__init__(origin.world, origin.network, origin.name)
        self._forget = forget

    def _start(self) -> None:
        super()._start()
        self._forget()  # type: ignore[operator]


class CounterIsNotDurable(Restarts):
    """After a restart the tokens begin again."""

    def __init__(self, seed: int | str, *, tell: bool = False) -> None:
        super().__init__(seed, tell=tell)
        self.authority = ForgetfulServer(self.authority, self._forget)

    def _forget(self) -> None:
        self.store.ledger.token = 0


class MarksAreNotDurable(Restarts):
    """After a restart the guard starts with no marks."""

    def __init__(self, seed: int | str, *, tell: bool = False) -> None:
        super().__init__(seed, tell=tell)
        self.resource = ForgetfulServer(self.resource, self._forget)

    def _forget(self) -> None:
        self.guard.marks.clear()


class CheckThenApply(Site):
    """The guard looks at the mark, and applies the write a little later."""

    def write(self, stamp, name, value):  # type: ignore[no-untyped-def]
        result = super().write(stamp, name, value)
        delay = self.world.rng.uniform(0.0, 0.5)
        self.world.after(delay, lambda: self._apply(name, value))
        return result

    def _apply(self, name: str, value: str) -> None:
        held = self.guard.values[name]
        self.guard.values[name] = type(held)(value, held.version)


class NothingAnnounced(Site):
    """Writes are fenced, reads are not: the textbook guard."""

    announces = False


def with_store(bug: type[MemoryStore]) -> type[Site]:
    return type(bug.__name__, (Site,), {"store_type": bug})


def with_guard(bug: type[MemoryGuard]) -> type[Site]:
    return type(bug.__name__, (Site,), {"guard_type": bug})


def with_hold(bug: type[GrantState]) -> type[Site]:
    return type(bug.__name__, (Site,), {"desk_type": bugs.desk_with(bug)})


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
    with_hold(bugs.DeadlineFromTheReply),
    with_hold(bugs.LossIsNotFinal),
    with_hold(bugs.NoMargin),
    *(
        type(bug.__name__, (Site,), {"desk_type": bug})
        for bug in (bugs.NewAttemptEachTime, bugs.GivenUpIsForgotten, bugs.WithdrawalIsWaitedFor)
    ),
]


@pytest.mark.parametrize("site_type", PLANTED, ids=lambda site_type: site_type.__name__)
def test_planted_bug_is_found(site_type: type[Site]) -> None:
    for seed in range(200):
        try:
            simulate(seed, site_type)
        except PromiseBroken:
            return
    pytest.fail(f"{site_type.__name__} was not found in 200 worlds")
