"""`fenced explain`: what happened to a name, from what authority and guards have kept."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import cast

import click

from fenced.cli.audit import moment
from fenced.cli.options import authority_option, elsewhere, json_option, namespace_option, opened
from fenced.cli.output import plain, write_file, write_json
from fenced.diagnosis.explain import around, explained
from fenced.diagnosis.records import audited
from fenced.runtime.blocking import step
from fenced.values.model import check_name
from fenced.values.past import PastLease, Remembers

RECENT = timedelta(minutes=10)


@click.command()
@click.argument("name")
@click.option("--at", callback=moment, metavar="TIME", help="Five minutes before and after this time.")
@click.option("--since", callback=moment, metavar="TIME", help="From here. Default: ten minutes ago.")
@click.option("--until", callback=moment, metavar="TIME", help="To here. Default: now.")
@click.option(
    "--guard",
    "guards",
    multiple=True,
    metavar="URL",
    envvar="FENCED_GUARD",
    callback=elsewhere,
    help="May be repeated; else FENCED_GUARD.",
)
@click.option(
    "--svg", type=click.Path(dir_okay=False), metavar="FILE", help="Draw it: a lane for each lease."
)
@authority_option
@namespace_option
@json_option
def explain(
    name: str,
    at: datetime | None,
    since: datetime | None,
    until: datetime | None,
    guards: tuple[str, ...],
    svg: str | None,
    url: str,
    namespace: str,
    as_json: bool,
) -> None:
    """Say what happened to NAME: who held it, who waited, what was refused, and why.

    Each sentence has its source. What no record shows is not claimed. TIME is 2026-01-31T03:12, 03:12 for today, or how
    long ago: 2h.

    \b
    Examples:
      fenced explain orders/42 --at 03:12 --guard postgresql://monitor@db/shop
      fenced explain orders/42 --since 10m --svg story.svg
    """
    check_name(name)
    if at is not None and (since is not None or until is not None):
        raise click.UsageError("either --at TIME, or --since and --until")
    now = datetime.now(UTC).astimezone()
    begin, end = around(at) if at else (since or now - RECENT, until or now)
    # Guards first: a refusal that is read here belongs to a lease that is read afterwards.
    audits = [audited(guard, changes=True) for guard in guards]
    account = explained(name, begin, end, _leases(url, namespace, name), audits)
    if svg is not None:
        from fenced.diagnosis.lanes import picture

        write_file(svg, picture(account))
    if as_json:
        write_json(account.as_json())
        return
    for line in account.lines():
        click.echo(plain(line))


def _leases(url: str, namespace: str, name: str) -> list[PastLease] | None:
    """What the authority has not forgotten; None if it remembers nothing that can be asked for."""
    with opened(url, namespace) as authority:
        return step(cast(Remembers, authority).past(name)) if hasattr(authority, "past") else None
