"""The picture of an account: a lane for each lease, and one for each guard, over one axis of time.

A bar begins where the lease was granted or last renewed, and is open to the left, because what came before is not
recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from fenced.diagnosis.explain import Account, Event, clock, of
from fenced.drills.picture import cross, line, svg, tag, text
from fenced.values.past import PastLease

WIDTH = 960.0
LANES_MAX = 16
"""How many leases are drawn, the newest; the others are counted."""
_LEFT, _RIGHT, _TOP, _LANE = 250.0, 930.0, 70.0, 44.0
_COLORS = 8


class Lanes:
    """One picture and its scale: from the first event to the last."""

    def __init__(self, account: Account) -> None:
        self._account = account
        times = [each.at.timestamp() for each in account.events]
        self._first, last = (min(times), max(times)) if times else (0.0, 1.0)
        self._seconds = max(last - self._first, 0.001)
        shown = {each.token for each in account.events}
        leases = [each for each in account.leases if each.token in shown]
        self._hidden = max(0, len(leases) - LANES_MAX)
        self._leases = leases[-LANES_MAX:]

    def draw(self) -> str:
        height = _TOP + _LANE * (len(self._leases) + 1) + 60
        parts = [text(20.0, 30.0, self._account.name, class_="strong")]
        for place, lease in enumerate(self._leases):
            parts.extend(self._lane(lease, _TOP + place * _LANE, place))
        parts.extend(self._guards(_TOP + len(self._leases) * _LANE))
        parts.extend(self._axis(height - 34))
        note = "open to the left: granted there, or renewed for the last time"
        if self._hidden:
            note += f"; {self._hidden} older leases are not drawn"
        parts.append(text(20.0, height - 8, note, class_="soft"))
        return svg(WIDTH, height, f"What happened to {self._account.name}", parts)

    def _x(self, moment: float) -> float:
        share = (moment - self._first) / self._seconds
        return _LEFT + max(0.0, min(1.0, share)) * (_RIGHT - _LEFT)

    def _lane(self, lease: PastLease, top: float, place: int) -> Iterator[str]:
        color = f"var(--h{place % _COLORS})"
        yield text(20.0, top + 15, f"token {lease.token}", class_="strong", style=f"fill:{color}")
        yield text(20.0, top + 31, of(lease.holder)[:34], class_="soft")
        yield line(_LEFT, top + 16, _RIGHT, top + 16, stroke="var(--edge)")
        if lease.confirmed is not None and lease.ended is not None:
            left, right = self._x(lease.confirmed), self._x(lease.ended)
            box = {"x": left, "y": top + 7, "width": max(2.0, right - left), "height": 18.0, "rx": 3}
            yield tag(
                "rect", tag("title", f"{lease.state}, ttl {lease.ttl:g} s"), **box, fill=color, opacity=0.85
            )
            end = _END.get(lease.state, lease.state)
            yield text(right, top + 38, end, class_="soft", text_anchor="end" if right > 400 else "start")
        for each in self._account.events:
            if each.token == lease.token and each.kind in ("refused", "let_through"):
                yield from self._decision(each, top + 16)

    def _guards(self, top: float) -> Iterator[str]:
        """What a guard decided without a lease that is drawn, and what operators changed."""
        drawn = {each.token for each in self._leases}
        yield text(20.0, top + 21, "guards", class_="strong")
        yield line(_LEFT, top + 16, _RIGHT, top + 16, stroke="var(--edge)")
        for each in self._account.events:
            if each.kind == "changed":
                yield tag(
                    "circle",
                    tag("title", each.says),
                    cx=self._x(each.at.timestamp()),
                    cy=top + 16,
                    r=5,
                    fill="var(--ink)",
                )
            elif each.kind in ("refused", "let_through") and each.token not in drawn:
                yield from self._decision(each, top + 16)

    def _decision(self, each: Event, y: float) -> Iterator[str]:
        x = self._x(each.at.timestamp())
        if each.kind == "refused":
            yield tag("g", tag("title", each.says) + cross(x, y))
        else:
            points = f"{x - 7:.1f},{y + 6:.1f} {x + 7:.1f},{y + 6:.1f} {x:.1f},{y - 7:.1f}"
            yield tag("polygon", tag("title", each.says), points=points, fill="var(--bad)")

    def _axis(self, y: float) -> Iterator[str]:
        yield line(_LEFT, y - 12, _RIGHT, y - 12, stroke="var(--soft)")
        for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
            at = clock(datetime.fromtimestamp(self._first + share * self._seconds, UTC))
            yield text(_LEFT + share * (_RIGHT - _LEFT), y + 4, at, class_="soft", text_anchor=anchor)


_END = {"granted": "ended, unrenewed", "expired": "ended, unrenewed", "revoked": "taken away"}


def picture(account: Account) -> str:
    return Lanes(account).draw()
