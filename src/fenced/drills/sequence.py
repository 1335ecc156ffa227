"""A sequence diagram of a scenario with two holders: four lifelines, time flowing downwards, not to scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fenced.drills.picture import cross, line, svg, tag, text
from fenced.drills.story import AUTHORITY, DATABASE, StoryStep

WIDTH = 960.0
_LIVES = {"A": 190.0, AUTHORITY: 410.0, "B": 630.0, DATABASE: 850.0}
_COLORS = {"A": "var(--a)", "B": "var(--b)", AUTHORITY: "var(--authority)", DATABASE: "var(--database)"}
_TOP = 66.0
_ROW = 34.0
_GAP_SECONDS = 0.15
_GAP = 26.0
_TONES = {"refused": "var(--good)", "corrupt": "var(--bad)"}


@dataclass(frozen=True, slots=True)
class SequenceRow:
    """A step and where it is drawn."""

    step: StoryStep
    y: float
    fate: str
    """The tone of the step after a write. The arrow of a refused write ends before the database."""
    sent: float | None = None
    """The height at which a delayed message was sent."""
    waited: bool = False
    """Time passed before it: more than the distance shows."""


def sequence_svg(steps: Sequence[StoryStep], title: str) -> str:
    """Draw every step that has a label."""
    rows = _rows([each for each in steps if each.label])
    bottom = rows[-1].y + _ROW if rows else _TOP
    parts = [_PATTERN, *_lifelines(bottom), *_bars(rows), *_clock(rows), *_legend(rows, bottom + 22)]
    for row in rows:
        parts.extend(_draw(row))
    return svg(WIDTH, bottom + 44, title, parts)


_PATTERN = (
    '<defs><pattern id="stopped" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="7" height="7" fill="var(--faint)"/>'
    '<line x1="0" y1="0" x2="0" y2="7" stroke="var(--soft)" stroke-width="2.5"/></pattern></defs>'
)


def _rows(steps: Sequence[StoryStep]) -> list[SequenceRow]:
    """One row for each step, with a gap where time passed."""
    rows: list[SequenceRow] = []
    y = _TOP
    for before, step, after in zip([None, *steps], steps, [*steps[1:], None], strict=False):
        waited = before is not None and step.time - before.time > _GAP_SECONDS
        y += _ROW + (_GAP if waited else 0.0)
        fate = after.tone if step.tone == "write" and after is not None else ""
        sent = (
            next((row.y for row in rows if row.step.tone == "held_up"), None) if step.tone == "late" else None
        )
        rows.append(SequenceRow(step, y, fate, sent, waited))
    return rows


def _lifelines(bottom: float) -> list[str]:
    parts = []
    for who, x in _LIVES.items():
        parts.append(line(x, 56.0, x, bottom, stroke="var(--edge)", stroke_width=1.5))
        box = {"x": x - 56, "y": 22.0, "width": 112.0, "height": 34.0, "rx": 8}
        parts.append(tag("rect", **box, fill="var(--card)", stroke=_COLORS[who], stroke_width=1.8))
        caption = f"holder {who}" if who in ("A", "B") else who
        parts.append(
            text(x, 44.0, caption, text_anchor="middle", class_="strong", style=f"fill:{_COLORS[who]}")
        )
    return parts


def _bars(rows: Sequence[SequenceRow]) -> list[str]:
    """The pause on A's lifeline, and over it A's lease until it expires; then B's."""
    at: dict[tuple[str, str], float] = {}
    for row in rows:
        at.setdefault((row.step.tone, row.step.target), row.y)
    last = rows[-1].y if rows else _TOP
    ends = {"A": at.get(("expiry", AUTHORITY), last), "B": last}
    parts = []
    if ("stop", "A") in at:
        parts.append(_pause_bar(at["stop", "A"], at.get(("wake", "A"), last)))
    for who, end in ends.items():
        if ("grant", who) in at:
            parts.append(_lease_bar(who, at["grant", who], end))
    return parts


def _lease_bar(who: str, top: float, bottom: float) -> str:
    box = {"x": _LIVES[who] - 4, "y": top, "width": 8.0, "height": bottom - top, "rx": 2}
    return tag("rect", **box, fill=_COLORS[who], opacity=0.85)


def _pause_bar(top: float, bottom: float) -> str:
    box = {"x": _LIVES["A"] - 13, "y": top, "width": 26.0, "height": bottom - top, "rx": 4}
    return tag("rect", **box, fill="url(#stopped)", stroke="var(--soft)")


