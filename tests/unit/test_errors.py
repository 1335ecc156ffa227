"""Errors cross process boundaries: a worker of a process pool raises them to its parent."""

import pickle
import pkgutil
from importlib import import_module

import fenced
from fenced import errors
from fenced.http.kept import KeptReply
from fenced.http.receiving import Replayed
from fenced.values.model import HeldBy, Holder, Stamp

STAMP = Stamp("00000000000000aa", ("a",), 7, 1, "0" * 32)
FIELDS: dict[type[errors.FencedError], dict[str, object]] = {
    errors.NotGranted: {"held_by": HeldBy(Holder("1", "label", "host", 1), 7, "0" * 32, 1.5), "ahead": 3},
    errors.LeaseLost: {"reason": "expired"},
    errors.NotEnoughTime: {"remaining": 0.5, "need": 2.0},
    errors.Refused: {"name": "a", "stamp": STAMP, "mark": 9, "holder": "1" * 32},
}
MADE = {Replayed: Replayed(KeptReply(200, (), b"ok"))}
"""Errors with another constructor."""


def tree(kind: type[errors.FencedError]) -> list[type[errors.FencedError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in tree(child))]


def made(kind: type[errors.FencedError]) -> errors.FencedError:
    if kind in MADE:
        return MADE[kind]
    fields: dict[str, object] = {}
    for parent in reversed(kind.__mro__):
        fields |= FIELDS.get(parent, {})
    error = kind("what happened", **fields)
    assert {name: getattr(error, name) for name in fields} == fields
    return error


def test_every_error_survives_pickling() -> None:
    for module in pkgutil.walk_packages(fenced.__path__, "fenced."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    for kind in set(tree(errors.FencedError)):
        error = made(kind)
        error.add_note("and when")
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert str(again) == str(error)
        assert vars(again) == vars(error)
        assert again.__notes__ == ["and when"]
