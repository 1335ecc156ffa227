"""The report of a drill: one self-contained page with the picture, the verdict and the records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from fenced.drills.history import Operation
from fenced.drills.outcome import DrillOutcome, sentence, versions
from fenced.drills.sequence import sequence_svg
from fenced.drills.strips import strips_svg

ROWS_MAX = 400
"""How many operations the table shows; `--json` has all of them."""

_STYLE = """
:root { color-scheme: light dark; --page:#f6f7f9; --ink:#1c2530; --soft:#5c6773; --card:#fff; --edge:#d5dae1;
  --good:#2b7a3d; --bad:#c92a2a; }
@media (prefers-color-scheme: dark) { :root { --page:#0d1117; --ink:#e6edf3; --soft:#9aa5b1; --card:#161b22;
  --edge:#30363d; --good:#63c77a; --bad:#ff7b72; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--page); color:var(--ink); line-height:1.5;
  font:16px/1.5 system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif; }
main { max-width:1000px; margin:0 auto; padding:32px 20px 64px; }
h1 { font-size:1.6rem; margin:0 0 .3rem; } h2 { font-size:1.15rem; margin:2.2rem 0 .6rem; }
p.soft, td.soft, .soft { color:var(--soft); }
.verdict { border:1px solid var(--edge); border-left:6px solid var(--good); background:var(--card);
  border-radius:8px; padding:14px 18px; margin:18px 0 22px; }
.verdict.broken { border-left-color:var(--bad); }
.verdict b { color:var(--good); margin-right:.6em; letter-spacing:.04em; }
.verdict.broken b { color:var(--bad); }
.picture { overflow-x:auto; } .picture svg { display:block; max-width:100%; height:auto; min-width:640px; }
.scroll { overflow-x:auto; }
table { border-collapse:collapse; width:100%; font-size:.9rem; background:var(--card);
  border:1px solid var(--edge); }
th, td { text-align:left; padding:6px 12px; border-top:1px solid var(--edge); vertical-align:top; }
tr:first-child > * { border-top:0; } th { color:var(--soft); font-weight:600; white-space:nowrap; }
.scroll td { white-space:nowrap; font-variant-numeric:tabular-nums; }
.scroll td:last-child { white-space:normal; word-break:break-all; min-width:17em; font:.75rem/1.4 monospace; }
tr.bad td { color:var(--bad); }
li { margin:.25rem 0; }
""".strip()

_TITLES = {
    "pause": "A paused holder wakes up and writes",
    "late-renewal": "A renewal arrives after its lease has moved on",
    "storm": "Holders are stopped while they work",
}


def write_report(path: Path, outcome: DrillOutcome) -> None:
    """Write the page, or the picture alone if the name of the file ends in .svg."""
    content = picture(outcome) if path.suffix == ".svg" else page(outcome)
    path.write_text(content, encoding="utf-8")


def picture(outcome: DrillOutcome) -> str:
    title = f"{_TITLES[outcome.plan.scenario]}. {sentence(outcome)}"
    if outcome.plan.scenario == "storm":
        history, findings = outcome.history, outcome.findings
        return strips_svg(history, findings, start=outcome.start, seconds=outcome.seconds, title=title)
    return sequence_svg(outcome.steps, title)


def page(outcome: DrillOutcome) -> str:
    """The whole page. Text that does not come from this module is escaped."""
    title = _TITLES[outcome.plan.scenario]
    shown, not_shown = _shown(outcome), _not_shown(outcome)
    sections = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">fenced drill {escape(outcome.plan.scenario)}, {escape(outcome.started)}</p>',
        _verdict(outcome),
        f'<div class="picture">{picture(outcome)}</div>',
        "<h2>Counts</h2>" + _table([], _counts(outcome)),
        "<h2>What this shows</h2>" + _bullets(shown),
        "<h2>What it does not show</h2>" + _bullets(not_shown),
        _operations(outcome),
        "<h2>Conditions</h2>" + _table([], _conditions(outcome)),
    ]
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>fenced drill: {escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _verdict(outcome: DrillOutcome) -> str:
    kind = outcome.findings.verdict
    return f'<div class="verdict {kind}"><b>{kind.upper()}</b>{escape(sentence(outcome))}</div>'


def _counts(outcome: DrillOutcome) -> list[tuple[str, ...]]:
    findings = outcome.findings
    return [
        ("acknowledged updates", str(findings.acknowledged)),
        ("refused operations", str(findings.refused)),
        ("pauses of a holder", str(len(outcome.history.pauses))),
        ("stale operations admitted", str(len(findings.stale))),
        ("lost updates", f"{len(findings.lost)} ({findings.lost_percent:.1f} % of the acknowledged)"),
        ("refused updates that are there nevertheless", str(len(findings.refused_applied))),
        ("tokens that did not rise", str(len(findings.tokens_fallen))),
        ("ended leases that a renewal revived", str(len(findings.revived))),
    ]


def _conditions(outcome: DrillOutcome) -> list[tuple[str, ...]]:
    plan = outcome.plan
    rows = [
        ("authority", outcome.authority),
        ("guard", outcome.guard),
        ("names", ", ".join(outcome.names)),
        ("ttl", f"{plan.ttl:g} s"),
        ("holders", str(plan.holders)),
        ("seed", str(plan.seed)),
        ("duration", f"{outcome.seconds:.2f} s"),
        ("versions", ", ".join(f"{key} {value}" for key, value in versions().items())),
    ]
    return [*rows, *(("best effort only", doubt) for doubt in outcome.doubts)]


def _shown(outcome: DrillOutcome) -> list[str]:
    who = "Holders were separate processes, stopped by SIGSTOP and resumed by SIGCONT."
    if outcome.plan.scenario == "late-renewal":
        who = "Holders were separate processes; A's renewal was delayed until after its lease had expired."
    what = sentence(outcome)
    how = (
        "A late holder sent its stamp without checking its lease or a clock. "
        "The resource alone decided whether the write was admitted."
    )
    if not outcome.guarded:
        how = "The holders carried tokens, and nobody at the table compared them: a lease alone stops no one."
    return [who, how, what]


def _not_shown(outcome: DrillOutcome) -> list[str]:
    inside = (
        "A holder that is stopped inside SQLite's own write transaction blocks its successor instead of "
        "being refused; the drill stops holders between their transactions."
    )
    found = [
        "One run on one machine is an example, not a proof: other timings were not tried.",
        "Nothing was done to the network, the clocks, the disk or the power.",
        "A write to something that no guard watches is refused by nobody.",
    ]
    if outcome.plan.scenario != "late-renewal":
        found.append(inside)
    if outcome.doubts:
        found.append("The authority promises its tokens by best effort only; see the conditions below.")
    return found


def _operations(outcome: DrillOutcome) -> str:
    rows = outcome.history.operations
    heads = ["time", "holder", "operation", "name", "token", "decision", "mark", "stamp"]
    fates = {id(each): ", though stale" for each in outcome.findings.stale}
    fates.update((id(each), ", and gone at the end") for each in outcome.findings.lost)
    shown = rows[:ROWS_MAX]
    marked = [each.decision == "refused" or id(each) in fates for each in shown]
    table = _table(heads, [_cells(each, outcome.start, fates.get(id(each), "")) for each in shown], marked)
    more = len(rows) - ROWS_MAX
    rest = f'<p class="soft">and {more} more; --json has all of them.</p>' if more > 0 else ""
    return f'<h2>Operations</h2><div class="scroll">{table}</div>{rest}'


def _cells(operation: Operation, start: float, fate: str) -> tuple[str, ...]:
    why = f": {operation.why}" if operation.why else ""
    return (
        f"{operation.time - start:.3f} s",
        operation.holder,
        operation.kind,
        operation.name,
        str(operation.token),
        f"{operation.decision}{why}{fate}",
        "" if operation.mark is None else str(operation.mark),
        operation.stamp,
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], marked: Sequence[bool] = ()) -> str:
    lines = []
    if heads:
        lines.append("<tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>")
    for place, cells in enumerate(rows):
        first = "td" if heads else "th"
        kind = ' class="bad"' if place < len(marked) and marked[place] else ""
        inner = f"<{first}>{escape(cells[0])}</{first}>" + "".join(
            f"<td>{escape(cell)}</td>" for cell in cells[1:]
        )
        lines.append(f"<tr{kind}>{inner}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _bullets(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
