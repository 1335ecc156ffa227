"""Write the tables of these pages from the code: `python docs/generate.py`.

A table is between `<!-- generated: KEY -->` and `<!-- end -->`; everything around it is written by hand.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs" / "decisions"
sys.path.insert(0, str(ROOT))  # docs/testing.md lists the planted bugs, which are with the tests

import fenced_testkit  # noqa: E402
from docs import proofs  # noqa: E402
from fenced import errors, testing  # noqa: E402 (the line above comes first)
from fenced.cli import exits  # noqa: E402
from fenced.client.registry import BUILT_IN, Kind, one_per_class  # noqa: E402
from fenced.drills.catalog import STORIES  # noqa: E402
from fenced.metrics.table import TABLE  # noqa: E402
from fenced.net.problems import PROBLEM_TYPES  # noqa: E402
from fenced.values.contracts import Trait  # noqa: E402
from tests.planted import bugs  # noqa: E402
from tests.simulation.planting import planted  # noqa: E402

PLACE = re.compile(r"(<!-- generated: ([\w .]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PROVES = re.compile(
    # Up to the next test: between them only further proofs and decorators, which may have several lines.
    r"^# proves (\w+) (\w+): ([\w, -]+)\n(?=(?:(?!(?:async )?def )(?:# proves |@|[ )\]]).*\n)*(?:async )?def (\w+))",
    re.MULTILINE,
)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    cells = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in cells) + "\n"


def said(thing: object) -> str:
    """The first sentence or two of a docstring, on one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


# Errors.


def error_types() -> list[type[errors.FencedError]]:
    kinds = [value for value in vars(errors).values() if isinstance(value, type)]
    return [kind for kind in kinds if issubclass(kind, errors.FencedError)]


def error_table() -> str:
    return table(
        ("error", "is a", "`.retry`", "exit status", "meaning"),
        (
            (
                f"`{kind.__name__}`",
                ", ".join(f"`{base.__name__}`" for base in kind.__bases__),
                f"`{kind.retry}`",
                "" if kind is errors.FencedError else str(exits.code_of(_made(kind))),
                said(kind),
            )
            for kind in error_types()
        ),
    )


def _made(kind: type[errors.FencedError]) -> errors.FencedError:
    """One of this kind, whatever its constructor needs."""
    return kind.__new__(kind)


def problem_table() -> str:
    return table(
        ("status", "type: `urn:fenced:problem:` and", "error", "`retry`", "title"),
        (
            (str(row.status), f"`{row.kind}`", f"`{row.error.__name__}`", f"`{row.error.retry}`", row.title())
            for row in PROBLEM_TYPES
        ),
    )


def exit_table() -> str:
    rows = [(str(row.code), row.word, row.meaning) for row in sorted(exits.TABLE)]
    notes = [(code, "", meaning) for code, meaning in exits._NOTES]
    return table(("status", "word", "meaning"), [*rows, *notes])


# Traits.


def trait_table(kind: Kind, scheme: str) -> str:
    module, _, name = BUILT_IN[kind][scheme].partition(":")
    traits: tuple[Trait, ...] = getattr(import_module(module), name).traits
    what = "authority" if kind == "fenced.authorities" else "guard"
    proofs = dict(_proofs(what, scheme))
    rows = [(f"`{trait.key}`", trait.sentence, proofs.get(trait.key, "nothing yet")) for trait in traits]
    return table(("trait", "in a sentence", "proven by"), rows)


@cache
def _tests() -> dict[Path, str]:
    return {path: path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}


def _proofs(what: str, scheme: str) -> Iterator[tuple[str, str]]:
    for path, text in _tests().items():
        for found in PROVES.finditer(text) if "# proves" in text else ():
            if found.group(1, 2) == (what, scheme):
                for key in found[3].split(","):
                    yield key.strip(), f"`{path.relative_to(ROOT)}`, `{found[4]}`"


# Tests.


def check_table(checks: Iterable[testing.Check[Any]]) -> str:
    return table(("check", "promise"), ((f"`{check.name}`", _line(check.promise)) for check in checks))


