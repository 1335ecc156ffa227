"""The model of the protocol: every world of it was visited, and no promise is broken but where we say so."""

import pytest

from tests.proofs.modelled import MISTAKES, Setting
from tests.proofs.protocol import search
from tests.proofs.settings import HOLDS, LIMITS, WRONG

pytestmark = pytest.mark.xdist_group("proofs")


@pytest.mark.parametrize("setting", HOLDS, ids=lambda setting: setting.what)
def test_every_promise_is_kept(setting: Setting) -> None:
    """The number of worlds is on the page. A model that changes changes it: then read the page again."""
    found = search(setting)
    assert not found.story
    assert found.states == setting.states


@pytest.mark.parametrize("setting", WRONG, ids=lambda setting: " and ".join(setting.mistakes))
def test_a_planted_mistake_breaks_a_promise(setting: Setting) -> None:
    found = search(setting)
    assert found.broken, f"{found.states} worlds, and no promise is broken"


def test_every_mistake_is_planted() -> None:
    assert {mistake for setting in WRONG for mistake in setting.mistakes} == set(MISTAKES)


@pytest.mark.parametrize("setting", [each for limit in LIMITS.values() for each in limit], ids=str)
def test_a_limit_is_one(setting: Setting) -> None:
    assert search(setting).broken in ("an acknowledged update is lost", "B holds the lease, and is refused")


def test_a_story_is_told_in_words() -> None:
    [setting] = next(iter(LIMITS.values()))
    assert search(setting).story == (
        "A asks",
        "A is granted token 1",
        "A's announcement arrives: admitted",
        "A reads",
        "A's write 1 arrives: admitted",
        "A's write 2 arrives: admitted",
        "a copy of A's write 1 arrives: admitted",
        "an acknowledged update is lost",
    )
