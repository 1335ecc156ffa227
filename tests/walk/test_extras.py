"""Each extra does what it is for in an environment that has that extra and nothing else.

The first line of a program in `extras` is what a user installs. The pages of the authorities show their extras: they
are walked in the same way (see tests/docs/test_blocks.py).
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.docs.test_blocks import PAGES, WALK, servers_of
from tests.walk.traveller import ROOT, Traveller

pytestmark = pytest.mark.xdist_group("walk")  # its environments are made once

PROGRAMS = sorted(Path(__file__).with_name("extras").glob("with_*.py"))
NEEDS = re.compile(r"# walk: (.+)")


def needs_of(program: Path) -> str:
    found = NEEDS.match(program.read_text())
    assert found, f"the first line of {program.name} says what to install"
    return found[1]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_program_with_one_extra(
    program: Path, traveller: Traveller, request: pytest.FixtureRequest
) -> None:
    text = program.read_text()
    done = traveller.run(
        ["python", "-W", "error", "-"],
        cwd=traveller.folder(),
        environment=traveller.environment(needs_of(program)),
        variables=servers_of(text, request),
        given=text,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_extra_is_walked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    walks = [needs_of(program) for program in PROGRAMS]
    walks += [found[1] for page in PAGES if (found := WALK.search(page.read_text()))]
    walked = {
        extra
        for extras in re.findall(r"\./fenced\[([^]]+)\]", " ".join(walks))
        for extra in extras.split(",")
    }
    assert walked == project["optional-dependencies"].keys()
    page = (ROOT / "docs/install.md").read_text()
    assert not [extra for extra in walked if not re.search(rf"[`[,]{extra}[`,\]]", page)]


@pytest.mark.parametrize(
    "url, remedy",
    {
        "postgresql://db.internal/shop": "pip install 'psycopg[binary]', which includes libpq",
        "postgres://db.internal/shop": "pip install 'psycopg[binary]', which includes libpq",
        "etcd://h1.internal": "pip install hpack",
    }.items(),
)
def test_a_missing_driver_is_named(url: str, remedy: str, traveller: Traveller) -> None:
    environment = traveller.environment("./fenced")
    command = ["fenced", "ls", "--authority", url]
    done = traveller.run(command, cwd=traveller.folder(), environment=environment)
    assert done.returncode == 78
    assert "needs a driver (No module named" in done.stderr and done.stderr.rstrip().endswith(remedy)


def test_a_missing_libpq_is_named(traveller: Traveller) -> None:
    """As in slim images: psycopg's pure form is there, and the library that it calls is not."""
    hidden = "import ctypes.util; ctypes.util.find_library = lambda name: None; from fenced.cli import main; main()"
    done = traveller.run(
        ["python", "-c", hidden, "guard", "status", "postgresql://db.internal/shop"],
        cwd=traveller.folder(),
        environment=traveller.environment("./fenced psycopg"),
    )
    assert done.returncode == 78
    assert done.stderr == (
        "fenced: postgresql: needs a driver (no pq wrapper available): "
        "pip install 'psycopg[binary]', which includes libpq\n"
    )
