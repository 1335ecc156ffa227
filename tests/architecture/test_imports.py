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

from release.lines import YOUNGER, lines_of

pytestmark = pytest.mark.xdist_group("architecture")  # the sources are parsed once

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fenced"
SOURCES = sorted(PACKAGE.rglob("*.py"))
LABORATORY = sorted((ROOT / "testkit" / "src").rglob("*.py"))

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 400
LARGE_FILES = {
    # One algorithm, or one protocol, that is read as a whole.
    "src/fenced/leases/rows.py": 433,
    "src/fenced/values/model.py": 421,
    "src/fenced/values/contracts.py": 515,
    "src/fenced/core/acquiring.py": 534,
    "src/fenced/stores/ledger/authority/journal.py": 416,
    "src/fenced/stores/files/guard/disk.py": 437,
    "src/fenced/stores/redis/guard/marks.py": 593,
    "src/fenced/stores/postgresql/guard/triggers.py": 447,
    "src/fenced/stores/postgresql/guard/tables.py": 500,
    "src/fenced/stores/postgresql/authority/authority.py": 445,
    "src/fenced/stores/zookeeper/wire/connection.py": 436,
    "src/fenced/proxy/gate.py": 508,
    "src/fenced/service/api.py": 560,
    "src/fenced/service/live.py": 526,
    # Lists of checks.
    "src/fenced/testing/authorities.py": 552,
    "src/fenced/testing/guards.py": 525,
    "testkit/src/fenced_testkit/outages.py": 612,
    # Servers and networks in memory, each modelled in one place.
    "testkit/src/fenced_testkit/runtime/network.py": 487,
    "testkit/src/fenced_testkit/worlds/etcd_cluster.py": 445,
    "testkit/src/fenced_testkit/worlds/redis_node.py": 454,
    "testkit/src/fenced_testkit/worlds/zookeeper_ensemble.py": 407,
}
"""Files over the limit, and how many lines they may have: as many as today, in tens."""
LARGE_FUNCTIONS = {
    "src/fenced/cli/once.py: once": 61,  # options of a command
    "src/fenced/cli/serve.py: serve": 69,
    "src/fenced/core/acquiring.py: _attempt": 61,
    "src/fenced/guards/cellguard.py: _operate": 63,
}
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


def sizes() -> Iterator[tuple[str, int, int]]:
    """Each file and each function of the package and of the laboratory: its name, its lines, and its limit."""
    for source in [*SOURCES, *LABORATORY]:
        where = str(source.relative_to(ROOT))
        found = lines_of(source)
        yield where, found["all"] - found["generated"], FILE_LINES_MAX
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{where}: {node.name}", (node.end_lineno or 0) - node.lineno + 1, FUNCTION_LINES_MAX


def test_files_and_functions_are_small() -> None:
    """Those over the limit are named, and do not grow; one that is small by now is no exception any more."""
    exceptions = {**LARGE_FILES, **LARGE_FUNCTIONS}
    found = {where: (lines, limit) for where, lines, limit in sizes() if lines > limit}
    grown = {
        where: lines for where, (lines, _) in found.items() if lines > -(-exceptions.get(where, 0) // 10) * 10
    }
    assert not grown
    assert not exceptions.keys() - found.keys(), "these are no exceptions any more"


def test_files_that_are_counted_apart_exist() -> None:
    """Else what was moved or renamed would be counted with the rest, or not at all."""
    named = [ROOT / folder / path for where in YOUNGER.values() for folder in where for path in where[folder]]
    assert [path for path in named if not path.exists()] == []


def test_names_of_tests_say_what_happens() -> None:
    """`test_who_waits` and `test_what_is_refused` name neither the actor nor the outcome."""
    relative = re.compile(r"def (test_(?:who|what|whoever|whatever|whose|whom)_\w+)")
    found = [
        name for path in (ROOT / "tests").rglob("test_*.py") for name in relative.findall(path.read_text())
    ]
    assert not found


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


INHERITANCE_STEPS_MAX = 2
ONE_CLASS = {
    # What it remembers of the cells is in a file of its own, for the size of both. Nothing else derives from it.
    ("CellGuard", "GuardedCells"),
}
"""Classes and bases that a reader takes for one class, by name and with the reason."""


def bases_of() -> dict[tuple[str, Path], list[tuple[str, Path]]]:
    """Of every class of the package, by name and file: the bases that are classes of the package, too.

    Left out are protocols, which have no code, and errors, which are a tree of kinds.
    """
    homes: dict[str, list[Path]] = {}
    for source in SOURCES:
        for node in parsed(source).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(source)
    found: dict[tuple[str, Path], list[tuple[str, Path]]] = {}
    for source in SOURCES:
        for node in parsed(source).body:
            if isinstance(node, ast.ClassDef):
                names = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
                found[node.name, source] = [
                    (name, source if source in homes[name] else homes[name][0])
                    for name in names
                    if name in homes and homes[name][0].name != "errors.py"
                ]
                if "Protocol" in names:
                    found[node.name, source] = []
    return found


def steps(made: tuple[str, Path], bases: dict[tuple[str, Path], list[tuple[str, Path]]]) -> int:
    """How often a reader of this class must go to another file, from base to base."""
    return max(
        (
            (base[1] != made[1] and (made[0], base[0]) not in ONE_CLASS) + steps(base, bases)
            for base in bases[made]
        ),
        default=0,
    )


def test_a_class_inherits_over_at_most_two_files() -> None:
    """Each `self.x` of a longer chain is searched in all its files: let the class have an object that does it."""
    bases = bases_of()
    deep = [
        f"{name} in {source.relative_to(ROOT)}"
        for name, source in bases
        if steps((name, source), bases) > INHERITANCE_STEPS_MAX
    ]
    assert not deep
