"""`fenced stamp`: any stamp in words, and stamps of the numbers of other locks."""

from __future__ import annotations

import click

from fenced.cli.options import json_option
from fenced.cli.output import plain, write_json
from fenced.values.foreign import SOURCES
from fenced.values.model import Stamp


@click.group()
def stamp() -> None:
    """Read a stamp, or make one of the number of another lock."""


@stamp.command()
@click.argument("text")
@json_option
def read(text: str, as_json: bool) -> None:
    """Say what the stamp TEXT means.

    \b
    Example:
      fenced stamp read "$FENCED_STAMP"
    """
    found = Stamp.parse(text)
    if as_json:
        write_json({**found._asdict(), "announces": found.seq == 0})
        return
    operation = {None: "none: rule retry", 0: "0: it announces"}.get(found.seq, str(found.seq))
    for title, value in (
        ("names", ", ".join(found.names)),
        ("token", found.token),
        ("seq", operation),
        ("realm", found.realm),
        ("grant", found.grant),
    ):
        click.echo(plain(f"{title:6} {value}"))


@stamp.command()
@click.argument("source", type=click.Choice(list(SOURCES)))
@click.argument("cluster")
@click.argument("number", type=int)
@click.argument("holder")
@click.argument("names", nargs=-1, required=True)
@click.option("--seq", type=int, help="Which operation of its holder this is; 0 announces.")
@click.option(
    "--guarantee",
    type=click.Choice(["strict", "best-effort"]),
    default="strict",
    show_default=True,
    help="best-effort: take a source whose numbers could repeat, too.",
)
def foreign(
    source: str,
    cluster: str,
    number: int,
    holder: str,
    names: tuple[str, ...],
    seq: int | None,
    guarantee: str,
) -> None:
    """Make the stamp of a lock of ZooKeeper's or etcd's own clients.

    CLUSTER is your name for the ensemble, the same everywhere. HOLDER differs between any two grants: session and node.

    \b
    Example:
      fenced stamp foreign etcd-revision main 4711 lease-7/locks/orders orders/42
    """
    click.echo(Stamp.foreign(source, cluster, names, number, holder, seq=seq, guarantee=guarantee))
