"""Where a PostgreSQL authority is: the address for libpq, the one to listen at, and one that can be shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from fenced.errors import Misuse, redacted, shown


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed `postgresql://` URL. Only `shown` may appear in messages."""

    conninfo: str = field(repr=False)
    listen: str | None = field(repr=False)
    """Where to listen for wake-ups; None: nowhere, the waiters look by themselves."""
    shown: str


def parse(url: str) -> Address:
    """Take our own `listen=` out of a URL that libpq understands otherwise.

    `listen=off` uses no connection for listening. `listen=HOST:PORT` goes round a connection pooler for that
    one connection; everything else of the address stays as it is.
    """
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise _wrong(url) from None
    if "\0" in url or parts.scheme != "postgresql" or parts.fragment:
        raise _wrong(url)
    choice = dict(query).pop("listen", "")
    rest = urlencode([(key, value) for key, value in query if key != "listen"])
    conninfo = urlunsplit(parts._replace(query=rest))
    listen: str | None = conninfo
    if choice == "off":
        listen = None
    elif choice:
        user, at, _ = parts.netloc.rpartition("@")
        listen = urlunsplit(parts._replace(netloc=user + at + choice, query=rest))
    host = parts.netloc.rpartition("@")[2]
    return Address(conninfo, listen, f"postgresql://{host}{parts.path}")


def _wrong(url: str) -> Misuse:
    return Misuse(f"a PostgreSQL address is postgresql://user@host:5432/database, not {shown(redacted(url))}")
