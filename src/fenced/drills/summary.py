"""`fenced drill all`, shown: a table while it runs, one page with a picture of each drill, or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import click

from fenced.drills.catalog import STORIES
from fenced.drills.every import DrillBatch, DrillRow, Told, status_of, steps_of
from fenced.drills.outcome import versions
from fenced.drills.report import FOOTER, check_report, document, marked, verdict_box
from fenced.drills.sequence import NARROW, sequence_svg
from fenced.runtime.clocks import now

COULD_NOT_RUN = 2
_WIDTH = max(len(each.name) for each in STORIES)
_COLORS = {"held": "green", "broken": "red", "inconclusive": "yellow"}


@dataclass(frozen=True, slots=True)
class AllOptions:
    """The options of `fenced drill all`."""

    options: list[str]
    """What each drill is given."""
    control: bool
    jobs: int
    as_json: bool
    report: Path | None
    pictures: Path | None


def run_all(shown: AllOptions) -> int:
    if shown.report is not None:
        check_report(shown.report, ("html", "htm"))
    began = now()
    batch = DrillBatch(shown.options, _without_guard(shown.options) if shown.control else None)
    if not shown.as_json:
        batch.done = _print_row
        click.echo(
            f"{'drill':<{_WIDTH}}  verdict       {'without a guard  ' if shown.control else ''}seconds"
        )
    rows = batch.run(jobs=shown.jobs)
    seconds, status = now() - began, status_of(rows)
    if shown.as_json:
        click.echo(json.dumps(as_object(rows, seconds), indent=2))
    else:
        click.echo(f"\n{_counts(rows)} in {seconds:.0f} s.")
    if shown.pictures is not None:
        write_pictures(shown.pictures, rows)
    report = shown.report
    if report is not None:
        content = summary_page(rows, seconds)
        work = lambda: report.write_text(content, encoding="utf-8")  # noqa: E731 (called once, below)
        status = reported(report, work, status, quiet=shown.as_json)
    return status


def reported(report: Path, write: Callable[[], object], status: int, *, quiet: bool) -> int:
    """Write the report last: whatever happens to it, the verdict has been shown."""
    try:
        write()
    except OSError as error:
        click.echo(f"drill: the report could not be written: {error}", err=True)
        return status or COULD_NOT_RUN
    if not quiet:
        click.echo(f"Report: {report}")
    return status


def _without_guard(options: Sequence[str]) -> list[str]:
    """The same drill, but with `--guard none`."""
    kept = list(options)
    if "--guard" in kept:
        at = kept.index("--guard")
        del kept[at : at + 2]
    return [*kept, "--guard", "none"]


def _print_row(row: DrillRow) -> None:
    cells = [f"{row.drill.name:<{_WIDTH}}"]
    for width, (_, told) in zip((12, 15), row.runs, strict=False):
        word = told["verdict"]
        cells.append(click.style(f"{word.upper():<{width}}", fg=_COLORS[word]))
    cells.append(f"{sum(told.get('seconds', 0.0) for _, told in row.runs):7.1f}")
    click.echo("  ".join(cells))
    if row.told["verdict"] != "held":
        click.echo(click.wrap_text(row.told["sentence"], 80, "    ", "    "))


def _counts(rows: Sequence[DrillRow]) -> str:
    held, broken, nothing = (
        sum(row.told["verdict"] == each for row in rows) for each in ("held", "broken", "inconclusive")
    )
    lost = sum(row.control["verdict"] == "broken" for row in rows if row.control is not None)
    beside = f"; without a guard {lost} lost data" if any(row.control for row in rows) else ""
    return f"{len(rows)} drills: {held} HELD, {broken} BROKEN, {nothing} INCONCLUSIVE{beside}"


def as_object(rows: Sequence[DrillRow], seconds: float) -> dict[str, object]:
    return {
        "seconds": round(seconds, 2),
        "verdicts": {row.drill.name: row.told["verdict"] for row in rows},
        "versions": versions(),
        "drills": [{**row.told, **({} if row.control is None else {"control": row.control})} for row in rows],
    }


def summary_page(rows: Sequence[DrillRow], seconds: float) -> str:
    """One page, with pictures that are as wide as a phone."""
    head = "".join(f"<th>{each}</th>" for each in ("drill", *(name for name, _ in rows[0].runs)))
    lines = [
        f'<tr><td><a href="#{row.drill.name}">{row.drill.name}</a></td>'
        + "".join(f'<td class="{told["verdict"]}">{told["verdict"].upper()}</td>' for _, told in row.runs)
        + "</tr>"
        for row in rows
    ]
    setting = next((row.told for row in rows if row.told.get("authority")), {})
    where = f"Leases from {_place(setting, 'authority')}, guard: {_place(setting, 'guard')}."
    return document(
        "fenced drill all",
        [
            '<p class="project">fenced <span class="soft">drill report</span></p>',
            f"<h1>{escape(_counts(rows))}</h1>",
            f'<p class="soft">{escape(where)} {seconds:.0f} s. One run on one machine is an example, not a proof.</p>',
            f'<table class="all"><tr>{head}</tr>{"".join(lines)}</table>',
            *(_section(row) for row in rows),
            FOOTER,
        ],
    )


def _place(told: Told, what: str) -> str:
    """A fresh file is gone by now, and its address says nothing."""
    address = str(told.get(what, "?"))
    return "a fresh SQLite file" if "/fenced-drill-" in address else address


def _section(row: DrillRow) -> str:
    drill = row.drill
    runs = "".join(
        f"<div>{_caption(row, name)}{verdict_box(told['verdict'], told['sentence'])}"
        f'<div class="story">{_picture(row, told)}</div></div>'
        for name, told in row.runs
    )
    return (
        f'<h2 id="{drill.name}"><code>{drill.name}</code>: {marked(drill.title)}</h2>'
        f'<p>{marked(drill.teaches)} <span class="soft">{escape(_literature(row))}</span></p>'
        f'<div class="pair">{runs}</div>'
    )


def _caption(row: DrillRow, name: str) -> str:
    """Above each of two pictures; a single one needs none."""
    return "" if row.control is None else f"<h3>{escape(name.capitalize())}</h3>"


def _literature(row: DrillRow) -> str:
    drill, factor = row.drill, row.told.get("factor")
    scale = f"; 1 s is {factor:.3g} s here" if factor not in (None, 1) else ""
    first, second = drill.tokens
    told = f"tokens {first} and {second}, ttl {drill.story_seconds:g} s"
    return f"In the literature: {drill.failure}, {told}{scale}."


def _picture(row: DrillRow, told: Told) -> str:
    steps = steps_of(told)
    title = f"{row.drill.title}. {told['sentence']}"
    return sequence_svg(steps, title, row.drill.bar, NARROW) if steps else ""


def write_pictures(folder: Path, rows: Sequence[DrillRow]) -> None:
    """NAME.svg and NAME-none.svg for each drill that has a story to tell."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _pictures(rows):
        (folder / name).write_text(content, encoding="utf-8")


def _pictures(rows: Sequence[DrillRow]) -> Iterator[tuple[str, str]]:
    for row in rows:
        for suffix, (_, told) in zip(("", "-none"), row.runs, strict=False):
            if told["steps"]:
                title = f"{row.drill.title}. {told['sentence']}"
                yield f"{row.drill.name}{suffix}.svg", sequence_svg(steps_of(told), title, row.drill.bar)
