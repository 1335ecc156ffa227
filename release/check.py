"""Checks a wheel and an sdist before anybody gets them: `python -m release.check dist [--tag v0.2.0]`."""

from __future__ import annotations

import argparse
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.metadata import Metadata

from release.metadata import CODE, LINK

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]


def sources() -> set[str]:
    """Every file of the package, as a wheel names it: code, types, SQL, Lua, vectors."""
    package = ROOT / "src" / "fenced"
    files = (path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(package.parent)) for path in files}


def wrong_files(what: str, found: set[str], expected: set[str]) -> Iterator[str]:
    for path in sorted(expected - found):
        yield f"{what} lacks {path}"
    for path in sorted(found - expected):
        yield f"{what} should not contain {path}"


def wrong_metadata(what: str, text: bytes) -> Iterator[str]:
    try:
        metadata = Metadata.from_email(text, validate=True)
    except ExceptionGroup as group:
        yield from (f"{what}: {error}" for error in group.exceptions)
        return
    if (found := (metadata.name, str(metadata.version))) != ("fenced", VERSION):
        yield f"{what} calls itself {' '.join(found)}"
    if set(metadata.provides_extra or ()) != PROJECT["optional-dependencies"].keys():
        yield f"{what}: its extras are not those of pyproject.toml"
    if metadata.description_content_type != "text/markdown":
        yield f"{what}: its README is not Markdown"
    prose = "".join(CODE.split(metadata.description or "")[::2])
    if not prose.startswith("# fenced"):
        yield f"{what} has no README"
    for link in LINK.finditer(prose):
        yield f"{what}: a link of its README leads nowhere: {link['path']}"


def wrong_wheel(path: Path) -> Iterator[str]:
    info = f"fenced-{VERSION}.dist-info"
    with zipfile.ZipFile(path) as wheel:
        about = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
        about.add(f"{info}/licenses/LICENSE")
        yield from wrong_files(path.name, set(wheel.namelist()), sources() | about)
        yield from wrong_metadata(path.name, wheel.read(f"{info}/METADATA"))


def wrong_sdist(path: Path) -> Iterator[str]:
    folder = f"fenced-{VERSION}"
    with tarfile.open(path) as sdist:
        found = {name.removeprefix(f"{folder}/") for name in sdist.getnames()}
        expected = {f"src/{name}" for name in sources()}
        expected |= {str(name.relative_to(ROOT)) for name in (ROOT / "release").glob("*.py")}
        expected |= {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO"}
        yield from wrong_files(
            path.name, found - {".gitignore"}, expected
        )  # hatchling adds it if there is one
        about = sdist.extractfile(f"{folder}/PKG-INFO")
        assert about is not None
        yield from wrong_metadata(path.name, about.read())


def wrong(folder: Path, tag: str | None = None) -> Iterator[str]:
    """Everything that is wrong with what was built into a folder."""
    wheel = folder / f"fenced-{VERSION}-py3-none-any.whl"
    sdist = folder / f"fenced-{VERSION}.tar.gz"
    if {*folder.iterdir()} != {wheel, sdist}:
        yield f"{folder} should contain {wheel.name} and {sdist.name}, and nothing else"
        return
    yield from wrong_wheel(wheel)
    yield from wrong_sdist(sdist)
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
