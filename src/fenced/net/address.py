"""Addresses of servers: one grammar and one set of words for all backends that speak over our own streams.

    scheme://user:password@host:port,host2,[::1]:2379/path?option=value

Special characters are written as %xx. TLS is chosen by the scheme, and its options are the same everywhere (`TLS`).
PostgreSQL's addresses are libpq's, and libpq parses them (stores/postgresql/address.py).
"""

from __future__ import annotations

import functools
import os
import re
import ssl
from collections.abc import Mapping
from typing import ClassVar, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from fenced.errors import Misconfigured, Misuse, shown

TLS = frozenset("ssl_ca_certs ssl_certfile ssl_keyfile ssl_password ssl_check_hostname".split())
"""The CAs to trust (a file or a folder; the system's if left out), a client's certificate, its key and the key's
password, and whether the server's name is checked (yes if left out)."""
_SWITCH = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


class AddressForm(NamedTuple):
    """What the addresses of one kind of server look like."""

    kind: str
    """The kind of server, with its article, for messages."""
    example: str
    schemes: Mapping[str, bool]
    """Each scheme, and whether it means TLS."""
    port: int
    """The port of a host that is written without one."""
    several: bool = True
    """Whether an address may name more than one host."""
    default_host: str = ""
    """The host of an address that names none; "": it must name one."""
    options: frozenset[str] = frozenset()
    """The options, other than those of TLS."""
    ignored: frozenset[str] = frozenset()
    """Options of other programs that are accepted and have no effect."""


class ServerAddress:
    """A parsed address. Its text forms, and the errors about it, contain no secret."""

    form: ClassVar[AddressForm]
    alpn: ClassVar[tuple[str, ...]] = ()

    def __init__(self, url: str) -> None:
        form = self.form
        try:
            parts = split_address(url)
            options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
            who, _, hosts = parts.netloc.rpartition("@")
            user, _, password = who.partition(":")
            self.user, self.password = _decoded(user), _decoded(password)
            self.path = parts.path
            """Still percent-encoded."""
            self.members = [_member(each, form) for each in hosts.split(",")] if self._has_hosts(url) else []
        except ValueError:  # not chained: its text may contain a part of a password
            raise self.wrong() from None
        self.scheme = parts.scheme
        if parts.scheme not in form.schemes or parts.fragment or not url.startswith(f"{parts.scheme}://"):
            raise self.wrong()
        if len(self.members) > 1 and not form.several:
            raise Misuse(f"an address of {form.kind} names one host, as in {form.example}")
        if len(set(self.members)) != len(self.members):
            raise Misuse(f"an address of {form.kind} names the same host twice")
        self.tls = form.schemes[parts.scheme]
        self.targets = [
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.members
        ]
        """The members, as written in the URL."""
        self.options = self._checked(options)
        self.url = f"{self.scheme}://{','.join(self.targets)}"
        """The address without secrets. Subclasses append other parts that matter."""

    def _has_hosts(self, url: str) -> bool:
        return True

    def wrong(self) -> Misuse:
        return Misuse(
            f"this is not an address of {self.form.kind}; one looks like {self.form.example}, with special "
            "characters as %xx"
        )

    def _checked(self, options: dict[str, str]) -> dict[str, str]:
        form = self.form
        for name in options:
            if name in TLS and not self.tls:
                secure = " or ".join(f"{scheme}://" for scheme, tls in form.schemes.items() if tls)
                raise Misuse(f"the option {name} is for TLS: the address must begin with {secure}")
            if name not in TLS | form.options | form.ignored:
                known = ", ".join(sorted(TLS | form.options))
                raise Misuse(f"an address of {form.kind} has no option {shown(name)}; known: {known}")
        if "ssl_keyfile" in options and "ssl_certfile" not in options:
            raise Misuse("ssl_keyfile needs an ssl_certfile")
        if options.get("ssl_check_hostname", "yes").lower() not in _SWITCH:
            raise Misuse("ssl_check_hostname is true or false")
        return {name: value for name, value in options.items() if name not in form.ignored}

    @functools.cached_property
    def context(self) -> ssl.SSLContext | None:
        """The TLS settings; None without TLS."""
        if not self.tls:
            return None
        options, asked = self.options, "ssl_ca_certs"
        trusted = options.get("ssl_ca_certs")
        folder = trusted is not None and os.path.isdir(trusted)
        try:
            context = ssl.create_default_context(
                cafile=None if folder else trusted, capath=trusted if folder else None
            )
            if (certificate := options.get("ssl_certfile")) is not None:
                asked = "ssl_certfile, ssl_keyfile, ssl_password"
                # Without a password OpenSSL would ask for one at the terminal.
                password = options.get("ssl_password", "")
                context.load_cert_chain(certificate, options.get("ssl_keyfile"), password)
        except OSError as error:
            raise Misconfigured(f"{self.url}: {asked}: {error}") from error
        context.check_hostname = _SWITCH[options.get("ssl_check_hostname", "yes").lower()]
        if self.alpn:
            context.set_alpn_protocols(list(self.alpn))
        return context

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"


def split_address(url: str) -> SplitResult:
    """As `urlsplit`, for an address that may name several hosts. ValueError as there.

    Since its security fixes of 2025 `urlsplit` itself refuses brackets around one host of several.
    """
    scheme, slashes, rest = url.partition("://")
    hosts = re.split("[/?#]", rest, maxsplit=1)[0]
    for host in hosts.rpartition("@")[2].split(","):
        urlsplit(f"//{host}")  # its brackets must be a pair
    return urlsplit(f"{scheme}{slashes}{rest.removeprefix(hosts)}")._replace(netloc=hosts)


def _decoded(text: str) -> str:
    return unquote(text, errors="strict")


def _member(text: str, form: AddressForm) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    host = _decoded(parts.hostname or "") or form.default_host
    if not host or parts.path or parts.query or parts.fragment or "@" in text:
        raise ValueError("no host")
    return host, parts.port or form.port
