"""What a drill shows of its outcome: the page, the pictures, the lines at the end. No process is started."""

from __future__ import annotations

import random
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fenced.drills.catalog import DRILLS, STORIES
from fenced.drills.every import DrillRow, Told, status_of
from fenced.drills.history import Grant, History, Operation, Pause, check
from fenced.drills.outcome import DrillOutcome, Setting, to_json
from fenced.drills.report import page, picture
from fenced.drills.sequence import NARROW, sequence_svg
from fenced.drills.stage import Plan, shown_ttl
from fenced.drills.storm import Storm, Tally, progress
from fenced.drills.story import Log, StoryStep
from fenced.drills.summary import summary_page
from fenced.drills.terminal import Terminal


def _outcome(scenario: str, history: History, *, words: str = "words", guarded: bool = True) -> DrillOutcome:
    """An outcome in which every text that could come from outside is `words`."""
    plan = Plan(DRILLS[scenario], guard=None if guarded else "none", seconds=8.0, seed=7)
    setting = Setting(words, words, (words,), (words,), True, True, 1.0, 8.0)
    steps = tuple(
        StoryStep(0.1, actor, target, "note", words, words)
        for actor, target in (("A", "A"), ("A", "database"), ("database", "database"))
    )
    return DrillOutcome(plan, setting, history, check(history), steps, 0.0, 1.0)


def _operation(token: int, at: float, words: str = "words") -> Operation:
    return Operation(f"H{token}", "write", words, words, token, "admitted", at, at + 0.1, update=f"u{token}")


@pytest.mark.parametrize("scenario", DRILLS)
def test_everything_in_a_report_is_escaped(scenario: str) -> None:
    nasty = "<script>alert('&\"')</script>"
    refused = replace(_operation(1, 0.0, nasty), holder=nasty, decision="refused", why=nasty)
    history = History(
        grants=[Grant(nasty, 1, nasty, 0.0, 0.1)],
        operations=[refused, _operation(2, 0.0, nasty)],
        pauses=[Pause(nasty, nasty, 1, 0.0, 0.5)],
        finals={nasty: ("u2",)},
    )
    outcome = _outcome(scenario, history, words=nasty)
    assert "<script" not in page(outcome)
    ElementTree.fromstring(picture(outcome))


def test_a_report_shows_first_what_was_refused_stale_or_lost() -> None:
    """Of 1,000 operations three matter, and they are the last ones."""
    many = [_operation(token, float(token)) for token in range(1, 1000)]
    last = _operation(1001, 2000.0)
    refused = replace(_operation(1000, 3000.0), decision="refused", why="stale", update="late")
    stale = replace(_operation(1000, 3001.0), update="later")
    updates = {each.update or "" for each in (*many, stale)}
    history = History(operations=[*many, last, refused, stale], finals={"words": tuple(updates)})
    html = page(_outcome("storm", history))
    rows = re.findall(r'<tr class="(\w*)">.*?<td class="fate">(.*?)</td>', html)
    assert rows[:3] == [
        ("bad", "admitted, and gone at the end"),
        ("refused", "refused: stale"),
        ("bad", "admitted, though stale"),
    ]
    assert all(row == ("", "admitted") for row in rows[3:])
    assert "999 operations" in html


