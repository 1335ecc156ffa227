"""`fenced proxy`: a service behind a fence, without a change to it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any, TypeVar

import click

from fenced.cli.logs import log_to_stderr
from fenced.cli.output import complain
from fenced.proofs import Ed25519Public, HmacKey, VerifyingKey
from fenced.values.durations import duration

F = TypeVar("F", bound=Callable[..., Any])
SECONDS_MAX = 86_400.0


def _time(option: str, text: str, default: float) -> Callable[[F], F]:
    shown = f"{text}  [default: {default:g}s]"
    return click.option(option, type=duration(0.1, SECONDS_MAX), metavar="TIME", default=default, help=shown)


def _limit(
    option: str, name: str, metavar: str, text: str, low: int, default: int | None
) -> Callable[[F], F]:
    kind = click.IntRange(low)
    return click.option(
        option, name, metavar=metavar, type=kind, default=default, show_default=default is not None, help=text
    )


def _keys(option: str, name: str, kind: type[HmacKey] | type[Ed25519Public], text: str) -> Callable[[F], F]:
    def read(_: click.Context, __: click.Parameter, words: tuple[str, ...]) -> list[VerifyingKey]:
        found: list[VerifyingKey] = []
        for word in words:
            key_id, equals, file = word.partition("=")
            if not equals:
                raise click.BadParameter(f"a key is ID=FILE, not {word!r}")
            found.append(kind.read(key_id, file))
        return found

    return click.option(option, name, metavar="ID=FILE", multiple=True, callback=read, help=text)


def listen_address(
    context: click.Context, option: click.Parameter, text: str | None
) -> tuple[str, int] | None:
    if text is None:
        return None
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise click.BadParameter(f"an address to listen on is HOST:PORT, not {text!r}")
    return host.strip("[]"), int(port)


@click.command()
@click.option("--upstream", metavar="URL", required=True, help="The service, such as http://127.0.0.1:9000.")
@click.option(
    "--name",
    "names",
    metavar="TEMPLATE",
    multiple=True,
    required=True,
    help="Which name a request is about. May be repeated: the first whose route matches counts.",
)
@click.option(
    "--store",
    metavar="URL",
    required=True,
    envvar="FENCED_STORE",
    help="Where the marks are, such as sqlite:////var/lib/marks.db; else FENCED_STORE.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:8080",
    show_default=True,
    callback=listen_address,
    help="Where clients connect.",
)
@click.option(
    "--admin",
    metavar="HOST:PORT",
    callback=listen_address,
    help="Serve operators: /healthz, /readyz, /metrics and /settle.",
)
@click.option("--alone", is_flag=True, help="No other proxy uses this store: one step for each new token.")
@_time("--settle", "How long a request may run at the upstream after the proxy gave it up.", 30.0)
@_time("--timeout", "How long the upstream may be silent.", 20.0)
@_time("--wait", "How long a request waits for those with older tokens.", 30.0)
@_time("--overtime", "How long a request may still take once a newer token waits for it.", 10.0)
@_time("--idle", "How long the connection of a client is kept between requests.", 60.0)
@_time("--slow", "How long a client may take for the next part of a request or an answer.", 20.0)
@_time("--grace", "How long requests may take to finish after SIGTERM.", 30.0)
@click.option(
    "--mode", metavar="MODE", help="Set the mode of the store, such as observe, enforce or require."
)
@click.option(
    "--unnamed",
    type=click.Choice(["refuse", "pass"]),
    default="refuse",
    show_default=True,
    help="What to do with a request that may change something, and has no name.",
)
@_limit("--max-head", "head_bytes_max", "BYTES", "The longest head of a request.", 1024, 32_768)
@_limit("--max-body", "body_bytes_max", "BYTES", "The longest body.  [default: no limit]", 0, None)
@_limit("--max-connections", "connections_max", "N", "How many clients may be connected.", 1, 1000)
@click.option("--cert", metavar="FILE", help="Serve TLS with this chain of certificates.")
@click.option("--key", metavar="FILE", help="The key of --cert.")
@_keys(
    "--hmac-key",
    "hmac_keys",
    HmacKey,
    "Accept only stamps signed by one of these keys. FILE holds the key in hexadecimal. May be repeated.",
)
@_keys("--ed25519-key", "public_keys", Ed25519Public, "The same with a public key: PEM, or hexadecimal.")
@click.option("--upstream-ca", metavar="FILE", help="Trust an https upstream by these certificates.")
def proxy(
    listen: tuple[str, int],
    admin: tuple[str, int] | None,
    cert: str | None,
    key: str | None,
    body_bytes_max: int | None,
    hmac_keys: list[VerifyingKey],
    public_keys: list[VerifyingKey],
    **options: Any,
) -> None:
    """Pass requests on to a service in the order of their tokens.

    A request with a stale token is answered 412 and does not reach the service. One with a newer token waits until
    the older ones have been answered. If the outcome of a request is unknown, newer tokens wait for --settle.

    \b
    Example:
      fenced proxy --upstream http://127.0.0.1:9000 --name 'orders/{path.id}' --store sqlite:////var/lib/marks.db
    """
    from fenced.http1.server import fast_loop
    from fenced.proxy import admin as operators
    from fenced.proxy.server import FencingProxy, ProxyOptions

    if options["store"].startswith("memory:"):
        complain("memory: forgets the marks when this proxy ends, and a stale holder is admitted after that")
    if (cert is None) != (key is None):
        raise click.UsageError("--cert and --key go together")

    log_to_stderr()

    async def serve() -> None:
        running = FencingProxy(
            ProxyOptions(
                listen=listen,
                certificate=(cert, key) if cert and key else None,
                body_bytes_max=-1 if body_bytes_max is None else body_bytes_max,
                keys=(*hmac_keys, *public_keys),
                **options,
            ),
            complain,
        )
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        host, port = await running.start()
        other = None if admin is None else operators.AdminPort(running, *admin).server
        if other is not None:
            await other.start()
        complain(f"listening on {host}:{port}, in front of {options['upstream']}")
        await stop.wait()
        await running.stop()
        if other is not None:
            await other.stop(0)

    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(serve())
