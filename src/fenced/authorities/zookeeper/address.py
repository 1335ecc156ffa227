"""What a ZooKeeper address says: the members, a chroot, credentials, TLS. Its text forms hold no secret."""

from __future__ import annotations

import functools
import ssl
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from fenced.errors import Misconfigured, Misuse

PORT = 2181
_FORM = "zookeeper://user:password@host:port,host:port/chroot, with special characters as %xx"
_TLS = frozenset("ssl_ca_certs ssl_certfile ssl_keyfile ssl_check_hostname".split())
_OPTIONS = _TLS | {"tls"}
_SWITCH = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


class ZooKeeperAddress:
    """Where an ensemble is, and how to connect to it."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            who, _, where = parts.netloc.rpartition("@")
            self.members = [_member(each) for each in where.split(",")]
            options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query), keep_blank_values=True))
            segments = [unquote(each, errors="strict") for each in parts.path.split("/")[1:]]
        except ValueError:
            # What does not parse is not quoted: a part of it may be a password.
            raise Misuse(f"not the address of a ZooKeeper ensemble; it looks like {_FORM}") from None
        if unknown := options.keys() - _OPTIONS:
            raise Misuse(f"a ZooKeeper address has no option {sorted(unknown)}; known: {sorted(_OPTIONS)}")
        if segments == [""]:
            segments = []
        if any(each in ("", ".", "..", "zookeeper") or not each.isprintable() for each in segments):
            raise Misuse("the chroot of a ZooKeeper address is a path like /a/b, and not ZooKeeper's own")
        self.chroot = "".join(f"/{each}" for each in segments)
        self.credentials = unquote(who) if who else None
        if self.credentials is not None and ":" not in self.credentials:
            raise Misuse(f"ZooKeeper's digest credentials are a user and a password: {_FORM}")
        self._options = options
        self.tls = _switch(options, "tls", bool(options.keys() & _TLS))
        if not self.tls and options.keys() & _TLS:
            raise Misuse("a ZooKeeper address with tls=false has no use for ssl_ options")
        listed = ",".join(f"{_bracketed(host)}:{port}" for host, port in self.members)
        self.url = f"zookeeper://{listed}{quote(self.chroot)}"

    def __repr__(self) -> str:
        return f"Address({self.url!r})"

    @property
    def authenticated(self) -> bool:
        """Whether the server knows who we are, so that our nodes can be ours alone."""
        return self.credentials is not None or "ssl_certfile" in self._options

    @functools.cached_property
    def context(self) -> ssl.SSLContext | None:
        """How to speak TLS; None: not at all."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self._options.get("ssl_ca_certs"))
            context.check_hostname = _switch(self._options, "ssl_check_hostname", True)
            if (certificate := self._options.get("ssl_certfile")) is not None:
                context.load_cert_chain(certificate, self._options.get("ssl_keyfile"))
        except (OSError, ssl.SSLError) as error:
            raise Misconfigured(f"{self.url}: the certificates cannot be used: {error}") from error
        return context


def _member(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.path or parts.query:
        raise ValueError(text)
    return parts.hostname, parts.port or PORT


def _switch(options: dict[str, str], name: str, default: bool) -> bool:
    value = options.get(name)
    if value is None:
        return default
    if value.lower() not in _SWITCH:
        raise Misuse(f"{name} is true or false")
    return _SWITCH[value.lower()]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
