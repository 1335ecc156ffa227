"""A picture of a storm: for each name a strip that shows who held it, who was stopped, and what was refused."""

from __future__ import annotations

from fenced.drills.history import Findings, History
from fenced.drills.picture import cross, line, svg, tag, text

WIDTH = 960.0
NAMES_MAX = 16
"""How many names are drawn; the others are counted."""
_LEFT, _RIGHT = 120.0, 936.0
_TOP = 64.0
_STRIP = 112.0
_COLORS = 8
_LEGEND_MAX = 10
"""How many holders the legend names."""


class Strips:
    """One picture, and its scale."""

    def __init__(self, history: History, findings: Findings, start: float, seconds: float) -> None:
        self._history = history
        self._findings = findings
        self._start = start
        self._seconds = max(seconds, 0.001)
        holders = sorted({each.holder for each in history.grants}, key=lambda each: (len(each), each))
        self._holders = holders
        self._color = {each: f"var(--h{place % _COLORS})" for place, each in enumerate(holders)}
        self._ends = _ends(history)

    def draw(self, title: str) -> str:
        names = sorted({each.name for each in self._history.grants})
        shown = names[:NAMES_MAX]
        height = _TOP + _STRIP * len(shown) + 36
        parts = self._legend()
        for place, name in enumerate(shown):
            parts.extend(self._strip(name, _TOP + place * _STRIP))
        parts.extend(self._axis(height - 30))
        if len(names) > len(shown):
            parts.append(text(_LEFT, height - 4, f"and {len(names) - len(shown)} more names", class_="soft"))
        return svg(WIDTH, height, title, parts)

    def _x(self, moment: float) -> float:
        share = (moment - self._start) / self._seconds
        return _LEFT + max(0.0, min(1.0, share)) * (_RIGHT - _LEFT)

    def _strip(self, name: str, top: float) -> list[str]:
        parts = [text(16.0, top + 16, _cut(name), class_="strong")]
        for row, caption in (
            (30.0, "held by"),
            (58.0, "stopped"),
            (86.0, self._late_caption()),
        ):
            parts.append(text(_LEFT - 10, top + row + 8, caption, class_="soft", text_anchor="end"))
        parts.append(
            tag("rect", x=_LEFT, y=top + 24, width=_RIGHT - _LEFT, height=22, rx=3, fill="var(--faint)")
        )
        parts.extend(self._held(name, top + 24))
        parts.extend(self._pauses(name, top + 54))
        parts.extend(self._marks(name, top + 90))
        return parts

    def _late_caption(self) -> str:
        kinds = {"refused": self._findings.refused, "lost": self._findings.lost}
        return ", ".join(word for word, found in kinds.items() if found) or "refused"

    def _held(self, name: str, top: float) -> list[str]:
        """A bar for each grant, until its last operation or the next grant of the name, whichever came first."""
        grants = sorted(
            (each for each in self._history.grants if each.name == name), key=lambda each: each.time
        )
        parts = []
        for grant, after in zip(grants, [*grants[1:], None], strict=True):
            end = self._ends.get((name, grant.token), grant.time)
            if after is not None:
                end = min(end, after.time)
            left = self._x(grant.time)
            width = max(1.2, self._x(end) - left)
            parts.append(tag("rect", x=left, y=top, width=width, height=22, fill=self._color[grant.holder]))
        return parts

    def _pauses(self, name: str, top: float) -> list[str]:
        parts = []
        for pause in self._history.pauses:
            if pause.name != name:
                continue
            left, right = self._x(pause.began), self._x(pause.ended)
            color = self._color.get(pause.holder, "var(--soft)")
            box = {"x": left, "y": top, "width": max(2.0, right - left), "height": 18.0, "rx": 3}
            parts.append(tag("rect", **box, fill=color, fill_opacity=0.22, stroke=color))
            if right - left > 26:
                parts.append(
                    text((left + right) / 2, top + 13, pause.holder, text_anchor="middle", class_="soft")
                )
        return parts

    def _marks(self, name: str, y: float) -> list[str]:
        refused = [each for each in self._history.operations if each.decision == "refused"]
        parts = [cross(self._x(each.time), y, 4.5) for each in refused if each.name == name]
        for each in self._findings.lost:
            if each.name == name:
                x = self._x(each.time)
                parts.append(line(x, y - 8, x, y + 8, stroke="var(--bad)", stroke_width=1.4, opacity=0.8))
        return parts

    def _legend(self) -> list[str]:
        parts, x = [], 16.0
        for holder in self._holders[:_LEGEND_MAX]:
            parts.append(tag("rect", x=x, y=20.0, width=12, height=12, rx=2, fill=self._color[holder]))
            parts.append(text(x + 17, 31.0, holder, class_="soft"))
            x += 30 + 8 * len(holder)
        x += 12
        if self._findings.refused:
            parts.append(cross(x + 5, 26.0, 4.5))
            parts.append(text(x + 16, 31.0, "late, refused as stale", class_="soft"))
            x += 170
        if self._findings.lost:
            parts.append(line(x, 18, x, 34, stroke="var(--bad)", stroke_width=2))
            parts.append(text(x + 8, 31.0, "acknowledged, and gone at the end", class_="soft"))
        return parts

    def _axis(self, y: float) -> list[str]:
        every = max(1, round(self._seconds / 8))
        parts = []
        for second in range(0, int(self._seconds) + 1, every):
            x = self._x(self._start + second)
            parts.append(line(x, y, x, y + 5, stroke="var(--soft)"))
            parts.append(text(x, y + 18, f"{second} s", text_anchor="middle", class_="soft"))
        return parts


def _ends(history: History) -> dict[tuple[str, int], float]:
    """The time of the last operation under each name and token."""
    return {(each.name, each.token): each.time for each in history.operations}


def _cut(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:39]}…"


def strips_svg(history: History, findings: Findings, *, start: float, seconds: float, title: str) -> str:
    """Draw a storm."""
    return Strips(history, findings, start, seconds).draw(title)
