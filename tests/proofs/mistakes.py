"""Mistakes planted into the decision: what another program, or an earlier version, does. The proof must miss each."""

from __future__ import annotations

from dataclasses import dataclass

from tests.proofs.symbolic import Symbolic, shipped


@dataclass(frozen=True)
class Mistake:
    """A piece of the source of a function, and what it is replaced by."""

    what: str
    function: str
    piece: str
    instead: str

    def source(self, name: str) -> str:
        text = shipped(name)
        if name != self.function:
            return text
        assert self.piece in text, f"{self.what}: {self.function} no longer has {self.piece!r}"
        return text.replace(self.piece, self.instead)

    def planted(self) -> Symbolic:
        return Symbolic(self.source)


RISES = "if mark is None or stamp.token > mark.token:"

MISTAKES = (
    Mistake("an equal token is stale", "judge", "stamp.token < mark.token", "stamp.token <= mark.token"),
    Mistake(
        "a token is stale from two below on",
        "judge",
        "stamp.token < mark.token",
        "stamp.token + 1 < mark.token",
    ),
    Mistake("the grant is not compared", "judge", "stamp.grant != mark.grant", "False"),
    Mistake(
        "an announcement counts as a write",
        "judge",
        "seq = 0 if announce else stamp.seq or 0",
        "seq = stamp.seq or 0",
    ),
    Mistake(
        "an announcement raises no mark",
        "judge",
        RISES,
        "if mark is None or (stamp.token > mark.token and not announce):",
    ),
    Mistake("`once` compares seqs", "_judge_repeat", "if mark.seq == 0 else", "if seq > mark.seq else"),
    Mistake("`sequenced` admits an equal seq", "_judge_repeat", "if seq > mark.seq:", "if seq >= mark.seq:"),
    Mistake(
        "an earlier seq is APPLIED", "_judge_repeat", "if seq == mark.seq else", "if seq <= mark.seq else"
    ),
    Mistake(
        "a further write forgets the grant",
        "_judge_repeat",
        "Mark(mark.token, mark.grant, seq, operation)",
        "Mark(mark.token, '', seq, operation)",
    ),
    Mistake("the realm is not compared", "_screen", "stamp.realm != realm", "False"),
    Mistake("a stamp covers every name", "_screen", "name not in stamp.names", "False"),
    Mistake("token 0 is in range", "_screen", "1 <= stamp.token", "0 <= stamp.token"),
    Mistake(
        "`sequenced` admits every repeat",
        "judge",
        'if announce or rule == "retry"',
        'if announce or rule != "once"',
    ),
    Mistake("a larger canary has fewer names", "in_canary", "<", ">"),
    Mistake(
        "`require` lets unstamped writes through",
        "rule_on",
        'mode.name == "require"',
        'mode.name == "enforce"',
    ),
    Mistake("`enforce` refuses nothing", "Mode.refuses", '("enforce", "require")', '("require",)'),
    Mistake(
        "a duplicate is ruled ADMIT",
        "rule_on",
        "(Verdict.ADMIT, Verdict.APPLIED)",
        "(Verdict.ADMIT, Verdict.APPLIED, Verdict.DUPLICATE)",
    ),
    # The next two were in version 0.2 until a proof was tried.
    Mistake(
        "an announcement lends its id to a write", "judge", "None if announce else operation", "operation"
    ),
    Mistake("a seq may be negative", "_screen", " and is_seq(stamp.seq)", ""),
    # And one that a reader of the code would hardly see.
    Mistake("a first mark is compared", "judge", "mark is not None and stamp.token <", "stamp.token <"),
)
