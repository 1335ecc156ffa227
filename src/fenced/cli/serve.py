"""`fenced serve`: leases over HTTP."""

from __future__ import annotations

import os
from collections.abc import Callable

import click

from fenced.cli import exits
from fenced.cli.logs import log_to_stderr
from fenced.cli.options import guarantee_option
from fenced.cli.output import complain
from fenced.cli.proxy import listen_address
from fenced.client import registry
from fenced.errors import Misconfigured
from fenced.values.contracts import Authority, Runtime

PORT = 8700
STORE = "ledger:///leases.ledger"
_INSTALL = "install fenced with its extra `service`, such as: pip install './fenced[service]' beside a clone"


@click.command()
@click.option(
    "--store",
    metavar="URL",
    envvar="FENCED_STORE",
    default=STORE,
    show_default=True,
    help="The authority behind it, such as postgresql://db.internal/leases; else FENCED_STORE.",
)
@click.option(
    "--standby",
    is_flag=True,
    help="If another process has the file of the store, wait until that process ends, and then serve.",
)
@click.option(
    "--values",
    metavar="URL",
    help="The guard of the values. Default: a SQLite file beside an embedded store; none for other stores.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    callback=listen_address,
    help=f"[default: 127.0.0.1:{PORT}, unless there is a --socket]",
)
@click.option("--socket", metavar="PATH", help="Listen on this Unix socket; only its owner may connect.")
@click.option("--cert", metavar="FILE", help="Serve TLS with this chain of certificates.")
@click.option("--key", metavar="FILE", help="The key of --cert.")
@click.option("--client-ca", metavar="FILE", help="Admit only clients with a certificate of this CA.")
@click.option("--tokens", metavar="FILE", help="Admit only clients with a bearer token of this file.")
@click.option(
    "--guard",
    "guards",
    metavar="URL",
    multiple=True,
    help="Show the stages and the refusals of this guard on the live page; may be repeated.",
)
@click.option(
    "--no-credentials",
    is_flag=True,
    help="Listen beyond this machine although everybody who can connect may take and revoke leases.",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="Attempts and other requests a second of each bearer token, or of each address. Default: any.",
)
@click.option(
    "--demo",
    is_flag=True,
    help="Every ten seconds, stop a process past its lease and let it write late: it is refused.",
)
@click.option(
    "--trace",
    metavar="FILE",
    help="Append every decision about leases to this file, a line each: python -m fenced.testing.trace checks it.",
)
@guarantee_option
def serve(
    store: str,
    values: str | None,
    listen: tuple[str, int] | None,
    socket: str | None,
    cert: str | None,
    key: str | None,
    client_ca: str | None,
    tokens: str | None,
    guards: tuple[str, ...],
    no_credentials: bool,
    rate: float | None,
    demo: bool,
    standby: bool,
    trace: str | None,
    guarantee: str,
) -> int:
    """Serve the leases of an authority over HTTP.

    Without --store they are in a ledger in the current folder, which belongs to one instance; others can be its
    --standby. Several instances may serve the same database: their clients go from one to another. /openapi.json
    has all requests.

    SIGTERM stops it: waiters are sent on, and no lease is lost. SIGHUP reads the tokens and the certificate again.

    \b
    Example:
      fenced serve --store ledger:////var/lib/fenced/leases.ledger
      fenced run nightly-report --authority http://127.0.0.1:8700 -- ./report.sh
    """
    try:
        from fenced.http1.server import ListenOptions
        from fenced.service.access import is_loopback
        from fenced.service.server import serve as serve_until_stopped
        from fenced.service.values import values_beside
    except ImportError as error:
        raise Misconfigured(f"fenced serve needs more packages ({error}): {_INSTALL}") from error
    if (cert is None) != (key is None):
        raise click.UsageError("--cert and --key go together")
    if cert is not None and socket is not None:
        raise click.UsageError("a Unix socket needs no TLS: serve it by a second instance, without --cert")
    if client_ca is not None and cert is None:
        raise click.UsageError("--client-ca needs --cert and --key")
    if demo and (cert or tokens):
        raise click.UsageError("--demo is for a service without TLS and tokens")
    if listen is None and socket is None:
        listen = ("127.0.0.1", PORT)
    if not (listen is None or is_loopback(listen[0]) or tokens or client_ca or no_credentials):
        raise Misconfigured(
            f"{listen[0]} can be reached from other machines, and without credentials everybody there could take and "
            "revoke leases: pass --tokens or --client-ca, or listen on 127.0.0.1 or --socket, or say --no-credentials"
        )
    certificate = (cert, key) if cert and key else None
    log_to_stderr()
    os.umask(0o077)  # files of the store, of the values, and the socket are for their owner alone
    failure = serve_until_stopped(
        _authorities(store, trace),
        ListenOptions(listen, socket, certificate, client_ca, any_host=no_credentials),
        complain,
        best_effort=guarantee == "best-effort",
        tokens=tokens,
        values=values,
        values_beside=values_beside(store),
        rate=rate,
        demo=demo,
        standby=standby,
        guards=guards,
    )
    return exits.OK if failure is None else exits.STORE_FAILED


def _authorities(store: str, trace: str | None) -> Callable[[Runtime, str], Authority]:
    """What makes the authority objects of the store; with a trace, those that write it."""

    def make(runtime: Runtime, namespace: str) -> Authority:
        return registry.authority(store, runtime, namespace)

    if trace is None:
        return make
    from fenced.testing.tracing import traced

    return traced(make, trace)
