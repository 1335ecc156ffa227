"""The tables in the pages are those that the code makes, and every one of them is in a page."""

from __future__ import annotations

import re
from pathlib import Path

from docs import generate

ROOT = Path(__file__).parents[2]


def test_the_tables_are_up_to_date() -> None:
    old = [page.name for page, text in generate.pages().items() if page.read_text() != text]
    assert not old, "run `python docs/generate.py`"


def test_every_table_is_shown_somewhere() -> None:
    shown = {found[2] for text in generate.pages().values() for found in generate.PLACE.finditer(text)}
    assert shown == set(generate.TABLES)


def test_every_invariant_of_the_judge_is_explained() -> None:
    source = "".join(path.read_text() for path in (ROOT / "testkit/src/fenced_testkit/worlds").glob("*.py"))
    judged = set(re.findall(r'broken\("(\w+)"', source))
    told = set(re.findall(r"^\| (\w+) \|", (ROOT / "docs/testing.md").read_text(), re.MULTILINE))
    assert judged
    assert judged <= told


def test_every_command_and_variable_is_explained() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text()
    sources = "".join(path.read_text() for path in (ROOT / "src/fenced/cli").glob("*.py"))
    from fenced.cli import COMMANDS

    assert not [name for name in COMMANDS if f"`fenced {name}" not in page]
    assert not [name for name in set(re.findall(r"\bFENCED_[A-Z]+", sources)) if f"`{name}" not in page]


def test_the_api_page_names_every_public_class() -> None:
    import fenced

    page = (ROOT / "docs/reference/api.md").read_text()
    named = [name for name in fenced.__all__ if isinstance(getattr(fenced, name), type)]
    classes = [name for name in named if not issubclass(getattr(fenced, name), fenced.FencedError)]
    assert not [name for name in classes if f"`{name}" not in page]
