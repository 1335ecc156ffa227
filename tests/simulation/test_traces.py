"""The automaton of the contract finds, by the trace of a world alone, what breaks it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from fenced.leases.rows import LeaseAlgorithm
from fenced.stores.ledger.authority.ledger import Ledger
from fenced.testing.lives import Deviation
from fenced.testing.trace import Trace
from fenced_testkit.simulation import simulate
from fenced_testkit.worlds.judge import PromiseBroken
from fenced_testkit.worlds.ledger import LedgerBackend
from fenced_testkit.worlds.memory import MemoryBackend
from fenced_testkit.worlds.site import Site
from tests.planted import bugs

UNSEEN: dict[type[LeaseAlgorithm], str] = {
    bugs.Barging: "waits for it since",
    bugs.NewestFirst: "waits for it since",
    bugs.TokenAtTheQueue: "had been told",
    bugs.LockDelayIsIgnored: "keeps it until",
    bugs.BusyThoughFree: "was free",
}
"""Five bugs that a judge of tokens and holders does not see, and what the automaton says about each."""


def deviation(backend: type[MemoryBackend], seen: Callable[[Site], Trace], seeds: range) -> str:
    """What the trace of the first world that deviates says."""
    sites: list[Site] = []

    class Noted(Site):
        backend_type = backend

        def __init__(self, seed: int | str, *, keep_log: bool = False) -> None:
            super().__init__(seed, keep_log=keep_log)
            sites.append(self)

        def check_traces(self) -> None:
            return  # it is done below, also if the judge ends the world

    for seed in seeds:
        with contextlib.suppress(PromiseBroken):
            simulate(seed, Noted)
        try:
            seen(sites[-1]).check()
        except Deviation as found:
            return str(found)
    return "no world deviates"


def decisions(site: Site) -> Trace:
    assert site.backend.decisions is not None
    return site.backend.decisions


@pytest.mark.parametrize("seen", [decisions, lambda site: site.trace], ids=["decided", "seen by clients"])
@pytest.mark.parametrize("bug", UNSEEN, ids=lambda bug: bug.__name__)
def test_a_bug_is_found_by_its_trace(bug: type[LeaseAlgorithm], seen: Callable[[Site], Trace]) -> None:
    backend = type(bug.__name__, (MemoryBackend,), {"store_type": bugs.store_with(bug)})
    # Where it shows; a change of the code may make it another one.
    first = 50 if bug is bugs.TokenAtTheQueue else 0
    assert UNSEEN[bug] in deviation(backend, seen, range(first, first + 200))


def test_a_bug_of_the_ledger_is_found_by_its_trace() -> None:
    """What had been in a release: a settled attempt no longer kept its name taken."""
    ledger = type("Bug", (Ledger,), {"rows_type": bugs.SettledFreesTheName})
    backend = type("SettledFreesTheName", (LedgerBackend,), {"ledger_type": ledger})
    assert "keeps it until" in deviation(backend, decisions, range(200))


def test_a_deviation_breaks_a_promise_of_the_world() -> None:
    backend = type("Bug", (MemoryBackend,), {"store_type": bugs.store_with(bugs.BusyThoughFree)})
    with pytest.raises(PromiseBroken, match=r"T at .* was free"):
        simulate(4, type("Site", (Site,), {"backend_type": backend}))
