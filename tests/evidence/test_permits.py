"""Contenders for three permits in processes, of which some are killed; and what the judge finds in what they say.

What a permit costs among few and many is measured by `make evidence`.
"""

from __future__ import annotations

import pytest

from evidence.permits import LIMIT, Said, judged, storm


def test_no_fourth_is_inside_while_contenders_are_killed(redis_url: str) -> None:
    found = storm(redis_url, kills=4, processes=4)
    assert found["broken"] == []
    assert (found["contenders"], found["kills"]) == (16, 4)
    assert found["served"] > 0
    assert found["processes_that_ended_by_themselves"] == 0


def _visit(turn: int, at: float, left: float | None) -> list[Said]:
    permit = f"pool#{turn}"
    said = [Said("granted", permit, turn, turn, at), Said("in", permit, turn, turn, at)]
    return said if left is None else [*said, Said("out", permit, turn, turn, left)]


@pytest.mark.parametrize(("killed_at", "most"), [(3.5, 4), (2.5, 3)])
def test_a_fourth_is_found_also_if_it_was_killed(killed_at: float, most: int) -> None:
    """Turn 1 does not say when it leaves: it was inside until it was killed."""
    killed = (_visit(1, 1.0, None), killed_at)
    others = [(_visit(turn, 1.0 + turn / 2, 9.0), 10.0) for turn in (2, 3)]
    found = judged([killed, *others, (_visit(4, 3.0, 9.0), 10.0)])
    assert found["most_inside_at_once"] == most
    assert found["broken"] == ([] if most == LIMIT else ["4 were inside at once"])


def test_a_permit_that_passes_by_an_earlier_turn_is_found() -> None:
    found = judged([(_visit(2, 1.0, 2.0), 9.0), (_visit(1, 3.0, 4.0), 9.0)])
    assert found["broken"] == ["turn 1 was granted pool#1 after turn 2"]
