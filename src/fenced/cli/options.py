"""Options that several commands share, and the authority behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import click
from click.core import ParameterSource

from fenced.client import registry
from fenced.errors import Misconfigured
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.values.contracts import Authority

Command = TypeVar("Command", bound=Callable[..., object])
_ARGUMENT = "fenced.cli.options.authority"


def need_authority(context: click.Context, option: click.Parameter, url: str | None) -> str:
    if url is None:
        how = "URL" if _ARGUMENT in context.meta else "--authority URL"
        raise click.UsageError(
            f"which authority? Pass {how} or set FENCED_AUTHORITY, such as sqlite:////var/lib/app/leases.db"
        )
    if url.partition(":")[0] == "memory":
        raise Misconfigured(
            "memory: is inside one process, so no other process could see its leases; use sqlite:///"
        )
    return url


def elsewhere(context: click.Context, option: click.Parameter, urls: tuple[str, ...]) -> tuple[str, ...]:
    """Addresses of stores that this process can look at, each perhaps behind a TARGET=."""
    for url in urls:
        target, _, rest = url.partition("=")
        if (rest if target.isidentifier() else url).startswith("memory:"):
            raise Misconfigured("memory: is inside one process, so no other process can look at it")
    return urls


authority_option = click.option(
    "--authority",
    "url",
    metavar="URL",
    envvar="FENCED_AUTHORITY",
    callback=need_authority,
    help="The store that grants the leases, such as sqlite:////var/lib/app/leases.db; else FENCED_AUTHORITY.",
)


def _argument(context: click.Context, argument: click.Parameter, url: str | None) -> None:
    context.meta[_ARGUMENT] = url


def _either(context: click.Context, option: click.Parameter, url: str | None) -> str:
    given = context.meta[_ARGUMENT]
    if given is not None and context.get_parameter_source("url") is ParameterSource.COMMANDLINE:
        raise click.UsageError("which authority? URL and --authority are the same; pass one of them")
    return need_authority(context, option, given or url)


def authority_either(command: Command) -> Command:
    """The authority as an argument, or as an option."""
    option = click.option(
        "--authority", "url", metavar="URL", envvar="FENCED_AUTHORITY", callback=_either,
        help="The same as the argument; else FENCED_AUTHORITY.",
    )  # fmt: skip
    argument = click.argument(
        "given", metavar="[URL]", required=False, is_eager=True, expose_value=False, callback=_argument
    )
    return argument(option(command))


namespace_option = click.option(
    "--namespace",
    metavar="NAME",
    envvar="FENCED_NAMESPACE",
    default="default",
    help="The stream of tokens; else FENCED_NAMESPACE, else 'default'.",
)
guarantee_option = click.option(
    "--guarantee",
    type=click.Choice(["strict", "best-effort"]),
    envvar="FENCED_GUARANTEE",
    default="strict",
    help="best-effort: use a store on which tokens could repeat; else FENCED_GUARANTEE, else 'strict'.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@contextmanager
def opened(url: str, namespace: str, *, create: bool = False) -> Iterator[Authority]:
    """An open authority. Unless `create`, it must exist: a mistyped path is not an empty authority."""
    authority = registry.authority(url, BlockingRuntime(), namespace)
    try:
        step(authority.open(create=create))
        yield authority
    finally:
        step(authority.close())
