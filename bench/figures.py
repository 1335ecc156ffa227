"""A figure with its target, and the tables that show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Direction = Literal["at most", "at least"]


@dataclass(frozen=True, slots=True)
class Cell:
    """Where a figure stands in the matrix of a group."""

    matrix: str
    row: str
    column: str


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. Without a target it is there for information."""

    key: str
    what: str
    value: float
    unit: str
    target: float | None = None
    detail: str = ""
    direction: Direction = "at most"
    cell: Cell | None = None

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        if self.direction == "at most":
            return "ok" if self.value <= self.target else "over"
        return "ok" if self.value >= self.target else "under"

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "verdict": self.verdict}


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs" if seconds < 0.01 else f"{seconds * 1e3:,.1f} ms"


def ratio(
    key: str, what: str, ours: float, theirs: float, *, target: float | None = None, against: str
) -> Figure:
    """Our time divided by another: the smaller, the better."""
    detail = f"{microseconds(ours)} against {microseconds(theirs)}, {against}"
    return Figure(key, what, ours / theirs, "x", target, detail)


def advantage(cell: Cell, key: str, *, theirs: float, ours: float, target: float | None, note: str) -> Figure:
    """A peer's time divided by ours: the greater, the better, and above 1 we are faster."""
    what = f"{cell.row}: {cell.column}, {cell.matrix}"
    detail = f"theirs {microseconds(theirs)}, ours {microseconds(ours)}; {note}"
    return Figure(key, what, theirs / ours, "x", target, detail, "at least", cell)


def table(figures: Iterable[Figure]) -> str:
    rows = [("figure", "measured", "target", "", "what was compared")]
    for figure in figures:
        target = (
            "" if figure.target is None else f"{figure.direction} {figure.target:g} {figure.unit}".rstrip()
        )
        measured = f"{figure.value:.2f} {figure.unit}"
        rows.append((figure.what, measured, target, figure.verdict, figure.detail))
    return _aligned(rows, numbers={1})


def matrices(figures: Iterable[Figure]) -> list[str]:
    """One for each matrix that the figures belong to: rows by columns, with targets in brackets."""
    found: dict[str, dict[tuple[str, str], Figure]] = {}
    for figure in figures:
        if (cell := figure.cell) is not None:
            found.setdefault(cell.matrix, {})[cell.row, cell.column] = figure
    return [_matrix(name, cells) for name, cells in found.items()]


def _matrix(name: str, cells: dict[tuple[str, str], Figure]) -> str:
    columns = list(dict.fromkeys(column for _, column in cells))
    rows = [(f"{name}: the peer's time divided by ours", *columns)]
    for row in dict.fromkeys(row for row, _ in cells):
        rows.append((row, *(_shown(cells.get((row, column))) for column in columns)))
    return _aligned(rows, numbers=set(range(1, len(columns) + 1)))


def _shown(figure: Figure | None) -> str:
    if figure is None:
        return ""
    target = "" if figure.target is None else f" ({figure.direction} {figure.target:g})"
    missed = " !" if figure.verdict == "under" else "  "
    return f"{figure.value:.2f}{target}{missed}"


def _aligned(rows: Sequence[tuple[str, ...]], numbers: set[int]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            text.rjust(width) if column in numbers else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join(lines)
