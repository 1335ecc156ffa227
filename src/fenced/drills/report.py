"""The report of a drill: one self-contained page with the picture, the verdict and the records."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

import fenced
from fenced.drills.history import Operation
from fenced.drills.outcome import DrillOutcome, versions
from fenced.drills.processes import CouldNotRun
from fenced.drills.sequence import NARROW, sequence_svg
from fenced.drills.stage import shown_ttl
from fenced.drills.strips import strips_svg

ROWS_MAX = 400
"""How many refused, stale and lost operations the page shows; `--json` has all of them."""
OTHERS_MAX = 100
"""How many of the other operations it shows."""
_OPEN_MAX = 20
"""Up to so many of them are shown without a click."""

_STYLE = """
:root { color-scheme: light dark; --page:#f6f7f9; --ink:#1c2530; --soft:#5c6773; --card:#fff; --edge:#d5dae1;
  --good:#2b7a3d; --bad:#c92a2a; --open:#9a6700; }
@media (prefers-color-scheme: dark) { :root { --page:#0d1117; --ink:#e6edf3; --soft:#9aa5b1; --card:#161b22;
  --edge:#30363d; --good:#63c77a; --bad:#ff7b72; --open:#e3b341; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--page); color:var(--ink);
  font:16px/1.5 system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif; }
main { max-width:1000px; margin:0 auto; padding:32px 20px 40px; }
h1 { font-size:1.6rem; line-height:1.25; margin:0 0 .3rem; } h3 { font-size:1rem; margin:.8rem 0 0; }
h2 { font-size:1.15rem; margin:2.2rem 0 .6rem; }
.soft { color:var(--soft); }
.project { margin:0 0 .8rem; font-weight:700; letter-spacing:.02em; }
.project .soft { font-weight:400; letter-spacing:0; }
footer { margin-top:2.5rem; padding-top:.8rem; border-top:1px solid var(--edge); font-size:.9rem; }
.verdict { border:1px solid var(--edge); border-left:6px solid var(--tone); background:var(--card);
  border-radius:8px; padding:14px 18px; margin:18px 0 22px; }
.verdict b { color:var(--tone); margin-right:.6em; letter-spacing:.04em; }
.held { --tone:var(--good); } .broken { --tone:var(--bad); } .inconclusive { --tone:var(--open); }
.scroll { overflow-x:auto; } .scroll:focus-visible { outline:2px solid var(--soft); }
.scroll svg { display:block; width:100%; height:auto; min-width:860px; }
.hint { display:none; margin:.3rem 0; font-size:.85rem; }
.narrow { display:none; }
@media (max-width: 900px) { .hint, .narrow { display:block; } .wide { display:none; } }
table { border-collapse:collapse; font-size:.9rem; background:var(--card); border:1px solid var(--edge); }
th, td { text-align:left; padding:6px 12px; border-top:1px solid var(--edge); vertical-align:top; }
tr:first-child > * { border-top:0; } th { color:var(--soft); font-weight:600; }
table.facts { max-width:100%; } .facts td { overflow-wrap:anywhere; }
.scroll table { width:100%; } .scroll th, .scroll td { white-space:nowrap; }
.number { text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap; }
tr.refused .fate { color:var(--good); font-weight:600; } tr.bad .fate { color:var(--bad); font-weight:600; }
summary { cursor:pointer; color:var(--soft); } details > .scroll { margin-top:.6rem; }
td code { display:block; max-width:26em; white-space:normal; word-break:break-all; font-size:.75rem; }
li { margin:.25rem 0; }
.story svg { display:block; max-width:100%; height:auto; } .story { margin:.6rem 0; }
.pair { display:flex; flex-wrap:wrap; gap:16px; } .pair > div { flex:1 1 350px; max-width:460px; }
.pair .verdict { margin:.6rem 0; padding:10px 14px; font-size:.92rem; } h2 code { font-size:1em; }
td.held { color:var(--good); font-weight:600; } td.broken { color:var(--bad); font-weight:600; }
td.inconclusive { color:var(--open); font-weight:600; } table.all td, table.all th { white-space:normal; }
@media (max-width: 600px) { main { padding:20px 14px 32px; } th, td { padding:5px 8px; } }
""".strip()

FOOTER = (
    f'<footer class="soft">fenced {fenced.__version__}: leases with fencing tokens, and guards that make the '
    "resource itself refuse a stale holder.</footer>"
)


def check_report(path: Path, formats: Sequence[str] = ("html", "htm", "svg")) -> None:
    """Raise CouldNotRun if there could be no report in this file. Asked before the drill, which may take an hour."""
    if path.suffix.lower().removeprefix(".") not in formats:
        alone = " or the picture alone (.svg)" if "svg" in formats else ""
        raise CouldNotRun(f"--report {path}: a report is a page (.html){alone}")
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise CouldNotRun(f"--report {path}: {error.strerror}") from error
    if not existed:
        path.unlink()


def write_report(path: Path, outcome: DrillOutcome) -> None:
    """Write the page, or the picture alone if the name of the file ends in .svg."""
    content = _FORMATS[path.suffix.lower()](outcome)
    path.write_text(content, encoding="utf-8")


def picture(outcome: DrillOutcome) -> str:
    title = _title(outcome)
    if outcome.plan.drill.many:
        history, findings = outcome.history, outcome.findings
        return strips_svg(history, findings, start=outcome.start, seconds=outcome.seconds, title=title)
    return sequence_svg(outcome.steps, title, outcome.plan.drill.bar)


def page(outcome: DrillOutcome) -> str:
    """The whole page. Text that does not come from this module is escaped."""
    title = outcome.plan.drill.title
    sections = [
        '<p class="project">fenced <span class="soft">drill report</span></p>',
        f"<h1>{marked(title)}</h1>",
        f'<p class="soft">fenced drill {escape(outcome.plan.drill.name)}, {escape(outcome.started)}</p>',
        _verdict(outcome),
        *_pictures(outcome),
        "<h2>Counts</h2>" + _facts(_counts(outcome)),
        "<h2>What this shows</h2>" + _bullets(_shown(outcome)),
        "<h2>What it does not show</h2>" + _bullets(_not_shown(outcome)),
        *_operations(outcome),
        "<h2>Conditions</h2>" + _facts(_conditions(outcome)),
        FOOTER,
    ]
    return document(f"fenced drill: {title}", sections)


def _pictures(outcome: DrillOutcome) -> list[str]:
    """A story has two, of which a window shows the one that fits; a storm is as wide as its time."""
    wide = _scrolling("The picture", picture(outcome))
    if outcome.plan.drill.many:
        return ['<p class="hint soft">The picture is wider than this window: scroll it sideways.</p>', wide]
    narrow = sequence_svg(outcome.steps, _title(outcome), outcome.plan.drill.bar, NARROW)
    return [f'<div class="wide">{wide}</div>', f'<div class="narrow story">{narrow}</div>']


def _title(outcome: DrillOutcome) -> str:
    return f"{outcome.plan.drill.title}. {outcome.sentence}"


def document(title: str, sections: Iterable[str]) -> str:
    """A page that needs nothing else."""
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _verdict(outcome: DrillOutcome) -> str:
    return verdict_box(outcome.verdict, outcome.sentence)


def verdict_box(verdict: str, sentence: str) -> str:
    return f'<div class="verdict {verdict}"><b>{verdict.upper()}</b>{marked(sentence)}</div>'


def marked(words: str) -> str:
    """Escaped; what is between backticks is code."""
    return re.sub(r"`([^`<>]+)`", r"<code>\1</code>", escape(words))


def _counts(outcome: DrillOutcome) -> list[tuple[str, ...]]:
    findings = outcome.findings
    return [
        ("acknowledged updates", str(findings.acknowledged)),
        ("pauses of a holder", str(len(outcome.history.pauses))),
        ("overtaken holders", str(findings.overtaken)),
        ("refused operations", str(findings.refused)),
        ("stale operations admitted", str(len(findings.stale))),
        ("lost updates", str(len(findings.lost))),
        ("doubled updates", str(len(findings.doubled))),
        ("refused updates that are there nevertheless", str(len(findings.refused_applied))),
        ("tokens that did not rise", str(len(findings.tokens_fallen))),
        ("ended leases that a renewal revived", str(len(findings.revived))),
    ]


def _conditions(outcome: DrillOutcome) -> list[tuple[str, ...]]:
    plan, setting = outcome.plan, outcome.setting
    rows = [
        ("failure", plan.drill.failure),
        *((key, str(value)) for key, value in outcome.history.facts.items()),
    ]
    if setting is not None:
        rows += [
            ("authority", setting.authority),
            ("guard", setting.guard),
            ("names", ", ".join(setting.names)),
            ("ttl", shown_ttl(plan.ttl, setting.ttl)),
            *(("best effort only", doubt) for doubt in setting.doubts),
        ]
    return [
        *rows,
        ("holders", str(plan.holders)),
        ("seed", str(plan.seed)),
        ("duration", f"{outcome.seconds:.2f} s"),
        ("versions", ", ".join(f"{key} {value}" for key, value in versions().items())),
    ]


def _shown(outcome: DrillOutcome) -> list[str]:
    if outcome.verdict == "inconclusive":
        return [outcome.sentence]
    how = (
        "Holders were separate processes. A late holder sent its stamp without checking its lease or a clock. "
        "The resource alone decided whether the write was admitted."
    )
    if not outcome.guarded:
        how = "The holders carried tokens, and nobody at the table compared them: a lease alone stops no one."
    return [outcome.plan.drill.teaches, how, outcome.sentence]


def _not_shown(outcome: DrillOutcome) -> list[str]:
    found = [
        "One run on one machine is an example, not a proof: other timings were not tried.",
        "No other fault happened: disk, power, and what this drill does not name stayed sound.",
        "A write to something that no guard watches is refused by nobody.",
        "A holder that is stopped inside a write transaction of SQLite blocks its successor; drills stop none there.",
    ]
    if outcome.setting is not None and outcome.setting.doubts:
        found.append("The authority promises its tokens by best effort only; see the conditions below.")
    return found


def _operations(outcome: DrillOutcome) -> list[str]:
    """First what was refused, stale or lost, then what else happened."""
    fates = _fates(outcome)
    notable = [each for each in outcome.history.operations if id(each) in fates]
    others = [each for each in outcome.history.operations if id(each) not in fates]
    opened = " open" if len(others) <= _OPEN_MAX else ""
    first = _operation_table(outcome, notable[:ROWS_MAX], fates) if notable else '<p class="soft">None.</p>'
    return [
        "<h2>Operations that were refused, stale or lost</h2>" + first + _more(len(notable) - ROWS_MAX),
        f"<h2>Other operations</h2><details{opened}><summary>{len(others)} operations</summary>"
        + _operation_table(outcome, others[:OTHERS_MAX], fates)
        + _more(len(others) - OTHERS_MAX)
        + "</details>",
    ]


def _fates(outcome: DrillOutcome) -> dict[int, tuple[str, str]]:
    """For each notable operation, by its id: the class of its row, and the words for it."""
    stale, lost = ({id(each) for each in found} for found in (outcome.findings.stale, outcome.findings.lost))
    fates = {}
    for each in outcome.history.operations:
        why = f": {each.why}" if each.why else ""
        stale_words = ", though stale" if id(each) in stale else ""
        lost_words = ", and gone at the end" if id(each) in lost else ""
        if stale_words or lost_words:
            fates[id(each)] = ("bad", f"{each.decision}{stale_words}{lost_words}")
        elif each.decision == "refused":
            fates[id(each)] = ("refused", f"refused{why}")
    return fates


def _operation_table(
    outcome: DrillOutcome, operations: Iterable[Operation], fates: dict[int, tuple[str, str]]
) -> str:
    heads = (
        '<th class="number">time</th><th>decision</th><th>holder</th><th>operation</th><th>name</th>'
        '<th class="number">token</th><th class="number">mark</th><th>stamp</th>'
    )
    rows = []
    for each in operations:
        kind, words = fates.get(id(each), ("", f"{each.decision}{f': {each.why}' if each.why else ''}"))
        mark = "" if each.mark is None else str(each.mark)
        rows.append(
            f'<tr class="{kind}"><td class="number">{each.time - outcome.start:.3f} s</td>'
            f'<td class="fate">{escape(words)}</td>'
            f"<td>{escape(each.holder)}</td><td>{escape(each.kind)}</td><td>{escape(each.name)}</td>"
            f'<td class="number">{each.token}</td><td class="number">{mark}</td>'
            f"<td><details><summary>show</summary><code>{escape(each.stamp)}</code></details></td></tr>"
        )
    return _scrolling("Operations", f"<table><tr>{heads}</tr>{''.join(rows)}</table>")


def _more(count: int) -> str:
    return f'<p class="soft">and {count} more; --json has all of them.</p>' if count > 0 else ""


def _facts(rows: Iterable[tuple[str, ...]]) -> str:
    """Names and values. Numbers are aligned on the right, next to their names."""
    lines = [
        f"<tr><th>{escape(name)}</th>"
        f"<td{' class=number' if value.isdigit() else ''}>{escape(value)}</td></tr>"
        for name, value in rows
    ]
    return f'<table class="facts">{"".join(lines)}</table>'


def _scrolling(label: str, content: str) -> str:
    """A part that scrolls sideways by itself, with the keyboard too."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">{content}</div>'


def _bullets(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{marked(item)}</li>" for item in items) + "</ul>"


_FORMATS: dict[str, Callable[[DrillOutcome], str]] = {".html": page, ".htm": page, ".svg": picture}
