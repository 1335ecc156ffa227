"""The tables of docs/explain/proof.md, from the theorems, the models and the planted mistakes that the tests run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

from fenced.values.decision import Verdict
from tests.proofs import mistakes, modelled, settings
from tests.proofs.protocol import search
from tests.proofs.questions import Theorem
from tests.proofs.symbolic import Symbolic
from tests.proofs.theorems import theorems

Table = Callable[[Sequence[str], Iterable[Sequence[str]]], str]


@cache
def every_theorem() -> tuple[Theorem, ...]:
    return tuple(theorems(Symbolic()))


def theorem_table(table: Table) -> str:
    """One row for each sentence. One that is proven of several verdicts, each by itself, says of how many."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for each in every_theorem():
        given = "; ".join(assumption.sentence for assumption in each.given)
        rows.setdefault((each.chapter, each.sentence, given), []).append(each.about)
    return table(
        ("about", "theorem", "given that", "theorems"),
        [
            (chapter, sentence + _verdicts(about), given, str(len(about)))
            for (chapter, sentence, given), about in rows.items()
        ],
    )


def _verdicts(about: list[str]) -> str:
    if about == [""]:
        return ""
    if len(about) == len(Verdict):
        return " Of each verdict."
    return f" Of {', '.join(Verdict(each).name for each in about)}."


def mistake_table(table: Table) -> str:
    return table(("in", "planted"), [(f"`{each.function}`", each.what) for each in mistakes.MISTAKES])


def model_table(table: Table) -> str:
    def row(setting: modelled.Setting) -> tuple[str, str, str]:
        refused = "" if setting.holder_is_admitted else ", but the holder may be refused"
        return setting.what, f"{setting.states:,}", f"every promise is kept{refused}"

    return table(("what happens", "worlds", "result"), map(row, settings.HOLDS))


def story_list(told: Iterable[tuple[str, Iterable[modelled.Setting]]]) -> str:
    lines = []
    for what, models in told:
        story = "; ".join(search(next(iter(models))).story)
        lines.append(f"- **{what}** {story[0].upper()}{story[1:]}.\n")
    return "\n" + "".join(lines) + "\n"


def limit_stories() -> str:
    return story_list(settings.LIMITS.items())


def wrong_stories() -> str:
    told = []
    for setting in settings.WRONG:
        what = "; ".join(modelled.MISTAKES[each] for each in setting.mistakes)
        told.append((f"{what[0].upper()}{what[1:]}.", (setting,)))
    return story_list(told)
