"""Builds the documentation site: `make docs`, or `python docs/site/build.py [FOLDER]`.

The pages are the Markdown of this repository. They are copied, with three changes that Sphinx needs and that a forge
would show as noise: the navigation (from the lists in `docs/index.md`), the API from the docstrings in place of its
tables, and links to pages above `docs`. A warning, such as a link that leads nowhere, fails the build. So does a page
that loads anything from another host.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

SITE = Path(__file__).resolve().parent
DOCS = SITE.parent
ROOT = DOCS.parent
ABOVE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages above `docs`, and what they are called in the site."""

MERMAID = "12.3.0"
MERMAID_SHA256 = "336df803d87a38b70a01e736e666c8f7601d2ce42f5e47c8fafe5d721074b9a3"

LINK = re.compile(r"\]\(([^)#\s]+\.md)[^)]*\)")
API_TABLE = re.compile(r"<!-- generated: api ([\w.]+) -->.*?<!-- end -->", re.DOTALL)
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
    return f"```{{eval-rst}}\n.. autoclass:: {found[1]}\n   :members:\n   :inherited-members:\n```"


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


def vendor_mermaid(static: Path) -> None:
    """Put mermaid beside the site's other scripts, so that no page loads it from another host."""
    kept = ROOT / ".docs" / f"mermaid-{MERMAID}.min.js"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            command = ["npm", "pack", f"mermaid@{MERMAID}", "--silent", "--pack-destination", folder]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            (packed,) = Path(folder).glob("*.tgz")
            with tarfile.open(packed) as archive:
                script = archive.extractfile("package/dist/mermaid.min.js")
                assert script is not None
                kept.write_bytes(script.read())
    script_bytes = kept.read_bytes()
    if hashlib.sha256(script_bytes).hexdigest() != MERMAID_SHA256:
        raise SystemExit(f"{kept} is not the mermaid {MERMAID} that was looked at; remove it and build again")
    static.mkdir(parents=True, exist_ok=True)
    (static / "mermaid.min.js").write_bytes(script_bytes)


def loaded_from_elsewhere(site: Path) -> list[str]:
    """The places at which the built site would load something from another host."""
    return [
        f"{path.relative_to(site)}: {found[0]}"
        for path in sorted(site.rglob("*"))
        if path.suffix in (".html", ".css")
        for found in FROM_ELSEWHERE.finditer(path.read_text())
    ]


def build(site: Path, *, work: Path) -> int:
    from sphinx.cmd.build import main as sphinx

    pages = work / "pages"
    assemble(pages)
    # Written again (-a) are all pages: each has the navigation in it. Read again are only those that changed.
    options = ["-b", "html", "-a", "-W", "--keep-going", "-q", "-c", str(SITE), "-d", str(work / "read")]
    status: int = sphinx([*options, str(pages), str(site)])
    if status:
        return status
    if wrong := loaded_from_elsewhere(site):
        print("the site must work without a network:", *wrong, sep="\n  ", file=sys.stderr)
        return 1
    return 0


def main(arguments: list[str]) -> int:
    site = Path(arguments[0] if arguments else ROOT / ".docs" / "site").resolve()
    if (status := build(site, work=ROOT / ".docs")) == 0:
        vendor_mermaid(site / "_static")
        print(f"the site is in {site}; open {site / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
