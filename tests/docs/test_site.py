"""The site is built, and what it adds to the pages: a navigation that has all of them, and nothing from other hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.site import build

SECONDS_MAX = 300


WRITTEN = ("index.md", "architecture.md", "drills.md", "reference/api.md")
PICTURE = re.compile(r"img/(?:drills/)?([\w-]+\.\w+)")


@pytest.mark.timeout(SECONDS_MAX + 20)
def test_every_page_is_read_and_some_are_written(tmp_path: Path) -> None:
    """A warning on any page fails, such as a link that leads nowhere. `make docs` writes all of them."""
    command = [sys.executable, build.__file__, str(tmp_path), *WRITTEN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert set(WRITTEN) <= {
        f"{path.relative_to(tmp_path / 'site').with_suffix('.md')}"
        for path in (tmp_path / "site").rglob("*.html")
    }
    shown = {page: set(PICTURE.findall(page.read_text())) for page in (tmp_path / "pages").rglob("*.md")}
    assert set().union(*shown.values()) == {path.name for path in (build.DOCS / "img").rglob("*.*")}
    copied = {path.name for path in (tmp_path / "site" / "_images").iterdir()}
    assert copied == set().union(*(shown[tmp_path / "pages" / page] for page in WRITTEN)) != set()


def test_every_page_is_in_the_navigation_once(tmp_path: Path) -> None:
    build.assemble(tmp_path)
    pages = sorted(tmp_path.rglob("*.md"))
    listed = [
        (page.parent / line).resolve()
        for page in pages
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        if line.endswith(".md")
    ]
    assert sorted(listed) == [page for page in pages if page != tmp_path / "index.md"]


def test_a_page_that_loads_from_another_host_is_found(tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text(
        '<a href="https://a.example"></a><script src="_static/a.js"></script>'
    )
    assert not build.loaded_from_elsewhere(tmp_path)
    loads = [
        '<script defer src="https://cdn.example/a.js"></script>',
        '<img alt="" src="//cdn.example/a.png">',
        '<link rel="stylesheet" href="https://cdn.example/a.css">',
        '<link href="https://cdn.example/a.css" rel="stylesheet">',
        '@import url("https://cdn.example/a.css");',
        "a { background: url(https://cdn.example/a.png) }",
    ]
    for number, text in enumerate(loads):
        (tmp_path / f"{number}.html").write_text(text)
    assert len(build.loaded_from_elsewhere(tmp_path)) == len(loads)
