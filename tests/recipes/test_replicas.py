"""A primary and versioned replicas: 500 worlds without a broken promise, and ten classical mistakes found."""

from __future__ import annotations

import pytest

import fenced
from fenced.recipes.replicas import Behind, Entry, NoMajority, Primary, ReplicaLog, drive
from tests.recipes.replica_worlds import MISTAKES, Disk, ReplacesLate, ReplicaWorld

FOUND_IN = {"longest log wins": 208, "no open entry": 156, "promises are not durable": 177}
"""The world in which it was found, tried first. A change of the code may make it another one."""


def test_nothing_that_was_acknowledged_is_lost_or_moves() -> None:
    counts = ReplicaWorld(0).counts
    for seed in range(500):
        world = ReplicaWorld(seed)
        assert world.run() == "", f"seed {seed}"
        counts += world.counts
    assert all(
        counts[what] > 500 for what in ("acknowledged", "partitions", "restarts", "refused", "rebuilt")
    ), counts


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str) -> None:
    first = FOUND_IN.get(mistake, 0)
    assert any(MISTAKES[mistake](seed).run() for seed in (first, *range(5000)))


def version(token: int) -> fenced.Stamp:
    return fenced.Stamp("0" * 16, ("log",), token, 1, f"{token:032x}")


def test_a_replica_that_was_away_is_stale_until_it_is_rebuilt() -> None:
    replicas = [ReplicaLog(Disk()) for _ in range(3)]
    primary = Primary(version(1), 3)
    drive(primary.open(), replicas)

    class Away:
        def __getattr__(self, name: str) -> object:
            raise ConnectionError("away")

    drive(primary.append(b"one"), [*replicas[:2], Away()])  # type: ignore[list-item]
    assert primary.stale == {2}
    drive(primary.append(b"two"), replicas)  # it is not asked: it would have a gap
    drive(primary.rebuild(), replicas)
    assert primary.stale == set() and primary.values == (b"one", b"two")
    later = Primary(version(2), 3)
    drive(later.open(), [Away(), *replicas[1:]])  # type: ignore[list-item]
    assert later.values == (b"one", b"two")


def test_a_deposed_primary_is_refused_and_shows_nothing() -> None:
    replicas = [ReplicaLog(Disk()) for _ in range(3)]
    old, new = Primary(version(1), 3), Primary(version(2), 3)
    drive(old.open(), replicas)
    drive(new.open(), replicas)
    with pytest.raises(fenced.StaleToken):
        drive(old.append(b"late"), replicas)
    with pytest.raises(fenced.Misuse, match="step down"):
        _ = old.values
    assert new.values == ()


def test_without_a_majority_nothing_is_acknowledged() -> None:
    replicas = [ReplicaLog(Disk()) for _ in range(3)]
    primary = Primary(version(1), 3)
    drive(primary.open(), replicas)
    primary.current = {0}
    with pytest.raises(NoMajority):
        drive(primary.append(b"one"), replicas)
    with pytest.raises(fenced.Misuse):
        drive(primary.append(b"two"), replicas)


def test_a_gap_is_refused() -> None:
    replica = ReplicaLog(Disk())
    replica.bump(version(1))
    with pytest.raises(Behind):
        replica.append(version(1), 3, (Entry(1, b"x"),))


@pytest.mark.parametrize("kind", [ReplicaLog, ReplacesLate])
def test_a_late_copy_of_an_install_removes_nothing(kind: type[ReplicaLog]) -> None:
    """The tenth mistake: it shows in a world of thousands."""
    replicas = [kind(Disk()) for _ in range(3)]
    primary = Primary(version(1), 3)
    drive(primary.open(), replicas)
    installed = primary.log
    primary.current = {0, 1}
    drive(primary.append(b"acknowledged"), replicas)
    replicas[0].install(version(1), installed)
    later = Primary(version(2), 3)
    drive(later.open(), [replicas[0], replicas[2], replicas[2]])
    assert (b"acknowledged" in later.values) is (kind is ReplicaLog)
