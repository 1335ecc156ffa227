"""`fenced once`: run a command once for each version, or once in each period, whatever the number of machines."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from typing import cast

import click

from fenced.cli import exits
from fenced.cli.inbox import Inbox, Stopped
from fenced.cli.options import authority_option, guarantee_option, namespace_option
from fenced.cli.output import complain, write_json
from fenced.cli.run import (
    PATIENCE_SECONDS,
    CommandAfterDashes,
    LastFailure,
    Margins,
    NotStarted,
    environment_of,
    lost,
    supervised,
    time_option,
)
from fenced.client.faces import Client, Guarantee
from fenced.client.leases import Lease
from fenced.client.once import Once, done, marks_beside
from fenced.client.values import Values
from fenced.errors import NotGranted
from fenced.runtime.blocking import expect_interrupts
from fenced.runtime.clocks import wall_time
from fenced.values import ticks, timing
from fenced.values.ticks import Missed

DAY = 86_400.0


class _Ended(Exception):
    """The command did not succeed: nothing is marked."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class _OnceCommand(CommandAfterDashes):
    """`--show` runs nothing, so it needs no command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return (
            click.Command.parse_args(self, ctx, args) if "--show" in args else super().parse_args(ctx, args)
        )


def _clock(context: click.Context, option: click.Parameter, text: str | None) -> float:
    """Seconds after midnight, UTC."""
    if text is None:
        return 0.0
    hours, colon, minutes = text.partition(":")
    if not (colon and hours.isdigit() and minutes.isdigit() and int(hours) < 24 and int(minutes) < 60):
        raise click.BadParameter(f"a time of day is HH:MM, in UTC, not {text!r}")
    return int(hours) * 3600.0 + int(minutes) * 60.0


@click.command(cls=_OnceCommand)
@click.argument("name")
@click.option(
    "--version",
    type=click.IntRange(0, ticks.VERSION_MAX),
    help="Run CMD unless this version or a later one is done.",
)
@time_option(
    "--every",
    "Run CMD once in each period: the version is the instant at which the period began.",
    1.0,
    366 * DAY,
)
@click.option(
    "--at",
    metavar="HH:MM",
    callback=_clock,
    help="With --every: when a period begins, in UTC.  [default: 00:00]",
)
@click.option(
    "--missed", type=click.Choice(["last", "all", "none"]), default="last",
    help="With --every: which of the periods that nobody has run are run now.  [default: last]",
)  # fmt: skip
@time_option(
    "--keep", "Forget the mark after this long, for names without end.  [default: never]", 1.0, 3660 * DAY
)
@click.option("--marks", metavar="URL", help="Where the marks are.  [default: in the authority's store]")
@click.option("--show", is_flag=True, help="Show which version is done, and run nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --show: one JSON value.")
@time_option(
    "--ttl",
    "How long the lease lasts without renewal.  [default: 30s]",
    timing.TTL_MIN,
    timing.TTL_MAX,
    default=timing.TTL_DEFAULT,
)
@time_option(
    "--wait", "How long to wait while another machine is at it.  [default: no limit]", 0.0, timing.WAIT_MAX
)
@click.option("--label", metavar="TEXT", help="Who holds the lease, for people.  [default: host:pid]")
@authority_option
@namespace_option
@guarantee_option
@click.pass_context
def once(
    ctx: click.Context,
    name: str,
    version: int | None,
    every: float | None,
    at: float,
    missed: Missed,
    keep: float | None,
    marks: str | None,
    show: bool,
    as_json: bool,
    ttl: float,
    wait: float | None,
    label: str | None,
    url: str,
    namespace: str,
    guarantee: Guarantee,
) -> int:
    """Run CMD once for each version of NAME, or once in each period, whatever the number of machines.

    The others wait while one of them is at it, and then skip. The exit status is 0 if CMD succeeded or was done
    before, CMD's own if it failed (then nothing is marked, and the next one runs it), 75 if NAME was not granted
    within --wait, 76 if the lease was lost. CMD gets the variables of `fenced run`, and FENCED_VERSION.

    \b
    Examples:
      fenced once schema --version 7 -- ./migrate.sh
      fenced once nightly --every 24h --at 02:00 -- ./report.sh
      fenced once schema --show
    """
    with ExitStack() as stack:
        values = stack.enter_context(Values(marks or marks_beside(url)))
        if show:
            return _show(values, name, keep, as_json)
        if (version is None) == (every is None):
            raise click.UsageError("pass --version N or --every TIME, and one of them")
        expect_interrupts()
        if os.environ.get("FENCED_DEBUG") != "1":
            threading.excepthook = lambda _: None  # the loss of the lease is reported instead
        failure = LastFailure()
        try:
            inbox = stack.enter_context(Inbox())
            client = stack.enter_context(
                Client(
                    url, namespace=namespace, label=label, guarantee=guarantee, patience=PATIENCE_SECONDS,
                    on_event=failure,
                )
            )  # fmt: skip
            for each in (
                [version] if version is not None else _due(values, name, keep, cast(float, every), at, missed)
            ):
                turns = [
                    client.once(name, each, marks=values, keep=keep, ttl=ttl, wait=long)
                    for long in (0.0, wait)
                ]
                _run(turns, name, each, wait, ctx.args, url, client, namespace, inbox, failure)
        except _Ended as ended:
            return ended.status
        except Stopped as stopped:
            return exits.SIGNALLED + stopped.signum
    return exits.OK


def _due(values: Values, name: str, keep: float | None, every: float, at: float, missed: Missed) -> list[int]:
    last = done(values, name, keep)
    return ticks.due(wall_time(), every, at, None if last is None else last.version, missed)


def _run(
    turns: list[Once], name: str, version: int, wait: float | None, command: list[str], url: str,
    client: Client, namespace: str, inbox: Inbox, failure: LastFailure,
) -> None:  # fmt: skip
    """Take a turn, at once or after a wait, and run the command in it. A command that fails leaves no mark."""
    first, second = turns
    with ExitStack() as stack:
        try:
            turn: Lease | None = stack.enter_context(first)
        except NotGranted as refused:
            if wait == 0:
                raise
            complain(f"waiting for {name}, {refused.why}")
            turn = stack.enter_context(second)
        if turn is None:
            return
        inbox.listen()
        environment = {**environment_of(turn, name, url, client, namespace), "FENCED_VERSION": str(version)}
        try:
            status = supervised(turn, command, environment, inbox, Margins.of(turn.ttl, None))
        except NotStarted as error:
            raise _Ended(error.status) from error
        if status is None:
            raise _Ended(lost(turn, failure))
        if status != exits.OK:
            raise _Ended(status)


def _show(values: Values, name: str, keep: float | None, as_json: bool) -> int:
    found = done(values, name, keep)
    if as_json:
        write_json(None if found is None else found._asdict())
    elif found is None:
        click.echo(f"{name}: no version is done")
    else:
        from datetime import UTC, datetime

        when = datetime.fromtimestamp(found.at, UTC).isoformat(timespec="seconds")
        click.echo(
            f"{name}: version {found.version} is done, under token {found.token}, at {when}, by {found.by}"
        )
    return exits.OK
