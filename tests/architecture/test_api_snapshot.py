"""The public names and signatures, written down in api.txt, so that no change to them goes unseen.

After a wanted change: `make api`, and look at the diff.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

import fenced
from fenced import client, sql
from fenced.sql import clauses

SNAPSHOT = Path(__file__).with_name("api.txt")
MODULES = (
    "fenced",
    "fenced.errors",
    "fenced.events",
    "fenced.messages",
    "fenced.sql",
    "fenced.http",
    "fenced.http.aiohttp",
    "fenced.http.httpx",
    "fenced.http.requests",
    "fenced.objects",
    "fenced.dynamodb",
    "fenced.proofs",
    "fenced.django",
    "fenced.alembic",
)
ENTERING = ("__init__", "__enter__", "__exit__", "__aenter__", "__aexit__")
HANDED_OUT = re.compile(r"(Async|Sqlite)?(Lease|Transaction|Announced)|(Plain|Async)?Clause")
"""Classes that programs get and never make: how they are made is nobody's business."""
STARS = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}


def public_names(module: ModuleType) -> list[str]:
    """What `__all__` lists, and the classes and functions that are defined there."""
    defined = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return sorted({*getattr(module, "__all__", ()), *defined})


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods, properties and values of a class, inherited ones of ours too."""
    ours = [base for base in reversed(kind.__mro__) if base.__module__.partition(".")[0] == "fenced"]
    found = {name: value for base in ours for name, value in vars(base).items()}
    for name in sorted(found):
        if name in ENTERING or not name.startswith("_"):
            yield name, found[name]


def annotated(text: str, annotation: object) -> str:
    """`text: annotation`, the annotation as it stands in the source."""
    if annotation is inspect.Parameter.empty:
        return text
    return f"{text}: {getattr(annotation, '__forward_arg__', annotation)}"


def signature(function: Callable[..., object]) -> str:
    found = inspect.signature(function)
    parts: list[str] = []
    starred = False
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        text = STARS.get(parameter.kind.name, "")
        starred = starred or parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        text = annotated(text + parameter.name, parameter.annotation)
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}"
        parts.append(text)
    returns = "" if found.return_annotation is found.empty else f" -> {found.return_annotation}"
    return f"({', '.join(parts)}){returns}"


def member(name: str, value: Any) -> str | None:
    """One line about a member of a class; None for what is not part of its face."""
    match value:
        case property():
            return annotated(name, inspect.signature(value.fget).return_annotation)  # type: ignore[arg-type]
        case FunctionType():
            return f"{'async ' if inspect.iscoroutinefunction(value) else ''}{name}{signature(value)}"
        case classmethod() | staticmethod():
            return f"{type(value).__name__} {name}{signature(value.__func__)}"
        case enum.Enum():
            return f"{name} = {value.value!r}"
        case str() | int() | float():
            return f"{name} = {value!r}"
    return None


def fields(kind: type) -> Iterator[str]:
    if dataclasses.is_dataclass(kind):
        yield from (annotated(field.name, field.type) for field in dataclasses.fields(kind))
    elif issubclass(kind, tuple):
        hints = inspect.get_annotations(kind)
        yield from (annotated(name, hints[name]) for name in vars(kind)["_fields"])


def describe(name: str, value: object) -> Iterator[str]:
    if isinstance(value, type):
        bases = [base.__name__ for base in value.__bases__ if base is not object and base.__name__[0] != "_"]
        yield f"class {name}({', '.join(bases)})" if bases else f"class {name}"
        yield from (f"    {line}" for line in fields(value))
        made_by_us = dataclasses.is_dataclass(value) or HANDED_OUT.fullmatch(name)
        for key, part in members(value):
            if not (key == "__init__" and made_by_us) and (line := member(key, part)) is not None:
                yield f"    {line}"
    elif inspect.isfunction(value):
        yield f"def {name}{signature(value)}"
    elif isinstance(value, ModuleType):
        yield f"module {name}"


def render() -> str:
    lines: list[str] = []
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        lines += [f"# {module_name}", ""]
        for name in public_names(module):
            value = getattr(module, name)
            home = getattr(value, "__module__", None)
            if module_name == "fenced" and home in MODULES[1:]:
                lines.append(f"{name}: see {home}")
            else:
                lines += describe(name, value)
        lines.append("")
    return "\n".join(lines)


def test_the_public_api_is_as_written_down() -> None:
    written, found = SNAPSHOT.read_text().splitlines(), render().splitlines()
    diff = difflib.unified_diff(written, found, "api.txt", "as it is now", lineterm="", n=2)
    changed = "\n".join(diff)
    assert not changed, f"the public API changed; if that is wanted, run `make api`:\n{changed}"


TWINS = [
    (fenced.Client, fenced.AsyncClient),
    (fenced.Lease, fenced.AsyncLease),
    (fenced.Values, fenced.AsyncValues),
    (client.LeaseContext, client.AsyncLeaseContext),
    (sql.Guard, sql.AsyncGuard),
    (sql.Announced, sql.AsyncAnnounced),
    (clauses.Clause, clauses.AsyncClause),
]


def face(kind: type) -> dict[str, object]:
    """The members of a class with the names, kinds and defaults of their parameters."""
    shape: dict[str, object] = {}
    for name, value in members(kind):
        key = name.replace("__a", "__") if name in ("__aenter__", "__aexit__") else name
        if isinstance(value, FunctionType):
            parameters = inspect.signature(value).parameters.values()
            shape[key] = [(each.name, each.kind.name, each.default) for each in parameters]
        else:
            shape[key] = type(value).__name__
    return shape


@pytest.mark.parametrize("plain, twin", TWINS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_twins_are_alike(plain: type, twin: type) -> None:
    assert face(plain) == face(twin)


def test_every_async_class_has_a_twin_in_the_list() -> None:
    paired = {kind for pair in TWINS for kind in pair}
    modules = (fenced, client, sql, importlib.import_module("fenced.guarding"))
    found = {
        value
        for module in modules
        for name in public_names(module)
        if isinstance(value := getattr(module, name), type) and name.startswith("Async")
    }
    # A transaction has only its two dunders, and its constructor is nobody's business.
    assert found - paired == {sql.AsyncTransaction}


if __name__ == "__main__":
    SNAPSHOT.write_text(render())
