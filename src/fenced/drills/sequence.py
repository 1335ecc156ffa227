"""A sequence diagram of a scenario with two holders: four lifelines, time flowing downwards, not to scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fenced.drills.picture import cross, line, svg, tag, text
from fenced.drills.story import AUTHORITY, DATABASE, StoryStep


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the lifelines are."""

    width: float
    lives: dict[str, float]
    box: float
    """The width of the boxes at their tops."""
    clock: float
    """The right end of the times."""
    pattern: str
    """The id of the hatching. A page with both layouts hides one, and then its hatching is not there."""


WIDE = Layout(960.0, {"A": 190.0, AUTHORITY: 410.0, "B": 630.0, DATABASE: 850.0}, 112.0, 84.0, "stopped")
NARROW = Layout(
    370.0, {"A": 70.0, AUTHORITY: 158.0, "B": 246.0, DATABASE: 327.0}, 72.0, 36.0, "stopped-narrow"
)
"""For phones: as wide as they are, so nothing is scrolled sideways."""
_LETTER = 6.6
"""About the width of a letter."""
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


def sequence_svg(
    steps: Sequence[StoryStep], title: str, bar: str = "process stopped", layout: Layout = WIDE
) -> str:
    """Draw every step that has a label. `bar` says what the hatched bar beside a holder means."""
    rows = _rows([each for each in steps if each.label])
    bottom = rows[-1].y + _ROW if rows else _TOP
    diagram = SequenceDiagram(rows, layout)
    legend, height = diagram.legend(bottom + 22, bar)
    parts = [
        _PATTERN.format(id=layout.pattern),
        *diagram.lifelines(bottom),
        *diagram.bars(),
        *diagram.clock(),
        *legend,
    ]
    for row in rows:
        parts.extend(diagram.draw(row))
    return svg(layout.width, bottom + 22 + height, title, parts)


