"""What the `fenced guard` commands share: their arguments, and how they print times."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fenced.values.decision import MODES, Mode

if TYPE_CHECKING:
    from fenced.guards.engine import TableGuard
    from fenced.guards.spec import Spec

F = TypeVar("F", bound=Callable[..., Any])
Completer = Callable[[click.Context, click.Parameter, str], list[str]]

_WHICH = "which database? Pass its DSN or set FENCED_GUARD, such as postgresql://owner@db.internal/shop"


def addressed(*names: str, complete: Completer | None = None) -> Callable[[F], F]:
    """The arguments of a command: a DSN, for which FENCED_GUARD is the default, and these names."""

    def arranged(context: click.Context, option: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
        if not words or "://" not in words[0]:
            default = os.environ.get("FENCED_GUARD")
            if not default:
                raise click.UsageError(_WHICH, context)
            words = (default, *words)
        for name in names[len(words) - 1 :]:
            if not name.startswith("["):
                raise click.UsageError(f"Missing argument '{name}'", context)
        if len(words) > len(names) + 1:
            raise click.UsageError(f"Got unexpected extra argument ({words[-1]})", context)
        return words

    return click.argument(
        "words",
        nargs=-1,
        metavar=" ".join(("[DSN]", *names)),
        callback=arranged,
        shell_complete=complete,
    )


def parsed_mode(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    """A mode in its usual form; Misuse before anything is connected."""
    return None if text is None else str(Mode.parse(text))


def modes_like(context: click.Context, option: click.Parameter, incomplete: str) -> list[str]:
    """The modes for a shell's completion."""
    modes = (f"{mode}(5%)" if mode == "canary" else mode for mode in MODES)
    return [mode for mode in modes if mode.startswith(incomplete)]


table_option = click.option(
    "--table",
    metavar="TABLE",
    help="The guarded table, in a SQL database; schema.table unless it is in public.",
)
sql_table_option = click.option(
    "--table", required=True, metavar="TABLE", help="The table; schema.table unless it is in public."
)
only_table_option = click.option("--table", metavar="TABLE", help="Only this table.")
why_option = click.option("--why", metavar="TEXT", help="Why; it is kept in the history.")
limit_option = click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="How many, the newest last."
)


def table_on(connection: Any, spec: Spec) -> TableGuard:
    """The mandatory guard of a table on this connection."""
    from fenced.sql.engines import on

    return on(connection, "blocking").table(spec, True)


def jsonable(value: Any) -> Any:
    """Dataclasses and times as JSON values."""
    if is_dataclass(value) and not isinstance(value, type):
        return jsonable(asdict(value))
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value.isoformat() if isinstance(value, datetime) else value


def clock(at: datetime) -> str:
    """A time for people, in the local time zone."""
    return f"{at.astimezone():%Y-%m-%d %H:%M:%S}"
