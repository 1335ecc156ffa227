"""Addresses of a service: one instance or several, over TCP, TLS or a Unix socket."""

from __future__ import annotations

from urllib.parse import unquote

from fenced.net.address import AddressForm, ServerAddress
from fenced.values.contracts import Endpoint

_OPTIONS = frozenset({"bearer_file"})


class ServiceAddress(ServerAddress):
    """Where the instances of a service are, and how to connect to them."""

    form = AddressForm(
        kind="a fenced service",
        example="http://127.0.0.1:8700 or https://leases1,leases2",
        schemes={"http": False, "https": True},
        port=80,
        options=_OPTIONS,
    )

    def __init__(self, url: str) -> None:
        super().__init__(url)
        if self.user or self.password:
            raise self.wrong()
        self.bearer_file = self.options.get("bearer_file")
        """The file whose text is the bearer token; None: none is sent."""
        self._read_path()

    def _read_path(self) -> None:
        self.base = self.path.rstrip("/")
        """What stands before /v1, where a gateway serves the service under a path of its own."""
        self.url += self.base
        self.endpoints: list[tuple[Endpoint, str]] = list(zip(self.members, self.targets, strict=True))
        """Where to connect, and the host header, of each instance."""


class SecureServiceAddress(ServiceAddress):
    """The same with another default port."""

    form = ServiceAddress.form._replace(port=443)


class ServiceSocketAddress(ServiceAddress):
    """A Unix socket."""

    form = AddressForm(
        kind="a fenced service behind a Unix socket",
        example="fenced+unix:///run/fenced.sock",
        schemes={"fenced+unix": False},
        port=0,
        options=_OPTIONS,
    )

    def _has_hosts(self, url: str) -> bool:
        return False

    def _read_path(self) -> None:
        path = unquote(self.path)
        if not path.startswith("/"):
            raise self.wrong()
        self.base = ""
        self.url += path
        self.endpoints = [(path, "localhost")]


_KINDS = {"https": SecureServiceAddress, "fenced+unix": ServiceSocketAddress}


def service_address(url: str) -> ServiceAddress:
    """The address behind a URL, by its scheme."""
    return _KINDS.get(url.partition("://")[0], ServiceAddress)(url)
