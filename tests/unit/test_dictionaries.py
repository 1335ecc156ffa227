"""The rows of the memory authority and the ledger."""

from __future__ import annotations

import random

from fenced.authorities.shared.dictionaries import MemoryRows
from fenced.authorities.shared.rows import AttemptRow, names_json


def test_names_are_in_the_order_of_their_bytes() -> None:
    """Whatever came and went between two surveys."""
    chance = random.Random(1)
    rows, taken, queued = MemoryRows(), dict[str, AttemptRow](), dict[str, AttemptRow]()
    for step in range(2000):
        name = "".join(chance.choices("a/é\U0001f512\uffff", k=3))
        row = AttemptRow(str(step), 0, "granted", names_json((name,)), 1, 0, step + 1, 1, 0, 0, "", "{}")
        waits = chance.random() < 0.5
        held, add, remove = (queued, rows.enqueue, rows.dequeue) if waits else (taken, rows.grant, rows.free)
        if name in held:
            remove(held.pop(name))
        else:
            held[name] = row
            add(row)
        if step % 7 == 0:
            after, limit = "".join(chance.choices("a/é\U0001f512\uffff", k=2)), chance.choice((1, 5, 1000))
            expected = sorted(
                (each for each in {*taken, *queued} if each.encode() > after.encode()), key=str.encode
            )
            assert rows.names(after, limit) == expected[:limit]