def _line(text: str) -> str:
    return " ".join(text.split())


def bug_table() -> str:
    in_worlds = {site.__name__: site for site in planted()}
    kits = {bug.__name__: "authority kit" for bug in bugs.AUTHORITY_BUGS}
    kits |= {bug.__name__: "authority kit, on the ledger" for bug in bugs.LEDGER_BUGS}
    kits |= {bug.__name__: "guard kit" for bug in bugs.GUARD_BUGS}
    kits |= {bug.__name__: "loop kit" for bug in bugs.LOOP_BUGS}
    rows = []
    for name in [*kits, *(name for name in in_worlds if name not in kits)]:
        bug = getattr(bugs, name, None) or in_worlds[name]
        suites = [kits[name]] if name in kits else []
        suites += ["worlds"] if name in in_worlds else []
        rows.append((f"`{name}`", said(bug), ", ".join(suites)))
    return table(("bug", "what goes wrong", "must be found by"), rows)


# The tree.

ROOMS = (("src/fenced", "stores"), ("testkit/src/fenced_testkit", ""))
"""The packages, each with the room whose own rooms are listed, too."""


def tree() -> str:
    """Every package and every module beside them, with the first line of its docstring."""
    lines = []
    for package, inner in ROOMS:
        lines += [f"{package}/", *_rooms(ROOT / package, inner, "  ")]
    return "\n```text\n" + "\n".join(lines) + "\n```\n\n"


