"""What the site adds to the pages: a navigation that has all of them, and nothing that comes from another host."""

from __future__ import annotations

import re
from pathlib import Path

from docs.site import build


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


def test_what_a_page_loads_from_another_host_is_found(tmp_path: Path) -> None:
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
