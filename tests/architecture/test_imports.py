"""What keeps the tree in shape: lazy imports, small functions, no traces of a machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("architecture")  # the sources are parsed once

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fenced"
SOURCES = sorted(PACKAGE.rglob("*.py"))
LABORATORY = sorted((ROOT / "testkit" / "src").rglob("*.py"))

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 600
HEAVY = {"asyncio", "ssl", "sqlite3"}


@cache
def parsed(source: Path) -> ast.Module:
    return ast.parse(source.read_text())


def loaded_after(program: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded at the end of `program`."""
    program += "\nimport sys; sys.stdout.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_importing_fenced_loads_nothing_heavy() -> None:
    assert not loaded_after("import fenced; assert fenced.__version__") & HEAVY


def test_blocking_programs_never_load_asyncio(tmp_path: Path) -> None:
    program = f"""
import fenced, fenced.sql
with fenced.Client("sqlite:///{tmp_path}/leases.db") as client, client.hold("orders") as lease:
    assert lease.token == 1
"""
    assert not loaded_after(program) & {"asyncio", "ssl"}


def test_every_public_name_can_be_had() -> None:
    program = "import fenced\nfor name in fenced.__all__: getattr(fenced, name)"
    assert "fenced" in loaded_after(program)


def test_files_and_functions_are_small() -> None:
    large = []
    for source in SOURCES:
        if (lines := len(source.read_text().splitlines())) > FILE_LINES_MAX:
            large.append(f"{source.relative_to(ROOT)} has {lines} lines, of {FILE_LINES_MAX}")
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    large.append(f"{source.relative_to(ROOT)}: {node.name} has {lines} lines")
    assert not large


def test_only_the_cli_and_the_drills_print() -> None:
    printing = [
        f"{source.relative_to(ROOT)}:{node.lineno}"
        for source in SOURCES
        if source.relative_to(PACKAGE).parts[0] not in ("cli", "drills")
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not printing


SQL = re.compile(r"\s*(SELECT(?! is)|INSERT INTO|UPDATE \w+ SET|DELETE FROM|(CREATE|ALTER|DROP) [A-Z]+) ")
SPEAK_SQL = ("stores", "guards", "drills", "testing")
CLAUSES = "sql/clauses.py"  # fragments for the program's own statement


def test_sql_stands_where_engines_are() -> None:
    """So that an engine can be added, or its statements read, without looking anywhere else."""
    found = [
        f"{source.relative_to(ROOT)}:{node.lineno}: {node.value[:40]!r}"
        for source in SOURCES
        if (where := source.relative_to(PACKAGE)).parts[0] not in SPEAK_SQL and str(where) != CLAUSES
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and SQL.match(node.value)
    ]
    assert not found


def project_files() -> Iterator[Path]:
    """What is committed or could be: all that git does not ignore, or what an unpacked copy holds."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
        files = [ROOT / name for name in done.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        files = [path for path in ROOT.rglob("*") if not path.relative_to(ROOT).parts[0].startswith(".")]
    yield from (path for path in files if path.is_file())


# Written in pieces, so that this file does not name them either.
HOSTS = ["py" + "pi.org", "python" + "hosted.org", "registry." + "npmjs", "crates" + ".io", "index" + "-url"]
HOMES = ["home", "Users", "root", "work"]
TRACES = re.compile("|".join([*map(re.escape, HOSTS), rf"(?<![\w.])/(?:{'|'.join(HOMES)})/\w"]))


def test_no_file_names_a_registry_or_a_path_of_one_machine() -> None:
    found = []
    for path in project_files():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, 1):
            if trace := TRACES.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {trace[0]}")
    assert not found


def test_a_class_name_has_one_meaning() -> None:
    """A reader who searches for a class finds one. Names with an underscore are private to their module."""
    homes: dict[str, list[str]] = {}
    for source in SOURCES:
        for node in parsed(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(source.relative_to(ROOT)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_no_function_takes_a_coroutine() -> None:
    """It may refuse before it awaits, and nobody would await the coroutine then: it takes a function that makes one."""
    found = [
        f"{source.relative_to(ROOT)}:{parameter.lineno}: {parameter.arg}"
        for source in SOURCES
        if source.relative_to(PACKAGE).parts[0] not in ("runtime", "testing")
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if parameter.annotation and ast.unparse(parameter.annotation).startswith(("Coroutine[", "Awaitable["))
    ]
    assert not found
