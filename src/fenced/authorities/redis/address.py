"""What a Redis address says, read by redis-py itself: credentials, TLS options, a database number."""

from __future__ import annotations

import inspect
import re
from typing import Any
from urllib.parse import urlsplit

import redis.connection

from fenced.errors import Misuse, shown

_OURS = frozenset(
    "socket_timeout socket_connect_timeout timeout retry_on_timeout retry_on_error health_check_interval "
    "max_connections socket_read_size protocol decode_responses encoding legacy_responses".split()
)
"""Options that redis-py's own clients know and that this authority sets by itself."""

_THEIRS = frozenset("host port db path username password client_name socket_keepalive".split())
_FORM = "redis://user:password@host:port/db, with special characters as %xx"


class Address:
    """Where a server is and how to connect to it. Its text forms hold no secret."""

    def __init__(self, url: str) -> None:
        options = _parsed(url)
        self.scheme = url.partition(":")[0]
        self.host = str(options.get("host", "localhost"))
        place = (
            f"{options.get('path', '')}?db={options.get('db', 0)}"
            if self.scheme == "unix"
            else f"{_bracketed(self.host)}:{options.get('port', 6379)}/{options.get('db', 0)}"
        )
        self.url = f"{self.scheme}://{place}"
        self.options = options

    def __repr__(self) -> str:
        return f"<Address {self.url}>"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _parsed(url: str) -> dict[str, Any]:
    try:
        options: dict[str, Any] = dict(redis.connection.parse_url(url))  # type: ignore[no-untyped-call]
        path = urlsplit(url).path
    except ValueError:  # its text may show a piece of a password
        raise Misuse(f"this is not an address of a Redis server; one looks like {_FORM}") from None
    if not url.startswith("unix:") and not re.fullmatch(r"(/\d*)?", path):
        raise Misuse(f"the database of a Redis server is a number; an address looks like {_FORM}")
    options.pop("connection_class", None)
    for name in list(options):
        if name in _OURS:
            del options[name]
        elif name not in _THEIRS and not name.startswith("ssl_"):
            raise Misuse(f"an address of a Redis server has no option {shown(name)}")
    return {**options, **_quiet()}


def _quiet() -> dict[str, Any]:
    """No round trips that tell the server who we are; redis-py 6 and 8 say it differently."""
    known = inspect.signature(redis.connection.AbstractConnection.__init__).parameters
    if "driver_info" in known:
        return {"driver_info": None}
    return {"lib_name": None, "lib_version": None}
