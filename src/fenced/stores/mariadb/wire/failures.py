"""What the error numbers of MariaDB and MySQL mean for whoever sent the statement."""

from __future__ import annotations

from fenced.errors import FencedError, Misconfigured, Unavailable
from fenced.net.pool import ConnectionBroken

DUPLICATE = 1062
LOCK_TIMEOUT = 1205
NO_LOGIN = 2059
"""The driver cannot log in as the account demands."""
NO_TLS = 2026
"""No TLS with this server: its certificate is not trusted, or it has none."""
CONFLICTS = frozenset({1020, 1213})
"""A deadlock's victim, and a row that has changed since the snapshot: the transaction is rolled back as a whole."""
_LOST = frozenset(
    {1053, 1077, 1079, 1080, 1152, 1158, 1159, 1160, 1161, 1184, 1927, 3169, 4031, *range(2000, 3000)}
)
"""The server ends the connection, or the driver has lost it; the last are the drivers' own numbers."""
_LOGIN = {
    1045: "correct the user or the password in the address",
    1698: "this user logs in by the system's account; name one with a password, or a Unix socket",
    1130: "the server's account must admit this machine",
    1044: "GRANT this user privileges on the database",
    1049: "create the database, or correct its name in the address",
    1820: "the password has expired: set a new one",
    1862: "the password has expired: set a new one",
    3118: "the account is locked: ALTER USER ... ACCOUNT UNLOCK",
    4151: "the account is locked: ALTER USER ... ACCOUNT UNLOCK",
    1524: "the driver does not speak the account's way to log in",
    NO_LOGIN: "the driver does not speak the account's way to log in",
    3159: "the server demands TLS: add ssl=true or ssl_ca to the address",
    NO_TLS: "the server does not offer TLS, or its certificate is not trusted: see ssl_ca",
}
_FORBIDDEN = frozenset({1142, 1143, 1227, 1370, 1410, 1419})
_READ_ONLY = frozenset({1036, 1290, 1792, 1836, 3989})
_SHAPE = frozenset({1054, 1064, 1146, 1136, 1305})


class ServerRefusal(Exception):
    """The server refused a statement. Those before it in the script were carried out."""

    def __init__(self, code: int, message: str, at: int) -> None:
        super().__init__(f"{' '.join(message.split())} ({code})")
        self.code = code
        self.at = at
        """The place of the statement in its script."""


def connection_lost(code: int) -> bool:
    return code in _LOST and code not in (NO_LOGIN, NO_TLS)


def connect_failed(error: ServerRefusal | ConnectionBroken, where: str) -> FencedError:
    """Why there is no connection; nothing else was asked of the server."""
    if isinstance(error, ServerRefusal):
        if error.code in _LOGIN:
            return Misconfigured(f"{where}: {error}: {_LOGIN[error.code]}")
        return refused(error, where)
    return Unavailable(str(error))


def refused(error: ServerRefusal, where: str) -> FencedError:
    """A refusal outside of a transaction, or of one that has been rolled back: nothing of it happened."""
    message = f"{where}: {error}"
    if error.code in _READ_ONLY:
        return Unavailable(f"{message}: this server is a replica, or set to read only")
    if error.code in _FORBIDDEN or error.code in _LOGIN:
        return Misconfigured(f"{message}: the user lacks a privilege that it needs here")
    if error.code in _SHAPE:
        return Misconfigured(f"{message}: the tables are missing, or not as fenced made them")
    if error.code == 1665:
        return Misconfigured(f"{message}: set binlog_format to ROW or MIXED")
    return Unavailable(message)  # locked too long, a deadlock, too many connections, a full disk ...
