"""What `fenced doctor` says: findings with the line to paste, and one verdict for each guard with its authority."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["broken", "unknown", "weak", "note"]
LEVELS: tuple[Level, ...] = ("broken", "unknown", "weak", "note")
"""The worst first. `unknown`: something that matters could not be looked at."""
Letter = Literal["A", "B", "C", "?", "D"]
LETTERS: tuple[Letter, ...] = ("A", "B", "C", "?", "D")
"""The best first. `?` is worse than every known state but the one in which nothing protects."""
EXITS: dict[Level, int] = {"broken": 2, "unknown": 3, "weak": 1, "note": 0}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that somebody should know. `check` is a stable id."""

    level: Level
    check: str
    where: str
    says: str
    do: str = ""
    """What to paste, or to do."""


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """What a guard and its authority guarantee together."""

    letter: Letter
    where: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Footgun:
    """A way in which a lock protects nothing: found here, not found, or to be asked."""

    name: str
    state: Literal["found", "clear", "ask"]
    checks: tuple[str, ...]
    """The findings that show it."""
    question: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one look has found."""

    verdicts: tuple[PairVerdict, ...]
    findings: tuple[Finding, ...]
    footguns: tuple[Footgun, ...]
    fine: tuple[str, ...] = ()
    """What was looked at, and is as it should be."""
    facts: dict[str, float | int | str] = field(default_factory=dict)

    @property
    def verdict(self) -> PairVerdict:
        """The worst one."""
        return max(self.verdicts, key=lambda each: LETTERS.index(each.letter))

    @property
    def exit(self) -> int:
        """0: nothing above a note, 1: weak, 2: broken, 3: something could not be looked at."""
        return EXITS[self.findings[0].level] if self.findings else 0

    def as_json(self, runbooks: str, pages: frozenset[str]) -> dict[str, Any]:
        found = [{**asdict(each), "runbook": _page(each, runbooks, pages)} for each in self.findings]
        return {
            "class": self.verdict.letter,
            "sentence": self.verdict.sentence,
            "verdicts": [asdict(each) for each in self.verdicts],
            "findings": found,
            "footguns": [asdict(each) for each in self.footguns],
            "fine": list(self.fine),
            "facts": self.facts,
        }

    def lines(self, runbooks: str, pages: frozenset[str]) -> Iterator[tuple[str, str]]:
        """Lines for people, each with its level: the verdict first."""
        yield "verdict", f"{self.verdict.letter}  {self.verdict.sentence}"
        if len(self.verdicts) > 1:
            yield from (("", f"   {each.letter}  {each.where}") for each in self.verdicts)
        for each in self.findings:
            yield each.level, f"{each.level.upper():<8}{each.where}: {each.says}"
            if each.do:
                yield "", f"{'':8}-> {each.do}"
            if page := _page(each, runbooks, pages):
                yield "", f"{'':8}see {page}"
        if self.fine:
            yield "", f"fine: {', '.join(self.fine)}"
        asked = [each for each in self.footguns if each.state == "ask"]
        if asked:
            yield "", "Not to be seen from here; ask:"
            yield from (("", f"  - {each.question} ({each.name})") for each in asked)


def in_order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The worst first; otherwise in the order in which they were found."""
    return tuple(sorted(findings, key=lambda each: LEVELS.index(each.level)))


def _page(finding: Finding, runbooks: str, pages: frozenset[str]) -> str | None:
    if finding.check not in pages or finding.level == "note":
        return None
    return runbooks.rstrip("/") + f"/{finding.check}.md"
