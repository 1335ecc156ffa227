"""What is proven of `fenced.values.decision`, for all tokens, seqs, grants, names, realms, operations and modes.

Each theorem is a sentence and a claim; what it takes for granted is an `Assumption`, a sentence and a term, too. The
page docs/explain/proof.md is generated from the sentences. `proven` asks Z3 for a case in which the assumptions hold
and the claim does not.
"""

from __future__ import annotations

from collections.abc import Iterator

import z3

from fenced.values.decision import MODES, Ruling, Verdict
from tests.proofs.questions import RULINGS, VERDICTS, Assumption, Question, Theorem, none_of
from tests.proofs.symbolic import (
    NUMBER,
    TEXT,
    Obj,
    Opt,
    Symbolic,
    Term,
    any_mark,
    any_mode,
    equal,
    term,
    truth,
)


def theorems(run: Symbolic) -> Iterator[Theorem]:
    """All of them, in the order of the page. Of those about a `Symbolic` with other sources, some do not hold."""
    yield from _answers(run)
    yield from _screen(run)
    yield from _marks(run)
    yield from _holders(run)
    yield from _announcements(run)
    for rule in ("once", "sequenced"):
        yield from _histories(run, rule)
    yield from theorems_of_modes(run)


def _answers(run: Symbolic) -> Iterator[Theorem]:
    q, chapter = Question(run, "q"), "Every operation is judged"
    conditions = [condition for condition, _ in q.outcomes]
    yield Theorem(chapter, "Every operation gets a verdict.", z3.Or(*conditions))
    both = [z3.And(one, other) for at, one in enumerate(conditions) for other in conditions[at + 1 :]]
    yield Theorem(
        chapter, "It gets one: no two ways through the function are open to one operation.", none_of(*both)
    )
    yield Theorem(
        chapter,
        "No assertion fails on the way, and nothing is read from a mark or a stamp that is not there.",
        z3.And(*(z3.Implies(condition, duty) for condition, duty in q.duties)),
    )


def _screen(run: Symbolic) -> Iterator[Theorem]:
    q, chapter = Question(run, "q"), "The stamp itself"
    rest = z3.And(q.stamped, z3.Not(q.out_of_range))
    yield Theorem(
        chapter, "MISSING is what carries no stamp, and nothing else.", q.is_(Verdict.MISSING) == q.stamp.none
    )
    needs_seq = z3.And(z3.Not(q.announce), q.rule != term("retry"), z3.Not(truth(q.s["seq"])))
    yield Theorem(
        chapter,
        "INVALID is a token or a seq out of range, or a write without a seq under `once` or `sequenced`; nothing else.",
        z3.And(
            z3.Implies(z3.And(q.stamped, q.out_of_range), q.is_(Verdict.INVALID)),
            z3.Implies(
                q.is_(Verdict.INVALID), z3.And(q.stamped, z3.Or(q.out_of_range, needs_seq), z3.Not(q.changed))
            ),
            z3.Implies(needs_seq, z3.Not(q.is_(Verdict.ADMIT, Verdict.APPLIED))),
        ),
    )
    yield Theorem(
        chapter,
        "FORGED is a stamp in range whose proof does not hold, and nothing else.",
        q.is_(Verdict.FORGED) == z3.And(rest, z3.Not(q.proven)),
    )
    rest = z3.And(rest, q.proven)
    yield Theorem(
        chapter,
        "FOREIGN is a stamp of another realm, once the guard has one, and nothing else.",
        q.is_(Verdict.FOREIGN) == z3.And(rest, q.foreign),
    )
    rest = z3.And(rest, z3.Not(q.foreign))
    yield Theorem(
        chapter,
        "UNCOVERED is a stamp of a lease that does not cover the name, and nothing else.",
        q.is_(Verdict.UNCOVERED) == z3.And(rest, q.uncovered),
    )
    yield Theorem(
        chapter,
        "What does not pass this screen is never admitted, and leaves the mark as it is.",
        z3.And(z3.Not(q.is_(Verdict.ADMIT, Verdict.APPLIED)), z3.Not(q.changed)),
        (Assumption("the stamp does not pass the screen", q.screened),),
    )
    yield Theorem(
        chapter,
        "What is admitted carries a proven stamp of the guard's realm that covers the name.",
        z3.Implies(q.is_(Verdict.ADMIT, Verdict.APPLIED), z3.Not(q.screened)),
    )


