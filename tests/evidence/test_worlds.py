"""The evidence of the worlds: new seeds of every authority, and broken promises are listed, not hidden."""

import pytest

from evidence import worlds
from fenced_testkit.simulation import BACKENDS, seeds_of
from tests.simulation.planting import planted


def test_every_authority_has_its_own_seeds() -> None:
    found = worlds.run(worlds=1)
    assert found.pop("worlds_each") == 1
    assert found.keys() == BACKENDS.keys()
    assert all(each["broken"] == {} and each["counts"]["grants"] for each in found.values())
    assert len({seed for each in found.values() for seed in seeds_of(each["seeds"])}) == len(BACKENDS)


def test_a_broken_promise_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    unfenced = next(site_type for site_type in planted() if site_type.__name__ == "NoFence")
    monkeypatch.setattr(worlds, "site_of", lambda authority: unfenced)
    _, broken = worlds._run_chunk("memory", range(20))
    assert set(broken) <= {str(seed) for seed in range(20)}
    assert any(why.startswith("I3 ") for why in broken.values()), broken
