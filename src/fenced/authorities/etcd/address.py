"""What an address of an etcd cluster says: its members, who we are, and how TLS is to be spoken."""

from __future__ import annotations

import functools
import ssl
from urllib.parse import parse_qsl, unquote, urlsplit

from fenced.errors import Misconfigured, Misuse, shown

PORT = 2379
_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_FORM = "etcd://user:password@host:2379,host2,host3, with special characters as %xx"


class EtcdAddress:
    """Where the members are and how to connect to them. Its text forms hold no secret."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:  # its text may show a piece of a password
            raise Misuse(f"this is not an address of an etcd cluster; one looks like {_FORM}") from None
        if parts.path not in ("", "/") or parts.fragment or not parts.netloc:
            raise Misuse(f"an address of an etcd cluster names its members only; it looks like {_FORM}")
        who, _, members = parts.netloc.rpartition("@")
        user, _, password = who.partition(":")
        self.tls = parts.scheme == "etcds"
        self.user, self.password = unquote(user), unquote(password)
        if bool(who) and not (self.user and self.password):
            raise Misuse(f"an address of an etcd cluster has both a user and a password, as in {_FORM}")
        self.members = [_member(member) for member in members.split(",")]
        self.targets = [_target(*member) for member in self.members]
        """The same, as they are written."""
        if len(set(self.targets)) != len(self.targets):
            raise Misuse(f"the same member twice: {shown(members)}")
        self.url = f"{parts.scheme}://{','.join(self.targets)}"
        self._files = self._checked(dict(pairs))

    def _checked(self, options: dict[str, str]) -> dict[str, str]:
        for name in options:
            if name not in _OPTIONS:
                raise Misuse(f"an address of an etcd cluster has no option {shown(name)}")
        if options and not self.tls:
            raise Misuse("these options are for TLS: the address begins with etcds://")
        if ("ssl_certfile" in options) != ("ssl_keyfile" in options):
            raise Misuse("a client certificate needs both ssl_certfile and ssl_keyfile")
        return options

    @functools.cached_property
    def context(self) -> ssl.SSLContext | None:
        """How to speak TLS; None: not at all. Without ssl_ca_certs the system's are trusted."""
        if not self.tls:
            return None
        asked = "ssl_ca_certs"
        try:
            context = ssl.create_default_context(cafile=self._files.get(asked))
            context.set_alpn_protocols(["h2"])
            if (certificate := self._files.get("ssl_certfile")) is not None:
                asked = "ssl_certfile, ssl_keyfile"
                context.load_cert_chain(certificate, self._files["ssl_keyfile"])
        except OSError as error:
            raise Misconfigured(f"{self.url}: {asked}: {error}") from error
        return context

    def __repr__(self) -> str:
        return f"<Address {self.url}>"


def _member(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or "@" in text:
        raise Misuse(f"an address of an etcd cluster looks like {_FORM}")
    return host, port or PORT


def _target(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
