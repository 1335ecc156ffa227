"""The shipped proxy in seeded worlds: its HTTP server, gate and upstream connections, and bugs that the worlds find."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from fenced.http1.connections import ServerConnection
from fenced.proxy.gate import Gate
from fenced_testkit.worlds.proxy import ProxyWorld
from tests.planted import bugs_http

WORLDS = 40
"""`make evidence` runs more."""


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """Every world loses its store and its upstream."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("alone", [False, True])
def test_nothing_stale_reaches_the_upstream_and_answers_keep_their_order(alone: bool) -> None:
    arrived = answered = 0
    for seed in range(WORLDS):
        found = ProxyWorld(seed, alone=alone).run()
        assert not found.broken, f"seed {seed}: {found.broken}"
        assert found.final, f"seed {seed}: the last holder did not get through"
        arrived, answered = arrived + found.arrived, answered + found.answered
    assert min(arrived, answered) > 10 * WORLDS  # they did happen


def test_one_seed_makes_one_world() -> None:
    assert ProxyWorld(7).run() == ProxyWorld(7).run()


def is_found(kind: type[ProxyWorld]) -> bool:
    outcomes = (kind(seed).run() for seed in range(300))
    return any(outcome.broken or not outcome.final for outcome in outcomes)


@pytest.mark.parametrize(
    "bug", [bugs_http.AnswersOutOfOrder, bugs_http.BodyIsTakenForAHead, bugs_http.KeptAfterABadLength]
)
def test_the_worlds_find_bugs_of_the_server(bug: type[ServerConnection]) -> None:
    assert is_found(type("Planted", (ProxyWorld,), {"connection_type": bug}))


def test_the_worlds_find_a_gate_that_keeps_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "_blocking", lambda *_: [])
    assert is_found(ProxyWorld)
