"""A figure with its target, and the table that shows them."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. Without a target it is there for information."""

    key: str
    what: str
    value: float
    unit: str
    target: float | None = None
    detail: str = ""

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        return "ok" if self.value <= self.target else "over"

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "verdict": self.verdict}


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs" if seconds < 0.01 else f"{seconds * 1e3:,.1f} ms"


def ratio(
    key: str, what: str, ours: float, theirs: float, *, target: float | None = None, against: str
) -> Figure:
    detail = f"{microseconds(ours)} against {microseconds(theirs)}, {against}"
    return Figure(key, what, ours / theirs, "x", target, detail)


def table(figures: list[Figure]) -> str:
    rows = [("figure", "measured", "target", "", "what was compared")]
    for figure in figures:
        target = "" if figure.target is None else f"<= {figure.target:g} {figure.unit}"
        measured = f"{figure.value:.2f} {figure.unit}"
        rows.append((figure.what, measured, target, figure.verdict, figure.detail))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        f"{what:<{widths[0]}}  {measured:>{widths[1]}}  {target:<{widths[2]}}  {verdict:<{widths[3]}}  {detail}"
        for what, measured, target, verdict, detail in rows
    ]
    lines.insert(1, "-" * max(len(line.rstrip()) for line in lines))
    return "\n".join(line.rstrip() for line in lines)
