"""Checks what was built of both distributions: `python -m release.check dist [--tag v0.2.0]`."""

from __future__ import annotations

import argparse
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from packaging.metadata import Metadata

from release.metadata import CODE, LINK

ROOT = Path(__file__).parents[1]


class Distribution(NamedTuple):
    """One of the two that are built here."""

    folder: Path
    package: str
    beside: frozenset[str]
    """What its sdist has beside the package."""

    @property
    def project(self) -> dict[str, Any]:
        found: dict[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]
        return found

    @property
    def stem(self) -> str:
        """How its files are called."""
        return f"{self.package}-{self.project['version']}"

    def sources(self) -> set[str]:
        """Every file of the package, as a wheel names it: code, types, SQL, Lua, vectors."""
        source = self.folder / "src"
        files = (
            path for path in (source / self.package).rglob("*") if path.is_file() and path.suffix != ".pyc"
        )
        return {str(path.relative_to(source)) for path in files}


RELEASE = frozenset(str(path.relative_to(ROOT)) for path in (ROOT / "release").glob("*.py"))
FENCED = Distribution(ROOT, "fenced", RELEASE | {"CHANGELOG.md"})
TESTKIT = Distribution(ROOT / "testkit", "fenced_testkit", frozenset())
PROJECT = FENCED.project
VERSION = PROJECT["version"]


def wrong_files(what: str, found: set[str], expected: set[str]) -> Iterator[str]:
    for path in sorted(expected - found):
        yield f"{what} lacks {path}"
    for path in sorted(found - expected):
        yield f"{what} should not contain {path}"


def wrong_metadata(built: Distribution, what: str, text: bytes) -> Iterator[str]:
    try:
        metadata = Metadata.from_email(text, validate=True)
    except ExceptionGroup as group:
        yield from (f"{what}: {error}" for error in group.exceptions)
        return
    if (found := (metadata.name, str(metadata.version))) != (built.project["name"], VERSION):
        yield f"{what} calls itself {' '.join(found)}"
    if set(metadata.provides_extra or ()) != built.project["optional-dependencies"].keys():
        yield f"{what}: its extras are not those of pyproject.toml"
    if metadata.description_content_type != "text/markdown":
        yield f"{what}: its README is not Markdown"
    prose = "".join(CODE.split(metadata.description or "")[::2])
    if not prose.startswith("# fenced"):
        yield f"{what} has no README"
    for link in LINK.finditer(prose) if built is FENCED else ():
        yield f"{what}: a link of its README leads nowhere: {link['path']}"


def wrong_wheel(built: Distribution, path: Path) -> Iterator[str]:
    info = f"{built.stem}.dist-info"
    with zipfile.ZipFile(path) as wheel:
        about = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")}
        if "scripts" in built.project:
            about.add(f"{info}/entry_points.txt")
        yield from wrong_files(path.name, set(wheel.namelist()), built.sources() | about)
        yield from wrong_metadata(built, path.name, wheel.read(f"{info}/METADATA"))


def wrong_sdist(built: Distribution, path: Path) -> Iterator[str]:
    with tarfile.open(path) as sdist:
        found = {name.removeprefix(f"{built.stem}/") for name in sdist.getnames()}
        expected = {f"src/{name}" for name in built.sources()}
        expected |= built.beside | {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"}
        # hatchling adds .gitignore if there is one
        yield from wrong_files(path.name, found - {".gitignore"}, expected)
        about = sdist.extractfile(f"{built.stem}/PKG-INFO")
        assert about is not None
        yield from wrong_metadata(built, path.name, about.read())


def wrong(folder: Path, tag: str | None = None) -> Iterator[str]:
    """Everything that is wrong with what was built into a folder."""
    both = (FENCED, TESTKIT)
    names = {f"{each.stem}{suffix}" for each in both for suffix in ("-py3-none-any.whl", ".tar.gz")}
    if {path.name for path in folder.iterdir()} != names:
        yield f"{folder} should contain {', '.join(sorted(names))}, and nothing else"
        return
    for each in both:
        yield from wrong_wheel(each, folder / f"{each.stem}-py3-none-any.whl")
        yield from wrong_sdist(each, folder / f"{each.stem}.tar.gz")
    if TESTKIT.project["dependencies"] != [f"fenced=={VERSION}"] or TESTKIT.project["version"] != VERSION:
        yield f"the testkit is not of version {VERSION}, for fenced of that version"
    if f"## [{VERSION}]" not in (ROOT / "CHANGELOG.md").read_text():
        yield f"CHANGELOG.md does not mention {VERSION}"
    if tag is not None and tag != f"v{VERSION}":
        yield f"the tag {tag} is not v{VERSION}, which pyproject.toml says"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tag")
    options = parser.parse_args()
    found = list(wrong(options.folder, options.tag))
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
