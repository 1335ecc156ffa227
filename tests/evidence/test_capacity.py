"""docs/capacity.md calculates with figures that `make evidence` compares with measured ones: all of them hold."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from evidence import capacity
from fenced_testkit.servers import ServiceServer

DOCS = Path(__file__).parents[2] / "docs"
SAID = {
    "renewals of a lease in each ttl": "3.25 L / T",
    "memory of an instance without leases, MB": "40 MB + ",
    "memory of a lease, KB": "1 KB L",
    "memory of a waiter, KB": "9 KB W",
    "seconds to start with a million attempts": "5 µs for each attempt",
    "renewals a second in requests of 5,000": "50,000 renewals",
    "grants a second in batches of 1,000": "30,000 grants",
}


@pytest.mark.parametrize("figure", capacity.PAGE)
def test_a_figure_of_the_page_is_there_and_was_measured_to_hold(figure: str) -> None:
    found = json.loads((DOCS / "evidence" / "capacity.json").read_text())["capacity"]["page"][figure]
    assert SAID[figure] in (DOCS / "capacity.md").read_text()
    assert (found["says"], found["holds"]) == (capacity.PAGE[figure], True)


@pytest.mark.parametrize(
    ("figure", "measured", "holds"),
    [
        ("memory of a lease, KB", 0.99, True),
        ("memory of a lease, KB", 1.01, False),
        ("grants a second in batches of 1,000", 29_999, False),
        ("renewals of a lease in each ttl", 3.6, False),
        ("renewals of a lease in each ttl", 3.1, True),
    ],
)
def test_a_figure_that_does_not_hold_is_found(figure: str, measured: float, holds: bool) -> None:
    assert capacity.holds(figure, measured) is holds


def test_the_formula_of_renewals_is_that_of_the_client() -> None:
    assert capacity.renewals_a_second(1, 1.0) == pytest.approx(capacity.RENEWALS_OF_A_LEASE, rel=0.01)


def test_leases_are_granted_and_renewed_in_large_requests(tmp_path: Path) -> None:
    """Whether the measurement still speaks the service's language."""
    attempts = [f"{number:032x}" for number in range(20)]
    with ServiceServer(tmp_path) as server, contextlib.closing(capacity.Caller(server)) as call:
        capacity.granted(call, attempts)
        capacity.renewed(call, attempts, 10)
        assert capacity.requests(call) == 2
