"""`fenced ls` and `fenced show`: the holders and waiters of an authority, for people and programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

import click

from fenced.cli.options import authority_option, json_option, namespace_option, opened
from fenced.cli.output import plain, seconds, write_json, write_table
from fenced.runtime.blocking import step
from fenced.values.contracts import Authority
from fenced.values.model import HeldBy, Holder, NameView, Waiter

PAGE = 1000
TOP = 10


@runtime_checkable
class CountsHotNames(Protocol):
    """An authority that counts how often names are waited for."""

    async def hot(self, until: float | None = None) -> list[tuple[str, int]]: ...


_TITLES = ("NAME", "HOLDER", "HOST", "PID", "TOKEN", "REMAINING", "WAITERS")
_NUMBERS = frozenset({3, 4, 5, 6})


@click.command()
@authority_option
@namespace_option
@json_option
def ls(url: str, namespace: str, as_json: bool) -> None:
    """List the names that are held or waited for.

    REMAINING is how long the lease lasts if its holder does not renew it.

    \b
    Example:
      fenced ls --json | jq '.[] | select(.waiting > 10) | .name'
    """
    with opened(url, namespace) as authority:
        views = list(_survey(authority))
    if as_json:
        write_json([_short(view) for view in views])
    elif views:
        write_table(_TITLES, [_row(view) for view in views], _NUMBERS)
    else:
        click.echo("no name is held or waited for", err=True)


@click.command()
@click.argument("name")
@authority_option
@namespace_option
@json_option
def show(name: str, url: str, namespace: str, as_json: bool) -> None:
    """Show the holder of NAME, and its waiters in order.

    \b
    Example:
      fenced show orders/42
    """
    with opened(url, namespace) as authority:
        view = step(authority.observe(name))
    if as_json:
        write_json(_full(view))
    else:
        for line in _lines(view):
            click.echo(plain(line))


@click.command()
@authority_option
@namespace_option
@json_option
def top(url: str, namespace: str, as_json: bool) -> None:
    """List the ten names that are most in demand.

    At a service: those that were most often waited for in the last minutes. At every authority: the longest queues.

    \b
    Example:
      fenced top --authority http://127.0.0.1:8700
    """
    with opened(url, namespace) as authority:
        waited = dict(step(authority.hot())) if isinstance(authority, CountsHotNames) else {}
        queues = sorted((v for v in _survey(authority) if v.waiters), key=lambda view: -len(view.waiters))[
            :TOP
        ]
        views = {view.name: view for view in queues}
        views |= {name: step(authority.observe(name)) for name in waited if name not in views}
    names = [*waited, *(name for name in views if name not in waited)][:TOP]
    if as_json:
        write_json([{**_short(views[name]), "waited_for": waited.get(name)} for name in names])
    elif names:
        counts = [str(waited.get(name, "-")) for name in names]
        rows = [[count, *_row(views[name])] for count, name in zip(counts, names, strict=True)]
        write_table(("WAITED FOR", *_TITLES), rows, frozenset({0, 4, 5, 6, 7}))
    else:
        click.echo("no name is in demand")


def _survey(authority: Authority) -> Iterator[NameView]:
    after = ""
    while True:
        page = step(authority.survey(after=after, limit=PAGE))
        yield from page
        if len(page) < PAGE:
            return
        after = page[-1].name


# For programs. The keys are stable; `show` has all that `ls` has.


def _short(view: NameView) -> dict[str, Any]:
    return {
        "name": view.name,
        "held_by": None if view.held_by is None else _held_by(view.held_by),
        "free_in": view.free_in,
        "waiting": len(view.waiters),
    }


def _full(view: NameView) -> dict[str, Any]:
    waiters = [{**asdict(w.holder), "names": w.names, "remaining": w.remaining} for w in view.waiters]
    return {**_short(view), "names": view.names, "ttl": view.ttl, "waiters": waiters}


def _held_by(held: HeldBy) -> dict[str, Any]:
    return {**asdict(held.holder), "token": held.token, "grant": held.grant, "remaining": held.remaining}


# For people.


def _row(view: NameView) -> list[str]:
    waiters = str(len(view.waiters))
    if view.held_by is None:
        return [view.name, "-", "-", "-", "-", _free_in(view), waiters]
    held = view.held_by
    who = held.holder
    return [view.name, who.label, who.host, str(who.pid), str(held.token), seconds(held.remaining), waiters]


def _free_in(view: NameView) -> str:
    return f"free in {seconds(view.free_in)}" if view.free_in > 0 else "-"


def _lines(view: NameView) -> Iterator[str]:
    if view.held_by is None:
        after = f" ({_free_in(view)})" if view.free_in > 0 else ""
        yield f"{view.name} is not held{after}"
    else:
        held = view.held_by
        yield f"{view.name} is held"
        yield f"  by         {_who(held.holder)}"
        yield f"  token      {held.token}"
        yield f"  grant      {held.grant}"
        yield f"  remaining  {seconds(held.remaining)} of {seconds(view.ttl or 0.0)}"
        if len(view.names) > 1:
            yield f"  with       {', '.join(name for name in view.names if name != view.name)}"
    if view.waiters:
        yield f"  waiting    {len(view.waiters)}"
    for place, waiter in enumerate(view.waiters, 1):
        yield f"  {place:>7}.   {_waiter(view.name, waiter)}"


def _waiter(name: str, waiter: Waiter) -> str:
    others = ", ".join(other for other in waiter.names if other != name)
    return _who(waiter.holder) + (f", also for {others}" if others else "")


def _who(holder: Holder) -> str:
    return f"{holder.label} (pid {holder.pid} on {holder.host})"
