"""The decision table of the design, row by row, and what must hold for every row."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenced.errors import REFUSALS
from fenced.testing.kit import REALM, stamp
from fenced.values.decision import MODES, RULES, Mark, Mode, Rule, Ruling, Verdict, in_canary, judge, rule_on

NAME = "orders/42"
ANNOUNCED = Mark(5, stamp(5).grant, 0)
WRITTEN = Mark(5, stamp(5).grant, 3, "tx 1")

TABLE = [
    # incoming, mark, announce, verdict under retry, once, sequenced
    (stamp(5), None, False, "admit", "admit", "admit"),
    (stamp(6), WRITTEN, False, "admit", "admit", "admit"),
    (stamp(5, 4, grant="f" * 32), WRITTEN, False, "reused", "reused", "reused"),
    (stamp(5, 0, grant="f" * 32), ANNOUNCED, True, "reused", "reused", "reused"),
    (stamp(5, 0), WRITTEN, True, "admit", "admit", "admit"),
    (stamp(5, 1), ANNOUNCED, False, "admit", "admit", "admit"),
    (stamp(5, 4), WRITTEN, False, "admit", "duplicate", "admit"),
    (stamp(5, 9), WRITTEN, False, "admit", "duplicate", "admit"),
    (stamp(5, 3), WRITTEN, False, "admit", "duplicate", "applied"),
    (stamp(5, 2), WRITTEN, False, "admit", "duplicate", "out_of_order"),
    (stamp(5, None), ANNOUNCED, False, "admit", "invalid", "invalid"),
    (stamp(5, 0), ANNOUNCED, False, "admit", "invalid", "invalid"),
    (stamp(4, 9), WRITTEN, False, "stale", "stale", "stale"),
    (stamp(4, 0), ANNOUNCED, True, "stale", "stale", "stale"),
    (stamp(9, 1, "orders"), WRITTEN, False, "uncovered", "uncovered", "uncovered"),
    (stamp(9, realm="00000000000000bb"), WRITTEN, False, "foreign", "foreign", "foreign"),
    (None, WRITTEN, False, "missing", "missing", "missing"),
    (stamp(1)._replace(token=2**53), None, False, "invalid", "invalid", "invalid"),
    (stamp(5, -1), ANNOUNCED, False, "invalid", "invalid", "invalid"),
    (stamp(5, -1), ANNOUNCED, True, "invalid", "invalid", "invalid"),
    (stamp(6, 2**53 - 1), WRITTEN, False, "admit", "admit", "admit"),
    (stamp(6, 2**53), WRITTEN, False, "invalid", "invalid", "invalid"),
]


@pytest.mark.parametrize(("incoming", "mark", "announce", *RULES), TABLE)
def test_table(incoming, mark, announce, retry, once, sequenced):  # type: ignore[no-untyped-def]
    for rule, verdict in zip(RULES, (retry, once, sequenced), strict=True):
        judged = judge(mark, incoming, name=NAME, rule=rule, realm=REALM, announce=announce, operation="tx 2")
        assert judged.verdict == verdict, rule


@pytest.mark.parametrize("rule", RULES)
def test_the_same_operation_again(rule: Rule) -> None:
    """Later statements of one transaction carry the same stamp, and are not repeats."""
    judged = judge(WRITTEN, stamp(5, 3), name=NAME, rule=rule, realm=REALM, operation="tx 1")
    assert (judged.verdict, judged.mark) == (Verdict.ADMIT, WRITTEN)


def test_a_proof_that_does_not_verify() -> None:
    assert judge(None, stamp(5), name=NAME, rule="retry", realm=REALM, proven=False).verdict == Verdict.FORGED


stamps = st.builds(
    lambda token, seq, grant: stamp(token, seq, grant=f"{grant:032x}"),
    st.integers(1, 4),
    st.none() | st.integers(0, 4),
    st.integers(1, 2),
)


@given(st.sampled_from(RULES), st.lists(st.tuples(stamps, st.booleans()), max_size=30))
def test_the_mark_never_falls(rule: Rule, operations) -> None:  # type: ignore[no-untyped-def]
    mark: Mark | None = None
    for operation, (incoming, announce) in enumerate(operations):
        judged = judge(
            mark, incoming, name=NAME, rule=rule, realm=REALM, announce=announce, operation=str(operation)
        )
        if judged.verdict is not Verdict.ADMIT:
            assert judged.mark == mark
        elif mark is not None:
            assert judged.mark is not None
            assert (judged.mark.token, judged.mark.seq) >= (mark.token, 0)
            if judged.mark.token == mark.token:
                assert judged.mark.grant == mark.grant
                assert judged.mark.seq >= mark.seq
        mark = judged.mark


@pytest.mark.parametrize("rule", ["once", "sequenced"])
def test_an_announcement_lends_its_id_to_nobody(rule: Rule) -> None:
    """Every history of four steps of one grant, each an announcement or the operation whose seq it is.

    Whatever ids announcements have: under `once` at most one operation is admitted, under `sequenced` no seq twice, and
    what is admitted raises the mark, so that it is known afterwards.
    """
    steps = [(announce, seq) for announce in (True, False) for seq in (1, 2, 3)]
    for history in itertools.product(steps, repeat=4):
        mark: Mark | None = None
        admitted = []
        for announce, seq in history:
            incoming, operation = stamp(5, 0 if announce else seq), f"tx {seq}"
            # A later statement of the same operation.
            again = mark is not None and not announce and mark.seq == seq
            judged = judge(
                mark, incoming, name=NAME, rule=rule, realm=REALM, announce=announce, operation=operation
            )
            if judged.verdict is Verdict.ADMIT and not announce and not again:
                admitted.append(seq)
                assert judged.mark == Mark(5, incoming.grant, seq, operation), history
            mark = judged.mark
        assert len(admitted) <= (1 if rule == "once" else len({*admitted})), history


@given(st.text(min_size=1, max_size=40), st.floats(0, 100), st.floats(0, 100))
def test_a_larger_canary_contains_the_smaller(name: str, one: float, other: float) -> None:
    if in_canary(name, min(one, other)):
        assert in_canary(name, max(one, other))
    assert in_canary(name, 100)
    assert not in_canary(name, 0)


@given(st.floats(0, 100))
def test_a_canary_is_written_as_sql_reads_it(percent: float) -> None:
    written = str(Mode("canary", percent))
    assert re.fullmatch(r"canary\([0-9]+(\.[0-9]+)?%\)", written)
    assert abs(Mode.parse(written).percent - percent) < 1e-8


def test_every_verdict_has_a_ruling_and_an_error() -> None:
    for verdict in Verdict:
        for name in MODES:
            ruling = rule_on(verdict, Mode(name, 50), NAME)
            assert (ruling is Ruling.ADMIT) == (verdict in (Verdict.ADMIT, Verdict.APPLIED))
    refusable = {v.value for v in Verdict} - {"admit", "applied"}
    assert refusable == set(REFUSALS)