@pytest.mark.parametrize("scenario", DRILLS)
@pytest.mark.parametrize("guarded", [True, False])
def test_the_last_line_can_be_typed(
    scenario: str, guarded: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a clone, where `fenced` is not on the path, and in an environment that has it."""
    words = "" if scenario == "sigstop" else f" {scenario}"
    words += " --guard none" if guarded else ""
    for by, typed in (("", f"fenced drill{words}"), ("make", f'make drill ARGS="{words.strip()}"')):
        monkeypatch.setenv("FENCED_DRILL_BY", by)
        Terminal().verdict(_outcome(scenario, History(), guarded=guarded))
        shown = capsys.readouterr().out.splitlines()[-1].partition(":  ")[2]
        assert shown == (typed if words or not by else "make drill")


def test_make_passes_the_options_on() -> None:
    command = ["make", "-n", "drill", "ARGS=storm --guard none", "PYTHON=true"]
    root = Path(__file__).parents[2]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout
    assert "FENCED_DRILL_BY=make .venv/bin/fenced drill storm --guard none" in shown


@pytest.mark.parametrize(
    ("tally", "holders"), [(Tally(), 0), (Tally(acknowledged=999_999, refused=99_999, pauses=99_999), 63)]
)
def test_the_progress_of_a_storm_fits_80_columns(tally: Tally, holders: int) -> None:
    stopped = {str(number): None for number in range(holders)}
    storm = Storm(0.3, 3600.0, 64, random.Random(1), Log(0.0), stopped=stopped, tally=tally)  # type: ignore[arg-type]
    assert len(progress(storm, 0.0)) < 80


@pytest.mark.parametrize("scenario", DRILLS)
@pytest.mark.parametrize("guarded", [True, False])
def test_where_nobody_was_overtaken_the_sentence_says_what_to_do(scenario: str, guarded: bool) -> None:
    outcome = _outcome(scenario, History(), guarded=guarded)
    assert "INCONCLUSIVE" in page(outcome)
    assert "this shows nothing" in outcome.sentence
    assert ("--seconds 2" in outcome.sentence) is (scenario in ("storm", "set"))


def test_a_drill_that_broke_off_is_never_held() -> None:
    """Somebody was overtaken, and refused; then the drill could not go on."""
    refused = replace(_operation(1, 3.0), decision="refused", update="late")
    history = History(operations=[_operation(2, 0.0), refused], finals={"words": ("u2",)})
    outcome = _outcome("sigstop", history)
    assert outcome.verdict == "held"
    broken_off = replace(outcome, why="its network is not there")
    assert (broken_off.verdict, broken_off.sentence) == (
        "inconclusive",
        "This shows nothing: its network is not there.",
    )
    lost = replace(
        broken_off,
        history=replace(history, finals={"words": ()}),
        findings=check(replace(history, finals={"words": ()})),
    )
    assert lost.verdict == "broken"


def _told(verdict: str, words: str = "words") -> Told:
    return to_json(_outcome("sigstop", History(), words=words)) | {"verdict": verdict, "sentence": words}


@pytest.mark.parametrize(
    ("verdicts", "status"), [(["held"], 0), (["held", "inconclusive"], 2), (["inconclusive", "broken"], 1)]
)
def test_the_status_of_all_is_that_of_the_worst_with_the_guard(verdicts: list[str], status: int) -> None:
    rows = [DrillRow(STORIES[0], _told(each), _told("broken")) for each in verdicts]
    assert status_of(rows) == status
    assert f"{len(rows)} drills: {verdicts.count('held')} HELD" in summary_page(rows, 1.0)


def test_everything_in_the_page_of_all_is_escaped() -> None:
    nasty = "<script>alert('&\"')</script>"
    html = summary_page(
        [DrillRow(each, _told("held", nasty), _told("broken", nasty)) for each in STORIES], 1.0
    )
    assert "<script" not in html


def test_a_picture_for_phones_keeps_its_words_inside() -> None:
    """Whatever is written beside which lifeline: nothing begins or ends outside of the picture."""
    words = "a label of some thirty letters"
    steps = [
        StoryStep(0.1 * place, actor, target, "note", "", words)
        for place, (actor, target) in enumerate(
            (actor, target) for actor in NARROW.lives for target in NARROW.lives
        )
    ]
    root = ElementTree.fromstring(sequence_svg(steps, "title", layout=NARROW))
    found = [each for each in root.iter("{http://www.w3.org/2000/svg}text") if each.text == words]
    assert len(found) == len(steps)
    for each in found:
        wide = 6.6 * len(words)
        left = (
            float(each.attrib["x"]) - {"start": 0, "middle": 0.5, "end": 1}[each.attrib["text-anchor"]] * wide
        )
        assert 0 <= left <= NARROW.width - wide


def test_the_page_of_a_story_has_a_picture_for_phones_too() -> None:
    """Each with a hatching of its own: that of a picture that is not shown is not there."""
    assert re.findall(r'<pattern id="([\w-]+)"', page(_outcome("sigstop", History()))) == [
        "stopped",
        "stopped-narrow",
    ]


@pytest.mark.parametrize(
    ("asked", "granted", "shown"), [(0.3, 0.3, "0.3 s"), (0.3, 2.0, "2 s (asked: 0.3 s)")]
)
def test_the_ttl_that_was_granted_is_shown(asked: float, granted: float, shown: str) -> None:
    assert shown_ttl(asked, granted) == shown
