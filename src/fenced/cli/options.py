"""Options that several commands share, and the authority behind them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from fenced import registry
from fenced.contracts import Authority
from fenced.errors import Misconfigured
from fenced.runtime.blocking import BlockingRuntime, step


def need_authority(context: click.Context, option: click.Parameter, url: str | None) -> str:
    if url is None:
        how = "URL" if isinstance(option, click.Argument) else "--authority URL"
        raise click.UsageError(
            f"which authority? Pass {how} or set FENCED_AUTHORITY, such as sqlite:////var/lib/app/leases.db"
        )
    if url.partition(":")[0] == "memory":
        raise Misconfigured(
            "memory: is inside one process, so no other process could see its leases; use sqlite:///"
        )
    return url


authority_option = click.option(
    "--authority",
    "url",
    metavar="URL",
    envvar="FENCED_AUTHORITY",
    callback=need_authority,
    help="The store that grants the leases, such as sqlite:////var/lib/app/leases.db; else FENCED_AUTHORITY.",
)
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
