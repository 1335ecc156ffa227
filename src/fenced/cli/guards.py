"""`fenced guard`: install guards, change the stages of their rollout, and operate them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import click

from fenced.cli.guard_keys import key
from fenced.cli.guard_options import (
    addressed,
    clock,
    jsonable,
    modes_like,
    parsed_mode,
    sql_table_option,
    table_on,
    table_option,
    why_option,
)
from fenced.cli.guard_status import status
from fenced.cli.guard_upkeep import (
    adopt,
    forget,
    grant_monitor,
    history,
    policy,
    records,
    reset,
    tidy,
    trust,
)
from fenced.cli.options import json_option
from fenced.cli.output import plain, write_json
from fenced.client.reaching import connected, operate
from fenced.errors import Misuse, Unsupported
from fenced.guards.spec import Spec, as_script
from fenced.runtime.blocking import step
from fenced.values import timing
from fenced.values.contracts import Operator
from fenced.values.decision import RULES, Mode, Rule
from fenced.values.durations import duration
from fenced.values.rollout import QUIET_SECONDS, several, skipped
from fenced.values.schema import Schema

names_option = click.option(
    "--names", "pattern", metavar="PATTERN", help="Only names like this; * stands for any characters."
)
wait_option = click.option(
    "--wait",
    type=duration(0.0, timing.WAIT_MAX),
    default="10s",
    show_default=True,
    metavar="TIME",
    help="How long to wait for older transactions.",
)
print_option = click.option(
    "--print", "as_sql", is_flag=True, help="Print the SQL for a migration; change nothing."
)
no_transaction_option = click.option(
    "--no-transaction",
    is_flag=True,
    help="With --print: no BEGIN and COMMIT, for tools that begin themselves.",
)


@click.group()
def guard() -> None:
    """Install guards in a database, and operate them.

    Pass the DSN of the database, postgresql://... or sqlite:///file, or set FENCED_GUARD, which keeps a
    password out of the list of processes. Connect as the owner of the tables.

    \b
    Examples:
      export FENCED_GUARD=postgresql://owner@db.internal/shop
      fenced guard install --table orders --name 'orders/{id}'
      fenced guard status
      fenced guard mode --table orders enforce
    """


for command in (status, history, records, reset, adopt, trust, key, tidy, forget, grant_monitor, policy):
    guard.add_command(command)


@guard.command()
@addressed()
@sql_table_option
@click.option(
    "--name", required=True, metavar="TEMPLATE", help="The name that covers a row, such as 'orders/{id}'."
)
@click.option(
    "--rule", type=click.Choice(RULES), default="retry", show_default=True, help="How writes are judged."
)
@click.option(
    "--mode",
    metavar="MODE",
    callback=parsed_mode,
    shell_complete=modes_like,
    help="By default a new guard gets observe, and an installed one keeps its mode.",
)
@click.option("--epoch", metavar="COLUMN", help="Keep the token of the last write in this column.")
@click.option(
    "--replace", is_flag=True, help="Change an installed guard that has another name, rule or epoch column."
)
@print_option
@no_transaction_option
@json_option
def install(
    words: tuple[str],
    table: str,
    name: str,
    rule: Rule,
    mode: str | None,
    epoch: str | None,
    replace: bool,
    as_sql: bool,
    no_transaction: bool,
    as_json: bool,
) -> None:
    """Guard a table.

    Installing the same guard again is harmless: marks stay, and so does the mode unless one is given. If the
    installed guard has another name, rule or epoch column, nothing changes without --replace.

    \b
    Examples:
      fenced guard install postgresql://owner@db.internal/shop --table orders --name 'orders/{id}'
      fenced guard install --table orders --name 'orders/{id}' --print > migration.sql
    """
    _check_print(as_sql, no_transaction)
    with connected(words[0]) as (engine, connection):
        guarded = table_on(connection, Spec(table, name, rule, epoch))
        if as_sql:
            script = step(guarded.script(mode, replace=replace, transaction=not no_transaction))
            _print_sql(table, script, as_json)
            return
        with warnings.catch_warnings(record=True) as cautions:
            warnings.simplefilter("always")
            step(guarded.install(mode, replace=replace))
        now = str(Mode.parse(mode)) if mode else step(engine.operator(connection).modes(table))["*"]
    for caution in cautions:
        click.echo(f"caution: {caution.message}", err=True)
    if as_json:
        write_json({"table": table, "name": name, "rule": rule, "epoch": epoch, "mode": now})
    else:
        click.echo(f"{table} is guarded under {plain(name)}, rule {rule}, mode {now}")


def _check_print(as_sql: bool, no_transaction: bool) -> None:
    if no_transaction and not as_sql:
        raise click.UsageError("--no-transaction goes with --print")


def _print_sql(table: str, script: str, as_json: bool) -> None:
    if as_json:
        write_json({"table": table, "sql": script})
    else:
        click.echo(script, nl=False)


@guard.command()
@addressed()
@json_option
def upgrade(words: tuple[str], as_json: bool) -> None:
    """Upgrade the guards of a database.

    Schema, functions and triggers become those of this version of fenced. Marks, modes and records stay.
    Clients of the previous version continue to work, so run this before you upgrade them. Writers wait while a
    table's triggers are replaced. If their locks are not free within 2 seconds, nothing changes: run it again.

    \b
    Example:
      fenced guard upgrade postgresql://owner@db.internal/shop
    """

    async def upgraded(operator: Operator) -> tuple[list[str], Schema | None]:
        tables = await operator.upgrade()
        return tables, (await operator.status()).schema if tables else None

    tables, stored = operate(words[0], upgraded)
    if as_json:
        write_json({"tables": tables, "schema": jsonable(stored)})
    else:
        version = stored.version if stored else "unchanged"
        click.echo(plain(f"schema {version}: {', '.join(tables) or 'no table is guarded'}"))


@guard.command()
@addressed()
@sql_table_option
@print_option
@no_transaction_option
@json_option
def uninstall(words: tuple[str], table: str, as_sql: bool, no_transaction: bool, as_json: bool) -> None:
    """Remove the guard of a table. Its marks stay: a later guard needs them to refuse old holders.

    \b
    Example:
      fenced guard uninstall postgresql://owner@db.internal/shop --table orders
    """
    _check_print(as_sql, no_transaction)
    with connected(words[0]) as (_, connection):
        guarded = table_on(connection, Spec(table, "any"))
        if as_sql:
            _print_sql(table, as_script(step(guarded.removal()), transaction=not no_transaction), as_json)
            return
        step(guarded.uninstall())
    if as_json:
        write_json({"table": table, "installed": False})
    else:
        click.echo(f"{table} is not guarded any more; its marks are kept")


@guard.command()
@addressed("[MODE]", complete=modes_like)
@table_option
@names_option
@click.option("--unset", is_flag=True, help="Instead of a MODE: delete the mode of --names.")
@wait_option
@json_option
def mode(
    words: tuple[str, ...], table: str | None, pattern: str | None, unset: bool, wait: float, as_json: bool
) -> None:
    """Set the stage of a rollout.

    The modes are observe, shadow, canary(P%), enforce and require. A mode binds every transaction that
    begins after the change; no table is locked. The command waits for older transactions, and shows those
    that still run as pending. With --names it sets the mode of those names only; the longest pattern counts.

    \b
    Examples:
      fenced guard mode postgresql://owner@db.internal/shop --table orders 'canary(5%)'
      fenced guard mode --table orders --names 'orders/9*' enforce
      fenced guard mode --table orders --names 'orders/9*' --unset
    """
    dsn, *modes = words
    if bool(modes) == unset or (unset and pattern is None):
        raise click.UsageError("say the MODE, or --names PATTERN --unset")
    for each in modes:
        Mode.parse(each)

    cautions: list[str] = []

    async def changed(operator: Operator) -> tuple[str, ...]:
        if modes:
            cautions.extend(await _skipping(operator, table, modes[0], pattern or "*"))
            return await operator.set_mode(table, modes[0], pattern or "*", wait)
        if not await operator.unset_mode(table, str(pattern)):
            raise Misuse(f"{pattern} has no mode of its own")
        return await operator.pending(table, wait)

    pending = operate(dsn, changed)
    for caution in cautions:
        click.echo(plain(f"caution: {caution}"), err=True)
    if as_json:
        shown = {"table": table, "names": pattern or "*", "mode": modes[0] if modes else None}
        write_json({**shown, "pending": list(pending)})
    else:
        names = f" for {pattern}" if pattern else ""
        where = f"{table}: " if table else ""
        click.echo(plain(f"{where}{modes[0] if modes else 'no mode of its own'}{names}"))
        _show_pending(pending)


async def _skipping(operator: Operator, table: str | None, mode: str, pattern: str) -> list[str]:
    """What `status` knows, if this change skips a stage."""
    try:
        found = await operator.status(table)
    except Unsupported:
        return []
    if len(found.guards) != 1:  # set_mode reports that the table is missing
        return []
    stages, reasons = skipped(found.guards[0], pattern, mode, found.now, QUIET_SECONDS)
    if not stages:
        return []
    *first, last = stages
    names = f"{', '.join(first)} and {last}" if first else last
    return [f"this skips {names}{':' if reasons else ''}", *(f"- {reason}" for reason in reasons)]


def _show_pending(pending: Sequence[str]) -> None:
    for who in pending:
        click.echo(
            plain(
                f"  pending: {who} began before the change, which does not bind it; see fenced guard status"
            )
        )


@guard.command()
@addressed()
@table_option
@names_option
@click.option(
    "--for",
    "seconds",
    type=duration(1.0, 86_400.0),
    metavar="TIME",
    help="How long, such as 15m; at most 24h.",
)
@why_option
@click.option("--end", is_flag=True, help="End the overrides of --names, or all of the table, now.")
@wait_option
@json_option
def override(
    words: tuple[str],
    table: str | None,
    pattern: str | None,
    seconds: float | None,
    why: str | None,
    end: bool,
    wait: float,
    as_json: bool,
) -> None:
    """Let writes through in an emergency.

    Whatever the mode is. The writes are recorded, and the override expires.

    \b
    Examples:
      fenced guard override --table orders --names 'orders/4*' --for 15m --why 'ticket 4711'
      fenced guard override --table orders --end
    """
    if end and (seconds is not None or why is not None):
        raise click.UsageError("--end takes neither --for nor --why")
    if not end and (pattern is None or seconds is None or why is None):
        raise click.UsageError("say which names, how long and why: --names PATTERN --for TIME --why TEXT")
    if pattern is not None and seconds is not None and why is not None:
        made = operate(words[0], lambda operator: operator.override(table, pattern, seconds, why))
        if as_json:
            write_json({"table": table, **jsonable(made)})
        else:
            click.echo(
                f"{table}: {plain(made.pattern)} is let through until {clock(made.until)}, and recorded"
            )
        return

    async def ended(operator: Operator) -> tuple[int, tuple[str, ...]]:
        number = await operator.end_overrides(table, pattern)
        return number, await operator.pending(table, wait) if number else ()

    number, pending = operate(words[0], ended)
    if as_json:
        write_json({"table": table, "ended": number, "pending": list(pending)})
    else:
        what = f"{several(number, 'override')} ended" if number else "no override was in force"
        click.echo(f"{table}: {what}")
        _show_pending(pending)
