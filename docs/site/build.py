"""Builds the documentation site: `make docs`.

The pages are the Markdown of this repository. They are copied, with three changes that Sphinx needs and that a forge
would show as noise: the navigation (from the lists in `docs/index.md`), the API from the docstrings in place of its
tables, and links to pages above `docs`. A warning, such as a link that leads nowhere, fails the build. So does a page
that loads anything from another host.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

SITE = Path(__file__).resolve().parent
DOCS = SITE.parent
ROOT = DOCS.parent
WORK = ROOT / ".docs"
ABOVE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages above `docs`, and what they are called in the site."""

CODE = (".py", ".pyc")
"""What is in `docs` and no part of the site."""

MERMAID = "12.3.0"
MERMAID_SHA256 = "336df803d87a38b70a01e736e666c8f7601d2ce42f5e47c8fafe5d721074b9a3"

LINK = re.compile(r"\]\(([^)#\s]+\.md)[^)]*\)")
SOURCE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:src|testkit)/[^)]+\)")
"""A link to a file of the source, which the site does not have: its words stay."""

API_TABLE = re.compile(r"<!-- generated: api ([\w.]+) -->(.*?)<!-- end -->", re.DOTALL)
API_ROW = re.compile(r"^\| `(\w+)(\(?)", re.MULTILINE)
FROM_ELSEWHERE = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*\ssrc="(?:https?:)?//|<link[^>]*\shref="(?:https?:)?//[^>]*stylesheet"""
    r"""|<link[^>]*stylesheet[^>]*\shref="(?:https?:)?//|@import\s+["']?(?:url\()?["']?(?:https?:)?//"""
    r"""|url\(["']?(?:https?:)?//"""
)


def assemble(folder: Path) -> None:
    """Copy the pages and what they show into a folder for Sphinx, and remove what was copied there before."""
    wanted = {
        folder / page: (ROOT / name).read_text().replace("](docs/", "](").encode()
        for name, page in ABOVE.items()
    }
    for path in DOCS.rglob("*"):
        if path.is_file() and path.suffix not in CODE and not path.is_relative_to(SITE):
            content = _changed(path).encode() if path.suffix == ".md" else path.read_bytes()
            wanted[folder / path.relative_to(DOCS)] = content
    for path in folder.rglob("*"):
        if path.is_file() and path not in wanted:
            path.unlink()
    for path, content in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != content:  # Sphinx reads again only what has changed
            path.write_bytes(content)


def _changed(path: Path) -> str:
    """A page as Sphinx needs it."""
    text = path.read_text()
    for name, page in ABOVE.items():
        text = text.replace(f"../{name}", page)
    text = API_TABLE.sub(_from_docstrings, SOURCE.sub(r"\1", text))
    if path == DOCS / "index.md":
        return text + "".join(_navigation(text))
    if path in (
        DOCS / "decisions" / "index.md",
        DOCS / "evidence" / "index.md",
        DOCS / "runbooks" / "index.md",
    ):
        return text + _contents("", sorted(page.name for page in path.parent.glob("*.md") if page != path))
    return text


def _from_docstrings(found: re.Match[str]) -> str:
    """The class and its members in the order of the table, with types and whole docstrings."""
    path, rows = found.groups()
    members = [
        f"   .. {'automethod' if called else 'autoproperty'}:: {name}"
        for name, called in API_ROW.findall(rows)
        if name != path.rpartition(".")[2]
    ]
    return "\n".join(["```{eval-rst}", f".. autoclass:: {path}", "", *members, "```"])


def _navigation(index: str) -> Iterator[str]:
    """A part of the navigation for each heading of the index, with the pages that its list links to."""
    seen: set[str] = set()
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        caption, _, text = part.partition("\n")
        pages = [page for page in dict.fromkeys(LINK.findall(text)) if page not in seen]
        seen.update(pages)
        if pages:
            yield _contents(caption, pages)


def _contents(caption: str, pages: list[str]) -> str:
    options = [":hidden:", f":caption: {caption}"] if caption else [":hidden:"]
    return "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""])


def vendor_mermaid(site: Path) -> None:
    """Put mermaid beside the site's other scripts, so that no page loads it from another host."""
    kept = WORK / f"mermaid-{MERMAID}.min.js"
    if not kept.exists():
        try:
            script = _fetch_mermaid()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"npm did not fetch mermaid: the diagrams of this site are text ({error})", file=sys.stderr)
            return
        WORK.mkdir(exist_ok=True)
        kept.write_bytes(script)
    if hashlib.sha256(kept.read_bytes()).hexdigest() != MERMAID_SHA256:
        raise SystemExit(f"{kept} has another hash than mermaid {MERMAID} had; remove it and build again")
    shutil.copy(kept, site / "_static" / "mermaid.min.js")


def _fetch_mermaid() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", f"mermaid@{MERMAID}", "--silent", "--pack-destination", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (packed,) = Path(folder).glob("*.tgz")
        with tarfile.open(packed) as archive:
            script = archive.extractfile("package/dist/mermaid.min.js")
            assert script is not None
            return script.read()


def loaded_from_elsewhere(site: Path) -> list[str]:
    """The places at which the built site would load something from another host."""
    return [
        f"{path.relative_to(site)}: {found[0]}"
        for path in sorted(site.rglob("*"))
        if path.suffix in (".html", ".css")
        for found in FROM_ELSEWHERE.finditer(path.read_text())
    ]


def build(work: Path, only: Sequence[str] = ()) -> int:
    """Build the site in a folder; the status of the program.

    With `only`, all pages are read and their links followed, and these alone are written: in a third of the time, most
    of which goes into the navigation of each page.
    """
    from sphinx.cmd.build import main as sphinx

    pages, site = work / "pages", work / "site"
    assemble(pages)
    shutil.rmtree(site, ignore_errors=True)  # all pages are written: each has the navigation in it
    options = ["-q", "-c", str(SITE), "-d", str(work / "read"), str(pages), str(site)]
    if only:
        status: int = sphinx(["-b", "dummy", "-W", "--keep-going", *options])
        # Not with -W: it warns that a search index of some pages is not whole.
        status = status or sphinx(["-b", "html", *options, *(str(pages / page) for page in only)])
    else:
        status = sphinx(["-b", "html", "-a", "-W", "--keep-going", *options])
    if status:
        return status
    vendor_mermaid(site)
    if wrong := loaded_from_elsewhere(site):
        print("the site must work without a network:", *wrong, sep="\n  ", file=sys.stderr)
        return 1
    print(f"the site is in {site}; open {site / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]).resolve() if sys.argv[1:] else WORK, sys.argv[2:]))
