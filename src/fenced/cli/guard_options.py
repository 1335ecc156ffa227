"""What the `fenced guard` commands share: the database they speak to, and how times are written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fenced import registry
from fenced.errors import Misconfigured, Unsupported, redacted
from fenced.runtime.blocking import BlockingRuntime

if TYPE_CHECKING:
    from fenced.guards.postgresql.operating import PostgresqlOperator
    from fenced.guards.shared.spec import Spec
    from fenced.guards.sqlite.operating import SqliteOperator
    from fenced.sql.engines import TableGuard

F = TypeVar("F", bound=Callable[..., Any])

_SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_WHICH = "which database? Pass its DSN or set FENCED_GUARD, such as postgresql://owner@db.internal/shop"


def addressed(*names: str) -> Callable[[F], F]:
    """The arguments of a command: a DSN, which FENCED_GUARD may stand for, and those that are named."""

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

    return click.argument("words", nargs=-1, metavar=" ".join(("[DSN]", *names)), callback=arranged)


table_option = click.option(
    "--table", required=True, metavar="TABLE", help="The guarded table; schema.table unless it is in public."
)
only_table_option = click.option("--table", metavar="TABLE", help="Only this table.")
why_option = click.option("--why", metavar="TEXT", help="Why; it is kept in the history.")
limit_option = click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="How many, the newest last."
)


def in_seconds(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    """A time such as 90s, 15m, 24h or 7d."""
    if text is None:
        return None
    found = _SPAN.fullmatch(text)
    if found is None:
        raise click.BadParameter("a time is a number and s, m, h or d, such as 15m")
    return float(found[1]) * _UNITS[found[2]]


@contextmanager
def connected(dsn: str) -> Iterator[Any]:
    """A connection to a guarded database. Nothing is created: a mistyped path is not an empty database."""
    guard = registry.guard(dsn, BlockingRuntime())  # checks the address, and that there is a driver
    if dsn.startswith(("postgresql:", "postgres:")):
        from fenced.guards.postgresql.refusals import typed

        connection = _postgresql(dsn, typed)
    elif dsn.startswith("sqlite:"):
        connection = _sqlite(Path(guard.url.removeprefix("sqlite:///")))
    else:
        raise Unsupported(f"{redacted(dsn)}: these commands are for postgresql:// and sqlite:///")
    try:
        yield connection
    finally:
        connection.close()


def _postgresql(dsn: str, typed: Callable[[BaseException], Exception]) -> Any:
    import psycopg

    try:
        return psycopg.connect(dsn, autocommit=True, fallback_application_name="fenced guard")
    except psycopg.Error as error:
        raise typed(error) from error


def _sqlite(path: Path) -> Any:
    import sqlite3

    if not path.is_file():
        raise Misconfigured(f"there is no file {path}")
    connection = sqlite3.connect(path, isolation_level=None, timeout=10)
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def table_on(connection: Any, spec: Spec) -> TableGuard:
    """The mandatory guard of a table on this connection."""
    from fenced.sql.engines import BLOCKING
    from fenced.sql.engines import table_on as found_on

    return found_on(connection, spec, True, BLOCKING)


def operator_on(connection: Any) -> PostgresqlOperator | SqliteOperator:
    """What an operator can look at on this connection."""
    if type(connection).__module__ == "sqlite3":
        from fenced.guards.sqlite.operating import SqliteOperator
        from fenced.guards.sqlite.sessions import PlainSession

        return SqliteOperator(PlainSession(connection))
    return server_operator_on(connection, "")


def server_operator_on(connection: Any, what: str) -> PostgresqlOperator:
    """What an operator can do on a server; Unsupported on a file."""
    if type(connection).__module__ == "sqlite3":
        raise Unsupported(f"an SQLite guard has no {what}; a PostgreSQL guard has")
    from fenced.guards.postgresql.operating import PostgresqlOperator
    from fenced.guards.postgresql.sessions import PsycopgSession

    return PostgresqlOperator(PsycopgSession(connection))


def jsonable(value: Any) -> Any:
    """Values and times as JSON has them."""
    if is_dataclass(value) and not isinstance(value, type):
        return jsonable(asdict(value))
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value.isoformat() if isinstance(value, datetime) else value


def clock(at: datetime) -> str:
    """A time for people, where they are."""
    return f"{at.astimezone():%Y-%m-%d %H:%M:%S}"
