"""The public names and signatures, written down in api.txt, so that no change to them goes unseen.

After a wanted change: `make api`, and look at the diff.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

import fenced
from fenced.client import contexts, decorating, once
from fenced.sql import clauses
from release import twins as generated

SNAPSHOT = Path(__file__).with_name("api.txt")
MODULES = (
    "fenced",
    "fenced.errors",
    "fenced.events",
    "fenced.metrics",
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
    "fenced.fastapi",
    "fenced.alembic",
    "fenced.celery",
    "fenced.redis",
    "fenced.etcd",
    "fenced.zookeeper",
    "fenced.files",
    "fenced.pauses",
    "fenced.work",
    "fenced.recipes.convergent",
    "fenced.recipes.election",
    "fenced.recipes.permits",
    "fenced.recipes.replicas",
    "fenced.testing",
    "fenced_testkit",
)
INTERNAL = set(
    "__main__ cli client core diagnosis drills guards http1 leases monitoring net proxy runtime service stores "
    "values".split()
)
"""Modules at the top that a program does not import: what they offer is in the others."""
NEED_A_PACKAGE = {
    "fenced.alembic": "alembic",
    "fenced.celery": "celery",
    "fenced.django": "django",
    "fenced.fastapi": "fastapi",
    "fenced.etcd": "hpack",
    "fenced.http.aiohttp": "aiohttp",
    "fenced.http.httpx": "httpx",
    "fenced.http.requests": "requests",
    "fenced.redis": "redis",
}
ENTERING = ("__init__", "__call__", "__enter__", "__exit__", "__aenter__", "__aexit__")
HANDED_OUT = re.compile(r"(Async|Sqlite)?(Lease|Transaction|Announced)|(Plain|Async)?Clause")
"""Classes that programs get and never make: how they are made is nobody's business."""
STARS = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}


def public_names(module: ModuleType) -> list[str]:
    return sorted(module.__all__)


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


def test_every_module_is_public_or_internal() -> None:
    modules = {path.stem for path in Path(fenced.__file__).parent.iterdir() if path.suffix == ".py"}
    packages = {path.parent.name for path in Path(fenced.__file__).parent.glob("*/__init__.py")}
    public = {name.split(".")[1] for name in MODULES if "." in name}
    assert modules - {"__init__"} | packages == public | INTERNAL


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_shows_its_public_names(name: str) -> None:
    module = importlib.import_module(name)
    assert dir(module) == sorted(module.__all__)
    for public in module.__all__:
        getattr(module, public)


def test_a_plain_install_imports_every_module_or_is_told_which_package_it_needs() -> None:
    """An interpreter without any installed package, as after `pip install fenced`."""
    program = f"""
import importlib, json, sys
sys.path.insert(0, {str(Path(fenced.__file__).parents[1])!r})
said = {{}}
for name in {[name for name in MODULES if name.startswith("fenced.")]!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        said[name] = str(error)
print(json.dumps(said))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {
        name: f"{name} needs a package (No module named {package!r}): pip install {package}"
        for name, package in NEED_A_PACKAGE.items()
    }


OTHER_NAMES = {
    "handle_async_request": "handle_request",
    "aclose": "close",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
}
"""Methods of asyncio that have another name than their twin."""


HANDED_OUT_TWINS = (
    (contexts.LeaseContext, contexts.AsyncLeaseContext),
    (clauses.Clause, clauses.AsyncClause),
    (once.Once, once.AsyncOnce),
    (decorating.Held, decorating.AsyncHeld),
)
INSIDE = set("AsyncPsycopgSession AsyncAlchemySession AsyncpgSession AsyncDoorway".split())
"""Classes of drivers and frameworks that programs never meet: their twins differ as the drivers do."""


def twins() -> list[tuple[type, type]]:
    """Each public class whose name begins with Async, and its twin of the same module; and those handed out."""
    modules = [importlib.import_module(name) for name in MODULES]
    public = [
        (getattr(module, name.removeprefix("Async")), getattr(module, name))
        for module in modules
        for name in public_names(module)
        if name.startswith("Async")
    ]
    return [*public, *HANDED_OUT_TWINS]


def test_every_asyncio_class_has_a_twin_that_is_compared() -> None:
    sources = Path(fenced.__file__).parent.rglob("*.py")
    found = {
        name for path in sources for name in re.findall(r"^class (Async\w+)", path.read_text(), re.MULTILINE)
    }
    assert found - INSIDE == {twin.__name__ for _, twin in twins()}


def face(kind: type) -> dict[str, object]:
    """The members of a class with the names, kinds and defaults of their parameters."""
    shape: dict[str, object] = {}
    for name, value in members(kind):
        key = OTHER_NAMES.get(name, name)
        if isinstance(value, FunctionType):
            parameters = inspect.signature(value).parameters.values()
            shape[key] = [(each.name, each.kind.name, each.default) for each in parameters]
        else:
            shape[key] = type(value).__name__
    return shape


def test_twins_are_alike() -> None:
    """One test: to name them, each worker would import every module with its libraries."""
    for plain, twin in twins():
        assert face(plain) == face(twin), f"{twin.__module__}.{twin.__name__}"


@pytest.mark.parametrize(
    "path", generated.files(), ids=lambda path: path.relative_to(generated.SOURCE).as_posix()
)
def test_generated_twins_are_as_the_script_writes_them(path: Path) -> None:
    assert path.read_text() == generated.rewritten(path), "run `make api`"


if __name__ == "__main__":
    SNAPSHOT.write_text(render())
