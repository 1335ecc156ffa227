"""`fenced exporter`: what guards and authorities know, for Prometheus."""

from __future__ import annotations

import asyncio
import signal

import click

from fenced.cli.logs import log_to_stderr
from fenced.cli.options import elsewhere
from fenced.cli.output import complain
from fenced.cli.proxy import listen_address
from fenced.values.durations import duration


@click.command()
@click.option(
    "--guard",
    "guards",
    metavar="[TARGET=]URL",
    multiple=True,
    envvar="FENCED_GUARD",
    callback=elsewhere,
    help="Guards to look at, as for `fenced guard`; may be repeated; else FENCED_GUARD. TARGET is their label.",
)
@click.option(
    "--authority",
    "authorities",
    metavar="[TARGET=]URL",
    multiple=True,
    envvar="FENCED_AUTHORITY",
    callback=elsewhere,
    help="An authority to look at; may be repeated; else FENCED_AUTHORITY.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:9464",
    show_default=True,
    callback=listen_address,
    help="Where Prometheus reads /metrics.",
)
@click.option(
    "--every", type=duration(0.1, 3600), default="5s", show_default=True, help="Time between two looks."
)
def exporter(
    guards: tuple[str, ...], authorities: tuple[str, ...], listen: tuple[str, int], every: float
) -> None:
    """Show Prometheus what guards and authorities know, for stores whose writers run no Python.

    Each store has a thread of its own. A scrape shows the last looks and waits for none: a store that fails or hangs
    is `fenced_up 0`, without old numbers. The role needs no more than `fenced guard grant-monitor` gives.

    `ps` shows the words of a command, so addresses with passwords belong in FENCED_GUARD and FENCED_AUTHORITY,
    separated by spaces.

    \b
    Example:
      fenced exporter --guard shop=postgresql://monitor@db/shop --authority leases=postgresql://monitor@db/leases
    """
    from fenced.http1.server import fast_loop
    from fenced.monitoring.exporter import Exporter
    from fenced.monitoring.looks import lookers

    if not guards and not authorities:
        raise click.UsageError("pass --guard URL or --authority URL, at least one")
    log_to_stderr()

    async def serve() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await Exporter(lookers(guards, authorities, every), listen).run(stop, complain)

    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(serve())