def _marks(run: Symbolic) -> Iterator[Theorem]:
    q, chapter = Question(run, "q"), "Marks"
    m, a = q.m, q.a
    given = (q.has_mark(),)
    yield Theorem(chapter, "A mark never disappears.", z3.Not(q.after.none), given)
    yield Theorem(chapter, "The token of a mark never falls.", a["token"] >= m["token"], given)
    falls = z3.Or(a["token"] < m["token"], z3.And(a["token"] == m["token"], a["seq"] < m["seq"]))
    yield Theorem(
        chapter,
        "A mark never falls: not its token, and not its seq while the token stays.",
        z3.Not(falls),
        (*given, q.known_rule()),
    )
    yield Theorem(
        chapter,
        "The grant of a mark changes only with its token.",
        z3.Implies(a["token"] == m["token"], a["grant"] == m["grant"]),
        given,
    )
    yield Theorem(chapter, "Only ADMIT changes a mark.", z3.Implies(q.changed, q.is_(Verdict.ADMIT)))
    yield Theorem(
        chapter,
        "After ADMIT and APPLIED the mark has the token and the grant of the stamp.",
        z3.Implies(
            q.is_(Verdict.ADMIT, Verdict.APPLIED),
            z3.And(z3.Not(q.after.none), a["token"] == q.s["token"], a["grant"] == q.s["grant"]),
        ),
    )


def _holders(run: Symbolic) -> Iterator[Theorem]:
    q, chapter = Question(run, "q"), "Old and new holders"
    m, s = q.m, q.s
    stale, same_token = s["token"] < m["token"], s["token"] == m["token"]
    other_grant = z3.And(same_token, s["grant"] != m["grant"])
    newer = z3.Or(q.mark.none, s["token"] > m["token"])
    mine = z3.And(q.marked, same_token, s["grant"] == m["grant"])
    has_seq = Assumption("the stamp has a seq of 1 or more", truth(s["seq"]))
    yield Theorem(
        chapter,
        "A token below the mark is never admitted, whatever else the stamp says.",
        z3.Implies(z3.And(q.stamped, stale), z3.Not(q.is_(Verdict.ADMIT, Verdict.APPLIED))),
        (q.has_mark(),),
    )
    yield Theorem(
        chapter,
        "A token below the mark is STALE.",
        z3.Implies(stale, q.is_(Verdict.STALE)),
        (q.has_mark(), q.passes()),
    )
    yield Theorem(
        chapter,
        "A token equal to the mark's, of another grant, is REUSED.",
        z3.Implies(other_grant, q.is_(Verdict.REUSED)),
        (q.has_mark(), q.passes()),
    )
    yield Theorem(
        chapter, "Nothing else is REUSED.", z3.Implies(q.is_(Verdict.REUSED), z3.And(q.marked, other_grant))
    )
    retry = Assumption("the rule is retry", q.rule == term("retry"))
    yield Theorem(
        chapter,
        "The newest grant is admitted, as often as it writes.",
        z3.Implies(z3.Or(newer, mine), q.is_(Verdict.ADMIT)),
        (q.passes(), retry),
    )
    yield Theorem(
        chapter,
        "A newer grant is admitted under every rule.",
        z3.Implies(newer, q.is_(Verdict.ADMIT)),
        (q.passes(), q.known_rule(), has_seq),
    )
    yield Theorem(
        chapter,
        "A grant that has announced and not yet written is admitted under every rule.",
        z3.Implies(z3.And(mine, m["seq"] == 0), q.is_(Verdict.ADMIT)),
        (q.passes(), q.known_rule(), has_seq),
    )


