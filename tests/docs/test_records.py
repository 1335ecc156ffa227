"""A record is short, says whether it holds, and names the record that replaced it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generate import RECORD, RECORDS

WORDS_MAX = 400
PAGES = sorted(RECORDS.glob("[0-9]*.md"))
REPLACED = r"replaced by \[(\d{4})\]\((\1-[\w-]+\.md)\)"
STATUS = re.compile(rf"in force(?:; replaces [^;]+)?|(?:in force; [^;\[\]]+ )?{REPLACED}")


def faults(text: str) -> list[str]:
    """What is wrong with the form of a record."""
    begin = RECORD.match(text)
    if begin is None:
        return ["it does not begin with number, title and status"]
    found = []
    status = STATUS.fullmatch(begin[3])
    if status is None:
        found.append(f"status {begin[3]!r}")
    elif status[2] and not (RECORDS / status[2]).exists():
        found.append(f"there is no {status[2]}")
    words = sum(1 for word in text.split() if re.search(r"\w", word))
    if words > WORDS_MAX:
        found.append(f"{words} words")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name[:4])
def test_a_record_is_short_and_says_whether_it_holds(page: Path) -> None:
    assert faults(page.read_text()) == []


def test_numbers_are_those_of_the_files_and_used_once() -> None:
    numbers = [found[1] for page in PAGES if (found := RECORD.match(page.read_text()))]
    assert numbers == [page.name[:4] for page in PAGES] and len(set(numbers)) == len(numbers)


@pytest.mark.parametrize(
    "text",
    [
        "# 0001 A title\n\nNo status\n",
        "# 0001: A title\n\nStatus: in force\n",
        "# 0001 A title\n\nStatus: perhaps\n",
        "# 0001 A title\n\nStatus: replaced by [0002](0002-no-such-record.md)\n",
        "# 0001 A title\n\nStatus: in force; a part replaced by [0002](0003-attempt-secret.md)\n",
        "# 0001 A title\n\nStatus: in force\n\n" + "word " * WORDS_MAX,
    ],
)
def test_another_form_is_noticed(text: str) -> None:
    assert faults(text)
