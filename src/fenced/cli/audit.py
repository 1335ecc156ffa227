"""`fenced audit`: what guards have decided, all of them in one list."""

from __future__ import annotations

import csv
import os
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from fenced.cli.guard_options import jsonable
from fenced.cli.options import elsewhere, json_option
from fenced.cli.output import plain, write_json, write_table
from fenced.diagnosis.doctor import CLOCK_SECONDS
from fenced.diagnosis.records import NEWEST, Audit, Wanted, audited, followed, merged
from fenced.values.decision import Verdict
from fenced.values.durations import duration
from fenced.values.rollout import Decision

FOLLOW_SECONDS = 1.0
COLUMNS = tuple(
    "at guard name verdict ruling mode token mark who application address pid stamp where".split()
)
_DONE = {"refuse": "refused", "admit": "admitted"}
_SPAN = duration(0.0, 3660 * 86_400.0)


def moment(context: click.Context, option: click.Parameter, text: str | None) -> datetime | None:
    """A time as people write it: 2026-01-31T03:12, 03:12 (today), or 2h ago."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        try:
            clock = datetime.strptime(text, "%H:%M:%S" if text.count(":") == 2 else "%H:%M").time()  # noqa: DTZ007
        except ValueError:
            try:
                return datetime.now(UTC) - timedelta(seconds=_SPAN(text))
            except click.BadParameter:
                raise click.BadParameter(
                    f"a time is 2026-01-31T03:12, 03:12 for today, or how long ago (2h), not {text!r}"
                ) from None
        found = datetime.combine(datetime.now().astimezone().date(), clock)
    return found.astimezone() if found.tzinfo is None else found


def guards_named(context: click.Context, argument: click.Parameter, urls: tuple[str, ...]) -> tuple[str, ...]:
    default = os.environ.get("FENCED_GUARD")
    if not urls and not default:
        raise click.UsageError("which guards? Pass their addresses, or set FENCED_GUARD", context)
    return elsewhere(context, argument, urls or (str(default),))


@click.command()
@click.argument("urls", metavar="[URL]...", nargs=-1, callback=guards_named)
@click.option("--name", metavar="PATTERN", help="Only names like this; * stands for any characters.")
@click.option("--token", type=click.IntRange(min=0), help="Only decisions about this token.")
@click.option(
    "--since", callback=moment, metavar="TIME", help="2026-01-31T03:12, 03:12 for today, or how long ago: 2h."
)
@click.option("--verdict", type=click.Choice([each.value for each in Verdict]), help="Only this one.")
@click.option("--limit", type=click.IntRange(1, NEWEST), default=1000, show_default=True, help="The newest.")
@click.option("--follow", is_flag=True, help="Go on, and show what is recorded from now on.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@json_option
def audit(
    urls: tuple[str, ...],
    name: str | None,
    token: int | None,
    since: datetime | None,
    verdict: str | None,
    limit: int,
    follow: bool,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Show what guards have refused or let through, the newest last.

    The decisions of all guards in one list, by the time of each guard's store. With --follow --json each line is one
    object.

    \b
    Examples:
      fenced audit postgresql://monitor@db/shop redis://cache --since 2h
      fenced audit --name 'orders/4*' --verdict stale --csv > stale.csv
      fenced audit --follow
    """
    if as_csv and as_json:
        raise click.UsageError("either --json or --csv")
    wanted = Wanted(name, token, since, verdict)
    out = _Out(as_csv, as_json, follow)
    if not follow:
        audits = [audited(url) for url in urls]
        _caution(audits)
        out.show(merged(audits, wanted)[-limit:])
        return
    found = followed(lambda: [audited(url) for url in urls], wanted, lambda: time.sleep(FOLLOW_SECONDS))
    for number, rows in enumerate(found):
        out.show(rows[-limit:] if number == 0 else rows)


def _caution(audits: Iterable[Audit]) -> None:
    """What the list cannot show."""
    for each in audits:
        if each.ahead is not None and abs(each.ahead) > CLOCK_SECONDS:
            click.echo(plain(f"{each.where}: its clock is {each.ahead:+.1f} s from this machine's"), err=True)
        if each.lags:
            says = "decisions arrive up to a second late, and only the newest of each process are kept"
            click.echo(plain(f"{each.where}: {says}"), err=True)
        if each.full:
            click.echo(plain(f"{each.where}: only the newest {NEWEST:,} records are looked at"), err=True)


class _Out:
    """Where the rows go."""

    def __init__(self, as_csv: bool, as_json: bool, lines: bool) -> None:
        self._csv = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n") if as_csv else None
        self._json = as_json
        self._lines = lines
        if self._csv:
            self._csv.writeheader()

    def show(self, rows: Sequence[tuple[str, Decision]]) -> None:
        if self._csv:
            self._csv.writerows(_fields(where, each) for where, each in rows)
        elif self._json and self._lines:
            import json

            for where, each in rows:
                click.echo(json.dumps(_fields(where, each)))
        elif self._json:
            write_json([_fields(where, each) for where, each in rows])
        elif rows:
            titles = "TIME GUARD NAME VERDICT DONE TOKEN MARK WHO APPLICATION ADDRESS".split()
            write_table(titles, [_row(each) for _, each in rows], frozenset({5, 6}))
        elif not self._lines:
            click.echo("there are no such records", err=True)
        sys.stdout.flush()


def _fields(where: str, each: Decision) -> dict[str, Any]:
    known = {**jsonable(each), "token": each.token, "where": where}
    return {column: known[column] for column in COLUMNS}


def _row(each: Decision) -> list[str]:
    numbers = ["-" if number is None else str(number) for number in (each.token, each.mark)]
    who = [text or "-" for text in (each.who, each.application, each.address)]
    at = f"{each.at.astimezone():%Y-%m-%d %H:%M:%S.%f}"[:-3]
    done = _DONE.get(each.ruling.value, "let through")
    return [at, each.guard, each.name or "-", each.verdict.value.replace("_", " "), done, *numbers, *who]
