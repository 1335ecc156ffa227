"""Who may do what: bearer tokens with scopes, from a file that holds only their hashes.

[[token]]
id = "cron"                       # for the audit
sha256 = "9f86d081884c7d65..."    # of the token: printf %s "$token" | sha256sum
rights = ["lease", "guard"]       # lease: take and release leases; guard: use values; observe: read; operate
names = ["nightly", "reports"]    # these names and those below them; left out: all
namespaces = ["default"]          # left out: all
rate = 100                        # attempts and other requests a second; left out: as `fenced serve --rate` says
leases = 5000                     # leases and places in queues at once; left out: 20,000
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from fenced.errors import Misconfigured
from fenced.service.routes import Right
from fenced.values.model import NameView


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


@lru_cache(256)
def is_own_host(header: str) -> bool:
    """Whether a Host header names this machine by its loopback address."""
    try:
        return is_loopback(urlsplit(f"//{header}").hostname or "")
    except ValueError:
        return False


class Principal(Struct, forbid_unknown_fields=True, frozen=True):
    """A client that has shown a token."""

    id: Annotated[str, Meta(min_length=1, max_length=200)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
    rights: Annotated[tuple[Right, ...], Meta(min_length=1)]
    names: tuple[str, ...] | None = None
    namespaces: tuple[str, ...] | None = None
    rate: Annotated[float, Meta(gt=0)] | None = None
    leases: Annotated[int, Meta(ge=0)] | None = None

    def may(self, right: Right | None, namespace: str) -> bool:
        return (right is None or right in self.rights) and (
            self.namespaces is None or namespace in self.namespaces
        )

    def may_use(self, names: Iterable[str]) -> bool:
        """Whether all of these names are among its own, or below one of them."""
        return self.names is None or all(self.owns(name) for name in names)

    def owns(self, name: str) -> bool:
        """Whether this name is one of its own, or below one of them."""
        if self.names is None:
            return True
        return any(
            name == each or name.startswith(f"{each}/")
            for each in (prefix.rstrip("/") for prefix in self.names)
        )

    def seen(self, view: NameView) -> NameView:
        """What it may see of one of its names: not the other names of a lease or of a waiter."""
        if self.names is None:
            return view
        own, waiters = filter(self.owns, view.names), view.waiters
        return replace(
            view,
            names=tuple(own),
            waiters=tuple(replace(each, names=tuple(filter(self.owns, each.names))) for each in waiters),
        )


EVERYBODY = Principal("everybody", "0" * 64, ("lease", "guard", "observe", "operate"))
"""Without a file of tokens: who can connect may do everything."""


class Admission(Struct, frozen=True):
    """What the head of a request decides: whose it is, and which store and namespace it means."""

    by: Principal
    namespace: str
    realm: str
    """The one that the client began with; "": it does not say."""
    access: int
    """How often the file of tokens had been read again: after the next time this is no longer valid."""


class _File(Struct, forbid_unknown_fields=True):
    token: list[Principal]


class TokenFile:
    """The tokens of a file, found by their hashes: no comparison takes longer for a better guess."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._known: dict[str, Principal] = {}
        self.reload()

    def reload(self) -> None:
        """Read the file again. Misconfigured if it cannot be used; then the tokens stay as they were."""
        try:
            found = msgspec.convert(tomllib.loads(Path(self._path).read_text()), _File)
        except (OSError, ValueError, msgspec.ValidationError) as error:
            raise Misconfigured(f"{self._path}: {error}") from error
        self._known = {principal.sha256: principal for principal in found.token}

    def is_current(self, by: Principal) -> bool:
        """Whether the file still has this token, with the same rights."""
        return self._known.get(by.sha256) == by

    def principal(self, authorization: Sequence[str]) -> Principal | None:
        """The client that the Authorization header identifies; None if the token is unknown."""
        if len(authorization) != 1:
            return None
        scheme, _, token = authorization[0].partition(" ")
        return self.shown(token) if scheme.lower() == "bearer" else None

    def shown(self, token: str) -> Principal | None:
        """Whose token this is."""
        return self._known.get(hashlib.sha256(token.strip().encode()).hexdigest())
