"""`fenced doctor`: whether an authority and its guards are safe together, and what to paste where they are not."""

from __future__ import annotations

import os

import click

from fenced.cli.options import elsewhere, json_option, namespace_option, need_authority
from fenced.cli.output import plain, write_json
from fenced.diagnosis.doctor import diagnosed
from fenced.diagnosis.looks import look_at_authority, look_at_guard
from fenced.diagnosis.runbooks import BASE, PAGES

_COLOURS = {"broken": "red", "unknown": "yellow", "weak": "yellow", "verdict": None}


def _named(context: click.Context, option: click.Parameter, urls: tuple[str, ...]) -> tuple[str, ...]:
    default = os.environ.get("FENCED_AUTHORITY")
    return tuple(need_authority(context, option, url) for url in urls or ((default,) if default else ()))


@click.command()
@click.argument("authorities", metavar="[AUTHORITY]...", nargs=-1, callback=_named)
@click.option(
    "--guard",
    "guards",
    multiple=True,
    metavar="URL",
    envvar="FENCED_GUARD",
    callback=elsewhere,
    help="The guards at this address; may be repeated; else FENCED_GUARD.",
)
@click.option(
    "--writer",
    "writers",
    multiple=True,
    metavar="ROLE",
    help="A role of the database that programs write as.",
)
@click.option(
    "--conformance", is_flag=True, help="Also run the authority kit, in a namespace of its own, which stays."
)
@click.option(
    "--runbooks", metavar="URL", default=BASE, show_default=True, help="Where the runbook pages are."
)
@namespace_option
@json_option
def doctor(
    authorities: tuple[str, ...],
    guards: tuple[str, ...],
    writers: tuple[str, ...],
    conformance: bool,
    runbooks: str,
    namespace: str,
    as_json: bool,
) -> int:
    """Say whether an authority and its guards are safe together.

    First a letter and a sentence about the pair: A strict, B strict for programs that send their token, C best-effort,
    D efficiency only, ? not known. Then what was found, the worst first, each with the line to paste.

    It changes nothing, and needs no more than the role of fenced guard grant-monitor and that of a holder. The exit
    status is 0 (nothing, or notes), 1 (weak), 2 (broken) or 3 (something could not be looked at).

    \b
    Examples:
      fenced doctor postgresql://app@db/leases --guard postgresql://monitor@db/shop --writer app
      fenced doctor redis://cache.internal --guard postgresql://monitor@db/shop --json
    """
    if not authorities and not guards:
        raise click.UsageError("which set-up? Pass an AUTHORITY, and --guard URL")
    # Guards before authorities: see looks.py.
    looked = [look_at_guard(url, asks_roles=bool(writers)) for url in guards]
    report = diagnosed([look_at_authority(url, namespace) for url in authorities], looked, frozenset(writers))
    failed = _run_kit(authorities) if conformance else []
    if as_json:
        more = {"conformance": failed} if conformance else {}
        write_json({**report.as_json(runbooks, PAGES), **more})
    else:
        for level, line in report.lines(runbooks, PAGES):
            colour = _COLOURS.get(level)
            shown = plain(line)
            click.echo(click.style(shown, fg=colour, bold=level == "verdict") if level else shown)
        for line in failed or (["conformance: every check passed"] if conformance else []):
            click.echo(plain(line))
    return 2 if failed else report.exit


def _run_kit(authorities: tuple[str, ...]) -> list[str]:
    from fenced.diagnosis.conformance import failures

    return [failure for url in authorities for failure in failures(url)]
