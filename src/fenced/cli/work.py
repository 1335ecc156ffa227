"""`fenced work ls`: the rows of tables with claims: ready, held back, claimed by whom and since when, dead."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from fenced.cli.guard_options import addressed, jsonable, limit_option, only_table_option, table_on
from fenced.cli.options import json_option
from fenced.cli.output import plain, seconds, write_json, write_table
from fenced.client.reaching import connected
from fenced.errors import Misconfigured
from fenced.guards.claims import ClaimView, WorkStatus
from fenced.guards.spec import Spec
from fenced.runtime.blocking import step

_TITLES = ("NAME", "WORKER", "SINCE", "ATTEMPT")


@click.group()
def work() -> None:
    """Look at the tables whose rows workers claim."""


@work.command("ls")
@addressed()
@only_table_option
@limit_option
@json_option
def ls(words: tuple[str], table: str | None, limit: int, as_json: bool) -> None:
    """List claimed rows, the oldest claims first, and count the others. Reads the whole table.

    \b
    Example:
      fenced work ls postgresql://owner@db.internal/shop --table runs
    """
    with connected(words[0]) as (_, connection):
        found = [_status(connection, spec, limit) for spec in _with_claims(connection, table)]
    if as_json:
        write_json(jsonable(found))
        return
    for status in found:
        oldest = f", next {status.oldest}" if status.oldest else ""
        counts = f"{status.ready} ready, {status.later} later, {status.claimed} claimed, {status.dead} dead"
        click.echo(plain(f"{status.table}: {counts}{oldest}"))
        if status.claims:
            write_table(_TITLES, [_row(claim) for claim in status.claims], frozenset({2, 3}))


def _with_claims(connection: Any, table: str | None) -> list[Spec]:
    guards = step(table_on(connection, Spec("any", "any")).registered())
    wanted = (table, f"public.{table}") if table is not None else None
    found = [
        spec for spec, _ in guards if spec.claims is not None and (wanted is None or spec.table in wanted)
    ]
    if not found:
        raise Misconfigured(f"claims are not installed on {table or 'any table'} of this database")
    return found


def _status(connection: Any, spec: Spec, limit: int) -> WorkStatus:
    from fenced.sql.engines import on

    return step(on(connection, "blocking").claims(spec).status(limit))


def _row(claim: ClaimView) -> tuple[str, ...]:
    age = (datetime.now(UTC) - claim.since).total_seconds()
    return claim.name, claim.worker, seconds(max(age, 0.0)), str(claim.attempt)
