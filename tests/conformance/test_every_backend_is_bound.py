"""Nobody can forget a kit, nor promise a trait that nothing proves."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from fenced.client.registry import BUILT_IN, Kind, one_per_class
from fenced.values.contracts import Trait

TESTS = Path(__file__).parents[1]
PROVES = re.compile(r"^# proves (\w+) (\w+): ([\w, -]+)$", re.MULTILINE)


def traits(kind: Kind, scheme: str) -> tuple[Trait, ...]:
    module, _, name = BUILT_IN[kind][scheme].partition(":")
    found: tuple[Trait, ...] | property = getattr(import_module(module), name).traits
    return () if isinstance(found, property) else found  # those of the store behind it


@pytest.mark.parametrize(("kind", "scheme"), one_per_class())
def test_a_registered_backend_has_a_binding(kind: Kind, scheme: str) -> None:
    folder = TESTS / "conformance" / kind.partition(".")[2]
    bound = [path for path in folder.glob("test_*.py") if f'BACKEND = "{scheme}"' in path.read_text()]
    assert bound, f"{kind} {scheme} is registered, but no file in {folder.name} binds it to the kit"


def test_mypy_compares_every_registered_class_with_its_protocol() -> None:
    compared = (TESTS / "typing" / "backends.py").read_text()
    registered = {target.partition(":")[2] for table in BUILT_IN.values() for target in table.values()}
    assert {name for name in registered if f"    {name},\n" not in compared} == set()


@pytest.mark.parametrize("kind", BUILT_IN)
def test_the_same_class_serves_tls(kind: Kind) -> None:
    """The tests of the authorities show the wires over TLS."""
    for scheme in ("redis", "etcd", "zookeeper"):
        assert BUILT_IN[kind][f"{scheme}s"] == BUILT_IN[kind][scheme]


@pytest.mark.parametrize(("kind", "scheme"), one_per_class())
def test_every_trait_is_proven(kind: Kind, scheme: str) -> None:
    """A line `# proves authority sqlite: trait, trait` stands above the test that shows it."""
    what = "authority" if kind == "fenced.authorities" else "guard"
    proven: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        for found in PROVES.finditer(path.read_text()):
            if found.group(1, 2) == (what, scheme):
                proven |= {key.strip() for key in found[3].split(",")}
    promised = {trait.key for trait in traits(kind, scheme)}
    assert proven == promised
