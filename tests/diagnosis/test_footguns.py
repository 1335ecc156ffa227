"""Each footgun of the literature is found by a finding, or is a question: none is passed over in silence."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fenced.diagnosis.findings import Finding, Footgun
from fenced.diagnosis.footguns import KNOWN, footguns
from fenced.diagnosis.looks import GuardLook, Span
from fenced.errors import Unavailable
from fenced.values.rollout import DatabaseStatus

SOURCE = Path(__file__).parents[2] / "src" / "fenced" / "diagnosis" / "doctor.py"
STATUS = DatabaseStatus(datetime(2026, 1, 2, tzinfo=UTC), "a" * 16, ())
LOOKED = GuardLook("postgresql://db/shop", Span(0.0, 0.0), STATUS)
PROVEN = GuardLook(
    "postgresql://db/shop", Span(0.0, 0.0), DatabaseStatus(STATUS.now, STATUS.realm, (), proof=True)
)
UNREAD = GuardLook("postgresql://db/shop", Span(0.0, 0.0), error=Unavailable("no"))
SHOWN = [(known.name, check) for known in KNOWN for check in known.shown_by]


def states(look: GuardLook, *findings: Finding) -> dict[str, Footgun]:
    return {each.name: each for each in footguns(findings, [look], frozenset())}


@pytest.mark.parametrize(("name", "check"), SHOWN)
def test_a_finding_shows_a_footgun(name: str, check: str) -> None:
    found = states(LOOKED, Finding("weak", check, "db", "says"))[name]
    assert (found.state, found.checks) == ("found", (check,))
    assert states(LOOKED, Finding("note", check, "db", "says"))[name].state != "found", "a note is no footgun"


def test_a_footgun_is_shown_by_findings_that_exist() -> None:
    exist = set(re.findall(r'Finding\(\s*"\w+",\s*"([\w-]+)"', SOURCE.read_text()))
    assert {check for _, check in SHOWN} <= exist


def test_the_rest_are_questions() -> None:
    """A store shows a part of most footguns: the others are clear only where a guard was looked at."""
    looked, proven, unread = states(LOOKED), states(PROVEN), states(UNREAD)
    assert len(looked) == 9
    assert all(each.question for each in looked.values())
    clear = {"a lease without fencing", "a timestamp as token", "a lease is taken for exclusion"}
    assert {name for name, each in looked.items() if each.state == "clear"} == clear
    assert {name for name, each in looked.items() if each.state == "ask"} == looked.keys() - clear
    assert proven["tokens made by clients"].state == "clear", "proofs exclude it"
    assert {each.state for each in unread.values()} == {"ask"}
    mails = "the last call goes to a system that cannot refuse"
    assert states(LOOKED, *(Finding("broken", check, "db", "") for _, check in SHOWN))[mails].state == "ask"