def _announcements(run: Symbolic) -> Iterator[Theorem]:
    chapter, yes = "Announcements", z3.BoolVal(True)
    first = Question(run, "a", announce=yes)
    admitted = Assumption("the announcement is admitted", first.is_(Verdict.ADMIT))
    yield Theorem(
        chapter,
        "An admitted announcement leaves a mark with its token.",
        z3.And(z3.Not(first.after.none), first.a["token"] == first.s["token"]),
        (admitted,),
    )
    q, announced = Question(run, "q"), z3.Const("announced", NUMBER)
    older = z3.And(q.stamped, q.s["token"] < announced)
    yield Theorem(
        chapter,
        "Every later step, of anybody, leaves the mark at that token or above; no older token is admitted by it.",
        z3.And(
            z3.Not(q.after.none),
            q.a["token"] >= announced,
            z3.Implies(older, z3.Not(q.is_(Verdict.ADMIT, Verdict.APPLIED))),
        ),
        (
            Assumption(
                "the mark is at an announced token or above", z3.And(q.marked, q.m["token"] >= announced)
            ),
        ),
    )
    same = {key: getattr(first, key) for key in ("stamp", "name", "rule", "realm", "operation", "proven")}
    again = Question(run, "again", mark=first.after, announce=yes, **same)
    unchanged = [again.a[key] == first.a[key] for key in ("token", "grant", "seq")]
    yield Theorem(
        chapter,
        "To announce twice is to announce once.",
        z3.And(again.is_(Verdict.ADMIT), *unchanged),
        (admitted,),
    )


class History:
    """Everything that has happened to one name, as far as one grant `g` is concerned, and one step of anybody.

    A ghost remembers whether g has written, its last seq and the operation that wrote it. The invariant says what the
    mark tells about the ghost. It holds at the beginning, and every step keeps it: so it holds in every history.
    """

    def __init__(self, run: Symbolic, rule: str) -> None:
        self.step = step = Question(run, rule, rule=term(rule))
        self.grant, self.token = z3.Const("g", TEXT), z3.Const("k", NUMBER)
        self.wrote, self.seq, self.by = z3.Bool("wrote"), z3.Const("w", NUMBER), z3.Const("o", TEXT)
        m, s, operation = step.m, step.s, step.operation
        self.mine = z3.And(step.stamped, s["grant"] == self.grant)
        self.writes = z3.And(self.mine, z3.Not(step.announce), step.is_(Verdict.ADMIT))
        going_on = z3.And(step.marked, z3.Not(operation.none), equal(operation, m["operation"]))
        at_mine = z3.And(m["token"] == self.token, m["grant"] == self.grant)
        self.goes_on = z3.And(self.wrote, at_mine, going_on)
        self.given = (
            Assumption("one grant has one token", z3.Implies(self.mine, s["token"] == self.token)),
            Assumption("every write has an operation id", z3.Or(step.announce, z3.Not(operation.none))),
            Assumption(
                "one operation carries one seq for a name",
                z3.Implies(z3.And(going_on, z3.Not(step.announce)), s["seq"].value == m["seq"]),
            ),
            Assumption(
                "the invariant held before the step", self.holds(step.mark, self.wrote, self.seq, self.by)
            ),
        )

    def holds(self, mark: Opt, wrote: Term, seq: Term, by: Term) -> Term:
        m = mark.value.fields
        known, mine = z3.Not(mark.none), z3.And(m["token"] == self.token, m["grant"] == self.grant)
        written = z3.And(
            mine, m["seq"] == seq, m["seq"] >= 1, equal(m["operation"], Opt(z3.BoolVal(False), by))
        )
        return z3.And(
            z3.Implies(wrote, z3.And(known, z3.Or(m["token"] > self.token, written))),
            z3.Implies(z3.And(z3.Not(wrote), known, mine), m["seq"] == 0),
            z3.Implies(known, m["seq"] >= 0),
            z3.Implies(z3.And(known, mine, m["seq"] == 0), m["operation"].none),
        )

    def is_kept(self) -> Term:
        step = self.step
        new = z3.And(self.writes, z3.Not(self.goes_on))
        after = self.holds(
            step.after,
            z3.Or(self.wrote, self.writes),
            z3.If(new, step.s["seq"].value, self.seq),
            z3.If(new, step.operation.value, self.by),
        )
        nothing = Opt(z3.BoolVal(True), any_mark("none").value)
        return z3.And(self.holds(nothing, z3.BoolVal(False), self.seq, self.by), after)


