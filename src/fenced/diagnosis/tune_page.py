"""The same as a page of HTML, with nothing to load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from fenced.diagnosis.tune import NEVER, Advice, TtlRow, histogram, length, rate, said, span
from fenced.drills.picture import line, svg, tag, text
from fenced.pauses import Recording

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 860.0, 300.0, 60.0, 250.0
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
:root { color-scheme: light dark; }
table { border-collapse: collapse; }
td, th { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #8884; }
tr.advised { font-weight: 600; } svg { max-width: 100%; height: auto; }
""".strip()


def page(recording: Recording, rows: Sequence[TtlRow], advised: Advice) -> str:
    seen = f"{span(recording.seconds)} recorded, {len(recording.pauses):,} long pauses"
    body = [
        f"<h1>Which ttl?</h1><p>{escape(seen)}</p>",
        _picture(recording),
        _table(rows, advised),
        *(f"<p>{escape(sentence)}</p>" for sentence in (*said(advised), NEVER)),
    ]
    head = f'<meta charset="utf-8"><title>Which ttl?</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _picture(recording: Recording) -> str:
    return svg(_WIDTH, _HEIGHT, "How late the meter woke up, and how often", list(_bars(recording)))


def _bars(recording: Recording) -> Iterator[str]:
    found = histogram(recording)
    most = max((count.bit_length() for _, count in found), default=1)
    step = (_WIDTH - _LEFT - 20) / max(1, len(found))
    yield text(_LEFT, 28, "how late the meter woke up, and how often (each line doubles)", class_="soft")
    for height in range(0, most + 1, 4):
        y = _BOTTOM - (_BOTTOM - 50) * height / most
        yield line(_LEFT, y, _WIDTH - 20, y, stroke="var(--edge)")
        yield text(_LEFT - 8, y + 4, f"{2**height:,}" if height else "0", class_="soft", text_anchor="end")
    for place, (upper, count) in enumerate(found):
        x, high = _LEFT + place * step, (_BOTTOM - 50) * count.bit_length() / most
        box = {"x": x + 3, "y": _BOTTOM - high, "width": step - 6, "height": high, "rx": 3}
        yield tag("rect", tag("title", f"{count:,} up to {length(upper)}"), **box, fill="var(--database)")
        yield text(x + step / 2, _BOTTOM + 20, length(upper), class_="soft", text_anchor="middle")


def _table(rows: Sequence[TtlRow], advised: Advice) -> str:
    titles = (
        "ttl",
        "heartbeat",
        "false expiries a day",
        "fail-over, mean",
        "fail-over, at most",
        "renewals a second",
    )
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    lines = []
    for each in rows:
        cells = (f"{each.ttl:g} s", f"{each.heartbeat:.2f} s", rate(each), f"{each.failover:.1f} s", f"{each.ttl:g} s",
                 f"{each.renewals:.2f}")  # fmt: skip
        advice = ' class="advised"' if each.ttl == advised.ttl else ""
        lines.append(f"<tr{advice}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
