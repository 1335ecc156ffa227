"""Output: aligned tables for people, one JSON value for programs, one line for an error."""

from __future__ import annotations

from collections.abc import Sequence

import click

from fenced.errors import Misconfigured


def plain(text: str) -> str:
    """Text that others chose (labels, hosts, names), for a terminal: characters that are not printable are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def complain(message: str) -> None:
    """One line on stderr."""
    click.echo(f"fenced: {plain(' '.join(message.split()))}", err=True)


def seconds(value: float) -> str:
    """A time for people, with tenths below 100 seconds."""
    return f"{value:.1f}s" if value < 100 else f"{value:.0f}s"


def write_json(value: object) -> None:
    import json  # not needed by `fenced run`

    click.echo(json.dumps(value, indent=2))


def write_file(path: str, text: str) -> None:
    """A picture or a page, which somebody has asked for."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise Misconfigured(f"{path} cannot be written: {error.strerror}") from error


def write_table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int]) -> None:
    """Columns with two spaces between them; those in `right` are aligned to the right."""
    cells = [titles, *([plain(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    for number, row in enumerate(cells):
        aligned = [
            cell.rjust(widths[column]) if column in right else cell.ljust(widths[column])
            for column, cell in enumerate(row)
        ]
        line = "  ".join(aligned).rstrip()
        click.echo(click.style(line, bold=True) if number == 0 else line)
