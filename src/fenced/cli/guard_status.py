"""`fenced guard status`: the stage of the rollout, what is wrong, and whether the next stage is safe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

import click

from fenced.cli import exits
from fenced.cli.guard_options import addressed, jsonable, only_table_option
from fenced.cli.options import json_option
from fenced.cli.output import plain, write_json
from fenced.client.reaching import operate
from fenced.values import timing
from fenced.values.durations import duration
from fenced.values.rollout import (
    DatabaseStatus,
    DecisionCount,
    GuardStatus,
    Stage,
    ago,
    by_writer,
    several,
    span,
)
from fenced.values.schema import Schema

WRITERS_SHOWN = 5
"""How many writers without a stamp are named; `--json` has all of them."""
_COLOURS = {"safe": "green", "not yet": "yellow"}


@click.command()
@addressed()
@only_table_option
@click.option(
    "--quiet-for",
    type=duration(0.0, timing.WAIT_MAX),
    default="24h",
    show_default=True,
    metavar="TIME",
    help="How long a stage must have been quiet before the next one is safe.",
)
@click.option("--check", is_flag=True, help="Exit with 1 when something is wrong, for monitoring.")
@json_option
def status(words: tuple[str], table: str | None, quiet_for: float, check: bool, as_json: bool) -> int:
    """Show the guards, and their next stages.

    Modes, marks, refusals, and who writes without a stamp. The next stage is safe when the present one has lasted
    --quiet-for, the guard has seen no write in that time that the next one would refuse, no override is in force, and
    no trigger is missing or disabled. This is advice: such a write (fenced guard records) may be the very
    thing that the guard has to stop.

    \b
    Examples:
      fenced guard status postgresql://owner@db.internal/shop
      fenced guard status --table orders --quiet-for 7d
      fenced guard status --check --json
    """
    found = operate(words[0], lambda operator: operator.status(table, quiet_for))
    if as_json:
        write_json(_full(found))
    else:
        for line in _lines(found):
            click.echo(line)
    return exits.FOUND_WRONG if check and found.wrong else exits.OK


# For programs. The keys are stable.


def _full(found: DatabaseStatus) -> Any:
    full = jsonable(found)
    for guard, shown in zip(found.guards, full["guards"], strict=True):
        for stage, row in zip(guard.stages, shown["stages"], strict=True):
            row["next"]["safe"] = stage.next.safe
    return {**full, "wrong": found.wrong}


# For people.


def _lines(found: DatabaseStatus) -> Iterator[str]:
    if not found.guards:
        yield "no table is guarded"
    for guard in found.guards:
        yield click.style(plain(guard.guard), bold=True) + plain(_kind(guard))
        yield from (line for label, texts in _facts(guard, found) for line in _fact(label, texts))
        yield ""
    yield plain(f"trusts {_trust(found)}")
    if found.schema is not None:
        yield plain(f"schema {_schema(found.schema)}")
    for doubt in found.doubts:
        yield click.style(plain(doubt), fg="red")
    for caution in (*filter(None, [found.failover]), *found.hidden):
        yield plain(f"caution: {caution}")
    if found.unrecorded:
        what = several(found.unrecorded, "decision")
        yield click.style(
            f"{what} could not be recorded; fenced guard tidy writes the number into the history", fg="red"
        )


def _fact(label: str, texts: list[str]) -> Iterator[str]:
    """One line for each text. Only the first line has the label."""
    for text in texts:
        colour = "red" if label == "wrong" else _COLOURS.get(text.rpartition(": ")[2])
        shown = plain(text)
        yield f"  {label if text is texts[0] else '':<14}" + (
            click.style(shown, fg=colour) if colour else shown
        )


def _kind(guard: GuardStatus) -> str:
    epoch = f", epoch column {guard.epoch}" if guard.epoch else ""
    return f"  {guard.template}, rule {guard.rule}{epoch}{'' if guard.mandatory else ', no triggers'}"


def _facts(guard: GuardStatus, found: DatabaseStatus) -> Iterator[tuple[str, list[str]]]:
    now = found.now
    yield "mode", [_mode(stage, found) for stage in guard.stages]
    yield (
        "override",
        [
            f"{o.pattern} for {span((o.until - now).total_seconds())} more, by {o.who}: {o.why}"
            for o in guard.overrides
        ],
    )
    yield "pending", [f"{who}: began before the last change, which does not bind it" for who in guard.pending]
    yield "marks", [f"{guard.marks:,}, highest token {guard.highest}" if guard.marks else "none yet"]
    yield "refused", list(_refused(guard, found))
    would = [count for count in guard.counts if count.would_refuse]
    yield "would refuse", [f"{_verdicts(would)}{_last(would, found)}"] if would else []
    unstamped = [count for count in guard.counts if count.unstamped]
    yield "unstamped", [*_writers(unstamped, now), *_nameless(unstamped)] if unstamped else []
    yield "bypass", [", ".join(guard.bypass)] if guard.bypass else []
    yield "wrong", list(guard.wrong)
    yield "next", [line for stage in guard.stages if stage.next.stage for line in _next(stage)]


def _mode(stage: Stage, found: DatabaseStatus) -> str:
    names = "" if stage.pattern == "*" else f" for {stage.pattern}"
    return f"{stage.mode}{names}" + (f", since {ago(stage.since, found.now)}" if stage.since else "")


def _next(stage: Stage) -> list[str]:
    names = "" if stage.pattern == "*" else f" for {stage.pattern}"
    answer = "safe" if stage.next.safe else "not yet"
    return [f"{stage.next.stage}{names}: {answer}", *(f"- {reason}" for reason in stage.next.reasons)]


def _verdicts(counts: Iterable[DecisionCount]) -> str:
    sums: Counter[str] = Counter()
    for count in counts:
        sums[count.verdict.replace("_", " ")] += count.count
    return ", ".join(f"{number:,} {verdict}" for verdict, number in sums.most_common()) or "none"


def _refused(guard: GuardStatus, found: DatabaseStatus) -> Iterator[str]:
    recorded = [count for count in guard.counts if count.refused]
    total = "" if guard.refused is None else f"{guard.refused:,}; recorded: "
    if recorded or guard.refused:
        yield total + _verdicts(recorded)
    yield from _writers([count for count in recorded if count.who], found.now)
    if guard.not_recorded and found.elsewhere:
        yield f"{guard.not_recorded:,} outside the wrapper, without a record. Look for"
        yield found.elsewhere


def _writers(counts: Iterable[DecisionCount], now: datetime) -> Iterator[str]:
    """Who, how many, when and from where, as far as the store knows it."""
    found = by_writer(counts)
    for row in found[:WRITERS_SHOWN]:
        last = f"; last {ago(row.last, now)}" if row.last else ""
        yield f"{row.count:,} by {row.who}{last}" + (f" from {row.where}" if row.where else "")
    if len(found) > WRITERS_SHOWN:
        yield f"and {len(found) - WRITERS_SHOWN:,} others"


def _nameless(counts: Iterable[DecisionCount]) -> Iterator[str]:
    """A hint, if the store could name the programs and no program has a name."""
    if all(count.who and not count.application for count in counts):
        yield "(let each program set application_name, and it is listed separately)"


def _last(counts: list[DecisionCount], found: DatabaseStatus) -> str:
    first, *_ = by_writer(counts)
    return f"; last {ago(first.last, found.now)} by {first.who}" if first.last else ""


def _schema(stored: Schema) -> str:
    readable = f", readable by clients that know {stored.readable_by} or later"
    return f"{stored.version}, installed by fenced {stored.release}{readable}"


def _trust(found: DatabaseStatus) -> str:
    jump = f", jumps of at most {found.max_jump:,}" if found.max_jump is not None else ""
    proof = ", only signed stamps" if found.proof else ""
    sample = f"; {100 * found.sample:g} % of admitted operations are recorded" if found.sample else ""
    realm = f"realm {found.realm}" if found.realm else "no authority yet: the first stamped write decides"
    return f"{realm}{jump}{proof}{sample}"
