"""Addresses of PostgreSQL authorities: one for libpq, one to listen at, and one without secrets to show."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote

from fenced.errors import Misuse
from fenced.net.address import split_address

SCHEMES = ("postgresql", "postgres")
"""Both schemes that libpq accepts."""
_SHOWN = ("service=", "host=", "hostaddr=", "port=", "dbname=")
"""Options that locate the server and hold no secret."""


@dataclass(frozen=True, slots=True)
class PostgresqlAddress:
    """A parsed `postgresql://` URL. Only `shown` may appear in messages."""

    conninfo: str = field(repr=False)
    listen: str | None = field(repr=False)
    """Where to listen for wake-ups; None: nowhere, the client polls instead."""
    shown: str


def parse(url: str) -> PostgresqlAddress:
    """Take our own option `listen=` out of a URL; libpq understands the rest.

    With `listen=off` no connection listens. With `listen=HOST:PORT` the one connection that listens goes to that
    host, to bypass a connection pooler; the rest of the address stays the same. Misuse if the URL cannot be parsed:
    the error does not quote it, because a part of it may be a password.
    """
    try:
        parts = split_address(url)
    except ValueError:
        raise _wrong() from None
    if "\0" in url or parts.scheme not in SCHEMES or not url.startswith(f"{parts.scheme}://"):
        raise _wrong()
    if parts.fragment or "@" in parts.path:
        raise _wrong()
    options = parts.query.split("&") if parts.query else []
    if not all(key and value for key, _, value in (option.partition("=") for option in options)):
        raise _wrong()
    choice = "".join(unquote(option[7:]) for option in options if option.startswith("listen="))
    rest = [option for option in options if not option.startswith("listen=")]
    conninfo = _written(parts.netloc, parts.path, rest)
    user, at, host = parts.netloc.rpartition("@")
    listen: str | None = conninfo
    if choice == "off":
        listen = None
    elif choice:
        if any(option.startswith(("host=", "hostaddr=", "port=")) for option in options):
            raise Misuse("listen=HOST:PORT needs the host before the path, not in an option after the ?")
        listen = _written(user + at + choice, parts.path, rest)
    shown = _written(host, parts.path, [option for option in rest if option.startswith(_SHOWN)])
    return PostgresqlAddress(conninfo, listen, shown)


def _written(place: str, path: str, options: list[str]) -> str:
    """Not with urllib: it omits the two slashes before an empty host, and libpq needs them."""
    return f"postgresql://{place}{path}{'?' if options else ''}{'&'.join(options)}"


def _wrong() -> Misuse:
    return Misuse(
        "a PostgreSQL address is postgresql://user:password@host:5432/database?option=value, "
        "with special characters as %xx"
    )