def _legend(rows: Sequence[SequenceRow], y: float) -> list[str]:
    parts = [
        tag("rect", x=40, y=y - 10, width=8, height=14, rx=2, fill=_COLORS["A"]),
        tag("rect", x=51, y=y - 10, width=8, height=14, rx=2, fill=_COLORS["B"]),
        text(67, y + 2, "lease, by the authority's clock", class_="soft"),
    ]
    if any(row.step.tone == "stop" for row in rows):
        parts.append(
            tag(
                "rect", x=268, y=y - 10, width=20, height=14, rx=3, fill="url(#stopped)", stroke="var(--soft)"
            )
        )
        parts.append(text(296, y + 2, "process stopped", class_="soft"))
    parts.append(
        text(920, y + 2, "time is not to scale; \u22ee stands for a wait", class_="soft", text_anchor="end")
    )
    return parts


def _clock(rows: Sequence[SequenceRow]) -> list[str]:
    parts, shown = [], ""
    for row in rows:
        moment = f"{row.step.time:.2f} s"
        if row.waited:
            parts.append(text(66.0, row.y - 25, "\u22ee", text_anchor="middle", class_="soft"))
        if moment != shown:
            parts.append(text(84.0, row.y + 4, moment, text_anchor="end", class_="soft"))
        shown = moment
    return parts


def _draw(row: SequenceRow) -> list[str]:
    step = row.step
    if step.tone == "expiry":
        return _draw_expiry(row)
    if row.sent is not None:
        return _draw_late(row, row.sent)
    if step.actor == step.target:
        return _draw_note(row)
    return _draw_arrow(row)


def _draw_late(row: SequenceRow, sent: float) -> list[str]:
    """A delayed message: a slanted arrow from where it was sent to where it arrived."""
    start, end, color = _LIVES[row.step.actor] + 5, _LIVES[row.step.target] - 3, _COLORS[row.step.actor]
    width, height = end - start, row.y - sent
    turn = math.degrees(math.atan2(height, width))
    return [
        line(start, sent, end, row.y, stroke=color, stroke_width=1.8, stroke_dasharray="7 3"),
        tag(
            "polygon",
            points="0,0 -9,-4.5 -9,4.5",
            fill=color,
            transform=f"translate({end:.1f} {row.y:.1f}) rotate({turn:.1f})",
        ),
        text(end + 16, row.y + 4, row.step.label, class_="halo"),
    ]


def _draw_expiry(row: SequenceRow) -> list[str]:
    left, right = _LIVES["A"] - 40, _LIVES[AUTHORITY]
    return [
        line(left, row.y, right, row.y, stroke="var(--ink)", stroke_width=1.5, stroke_dasharray="2 4"),
        tag("circle", cx=right, cy=row.y, r=5, fill="var(--card)", stroke="var(--ink)", stroke_width=2),
        text(right + 14, row.y + 4, row.step.label, class_="strong halo"),
    ]


def _draw_note(row: SequenceRow) -> list[str]:
    """A step that concerns one participant: written next to its lifeline."""
    step, x = row.step, _LIVES[row.step.actor]
    color = _TONES.get(step.tone, "var(--ink)")
    left = step.actor == DATABASE  # the last lifeline: there is no room to its right
    dot = tag("circle", cx=x, cy=row.y, r=4, fill=color)
    place = {"text_anchor": "end" if left else "start", "class_": "strong halo", "style": f"fill:{color}"}
    return [dot, text(x - 14 if left else x + 20, row.y + 4, step.label, **place)]


def _draw_arrow(row: SequenceRow) -> list[str]:
    step = row.step
    start, end = _LIVES[step.actor], _LIVES[step.target]
    way = 1 if end > start else -1
    refused = row.fate == "refused"
    judged = _TONES.get(
        "corrupt" if row.fate == "corrupt" else step.tone
    )  # a refused write keeps its sender's colour
    color = judged or _COLORS[step.actor]
    strong = judged is not None or refused
    is_reply = step.tone in ("grant", "read", "admitted", "refused", "corrupt", "ended")
    stop = end - way * (16 if refused else 3)
    dash = {"stroke_dasharray": "5 4"} if is_reply else {}
    parts = [
        line(start + way * 6, row.y, stop, row.y, stroke=color, stroke_width=2.6 if strong else 1.8, **dash)
    ]
    parts.append(cross(end - way * 9, row.y) if refused else _head(stop, row.y, way, color))
    middle = start + way * 110  # next to the sender, where no other lifeline passes
    style = f"fill:{color}" if judged else ""
    kind = "strong halo" if strong or step.tone == "grant" else "halo"
    parts.append(text(middle, row.y - 6, step.label, text_anchor="middle", class_=kind, style=style))
    return parts


def _head(x: float, y: float, way: int, color: str) -> str:
    points = f"{x:.1f},{y:.1f} {x - way * 9:.1f},{y - 4.5:.1f} {x - way * 9:.1f},{y + 4.5:.1f}"
    return tag("polygon", points=points, fill=color)
