"""The guard's decision: one pure function that every guard, in whatever language, agrees with.

`judge` says what an operation *is*, by the rule; `rule_on` says what is done about it, by the mode. A
mark rises exactly when an operation is admitted, in the same atomic step as its effect, and never falls.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Literal

from fenced.errors import Misuse, shown
from fenced.values.model import TOKEN_MAX, Stamp, is_seq

Rule = Literal["retry", "once", "sequenced"]
RULES: tuple[Rule, ...] = ("retry", "once", "sequenced")


class Verdict(StrEnum):
    """What an operation is, whatever is then done about it."""

    ADMIT = "admit"
    APPLIED = "applied"
    """Rule `sequenced`: this very operation was applied before; nothing is to be done."""
    STALE = "stale"
    DUPLICATE = "duplicate"
    OUT_OF_ORDER = "out_of_order"
    REUSED = "reused"
    UNCOVERED = "uncovered"
    FOREIGN = "foreign"
    MISSING = "missing"
    INVALID = "invalid"
    FORGED = "forged"


@dataclass(frozen=True, slots=True)
class Mark:
    """The highest stamp admitted for a name. `seq` 0: announced, nothing written yet."""

    token: int
    grant: str
    seq: int = 0
    operation: str | None = None
    """Which transaction set it, so that its later statements are not taken for a repeat; none if it was announced."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and the mark that stands once it is carried out."""

    verdict: Verdict
    mark: Mark | None


def judge(
    mark: Mark | None,
    stamp: Stamp | None,
    *,
    name: str,
    rule: Rule,
    realm: str | None,
    announce: bool = False,
    operation: str | None = None,
    proven: bool = True,
) -> Judgement:
    """Decide one operation on `name`. `realm` None: the guard has not met an authority yet.

    `operation` is unique for ever: an operation with the id of the one that set the mark is that one, going on.
    """
    verdict = _screen(stamp, name, realm, proven)
    if verdict is not None:
        return Judgement(verdict, mark)
    assert stamp is not None
    if mark is not None and stamp.token < mark.token:
        return Judgement(Verdict.STALE, mark)
    if mark is not None and stamp.token == mark.token and stamp.grant != mark.grant:
        return Judgement(Verdict.REUSED, mark)
    if not announce and rule != "retry" and not stamp.seq:
        return Judgement(Verdict.INVALID, mark)  # a write needs a seq of its own; 0 and none announce
    seq = 0 if announce else stamp.seq or 0
    if mark is None or stamp.token > mark.token:
        # An announced mark has no operation: a write with the announcement's id would be taken for its continuation,
        # and would not be counted.
        risen = Mark(stamp.token, stamp.grant, seq, None if announce else operation)
        return Judgement(Verdict.ADMIT, risen)
    if announce or rule == "retry" or (operation is not None and operation == mark.operation):
        return Judgement(Verdict.ADMIT, mark)
    return _judge_repeat(mark, seq, rule, operation)


def _screen(stamp: Stamp | None, name: str, realm: str | None, proven: bool) -> Verdict | None:
    """What can be said of a stamp before any mark is looked at."""
    if stamp is None:
        return Verdict.MISSING
    if not (1 <= stamp.token <= TOKEN_MAX and is_seq(stamp.seq)):
        return Verdict.INVALID
    if not proven:
        return Verdict.FORGED
    if realm is not None and stamp.realm != realm:
        return Verdict.FOREIGN
    if name not in stamp.names:
        return Verdict.UNCOVERED
    return None


def _judge_repeat(mark: Mark, seq: int, rule: Rule, operation: str | None) -> Judgement:
    """A further write of the grant that set the mark, under `once` or `sequenced`."""
    risen = Mark(mark.token, mark.grant, seq, operation)
    if rule == "once":
        return Judgement(Verdict.ADMIT, risen) if mark.seq == 0 else Judgement(Verdict.DUPLICATE, mark)
    if seq > mark.seq:
        return Judgement(Verdict.ADMIT, risen)
    return Judgement(Verdict.APPLIED if seq == mark.seq else Verdict.OUT_OF_ORDER, mark)


class Ruling(StrEnum):
    """What is done about a verdict."""

    ADMIT = "admit"
    REFUSE = "refuse"
    COUNT = "count"
    """Let through and counted; the mark stays."""
    RECORD = "record"
    """Let through and recorded in full as would-refuse; the mark stays."""


ModeName = Literal["observe", "shadow", "canary", "enforce", "require"]
MODES: tuple[ModeName, ...] = ("observe", "shadow", "canary", "enforce", "require")


@dataclass(frozen=True, slots=True)
class Mode:
    """A stage of the rollout. `percent` belongs to `canary`: the share of names that is enforced."""

    name: ModeName
    percent: float = 0.0

    @classmethod
    def parse(cls, text: object) -> Mode:
        """Read `observe`, `shadow`, `canary(5%)`, `enforce` or `require`."""
        if isinstance(text, Mode):
            return text
        if isinstance(text, str):
            for name in MODES:
                if text == name and name != "canary":
                    return cls(name)
            if text.startswith("canary(") and text.endswith("%)"):
                return cls("canary", _percent(text[7:-2]))
        needs = ": a canary needs its share of the names, such as canary(5%)" if text == "canary" else ""
        raise Misuse(f"a mode is observe, shadow, canary(P%), enforce or require, not {shown(text)}{needs}")

    def __str__(self) -> str:
        if self.name != "canary":
            return self.name
        digits = f"{self.percent:.9f}".rstrip("0").rstrip(".")  # never as 1e-05, which no SQL would read back
        return f"canary({digits}%)"

    def refuses(self, name: str) -> bool:
        """Whether a bad stamp on `name` is refused in this mode."""
        if self.name == "canary":
            return in_canary(name, self.percent)
        return self.name in ("enforce", "require")


def _percent(text: str) -> float:
    try:
        percent = float(text) if text.isascii() else -1.0
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise Misuse(f"a canary takes 0% to 100% of names, not {shown(text)}")
    return percent


def canary_point(name: str) -> int:
    """Where a name lies among 2**32 points: the first four bytes of its SHA-256, the highest first.

    A store that cannot compute it is sent the point with the request.
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])


def in_canary(name: str, percent: float) -> bool:
    """Whether `name` is among the `percent` that is enforced; a larger share contains the smaller."""
    return canary_point(name) < percent / 100 * 2**32


@lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in pattern.split("*")), re.DOTALL)


def mode_of(name: str, modes: Iterable[tuple[str, Mode]]) -> Mode:
    """The mode of the longest pattern that matches, of several the last in order; `observe` when none does."""
    best, found = "", Mode("observe")
    for pattern, mode in modes:
        longer = (len(pattern), pattern) > (len(best), best)
        if longer and (pattern == "*" or _regex(pattern).fullmatch(name)):
            best, found = pattern, mode
    return found


def rule_on(verdict: Verdict, mode: Mode, name: str) -> Ruling:
    """What is done about `verdict` on `name` in `mode`."""
    if verdict in (Verdict.ADMIT, Verdict.APPLIED):
        return Ruling.ADMIT
    if verdict is Verdict.MISSING:
        if mode.name == "require":
            return Ruling.REFUSE
        return Ruling.RECORD if mode.name == "shadow" else Ruling.COUNT
    if mode.refuses(name):
        return Ruling.REFUSE
    return Ruling.COUNT if mode.name == "observe" else Ruling.RECORD
