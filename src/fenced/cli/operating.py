"""What an operator does to an authority: install it, show it, take a name by force, raise the floor."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict

import click

from fenced.cli.moving import move
from fenced.cli.options import authority_either, authority_option, json_option, namespace_option, opened
from fenced.cli.output import plain, write_json
from fenced.client import registry
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.values.model import HeldBy, Standing, check_floor, check_name

_DIGITS = re.compile(r"0|[1-9][0-9]{0,15}", re.ASCII)


def _token(context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """Plain digits. `int()` would also take 1_000 and the digits of other scripts."""
    if text is None:
        return None
    if not _DIGITS.fullmatch(text):
        raise click.BadParameter("a token is a whole number, in digits")
    return int(text)


def _floor(context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    if text is not None and not _DIGITS.fullmatch(text):
        raise click.BadParameter("a floor is a whole number from 0 to 2**53 - 2, in digits")
    return None if text is None else check_floor(int(text))


@click.command()
@click.argument("name")
@click.option(
    "--force",
    "token",
    callback=_token,
    metavar="TOKEN",
    help="Take the name from the holder that has this token; fenced show and fenced ls show it.",
)
@authority_option
@namespace_option
@json_option
def release(name: str, token: int | None, url: str, namespace: str, as_json: bool) -> None:
    """Take NAME from its holder by force, with all other names of the same lease.

    Only from the holder that has TOKEN: if somebody else holds the name by now, nothing is done. Mints a token above
    the holder's. The holder detects the loss at its next renewal; until then only a guard that has seen a newer token
    refuses its writes.

    \b
    Example:
      fenced release orders/42 --force 81204
    """
    check_name(name)
    with opened(url, namespace) as authority:
        minted = None if token is None else step(authority.force_release(name, token))
        held_by = step(authority.observe(name)).held_by if minted is None else None
    if token is None:
        command = f"fenced release {shlex.quote(name)} --force {held_by.token if held_by else 'TOKEN'}"
        raise click.UsageError(
            f"a lease is released by its holder. {_held(name, held_by)}. To take the name away: {plain(command)}"
        )
    if as_json:
        write_json({"name": name, "released": minted is not None, "token": minted})
    elif minted is None:
        click.echo(f"{_held(name, held_by)}; nothing was done")
    else:
        click.echo(f"{plain(name)} was taken from its holder; token {minted} was minted above the holder's")


def _held(name: str, held_by: HeldBy | None) -> str:
    if held_by is None:
        return f"{plain(name)} is not held"
    holder = held_by.holder
    return (
        f"{plain(name)} is held by {plain(holder.label)} on {plain(holder.host)} with token {held_by.token}"
    )


@click.group()
def authority() -> None:
    """Operate an authority.

    \b
    Example:
      fenced authority raise --above 81204
    """


authority.add_command(move)


@authority.command()
@authority_either
@namespace_option
@json_option
def install(url: str, namespace: str, as_json: bool) -> None:
    """Create what the authority needs, unless it exists, and show what it guarantees.

    The first client does the same, if its role has the rights. If no client has them, run this once as a role that has.

    \b
    Example:
      fenced authority install postgresql://owner@db.internal/shop
    """
    with opened(url, namespace, create=True) as opened_authority:
        standing = step(opened_authority.open())
        _describe(opened_authority.url, namespace, standing, as_json)


@authority.command()
@authority_either
@namespace_option
@json_option
def show(url: str, namespace: str, as_json: bool) -> None:
    """Show an authority: its realm, last token, guarantee and schema.

    URL is the authority; else FENCED_AUTHORITY. Guards trust one realm; fenced guard status shows which.

    \b
    Example:
      fenced authority show redis://cache.internal
    """
    with opened(url, namespace) as opened_authority:
        standing = step(opened_authority.open(create=False))
        _describe(opened_authority.url, namespace, standing, as_json)


def _describe(where: str, namespace: str, standing: Standing, as_json: bool) -> None:
    guarantee = "best-effort" if standing.doubts else "strict"
    if as_json:
        write_json({"authority": where, "namespace": namespace, "guarantee": guarantee, **asdict(standing)})
        return
    click.echo(f"{plain(where)}, namespace {plain(namespace)}")
    click.echo(f"  realm       {standing.realm}")
    click.echo(f"  last token  {standing.last_token}; every later one is greater")
    click.echo(f"  guarantee   {guarantee}")
    for doubt in standing.doubts:
        click.echo(f"              {plain(doubt)}")
    if standing.stopped:
        click.echo(f"  stopped     {plain(standing.stopped)}")
    for warning in standing.warnings:
        click.echo(f"  warning     {plain(warning)}")
    if (schema := standing.schema) is not None:
        by = f", stored by fenced {plain(schema.release)}" if schema.release else ""
        click.echo(f"  schema      {schema.version}{by}")


@authority.command("raise")
@click.option("--above", callback=_floor, metavar="N", help="Every later token is greater than N.")
@click.option(
    "--above-guards",
    "guards",
    multiple=True,
    metavar="URL",
    help="Every later token is greater than this guard's marks. May be repeated.",
)
@authority_either
@namespace_option
@json_option
def raise_(above: int | None, guards: tuple[str, ...], url: str, namespace: str, as_json: bool) -> None:
    """Raise the floor: every later token is greater.

    After a restore from a backup guards have seen tokens that this authority does not know. They refuse its
    holders until its tokens are above those. For a change of the authority: fenced authority move.

    \b
    Examples:
      fenced authority raise --above 81204
      fenced authority raise sqlite:////var/lib/app/leases.db --above-guards sqlite:////var/lib/app/data.db
      fenced authority raise --above-guards postgresql://owner@db.internal/shop
    """
    if above is None and not guards:
        raise click.UsageError("above what? Pass --above N, or --above-guards URL")
    highest = max((above or 0, *(highest_mark(guard) for guard in guards)))
    with opened(url, namespace, create=True) as opened_authority:
        floor = step(opened_authority.raise_floor(highest))
    if as_json:
        write_json({"above": highest, "floor": floor, "namespace": namespace})
    else:
        click.echo(f"the floor is {floor}: every later token is greater")


def highest_mark(url: str) -> int:
    """The highest token that a guard has admitted under any name; 0 when there is none."""
    guard = registry.guard(url, BlockingRuntime())
    try:
        return step(guard.highest())
    finally:
        step(guard.close())
