"""How a bug is planted in a world, and where all of them are: `PLANTED` of every module `bugs_*` beside this one."""

from __future__ import annotations

import importlib
from pathlib import Path

from fenced_testkit.worlds.backend import AuthorityBackend
from fenced_testkit.worlds.site import Site


def with_backend(bug: type, backend: type[AuthorityBackend]) -> type[Site]:
    """A site whose authority has the bug; it is called after the class of the bug, whose docstring explains it."""
    return type(bug.__name__, (Site,), {"backend_type": backend, "__doc__": bug.__doc__})


def with_authority(bug: type, backend: type[AuthorityBackend]) -> type[Site]:
    """A site whose clients use `bug`, a subclass of the shipped authority, instead of it."""
    return with_backend(bug, type(bug.__name__, (backend,), {"authority_type": bug}))


def over(bug: type, backend: type[AuthorityBackend], **parts: type) -> type[Site]:
    """The same mistake of a client as elsewhere, but with this authority."""
    name = f"{bug.__name__}_{backend.name.replace('-', '_')}"
    return type(name, (Site,), {"backend_type": backend, "__doc__": bug.__doc__, **parts})


def planted() -> list[type[Site]]:
    found: list[type[Site]] = []
    for path in sorted(Path(__file__).parent.glob("bugs_*.py")):
        found += importlib.import_module(f"tests.simulation.{path.stem}").PLANTED
    return found
