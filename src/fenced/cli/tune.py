"""`fenced tune`: which ttl, from pauses that were recorded where the programs run."""

from __future__ import annotations

import threading

import click

from fenced.cli.options import json_option
from fenced.cli.output import write_file, write_json
from fenced.diagnosis import tune as tuning
from fenced.errors import Misconfigured
from fenced.pauses import PauseMeter, Recording
from fenced.values import timing
from fenced.values.durations import duration


@click.command()
@click.option(
    "--record", type=click.Path(dir_okay=False), metavar="FILE", help="Append the pauses of this process."
)
@click.option(
    "--for",
    "seconds",
    type=duration(1.0, 366 * 86_400.0),
    metavar="TIME",
    help="With --record: how long; else until Ctrl-C.",
)
@click.option(
    "--from",
    "recorded",
    type=click.Path(dir_okay=False),
    multiple=True,
    metavar="FILE",
    help="Read it; may repeat.",
)
@click.option(
    "--ttl",
    "ttls",
    type=duration(timing.TTL_MIN, timing.TTL_MAX),
    multiple=True,
    metavar="TIME",
    help="Also this one.",
)
@click.option(
    "--round-trip",
    type=duration(0.0, 60.0),
    default="0.01s",
    show_default=True,
    metavar="TIME",
    help="Of a renewal, at its slowest.",
)
@click.option(
    "--section",
    type=duration(0.0, timing.TTL_MAX),
    metavar="TIME",
    help="How long the work takes, 99.9 % of the time: for a lease that is not renewed.",
)
@click.option(
    "--html", type=click.Path(dir_okay=False), metavar="FILE", help="Write a page with the histogram."
)
@json_option
def tune(
    record: str | None,
    seconds: float | None,
    recorded: tuple[str, ...],
    ttls: tuple[float, ...],
    round_trip: float,
    section: float | None,
    html: str | None,
    as_json: bool,
) -> None:
    """Choose a ttl by the pauses of your machines.

    Record where the programs run, best inside of them (fenced.pauses.PauseMeter), for days. Then read
    the recording at home: for each ttl, how often a lease would be lost without need, how long a fail-over takes, and
    how many renewals it costs.

    \b
    Examples:
      fenced tune --record pauses.jsonl --for 24h
      fenced tune --from pauses.jsonl --section 20s --html pauses.html
    """
    if (record is None) == (not recorded):
        raise click.UsageError("either --record FILE, where the programs run, or --from FILE, to read it")
    if record is not None:
        _record(record, seconds)
        return
    try:
        recording = Recording.read(*recorded)
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured(f"the recording cannot be read: {error}") from error
    rows = [tuning.row(recording, ttl, round_trip) for ttl in sorted({*tuning.TTLS, *ttls})]
    advised = tuning.advice(recording, round_trip, section)
    if html is not None:
        from fenced.diagnosis.tune_page import page

        write_file(html, page(recording, rows, advised))
    if as_json:
        write_json(tuning.as_json(recording, rows, advised))
        return
    for line in tuning.lines(recording, rows, advised):
        click.echo(line)


def _record(path: str, seconds: float | None) -> None:
    try:
        meter = PauseMeter(path).start()
    except OSError as error:
        raise Misconfigured(f"the recording cannot be written: {error}") from error
    click.echo(f"recording to {path}; Ctrl-C ends it", err=True)
    try:
        threading.Event().wait(seconds)
    except KeyboardInterrupt:
        pass
    finally:
        meter.stop()
    click.echo(
        f"longest pause: {meter.buckets.longest:.3f} s. Read it by fenced tune --from {path}", err=True
    )
