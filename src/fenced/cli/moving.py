"""`fenced authority move`: let guards trust another authority."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict

import click

from fenced.cli.options import guarantee_option, json_option, namespace_option, need_authority, opened
from fenced.cli.output import plain, write_json
from fenced.client import moving, registry
from fenced.client.moving import AdoptRealm, Moved, MoveStep
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.values.contracts import MODE_LAG, Authority, Marks
from fenced.values.rollout import several

SHOWN_MAX = 10
"""How many names that are still held in the old authority are listed."""
PATIENCE_SECONDS = 60.0


@click.command()
@click.argument("old", callback=need_authority)
@click.argument("new", callback=need_authority)
@click.option(
    "--guards",
    "guard_urls",
    multiple=True,
    metavar="URL",
    help="A guarded database that trusts OLD. May be repeated: name all of them.",
)
@namespace_option
@click.option(
    "--new-namespace", metavar="NAME", help="The namespace in NEW, if it is not the same as in OLD."
)
@guarantee_option
@click.option(
    "--leave-messages",
    is_flag=True,
    help="Move although messages of OLD wait in an outbox: the guards of their consumers refuse them.",
)
@json_option
def move(
    old: str,
    new: str,
    guard_urls: tuple[str, ...],
    namespace: str,
    new_namespace: str | None,
    guarantee: str,
    leave_messages: bool,
    as_json: bool,
) -> None:
    """Move guards from the authority OLD to the authority NEW, while programs run.

    Raises the floor of NEW far above every token of OLD and every mark, lets each guard trust NEW, and checks
    the result. From then on the guards refuse the holders of OLD, and admit those of NEW. A move that was
    interrupted is completed by the same command; a complete one is not changed.

    \b
    Example:
      fenced authority move sqlite:////var/lib/app/leases.db redis://cache.internal \\
        --guards postgresql://owner@db.internal/shop
    """
    if not guard_urls:
        raise click.UsageError("which guards? Pass --guards URL for every guarded database that trusts OLD")
    runtime = BlockingRuntime()
    with ExitStack() as stack:
        old_authority = stack.enter_context(opened(old, namespace))
        guards = [registry.guard(url, runtime) for url in guard_urls]
        new_authority = registry.authority(new, runtime, new_namespace or namespace)
        stack.callback(_close, new_authority)
        for guard in guards:
            stack.callback(_close, guard)

        def report(done: MoveStep) -> None:
            if as_json:
                return
            if isinstance(done, AdoptRealm):
                lag = ", within a second" if MODE_LAG in guards[done.guard].traits else ""
                click.echo(f"{plain(guards[done.guard].url)} trusts NEW from now on{lag}, and OLD no longer")
            else:
                click.echo(f"the floor of NEW is {done.above}, above every token of OLD")

        moved = step(
            moving.move(
                old_authority,
                new_authority,
                guards,
                runtime,
                patience=PATIENCE_SECONDS,
                guarantee=guarantee,
                leave_messages=leave_messages,
                on_step=report,
            )
        )
        names = (old_authority.url, new_authority.url)
    if as_json:
        write_json(_for_programs(moved, *names))
    else:
        _for_people(moved, *names)


def _close(opened: Authority | Marks) -> None:
    step(opened.close())


def _for_programs(moved: Moved, old: str, new: str) -> dict[str, object]:
    return {
        "old": {"authority": old, "realm": moved.old.realm, "last_token": moved.old.last_token},
        "new": {"authority": new, "realm": moved.new.realm, "last_token": moved.new.last_token},
        "guards": [{**asdict(guard), "waiting": dict(guard.waiting)} for guard in moved.guards],
        "held_in_old": [view.name for view in moved.held],
    }


def _for_people(moved: Moved, old: str, new: str) -> None:
    click.echo(f"moved: {several(len(moved.guards), 'database')}")
    click.echo(f"  from realm {moved.old.realm}, {plain(old)}")
    click.echo(f"    to realm {moved.new.realm}, {plain(new)}")
    if not moved.held:
        return
    click.echo(
        f"still in use in OLD, where the guards refuse every holder: {several(len(moved.held), 'name')}"
    )
    for view in moved.held[:SHOWN_MAX]:
        held = view.held_by
        who = f" by {held.holder.label} (pid {held.holder.pid} on {held.holder.host})" if held else ""
        click.echo(plain(f"  {view.name}{who}"))
    if len(moved.held) > SHOWN_MAX:
        click.echo("  and others: fenced ls --authority OLD")
