"""The worlds: thousands without a broken promise, each the same every time, and every planted bug found."""

import hashlib

import pytest

from fenced_testkit.simulation import BACKENDS, fresh_seeds, main, run_worlds, seeds_of, simulate, site_of
from fenced_testkit.worlds.judge import PromiseBroken
from fenced_testkit.worlds.site import Site
from tests.codebase import digest
from tests.simulation.planting import planted

FIXED = 60
"""The worlds 0 to 59 of each authority run every time: they must show enough of everything."""
CHUNK = 50
FRESH = {
    "memory": 50,
    "ledger": 250,
    "redis": 100,
    "redis-cluster": 100,
    "etcd": 150,
    "zookeeper": 100,
    "service": 150,
}
"""How many new worlds run besides, by how intricate the code is that runs in them and by what they cost. `make evidence
ARGS=worlds` plays ten thousand of each."""
CHUNKS = [(authority, part) for authority in BACKENDS for part in range(FRESH[authority] // CHUNK)]
STRONG = (
    "acknowledged",
    "refused",
    "overtaken",
    "unavailable",
    "not granted",
    "applied already",
    "interrupted",
)
"""Sixty worlds in which one of these hardly happened would prove little."""
FOUND_IN = {
    "AnsweredBeforeTheSync": 6,
    "AnyMemberConfirms": 14,
    "BrokenMeansNothingHappened": 12,
    "CrossedRenewalDropsTheLease": 29,
    "DeadlineFromTheReply": 8,
    "DeadlineFromTheReply_service": 11,
    "GoesOnAfterAFailedWrite": 15,
    "KeptNamesAreFreed": 7,
    "LateResponseAnswersTheNext": 7,
    "LossIsNotFinal": 42,
    "MarksAreNotDurable": 9,
    "NoMargin": 11,
    "NoTombstone": 11,
    "NothingAnnounced": 9,
    "OpenConnectionsAreBelieved": 7,
    "RenewalRevives": 21,
    "RepliesAreNotMatched": 9,
    "SettledIsForgotten": 9,
    "SweptTwice": 29,
    "TheLoopRenews": 8,
    "UnavailableIsBelieved": 20,
    "UnknownIsAnsweredAsNo": 103,
}
"""The world in which a planted bug was found, tried before the others. A change of the code may make it another one."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("authority", BACKENDS)
def test_no_promise_is_broken(authority: str) -> None:
    counts, _ = run_worlds(authority, range(FIXED))
    assert all(counts.get(what, 0) >= 3 for what in STRONG), counts


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("authority", "part"), CHUNKS)
def test_no_promise_is_broken_in_worlds_of_this_code_alone(authority: str, part: int) -> None:
    """Any change of the code draws other ones. The message of a failure names its seed, and how to replay it."""
    drawn = hashlib.sha256(digest() + f"{authority} {part}".encode()).digest()
    first = 10**14 + int.from_bytes(drawn[:8]) % (9 * 10**14)
    run_worlds(authority, range(first, first + CHUNK))


@pytest.mark.parametrize("authority", BACKENDS)
def test_one_seed_one_world(authority: str) -> None:
    site_type = site_of(authority)
    for seed in range(3):
        first, second = simulate(seed, site_type, keep_log=True), simulate(seed, site_type, keep_log=True)
        assert first.log == second.log
        assert first.log


def test_seeds_are_read() -> None:
    assert seeds_of("7") == [7]
    assert seeds_of("1-3,9") == [1, 2, 3, 9]


def test_fresh_seeds_are_printed_before_they_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fresh", "--count", "2"]) == 0
    named, summary = capsys.readouterr().out.splitlines()
    first, last = seeds_of(named.removeprefix("fresh seeds: "))
    assert summary.startswith("2 worlds, no promise broken") and first + 1 == last
    assert main([str(first), str(last)]) == 0
    assert capsys.readouterr().out.splitlines() == [summary]
    assert first not in fresh_seeds(1000)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("site_type", planted(), ids=lambda site_type: site_type.__name__)
def test_planted_bug_is_found(site_type: type[Site]) -> None:
    for seed in (FOUND_IN.get(site_type.__name__, 0), *range(200)):
        try:
            simulate(seed, site_type)
        except PromiseBroken:
            return
    pytest.fail(f"{site_type.__name__} was not found in 200 worlds")
