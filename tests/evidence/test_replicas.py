"""The example of replicas in processes: a replica is killed, and the primary is cut off from the authority, or from the
replicas. Each time another one leads, and what was acknowledged stays.
"""

from __future__ import annotations

import pytest

from evidence.replicas import (
    REPLICA_KILLED,
    WITHOUT_AUTHORITY,
    WITHOUT_REPLICAS,
    broken_promises,
    storm,
)


def test_a_primary_that_is_cut_off_is_deposed_and_changes_nothing() -> None:
    found = storm(0, [REPLICA_KILLED, WITHOUT_AUTHORITY, WITHOUT_REPLICAS])
    assert found["broken"] == []
    assert found["faults"]["cut off from the authority, refused by a replica"] == 1
    assert found["stale_replicas_rebuilt"] >= 1
    assert found["primaries"] >= 3


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["a"], "b is lost"),
        (["a", "b", "b"], "b is there 2 times"),
        (["a", "x", "b"], "b has moved from 1 to 2"),
    ],
)
def test_a_broken_promise_is_found(values: list[str], said: str) -> None:
    assert broken_promises([("a", 0), ("b", 1)], values) == [said]
    assert broken_promises([("a", 0), ("b", 1)], ["a", "b", "c"]) == []
