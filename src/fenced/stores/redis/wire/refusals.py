"""Turns a Redis server's error replies into exceptions: the server did nothing, and each says what to change."""

from __future__ import annotations

from fenced.errors import FencedError, Misconfigured, Unavailable
from fenced.net.tls import tls_refused
from fenced.stores.redis.wire.resp import ErrorReply

_MEANINGS: dict[str, tuple[type[FencedError], str]] = {
    "NOPERM": (Misconfigured, "its user may not do that"),
    "NOAUTH": (Misconfigured, "it wants another user or password: redis://user:password@host:port/db"),
    "WRONGPASS": (Misconfigured, "it wants another user or password: redis://user:password@host:port/db"),
    "WRONGTYPE": (
        Misconfigured,
        "another program uses a key that begins with fenced:; take another database",
    ),
    "READONLY": (Unavailable, "this is a replica; leases are granted by the primary"),
    "MASTERDOWN": (Unavailable, "this is a replica; leases are granted by the primary"),
    "LOADING": (Unavailable, "it is loading its data"),
    "BUSY": (Unavailable, "a script of another program keeps it busy; SCRIPT KILL ends that"),
    "MISCONF": (Unavailable, "it cannot write to its disk; see its log"),
    "OOM": (Unavailable, "its maxmemory is used up; raise it"),
    "NOREPLICAS": (Unavailable, "it has fewer replicas than min-replicas-to-write"),
    "CLUSTERDOWN": (Unavailable, "its cluster is down"),
    "TRYAGAIN": (Unavailable, "its cluster moves these keys to another node just now; try again"),
    "ASK": (Unavailable, "its cluster moves these keys to another node just now; try again"),
    "DENIED": (Misconfigured, "it takes no connections from elsewhere; look up its protected-mode"),
    "MAXCLIENTS": (Unavailable, "it has no room for another connection; raise its maxclients"),
    "NODB": (
        Misconfigured,
        "it has no such database; change the number at the end of the address, or leave it out",
    ),
    "MOVED": (Misconfigured, "another node of its cluster has this namespace; name that one"),
}

_SAID = {
    "max number of clients": "MAXCLIENTS",
    "unauthenticated": "NOAUTH",
    "DB index is out of range": "NODB",
    "SELECT is not allowed": "NODB",
    "user executing the script": "NOPERM",
}
"""Refusals that Redis sends without a specific code."""


def refused(error: ErrorReply, where: str, rights: str = "") -> FencedError:
    """The exception for an error reply. `rights`: what the caller's user needs, as ACL SETUSER takes it."""
    code = next((code for text, code in _SAID.items() if text in error), error.code)
    if code not in _MEANINGS:  # before Redis 7 a script's error is wrapped in another error
        code = next((word for word in error.split() if word in _MEANINGS), code)
    kind, meaning = _MEANINGS.get(
        code, (Misconfigured, "it cannot do that; this needs Redis 6.2 or later, or Valkey")
    )
    if code == "NOPERM" and rights:
        meaning = f"its user needs the rights {rights}"
    said = error if code == "MOVED" or code not in _MEANINGS else code
    return kind(f"{where}: {meaning} (it said: {said})")


def login_refused(error: ErrorReply, where: str) -> FencedError:
    """The exception for a refused AUTH. An unknown text is not shown: it may contain the password."""
    known = any(text in error for text in _SAID) or error.code in _MEANINGS
    return refused(error if known else ErrorReply("WRONGPASS"), where)


def connect_failed(error: Exception, where: str) -> FencedError:
    """The exception for a failed connect. No request was sent."""
    if isinstance(error, OSError):
        return tls_refused(error, where) or Unavailable(f"{where} cannot be reached: {error}")
    return Misconfigured(f"{where}: this is not a Redis server: it answers in another protocol")