def _histories(run: Symbolic, rule: str) -> Iterator[Theorem]:
    history, chapter = History(run, rule), f"Rule `{rule}`, in every history"
    step, seq = history.step, history.step.s["seq"].value
    yield Theorem(
        chapter,
        "What the mark tells about a grant is true at the beginning and after every step of anybody: whether it has "
        "written, its last seq, and its last operation.",
        history.is_kept(),
        history.given,
    )
    repeated = z3.And(history.wrote, history.writes)
    if rule == "once":
        yield Theorem(
            chapter,
            "Of one grant, a second operation is never admitted.",
            z3.Implies(repeated, history.goes_on),
            history.given,
        )
        return
    yield Theorem(
        chapter,
        "Of one grant, every operation that is admitted has a higher seq than all that were admitted before it.",
        z3.Implies(repeated, z3.Or(history.goes_on, seq > history.seq)),
        history.given,
    )
    yield Theorem(
        chapter,
        "APPLIED is only the seq that its grant has written last.",
        z3.Implies(
            z3.And(history.mine, step.is_(Verdict.APPLIED)), z3.And(history.wrote, seq == history.seq)
        ),
        history.given,
    )


class Stage:
    """Any mode, and what `rule_on` does in it about a verdict on any name."""

    def __init__(self, run: Symbolic, tag: str, mode: Obj | None = None) -> None:
        self._run = run
        self.mode = mode or any_mode(tag)
        self.name, self.percent = self.mode.fields["name"], self.mode.fields["percent"]
        self.rank: Term = z3.IntVal(0)
        for number, name in enumerate(MODES):
            self.rank = z3.If(self.name == term(name), z3.IntVal(number), self.rank)
        known = z3.Or(*(self.name == term(name) for name in MODES))
        self.legal = z3.And(known, self.percent >= 0, self.percent <= 100)

    def ruling(self, verdict: Verdict) -> Term:
        result: Term = z3.IntVal(-1)
        arguments = {"verdict": verdict, "mode": self.mode, "name": z3.Const("name", TEXT)}
        for condition, ruling in self._run.call("rule_on", z3.BoolVal(True), arguments):
            result = z3.If(condition, z3.IntVal(RULINGS.index(ruling)), result)
        return result

    def does(self, verdict: Verdict, ruling: Ruling) -> Term:
        return self.ruling(verdict) == z3.IntVal(RULINGS.index(ruling))


def theorems_of_modes(run: Symbolic) -> Iterator[Theorem]:
    chapter = "Modes"
    point = z3.Function("canary_point", TEXT, NUMBER)
    run.hooks["canary_point"] = point
    one, later = Stage(run, "one"), Stage(run, "later")
    name = z3.Const("name", TEXT)
    hashed = Assumption("the hash of a name is below 2**32", z3.And(point(name) >= 0, point(name) < 2**32))
    legal = Assumption("a canary has 0 to 100 percent", z3.And(one.legal, later.legal))
    higher = z3.And(one.rank == later.rank, one.percent <= later.percent)
    order = Assumption(
        "one mode follows the other, or is a canary of as many percent or more",
        z3.Or(one.rank < later.rank, higher),
    )
    for verdict in VERDICTS:
        refused = z3.Implies(one.does(verdict, Ruling.REFUSE), later.does(verdict, Ruling.REFUSE))
        sentence = "What a mode refuses is refused in every later mode, and by a canary of more percent."
        yield Theorem(chapter, sentence, refused, (hashed, legal, order), verdict)
        good = verdict in (Verdict.ADMIT, Verdict.APPLIED)
        admitted = one.does(verdict, Ruling.ADMIT)
        yield Theorem(
            chapter,
            f"In every mode this verdict is {'' if good else 'not '}ruled ADMIT.",
            admitted if good else z3.Not(admitted),
            (hashed, legal),
            verdict,
        )
        ruled = z3.Or(*(one.does(verdict, ruling) for ruling in RULINGS))
        yield Theorem(
            chapter, "In every mode it gets one of the four rulings.", ruled, (hashed, legal), verdict
        )
    canary = one.name == term("canary")
    enforce = Stage(run, "", Obj("Mode", {"name": term("enforce"), "percent": z3.RealVal(0)}))
    alike = [one.ruling(verdict) == enforce.ruling(verdict) for verdict in VERDICTS]
    yield Theorem(
        chapter,
        "`canary(100%)` rules as `enforce` does.",
        z3.And(*alike),
        (hashed, Assumption("the mode is canary(100%)", z3.And(canary, one.percent == 100))),
    )
    yield Theorem(
        chapter,
        "`canary(0%)` refuses nothing.",
        none_of(*(one.does(verdict, Ruling.REFUSE) for verdict in VERDICTS)),
        (hashed, Assumption("the mode is canary(0%)", z3.And(canary, one.percent == 0))),
    )
