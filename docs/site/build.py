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
from collections.abc import Iterator
from pathlib import Path

SITE = Path(__file__).resolve().parent
DOCS = SITE.parent
ROOT = DOCS.parent
WORK = ROOT / ".docs"
OUT = WORK / "site"
ABOVE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages above `docs`, and what they are called in the site."""

MERMAID = "12.3.0"
MERMAID_SHA256 = "336df803d87a38b70a01e736e666c8f7601d2ce42f5e47c8fafe5d721074b9a3"

LINK = re.compile(r"\]\(([^)#\s]+\.md)[^)]*\)")
API_TABLE = re.compile(r"<!-- generated: api ([\w.]+) -->(.*?)<!-- end -->", re.DOTALL)
API_ROW = re.compile(r"^\| `(\w+)(\(?)", re.MULTILINE)
FROM_ELSEWHERE = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*\ssrc="(?:https?:)?//|<link[^>]*\shref="(?:https?:)?//[^>]*stylesheet"""
    r"""|<link[^>]*stylesheet[^>]*\shref="(?:https?:)?//|@import\s+["']?(?:url\()?["']?(?:https?:)?//"""
    r"""|url\(["']?(?:https?:)?//"""
)


def assemble(folder: Path) -> None:
    """Copy the pages and what they show into a folder for Sphinx, and remove what was copied there before."""
    texts = {
        folder / page: (ROOT / name).read_text().replace("](docs/", "](") for name, page in ABOVE.items()
    }
    for path in DOCS.rglob("*"):
        if path.suffix in (".md", ".svg", ".json") and not path.is_relative_to(SITE):
            texts[folder / path.relative_to(DOCS)] = _changed(path)
    for path in folder.rglob("*.*"):
        if path not in texts:
            path.unlink()
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:  # Sphinx reads again only what has changed
            path.write_text(text)


def _changed(path: Path) -> str:
    text = path.read_text()
    if path.suffix != ".md":
        return text
    for name, page in ABOVE.items():
        text = text.replace(f"../{name}", page)
    text = API_TABLE.sub(_from_docstrings, text)
    if path == DOCS / "index.md":
        return text + "".join(_navigation(text))
    if path == DOCS / "decisions" / "index.md":
        return text + _contents("", sorted(page.name for page in path.parent.glob("[0-9]*.md")))
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


def vendor_mermaid() -> None:
    """Put mermaid beside the site's other scripts, so that no page loads it from another host."""
    kept = WORK / f"mermaid-{MERMAID}.min.js"
    if not kept.exists():
        if shutil.which("npm") is None:
            raise SystemExit("the diagrams need mermaid, which npm fetches; install npm and build again")
        with tempfile.TemporaryDirectory() as folder:
            command = ["npm", "pack", f"mermaid@{MERMAID}", "--silent", "--pack-destination", folder]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            (packed,) = Path(folder).glob("*.tgz")
            with tarfile.open(packed) as archive:
                script = archive.extractfile("package/dist/mermaid.min.js")
                assert script is not None
                kept.write_bytes(script.read())
    if hashlib.sha256(kept.read_bytes()).hexdigest() != MERMAID_SHA256:
        raise SystemExit(f"{kept} has another hash than mermaid {MERMAID} had; remove it and build again")
    shutil.copy(kept, OUT / "_static" / "mermaid.min.js")


def loaded_from_elsewhere(site: Path) -> list[str]:
    """The places at which the built site would load something from another host."""
    return [
        f"{path.relative_to(site)}: {found[0]}"
        for path in sorted(site.rglob("*"))
        if path.suffix in (".html", ".css")
        for found in FROM_ELSEWHERE.finditer(path.read_text())
    ]


def main() -> int:
    from sphinx.cmd.build import main as sphinx

    pages = WORK / "pages"
    assemble(pages)
    shutil.rmtree(OUT, ignore_errors=True)  # all pages are written: each has the navigation in it
    options = ["-b", "html", "-a", "-W", "--keep-going", "-q", "-c", str(SITE), "-d", str(WORK / "read")]
    status: int = sphinx([*options, str(pages), str(OUT)])
    if status:
        return status
    vendor_mermaid()
    if wrong := loaded_from_elsewhere(OUT):
        print("the site must work without a network:", *wrong, sep="\n  ", file=sys.stderr)
        return 1
    print(f"the site is in {OUT}; open {OUT / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
