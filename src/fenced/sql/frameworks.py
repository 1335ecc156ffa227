"""SQLAlchemy's and Django's connections: the framework's name for the database behind each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fenced.errors import Misuse

Found = tuple[Any, str]
"""The connection that a guard works on, and the framework's name for its database."""


def _alchemy_connection(connection: Any) -> Found:
    return connection, connection.engine.dialect.name


def _alchemy_session(session: Any) -> Found:
    from sqlalchemy.exc import UnboundExecutionError

    try:
        return session, session.get_bind().dialect.name
    except UnboundExecutionError as error:
        raise Misuse(
            "this session has no single bind; begin, and announce_within(session.connection(bind_arguments=...), lease)"
        ) from error


def _scoped_session(registry: Any) -> Found:
    """The session of this thread or task."""
    return _alchemy_session(registry())


def _django(connection: Any) -> Found:
    return connection, connection.vendor


FRAMEWORKS: dict[tuple[str, str], Callable[[Any], Found]] = {
    ("sqlalchemy", "Connection"): _alchemy_connection,
    ("sqlalchemy", "AsyncConnection"): _alchemy_connection,
    ("sqlalchemy", "Session"): _alchemy_session,
    ("sqlalchemy", "AsyncSession"): _alchemy_session,
    ("sqlalchemy", "scoped_session"): _scoped_session,
    ("sqlalchemy", "async_scoped_session"): _scoped_session,
    ("django", "DatabaseWrapper"): _django,
    ("django", "ConnectionProxy"): _django,
}
"""By the package and the name of the class, or of a class that it inherits from."""
