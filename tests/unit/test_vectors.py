"""The shipped decision vectors are those of the pure functions, and tell a wrong decision from a right one."""

import json
from collections.abc import Callable

import pytest

import fenced.testing.vectors as vectors
from fenced.values.decision import Judgement, Mark, Mode, Ruling, Verdict, in_canary, judge, mode_of, rule_on
from fenced.values.model import SEQ_MAX, Stamp

FILE = json.loads(vectors.PATH.read_text())


def test_the_file_is_what_the_pure_functions_say() -> None:
    """If this fails after a wanted change: python -c 'from fenced.testing import vectors; vectors.write()'"""
    assert vectors.PATH.read_text() == vectors.packed(vectors.made())


def test_every_answer_occurs() -> None:
    assert {case.verdict for case in vectors.cases()} == {verdict.value for verdict in Verdict}
    assert {row[-1] for row in FILE["rule_on"]["rows"]} == {ruling.value for ruling in Ruling}
    assert len(vectors.cases()) > 1500


def _judged(case: vectors.Case, decide: Callable[..., Judgement]) -> tuple[str, bool]:
    judged = decide(
        case.mark,
        case.stamp,
        name=vectors.NAME,
        rule=case.rule,
        realm=case.guard_realm,
        announce=case.announce,
        operation=case.operation,
        proven=case.proven,
    )
    return judged.verdict.value, judged.mark != case.mark


def _as_texts(mark: Mark | None, stamp: Stamp | None, **more: object) -> Judgement:
    if mark and stamp and str(stamp.token) < str(mark.token):
        return Judgement(Verdict.STALE, mark)
    return judge(mark, stamp, **more)  # type: ignore[arg-type]


def _as_floats(mark: Mark | None, stamp: Stamp | None, **more: object) -> Judgement:
    """As a language does whose numbers are 32-bit floats."""
    if mark and stamp and abs(stamp.token - mark.token) < stamp.token / 2**24 and stamp.token > 2**24:
        stamp = stamp._replace(token=mark.token)
    return judge(mark, stamp, **more)  # type: ignore[arg-type]


def _any_grant(mark: Mark | None, stamp: Stamp | None, **more: object) -> Judgement:
    same = mark and stamp and mark.token == stamp.token
    return judge(mark, stamp._replace(grant=mark.grant) if same and mark and stamp else stamp, **more)  # type: ignore[arg-type]


def _mark_first(mark: Mark | None, stamp: Stamp | None, **more: object) -> Judgement:
    """The mark is compared before the stamp is screened."""
    if mark and stamp and stamp.token < mark.token:
        return Judgement(Verdict.STALE, mark)
    return judge(mark, stamp, **more)  # type: ignore[arg-type]


def _no_operation(mark: Mark | None, stamp: Stamp | None, **more: object) -> Judgement:
    return judge(mark, stamp, **{**more, "operation": None})  # type: ignore[arg-type]


def _unproven(mark: Mark | None, stamp: Stamp | None, **more: object) -> Judgement:
    return judge(mark, stamp, **{**more, "proven": True})  # type: ignore[arg-type]


def _any_seq(mark: Mark | None, stamp: Stamp | None, **more: object) -> Judgement:
    return judge(mark, stamp and stamp._replace(seq=stamp.seq and stamp.seq % SEQ_MAX), **more)  # type: ignore[arg-type]


WRONG = [_as_texts, _as_floats, _any_grant, _mark_first, _no_operation, _unproven, _any_seq]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_planted_bug_is_caught(wrong: Callable[..., Judgement]) -> None:
    assert all(_judged(case, judge) == (case.verdict, case.rises) for case in vectors.cases())
    assert any(_judged(case, wrong) != (case.verdict, case.rises) for case in vectors.cases())


def test_a_receiver_needs_the_file_alone() -> None:
    """Written as the page describes it: rulings, shares, patterns and stamps."""
    for verdict, mode, name, ruling in FILE["rule_on"]["rows"]:
        assert rule_on(Verdict(verdict), Mode.parse(mode), name) == ruling
    for name, point in FILE["canary"]["rows"]:
        for percent in (0, 5, 50, 99.9, 100):
            assert in_canary(name, percent) == (point < percent / 100 * 2**32)
    for story in FILE["mode_of"]:
        modes = [(pattern, Mode.parse(mode)) for pattern, mode in story["modes"].items()]
        assert {name: str(mode_of(name, modes)) for name in story["names"]} == story["names"]
    for good in FILE["stamps"]["good"]:
        text = good.pop("text")
        assert Stamp.parse(text) == Stamp(**{**good, "names": tuple(good["names"])})
    assert len(FILE["stamps"]["bad"]) > 50
