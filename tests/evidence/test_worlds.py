"""The evidence of the worlds: new seeds of every kind, and broken promises are listed, not hidden."""

import ast

import pytest

from evidence import worlds
from fenced.proxy.gate import Gate
from fenced_testkit.simulation import BACKENDS, seeds_of
from tests.simulation.planting import planted


def test_every_kind_has_its_own_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "code_of", lambda kind: "this")
    found = {kind: worlds.run(kind, 1) for kind in worlds.KINDS}
    assert all(each["broken"] == {} and each["code"] == "this" for each in found.values())
    assert found["proxy"]["counts"]["arrived"]
    assert all(found[authority]["counts"]["answers"] for authority in BACKENDS)  # its traces were checked
    assert len({seed for each in found.values() for seed in seeds_of(each["seeds"])}) == len(worlds.KINDS)


def test_a_broken_promise_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    unfenced = next(site_type for site_type in planted() if site_type.__name__ == "NoFence")
    monkeypatch.setattr(worlds, "site_of", lambda authority: unfenced)
    _, broken = worlds.play("memory", range(20))
    assert set(broken) <= {str(seed) for seed in range(20)}
    assert any(why.startswith("I3 ") for why in broken.values()), broken


def test_a_broken_promise_of_the_proxy_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "_blocking", lambda *_: [])
    _, broken = worlds.play("proxy", range(100))
    assert any("arrived while" in why for why in broken.values()), broken


def test_runs_of_the_same_code_are_added_and_others_replaced() -> None:
    before = {
        "worlds": 2,
        "code": "a",
        "seeds": "1-2",
        "seconds": 3,
        "broken": {"1": "I3"},
        "counts": {"grants": 5, "overtaken": 1},
    }
    after = {**before, "seeds": "7-8", "broken": {}, "counts": {"grants": 4}}
    assert worlds.together(None, after) == after
    assert worlds.together({**before, "code": "b"}, after) == after
    assert worlds.together(before, after) == {
        "worlds": 4,
        "code": "a",
        "seeds": "1-2, 7-8",
        "seconds": 6,
        "broken": {"1": "I3"},
        "counts": {"grants": 9, "overtaken": 1},
    }


def test_the_digest_is_of_what_the_code_does() -> None:
    said = """'Says.'\nclass A:\n    'Says.'\n    x: int = 1  # says\n    'Says.'\n"""
    assert worlds._statements(ast.parse(said)) == worlds._statements(ast.parse("class A:\n    x: int = 1"))
    assert worlds._statements(ast.parse(said)) != worlds._statements(ast.parse("class A:\n    x: int = 2"))


def test_the_digest_is_of_the_code_that_runs_in_these_worlds() -> None:
    assert worlds.code_of("proxy") == worlds.code_of("proxy") != worlds.code_of("memory")