def _rooms(folder: Path, inner: str, indent: str) -> Iterator[str]:
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_file(), path.name)):
        source = path / "__init__.py" if path.is_dir() else path
        if path.name.startswith("__") or source.suffix != ".py" or not source.exists():
            continue
        name = f"{path.name}/" if path.is_dir() else path.name
        first = (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n")[0]
        yield f"{indent}{name:<18} {first}"
        if path.name == inner:
            yield from _rooms(path, "", indent + "  ")


# The API.


def call_of(name: str, function: Callable[..., object]) -> str:
    """A call as a reader would write it: names and defaults, no annotations."""
    parts: list[str] = []
    starred = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred = starred or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parts.append(f"{stars}{parameter.name}{default}")
    return f"{name}({', '.join(parts)})"


def members_of(kind: type) -> dict[str, Any]:
    """The public members in the order of the source, those of our base classes first."""
    bases = [base for base in reversed(kind.__mro__) if base.__module__.partition(".")[0] == "fenced"]
    return {name: value for base in bases for name, value in vars(base).items() if not name.startswith("_")}


def api_table(path: str) -> str:
    """One row a member: how it is called, and the first paragraph of its docstring."""
    module, _, name = path.rpartition(".")
    kind = getattr(import_module(module), name)
    rows = []
    if not name.endswith("Lease"):  # which programs get and never make
        rows.append((f"`{call_of(name, kind)}`", said(kind)))
    for key, value in members_of(kind).items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(value, property):
            rows.append((f"`{key}`", said(value)))
        elif inspect.isfunction(function):
            rows.append((f"`{call_of(key, function)}`", said(function)))
    if missing := [call for call, does in rows if not does]:
        raise SystemExit(f"{path}: a docstring is missing: {', '.join(missing)}")
    return table(("call", "does"), rows)


API = (
    "fenced.Client",
    "fenced.Lease",
    "fenced.sql.Guard",
    "fenced.Values",
    "fenced.metrics.Recorder",
)

# Metrics.


def metric_table() -> str:
    rows = []
    for metric in TABLE:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        also = f" Also `{metric.also}`" if metric.also else ""
        if metric.also_where:
            also += " where `{}` is `{}`".format(*metric.also_where)
        rows.append(
            (
                f"`{metric.name}`",
                metric.kind,
                labels,
                ", ".join(metric.sources),
                metric.meaning + also + "." * bool(also),
            )
        )
    return table(("metric", "kind", "labels", "from", "meaning"), rows)


# Records.

RECORD = re.compile(r"# (\d{4}) (.+)\n\nStatus: (.+)\n")
"""How a record begins: its number and title, and whether it holds."""


def drill_list() -> str:
    """Each story: what it teaches, and its pictures (`fenced drill all --control --pictures docs/img/drills`)."""
    parts = []
    for drill in STORIES:
        tokens = f"tokens {drill.tokens[0]} and {drill.tokens[1]}, ttl {drill.story_seconds:g} s"
        parts.append(
            f"### {drill.title}\n\n`fenced drill {drill.name}`: {drill.failure} ({tokens}). {drill.teaches}"
        )
        parts.append(f"![With the guard: {drill.held}](img/drills/{drill.name}.svg)")
        if drill.loses:
            parts.append(f"Without the guard:\n\n![{drill.broken}](img/drills/{drill.name}-none.svg)")
    return "\n\n".join(parts)


def capacity_table() -> str:
    """What `make evidence ARGS=capacity` has measured."""
    found = json.loads((ROOT / "docs" / "evidence" / "capacity.json").read_text())["capacity"]
    held, asked, direct = found["held"], found["asked"], dict(found["direct"])
    rates = [(what, rate["a second"]) for what, rate in held.items() if isinstance(rate, dict)]
    clients = direct.pop("clients")
    many = f"{asked['clients']} clients with {asked['leases']:,} leases, ttl {asked['ttl']:g} s"
    formula = [
        (
            f"{what} of {many}",
            f"{asked[what]['measured']:g}; by the formula {asked[what]['by the formula']:g}",
        )
        for what in ("renewals a second", "requests a second")
    ]
    rows = [
        ("memory without leases", f"{held['memory before, MB']:g} MB"),
        (f"memory of each of {held['leases']:,} leases", f"{held['memory of a lease, KB']:g} KB"),
        *((f"{what}: a second", f"{rate:,}") for what, rate in rates),
        *formula,
        *(
            (f"{clients} clients that ask {store} directly, each alone: renewals a second", f"{rate:,}")
            for store, rate in direct.items()
        ),
    ]
    return table(("", "measured"), rows)


def record_table() -> str:
    """What was decided, and what still holds; one line for each record."""
    found = [(path, RECORD.match(path.read_text())) for path in sorted(RECORDS.glob("[0-9]*.md"))]
    return table(
        ("record", "what was decided", "status"),
        [(f"[{said[1]}]({path.name})", said[2], said[3]) for path, said in found if said],
    )


TABLES: dict[str, Callable[[], str]] = {
    "records": record_table,
    "metrics": metric_table,
    **{f"api {path}": partial(api_table, path) for path in API},
    "drills": drill_list,
    "capacity": capacity_table,
    "tree": tree,
    "errors": error_table,
    "exits": exit_table,
    **{
        f"traits {kind} {scheme}": partial(trait_table, kind, scheme)
        for kind, scheme in one_per_class()
        if scheme != "http"  # its traits are those of the store behind it
    },
    "authority checks": lambda: check_table(testing.AUTHORITY_CHECKS),
    "guard checks": lambda: check_table(testing.GUARD_CHECKS),
    "outage checks": lambda: check_table(fenced_testkit.OUTAGE_CHECKS),
    "guard outage checks": lambda: check_table(fenced_testkit.GUARD_OUTAGE_CHECKS),
    "guard failover checks": lambda: check_table(fenced_testkit.GUARD_FAILOVER_CHECKS),
    "planted bugs": bug_table,
    "theorems": lambda: proofs.theorem_table(table),
    "mistakes in the decision": lambda: proofs.mistake_table(table),
    "models": lambda: proofs.model_table(table),
    "limits": proofs.limit_stories,
    "mistakes in the protocol": proofs.wrong_stories,
    "problems": problem_table,
}


def filled(text: str) -> str:
    """A page with its tables as the code has them now."""
    return PLACE.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


@cache
def pages() -> dict[Path, str]:
    """Every page that has a generated table, as it should be."""
    texts = {
        path: path.read_text() for path in (ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    }
    return {path: filled(text) for path, text in texts.items() if PLACE.search(text)}


def main() -> None:
    for path, text in pages().items():
        if path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
