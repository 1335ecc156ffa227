"""The decision is proven: every theorem holds, no planted mistake passes, and the terms are what the functions do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest
import z3

from fenced.testing import vectors
from fenced.values.decision import RULES, Judgement, Mark, Rule, judge
from fenced.values.model import SEQ_MAX, TOKEN_MAX, Stamp
from tests.proofs.mistakes import MISTAKES, Mistake
from tests.proofs.questions import VERDICTS, Question, Theorem
from tests.proofs.symbolic import NotUnderstood, Symbolic, Term, shipped, term
from tests.proofs.theorems import theorems, theorems_of_modes

pytestmark = pytest.mark.xdist_group("proofs")

THEOREMS = 66
OF_MODES = {"rule_on", "in_canary", "Mode.refuses"}
RANDOM = 1000


@cache
def every_theorem() -> tuple[list[Theorem], set[str]]:
    """All of them, and the functions that were read for them."""
    read = set[str]()

    def reading(name: str) -> str:
        read.add(name)
        return shipped(name)

    return list(theorems(Symbolic(reading))), read


def test_every_theorem_is_proven() -> None:
    every, _ = every_theorem()
    assert len(every) == THEOREMS
    assert [(str(each), why) for each in every if (why := each.counterexample())] == []


def test_no_theorem_is_about_nothing() -> None:
    every, _ = every_theorem()
    assert [str(each) for each in every if not each.is_about_something()] == []


def test_the_functions_that_ship_are_read() -> None:
    """And not only `judge` and `rule_on`: what they call, too."""
    _, read = every_theorem()
    assert read == {"judge", "_screen", "_judge_repeat", "is_seq", *OF_MODES}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_a_planted_mistake_is_found(mistake: Mistake) -> None:
    first = theorems_of_modes if mistake.function in OF_MODES else theorems
    assert any(each.counterexample() for each in first(mistake.planted()))


def test_an_expression_that_is_not_understood_fails() -> None:
    changed = Mistake("", "judge", "seq = 0 if announce", "seq = [0][0] if announce")
    with pytest.raises(NotUnderstood):
        list(theorems(changed.planted()))


class Operation(NamedTuple):
    """The arguments of `judge`."""

    mark: Mark | None
    stamp: Stamp | None
    name: str
    rule: Rule
    realm: str | None
    announce: bool
    operation: str | None
    proven: bool

    def judged(self) -> Judgement:
        mark, stamp, *_ = self
        options = {key: value for key, value in self._asdict().items() if key not in ("mark", "stamp")}
        return judge(mark, stamp, **options)

    def values(self, asked: Question) -> Iterator[tuple[Term, Term]]:
        """Each unknown of the question, and its value here. What belongs to a stamp or mark of None has any value."""
        mark, stamp = self.mark or Mark(0, ""), self.stamp or Stamp("", (), 0, None, "")
        # Before the name is replaced.
        yield (
            asked.s["names"].member(asked.name),
            term(self.name in stamp.names),
        )
        yield asked.mark.none, term(self.mark is None)
        yield asked.stamp.none, term(self.stamp is None)
        for key in ("token", "grant", "seq"):
            yield asked.m[key], term(getattr(mark, key))
        for key in ("realm", "token", "grant"):
            yield asked.s[key], term(getattr(stamp, key))
        for unknown, text in ((asked.m["operation"], mark.operation), (asked.operation, self.operation)):
            yield from ((unknown.none, term(text is None)), (unknown.value, term(text or "")))
        seq = asked.s["seq"]
        yield from ((seq.none, term(stamp.seq is None)), (seq.value, term(stamp.seq or 0)))
        yield from ((asked.realm.none, term(self.realm is None)), (asked.realm.value, term(self.realm or "")))
        for key in ("name", "rule", "announce", "proven"):
            yield getattr(asked, key), term(getattr(self, key))


def operations() -> Iterator[Operation]:
    for each in vectors.cases():
        realm, operation = each.guard_realm, each.operation
        yield Operation(
            each.mark, each.stamp, vectors.NAME, each.rule, realm, each.announce, operation, each.proven
        )
    draw = random.Random(1)
    one = draw.choice
    for _ in range(RANDOM):
        mark = Mark(one((1, 2, 3, TOKEN_MAX)), one("AB"), one((0, 1, 2, -1)), one((None, "x", "y")))
        names = one((("n",), ("o",), ("n", "o")))
        seq = one((None, 0, 1, 2, 3, -1, SEQ_MAX, SEQ_MAX + 1))
        stamp = Stamp(one("RS"), names, one((0, 1, 2, 3, TOKEN_MAX, TOKEN_MAX + 1)), seq, one("AB"))
        yield Operation(
            one((mark, mark, mark, None)),
            one((*[stamp] * 9, None)),
            "n",
            one(RULES),
            one((None, "R")),
            one((False, False, True)),
            one((None, "x", "y")),
            one((*[True] * 9, False)),
        )


def test_the_terms_are_what_the_functions_do() -> None:
    """For every vector and a thousand random operations, the terms give the answer of `judge`."""
    asked = Question(Symbolic(), "q")
    by = asked.a["operation"]
    answer = [
        asked.verdict,
        asked.after.none,
        asked.a["token"],
        asked.a["grant"],
        asked.a["seq"],
        by.none,
        by.value,
    ]
    whole = z3.Function("answer", *(each.sort() for each in answer), z3.BoolSort())(*answer)
    compared = 0
    for operation in operations():
        (covers, *rest), judged = operation.values(asked), operation.judged()
        found = z3.simplify(z3.substitute(z3.substitute(whole, covers), *rest))
        verdict, none, token, grant, seq, unset, text = found.children()
        assert VERDICTS[verdict.as_long()] is judged.verdict, operation
        assert z3.is_true(none) == (judged.mark is None), operation
        if judged.mark is not None:
            written = None if z3.is_true(unset) else text.as_string()
            mark = Mark(token.as_long(), grant.as_string(), seq.as_long(), written)
            assert mark == judged.mark, operation
        compared += 1
    assert compared > RANDOM + 2000
