"""The parts of a Redis address: the server, the user, the database and the TLS options."""

from __future__ import annotations

import functools
import ssl
from urllib.parse import parse_qsl, unquote, urlsplit

from fenced.errors import Misconfigured, Misuse, shown

PORT = 6379
SCHEMES = ("redis", "rediss", "unix")
_IGNORED = frozenset(
    "socket_timeout socket_connect_timeout timeout retry_on_timeout retry_on_error health_check_interval "
    "max_connections socket_read_size socket_keepalive protocol decode_responses encoding legacy_responses".split()
)
"""Options of other clients that have no effect here: this authority sets such things itself."""

_PLAIN = frozenset("db username password client_name".split())
_TLS = frozenset(
    "ssl_ca_certs ssl_ca_path ssl_certfile ssl_keyfile ssl_password ssl_cert_reqs ssl_check_hostname".split()
)
_FALSE = frozenset(("0", "f", "false", "n", "no"))
_FORM = "redis://user:password@host:port/db, with special characters as %xx"


class RedisAddress:
    """Where a server is and how to connect to it. Its text forms hold no secret."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:  # not chained: its text may contain a part of a password
            raise Misuse(f"this is not an address of a Redis server; one looks like {_FORM}") from None
        if parts.scheme not in SCHEMES or parts.fragment:
            raise Misuse(f"this is not an address of a Redis server; one looks like {_FORM}")
        self.scheme = parts.scheme
        options = self._checked(dict(pairs))
        path, db = unquote(parts.path), options.get("db", "0")
        if self.scheme == "unix":
            self.path, self.host, self.port = path, "", 0
            if not path:
                raise Misuse("an address of a socket file looks like unix:///run/redis.sock?db=0")
        else:
            self.path, self.host, self.port = "", unquote(host or "localhost"), port or PORT
            db = path[1:] or db
        self.db = _number(db)
        self.user = unquote(parts.username or "") or options.get("username", "")
        self.password = unquote(parts.password or "") or options.get("password", "")
        self.client_name = options.get("client_name", "")
        place = f"{path}?db={self.db}" if self.path else f"{_bracketed(self.host)}:{self.port}/{self.db}"
        self.url = f"{self.scheme}://{place}"
        self._tls = {name: value for name, value in options.items() if name in _TLS}

    def _checked(self, options: dict[str, str]) -> dict[str, str]:
        for name in list(options):
            if name in _IGNORED:
                del options[name]
            elif name not in _PLAIN and name not in _TLS:
                raise Misuse(f"an address of a Redis server has no option {shown(name)}")
            elif name in _TLS and self.scheme != "rediss":
                raise Misuse(f"the option {name} is for TLS: the address must begin with rediss://")
        _number(options.get("db", "0"))
        if options.get("ssl_cert_reqs", "required") not in ("required", "optional", "none"):
            raise Misuse("ssl_cert_reqs is required, optional or none")
        if "ssl_keyfile" in options and "ssl_certfile" not in options:
            raise Misuse("ssl_keyfile needs an ssl_certfile")
        return options

    @functools.cached_property
    def context(self) -> ssl.SSLContext | None:
        """The TLS settings; None without TLS. Without ssl_ca_certs and ssl_ca_path the system's CAs are trusted."""
        if self.scheme != "rediss":
            return None
        tls = self._tls
        asked = "ssl_ca_certs, ssl_ca_path"
        try:
            context = ssl.create_default_context(
                cafile=tls.get("ssl_ca_certs"), capath=tls.get("ssl_ca_path")
            )
            if (certificate := tls.get("ssl_certfile")) is not None:
                asked = "ssl_certfile, ssl_keyfile, ssl_password"
                context.load_cert_chain(certificate, tls.get("ssl_keyfile"), tls.get("ssl_password"))
        except OSError as error:
            raise Misconfigured(f"{self.url}: {asked}: {error}") from error
        required = tls.get("ssl_cert_reqs", "required")
        context.check_hostname = (
            required == "required" and tls.get("ssl_check_hostname", "yes").lower() not in _FALSE
        )
        context.verify_mode = {
            "required": ssl.CERT_REQUIRED,
            "optional": ssl.CERT_OPTIONAL,
            "none": ssl.CERT_NONE,
        }[required]
        return context

    def __repr__(self) -> str:
        return f"<Address {self.url}>"


def _number(db: str) -> int:
    if not (db.isascii() and db.isdigit()):
        raise Misuse(f"the database of a Redis server is a number; an address looks like {_FORM}")
    return int(db)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
