"""What a theorem is, and one call of `judge` with everything unknown, of which most theorems speak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import z3

from fenced.values.decision import RULES, Ruling, Verdict
from fenced.values.model import SEQ_MAX, TOKEN_MAX
from tests.proofs.symbolic import (
    TEXT,
    Obj,
    Opt,
    Symbolic,
    Term,
    any_mark,
    any_stamp,
    equal,
    lifted,
    optional,
    term,
)

VERDICTS = tuple(Verdict)
RULINGS = tuple(Ruling)
SECONDS_MAX = 20
"""A theorem takes milliseconds. One that Z3 cannot decide in this time counts as not proven."""


@dataclass(frozen=True)
class Assumption:
    """What a theorem takes for granted, as a sentence and as a term."""

    sentence: str
    term: Term


@dataclass(frozen=True)
class Theorem:
    """`about`: the verdict, if there is one such theorem for each of them."""

    chapter: str
    sentence: str
    claim: Term
    given: tuple[Assumption, ...] = ()
    about: str = ""

    def __str__(self) -> str:
        return f"{self.chapter}: {self.sentence}{self.about and f' [{self.about}]'}"

    def counterexample(self) -> str | None:
        """A case in which it does not hold; None if there is none, which proves it."""
        solver = z3.Solver()
        solver.set("timeout", SECONDS_MAX * 1000)
        solver.add(*(each.term for each in self.given), z3.Not(self.claim))
        answer = solver.check()
        if answer == z3.unsat:
            return None
        if answer == z3.unknown:
            return f"undecided after {SECONDS_MAX} s"
        model = solver.model()
        return ", ".join(sorted(f"{each}={model[each]}" for each in model.decls() if each.arity() == 0))

    def is_about_something(self) -> bool:
        """Whether there is any case at all in which its assumptions hold."""
        solver = z3.Solver()
        solver.set("timeout", SECONDS_MAX * 1000)
        solver.add(*(each.term for each in self.given))
        return bool(solver.check() == z3.sat)


def none_of(*terms: Term) -> Term:
    return z3.Not(z3.Or(*terms))


def verdict_term(verdict: Verdict) -> Term:
    return z3.IntVal(VERDICTS.index(verdict))


class Question:
    """One call of `judge` with everything unknown but what is `fixed`, and its answer as terms."""

    def __init__(self, run: Symbolic, tag: str, **fixed: Term) -> None:
        self.fixed = fixed
        self.mark: Opt = fixed.get("mark") or any_mark(f"{tag}.mark")
        self.stamp: Opt = fixed.get("stamp") or any_stamp(f"{tag}.stamp")
        self.name = fixed.get("name", z3.Const(f"{tag}.name", TEXT))
        self.rule = fixed.get("rule", z3.Const(f"{tag}.rule", TEXT))
        self.realm: Opt = fixed.get("realm") or optional(f"{tag}.realm", TEXT)
        self.announce = fixed.get("announce", z3.Bool(f"{tag}.announce"))
        self.operation: Opt = fixed.get("operation") or optional(f"{tag}.operation", TEXT)
        self.proven = fixed.get("proven", z3.Bool(f"{tag}.proven"))
        before = len(run.duties)
        arguments = ("mark", "stamp", "name", "rule", "realm", "announce", "operation", "proven")
        self.outcomes = run.call("judge", z3.BoolVal(True), {key: getattr(self, key) for key in arguments})
        self.duties = run.duties[before:]
        self.m, self.s = self.mark.value.fields, self.stamp.value.fields

    @cached_property
    def verdict(self) -> Term:
        result: Term = z3.IntVal(-1)
        for condition, judgement in self.outcomes:
            result = z3.If(condition, verdict_term(judgement.fields["verdict"]), result)
        return result

    @cached_property
    def after(self) -> Opt:
        """The mark afterwards."""
        none, values = self.mark.none, dict(self.m)
        for condition, judgement in self.outcomes:
            new = lifted(judgement.fields["mark"])
            none = z3.If(condition, new.none, none)
            for key in ("token", "grant", "seq"):
                values[key] = z3.If(condition, term(new.value.fields[key]), values[key])
            operation, old = lifted(new.value.fields["operation"]), values["operation"]
            value = old.value if operation.value is None else operation.value
            values["operation"] = Opt(
                z3.If(condition, operation.none, old.none), z3.If(condition, value, old.value)
            )
        return Opt(none, Obj("Mark", values))

    @property
    def a(self) -> dict[str, Term]:
        """The fields of the mark afterwards."""
        return dict(self.after.value.fields)

    def is_(self, *verdicts: Verdict) -> Term:
        return z3.Or(*(self.verdict == verdict_term(each) for each in verdicts))

    @property
    def stamped(self) -> Term:
        return z3.Not(self.stamp.none)

    @property
    def marked(self) -> Term:
        return z3.Not(self.mark.none)

    @property
    def out_of_range(self) -> Term:
        token, seq = self.s["token"], self.s["seq"]
        seq_range = z3.Or(seq.none, z3.And(seq.value >= 0, seq.value <= SEQ_MAX))
        return z3.Not(z3.And(token >= 1, token <= TOKEN_MAX, seq_range))

    @property
    def foreign(self) -> Term:
        return z3.And(z3.Not(self.realm.none), self.s["realm"] != self.realm.value)

    @property
    def uncovered(self) -> Term:
        return z3.Not(self.s["names"].member(self.name))

    @property
    def screened(self) -> Term:
        """Something is wrong with the stamp itself, whatever the mark."""
        wrong = (self.out_of_range, z3.Not(self.proven), self.foreign, self.uncovered)
        return z3.Or(self.stamp.none, *wrong)

    @property
    def changed(self) -> Term:
        """The mark afterwards is another one. Of most outcomes it is the very same term, which Z3 need not look at."""
        return z3.Or(*(z3.And(condition, self._differs(new)) for condition, new in self._new_marks()))

    def _new_marks(self) -> Iterator[tuple[Term, Opt]]:
        for condition, judgement in self.outcomes:
            if judgement.fields["mark"] is not self.mark:
                yield condition, lifted(judgement.fields["mark"])

    def _differs(self, new: Opt) -> Term:
        n = new.value.fields
        differs = [term(n[key]) != self.m[key] for key in ("token", "grant", "seq")]
        differs.append(z3.Not(equal(n["operation"], self.m["operation"])))
        return z3.Or(new.none != self.mark.none, z3.And(self.marked, z3.Or(*differs)))

    # Assumptions about it.

    def has_mark(self) -> Assumption:
        return Assumption("the name has a mark", self.marked)

    def passes(self) -> Assumption:
        return Assumption("the stamp passes the screen", z3.Not(self.screened))

    def known_rule(self) -> Assumption:
        return Assumption(
            f"the rule is {', '.join(RULES[:-1])} or {RULES[-1]}",
            z3.Or(*(self.rule == term(each) for each in RULES)),
        )
