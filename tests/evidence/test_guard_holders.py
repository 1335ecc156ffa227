"""The judge of eight holders, in both directions."""

import pytest

from evidence.guard_holders import Admitted, judge


@pytest.mark.parametrize(
    ("admitted", "wanted"),
    [
        ([(2, 5), (1, 5), (3, 9)], (0, 0)),
        ([(1, 5), (2, 9), (3, 7)], (1, 0)),
        ([(1, 5), (2, 6), (2, 7)], (0, 1)),
        ([(1, 5), (4, 6)], (0, 1)),
    ],
    ids=["orderly", "a token falls", "two writes have one version", "a write is gone"],
)
def test_the_judge(admitted: list[tuple[int, int]], wanted: tuple[int, int]) -> None:
    found = judge([Admitted(*each) for each in admitted], last=3)
    assert (found["tokens_fell"], found["lost"]) == wanted
