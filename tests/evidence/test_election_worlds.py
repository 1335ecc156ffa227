"""Worlds of elections: no promise broken in a hundred, and planted mistakes found."""

from __future__ import annotations

import pytest

from evidence.elections import worlds


def test_each_term_has_one_leader_and_followers_obey_none_that_is_over() -> None:
    counts, broken = worlds.run(range(100))
    assert broken == {}
    assert all(counts[what] > 20 for what in ("terms", "obeyed", "wishes", "lost", "refused by a follower"))


@pytest.mark.parametrize(
    "mistake, promise",
    list(zip(worlds.MISTAKES, ("E2", "E2", "E1"), strict=True)),
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_planted_mistake_is_found(mistake: type[worlds.ElectionSite], promise: str) -> None:
    found = (why for seed in range(300) for why in worlds.run([seed], mistake)[1].values())
    assert next(found, "nothing").startswith(f"{promise} ")