_PATTERN = (
    '<defs><pattern id="{id}" width="7" height="7" patternUnits="userSpaceOnUse" '
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


class SequenceDiagram:
    """The rows of one story in one layout."""

    def __init__(self, rows: Sequence[SequenceRow], layout: Layout) -> None:
        self._rows = rows
        self._layout = layout
        self._lives = layout.lives
        self._wide = layout is WIDE

    def lifelines(self, bottom: float) -> list[str]:
        parts, half = [], self._layout.box / 2
        for who, x in self._lives.items():
            parts.append(line(x, 56.0, x, bottom, stroke="var(--edge)", stroke_width=1.5))
            box = {"x": x - half, "y": 22.0, "width": 2 * half, "height": 34.0, "rx": 8}
            parts.append(tag("rect", **box, fill="var(--card)", stroke=_COLORS[who], stroke_width=1.8))
            caption = f"holder {who}" if who in ("A", "B") else who
            parts.append(
                text(x, 44.0, caption, text_anchor="middle", class_="strong", style=f"fill:{_COLORS[who]}")
            )
        return parts

    def bars(self) -> list[str]:
        """The fault on a holder's lifeline, and over it its lease: A's until it expires, then B's."""
        at: dict[tuple[str, str], float] = {}
        for row in self._rows:
            at.setdefault((row.step.tone, row.step.target), row.y)
        last = self._rows[-1].y if self._rows else _TOP
        ends = {"A": at.get(("expiry", AUTHORITY), last), "B": last}
        parts = []
        if ("stop", "A") in at:
            parts.append(self._bar("A", 13, at["stop", "A"], at.get(("wake", "A"), last)))
        for who, end in ends.items():
            if ("grant", who) in at:
                parts.append(self._bar(who, 4, at["grant", who], end))
        return parts

    def _bar(self, who: str, half: int, top: float, bottom: float) -> str:
        box = {"x": self._lives[who] - half, "y": top, "width": 2.0 * half, "height": bottom - top}
        if half > 4:
            return tag("rect", **box, rx=4, fill=f"url(#{self._layout.pattern})", stroke="var(--soft)")
        return tag("rect", **box, rx=2, fill=_COLORS[who], opacity=0.85)

    def legend(self, y: float, bar: str) -> tuple[list[str], float]:
        """In one line, or on a narrow picture in several; and how high it is."""
        hatched = any(row.step.tone == "stop" for row in self._rows)
        left, down = (40, 0) if self._wide else (12, 20)
        parts = [
            tag("rect", x=left, y=y - 10, width=8, height=14, rx=2, fill=_COLORS["A"]),
            tag("rect", x=left + 11, y=y - 10, width=8, height=14, rx=2, fill=_COLORS["B"]),
            text(left + 27, y + 2, "lease, by the authority's clock", class_="soft"),
        ]
        if hatched:
            x, top = (268, y) if self._wide else (12, y + down)
            box = {"x": x, "y": top - 10, "width": 20, "height": 14, "rx": 3}
            parts.append(tag("rect", **box, fill=f"url(#{self._layout.pattern})", stroke="var(--soft)"))
            parts.append(text(x + 28, top + 2, bar, class_="soft"))
        if self._wide:
            parts.append(text(920, y + 2, _NOT_TO_SCALE, class_="soft", text_anchor="end"))
            return parts, 22.0
        parts.append(text(12, y + down * (1 + hatched) + 2, _NOT_TO_SCALE, class_="soft"))
        return parts, 22.0 + down * (1 + hatched)

    def clock(self) -> list[str]:
        parts, shown, x = [], "", self._layout.clock
        for row in self._rows:
            moment = f"{row.step.time:.2f}" + (" s" if self._wide else "")
            if row.waited:
                parts.append(text(x - 18, row.y - 25, "\u22ee", text_anchor="middle", class_="soft"))
            if moment != shown:
                parts.append(text(x, row.y + 4, moment, text_anchor="end", class_="soft"))
            shown = moment
        return parts

    def draw(self, row: SequenceRow) -> list[str]:
        step = row.step
        if step.tone == "expiry":
            return self._expiry(row)
        if row.sent is not None:
            return self._late(row, row.sent)
        if step.actor == step.target:
            return self._note(row)
        return self._arrow(row)

    def _label(self, x: float, y: float, words: str, anchor: str, **attributes: str) -> str:
        """Words at `x`, or as far beside it as the width of the picture demands."""
        wide = _LETTER * len(words) * (1.08 if "strong" in attributes.get("class_", "") else 1.0)
        left = x - wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
        room = self._layout.width - 8.0 - wide
        if left > room or left < self._layout.clock + 6:
            x, anchor = max(self._layout.clock + 6, min(left, room)), "start"
        return text(x, y, words, text_anchor=anchor, **attributes)

    def _late(self, row: SequenceRow, sent: float) -> list[str]:
        """A delayed message: a slanted arrow from where it was sent to where it arrived."""
        start, end = self._lives[row.step.actor] + 5, self._lives[row.step.target] - 3
        color, width, height = _COLORS[row.step.actor], end - start, row.y - sent
        turn = math.degrees(math.atan2(height, width))
        head = {"points": "0,0 -9,-4.5 -9,4.5", "fill": color}
        place = f"translate({end:.1f} {row.y:.1f}) rotate({turn:.1f})"
        return [
            line(start, sent, end, row.y, stroke=color, stroke_width=1.8, stroke_dasharray="7 3"),
            tag("polygon", **head, transform=place),
            self._label(end + 16, row.y + (4 if self._wide else 16), row.step.label, "start", class_="halo"),
        ]

    def _expiry(self, row: SequenceRow) -> list[str]:
        left, right = self._lives["A"] - (40 if self._wide else 16), self._lives[AUTHORITY]
        return [
            line(left, row.y, right, row.y, stroke="var(--ink)", stroke_width=1.5, stroke_dasharray="2 4"),
            tag("circle", cx=right, cy=row.y, r=5, fill="var(--card)", stroke="var(--ink)", stroke_width=2),
            self._label(right + 14, row.y + 4, row.step.label, "start", class_="strong halo"),
        ]

    def _note(self, row: SequenceRow) -> list[str]:
        """A step that concerns one participant: written next to its lifeline."""
        step, x = row.step, self._lives[row.step.actor]
        color = _TONES.get(step.tone, "var(--ink)")
        left = step.actor == DATABASE  # the last lifeline: there is no room to its right
        dot = tag("circle", cx=x, cy=row.y, r=4, fill=color)
        place = (x - 14, "end") if left else (x + 20, "start")
        words = self._label(
            place[0], row.y + 4, step.label, place[1], class_="strong halo", style=f"fill:{color}"
        )
        return [dot, words]

    def _arrow(self, row: SequenceRow) -> list[str]:
        step = row.step
        start, end = self._lives[step.actor], self._lives[step.target]
        way = 1 if end > start else -1
        refused = row.fate == "refused"
        # A refused write keeps its sender's colour.
        judged = _TONES.get("corrupt" if row.fate == "corrupt" else step.tone)
        color = judged or _COLORS[step.actor]
        strong = judged is not None or refused
        is_reply = step.tone in ("grant", "read", "admitted", "refused", "corrupt", "ended")
        stop = end - way * (16 if refused else 3)
        dash = {"stroke_dasharray": "5 4"} if is_reply else {}
        width = 2.6 if strong else 1.8
        parts = [line(start + way * 6, row.y, stop, row.y, stroke=color, stroke_width=width, **dash)]
        parts.append(cross(end - way * 9, row.y) if refused else _head(stop, row.y, way, color))
        style = f"fill:{color}" if judged else ""
        kind = "strong halo" if strong or step.tone == "grant" else "halo"
        # Next to the sender, where no other lifeline passes.
        parts.append(
            self._label(start + way * 110, row.y - 6, step.label, "middle", class_=kind, style=style)
            if self._wide
            else self._label((start + end) / 2, row.y - 6, step.label, "middle", class_=kind, style=style)
        )
        return parts


_NOT_TO_SCALE = "time is not to scale; \u22ee stands for a wait"


def _head(x: float, y: float, way: int, color: str) -> str:
    points = f"{x:.1f},{y:.1f} {x - way * 9:.1f},{y - 4.5:.1f} {x - way * 9:.1f},{y + 4.5:.1f}"
    return tag("polygon", points=points, fill=color)
