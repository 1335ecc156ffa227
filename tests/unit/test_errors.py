"""Errors cross process boundaries: a worker of a process pool raises them to its parent."""

import pickle

import pytest

from fenced import errors
from fenced.model import HeldBy, Holder, Stamp

STAMP = Stamp("00000000000000aa", ("a",), 7, 1, "0" * 32)
FIELDS: dict[type[errors.FencedError], dict[str, object]] = {
    errors.NotGranted: {"held_by": HeldBy(Holder("1", "label", "host", 1), 7, "0" * 32, 1.5), "ahead": 3},
    errors.LeaseLost: {"reason": "expired"},
    errors.NotEnoughTime: {"remaining": 0.5, "need": 2.0},
    errors.Refused: {"name": "a", "stamp": STAMP, "mark": 9, "holder": "1" * 32},
}


def tree(kind: type[errors.FencedError]) -> list[type[errors.FencedError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in tree(child))]


@pytest.mark.parametrize("kind", sorted(set(tree(errors.FencedError)), key=str))
def test_every_error_survives_pickling(kind: type[errors.FencedError]) -> None:
    fields: dict[str, object] = {}
    for parent in reversed(kind.__mro__):
        fields |= FIELDS.get(parent, {})
    error = kind("what happened", **fields)
    error.add_note("and when")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == "what happened"
    assert {name: getattr(again, name) for name in fields} == fields
    assert again.__notes__ == ["and when"]
