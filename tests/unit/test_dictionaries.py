"""The rows of the memory authority and the ledger."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from fenced.leases.dictionaries import MemoryRows
from fenced.leases.rows import AttemptRow, names_json
from fenced.stores.ledger.authority.changes import MANY, ROWS, RecordedRows


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


def test_long_leases_do_not_stop_the_sweep() -> None:
    """They came first, and there are more of them than one sweep checks."""
    rows = MemoryRows()
    for each in range(30):
        forget = 100 if each < 20 else 1
        rows.put(AttemptRow(str(each), 0, "granted", "[]", 1, 0, 0, 1, 0, forget, "", "{}"))
    found = [rows.overdue(now=50, limit=10) for _ in range(3)]
    assert [len(each) for each in found] == [0, 0, 10]


@pytest.mark.parametrize("count", [1, 2, ROWS, ROWS + 1])
def test_a_snapshot_has_every_row(count: int) -> None:
    """Also where all values of a column are the same, which are written once."""
    rows, again = (RecordedRows("default", "realm", 0, []) for _ in range(2))
    states = ("released", "expired")
    for each in range(count):
        names, holder = names_json((f"orders/{each}",)), f"holder {each % 3}"
        rows.put(AttemptRow(f"{each:032x}", 0, states[each % 2], names, 9, 0, 0, each, 7, 8, "", holder))
    for _, verb, *arguments in json.loads(json.dumps(list(rows.copied()))):
        if verb != "namespace":
            again.redo(verb, arguments)
    assert again._attempts == rows._attempts  # and in the same order
    assert {type(row) for row in again._attempts.values()} == {AttemptRow}


@pytest.mark.parametrize("damage", [lambda columns: columns.pop(), lambda columns: columns[3].append("")])
def test_rows_of_another_shape_are_refused(damage: Callable[[list[list[Any]]], object]) -> None:
    rows = RecordedRows("default", "realm", 0, [])
    columns: list[list[Any]] = [["a", "b"], [0], ["released"], ["[]", "[]"], *[[0]] * 6, [""], [0]]
    damage(columns)
    with pytest.raises(ValueError, match=r"column|argument"):
        rows.redo("rows", [["h"], columns])


def test_ids_of_deleted_attempts_are_dropped() -> None:
    """Also while the client asks again and again, and long leases came before what it never settles."""
    rows = RecordedRows("default", "realm", 0, [])
    for number in range(1, 1000):
        row = AttemptRow(str(number), 0, "granted", "[]", 1, 0, 0, number, 0, 0, "", "{}")
        rows.grant(row)
        rows.count("series", number, 0, row.id, number)
        if number > 5:
            rows.forget(row)
    remembered = rows.series["series"].attempts
    assert list(remembered)[:5] == [1, 2, 3, 4, 5]
    assert len(remembered) <= 2 * 5 + MANY + 1
