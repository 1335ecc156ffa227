"""Addresses of MariaDB and MySQL: one server or several, a database, and the words for TLS that its drivers use."""

from __future__ import annotations

from urllib.parse import unquote

from fenced.errors import Misuse
from fenced.net.address import AddressForm, ServerAddress
from fenced.values.contracts import Endpoint

_TLS = {"ssl_ca": "ssl_ca_certs", "ssl_cert": "ssl_certfile", "ssl_key": "ssl_keyfile"}
"""What its drivers call the files, and what they are called in every other address here."""
_IGNORED = frozenset(
    "charset collation use_unicode autocommit local_infile connect_timeout read_timeout write_timeout".split()
)
"""Options in addresses of SQLAlchemy and Django."""


class MariadbAddress(ServerAddress):
    """Where the servers are, which of their databases is meant, and how to connect.

    Without an option for TLS nothing is encrypted: `ssl=true` trusts the system's CAs, `ssl_ca` those of a file.
    """

    form = AddressForm(
        kind="MariaDB or MySQL",
        example="mariadb://user:password@host:3306/database?ssl_ca=ca.pem",
        schemes={"mariadb": True, "mysql": True},
        port=3306,
        default_host="localhost",
        options=frozenset({"unix_socket", "ssl"}),
        ignored=_IGNORED,
    )

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.database = unquote(self.path.removeprefix("/"))
        if not self.database or "/" in self.path.removeprefix("/"):
            raise Misuse(f"an address of {self.form.kind} names a database, as in {self.form.example}")
        if not self.user:
            raise Misuse(f"an address of {self.form.kind} names a user, as in {self.form.example}")
        self.endpoints: list[Endpoint] = list(self.members)
        """Where to connect; the first one that answers is taken."""
        where = ",".join(self.targets)
        if (path := self.options.get("unix_socket")) is not None:
            if {host for host, _ in self.members} != {"localhost"}:
                raise Misuse("unix_socket is a file of this machine: leave the host out, or name localhost")
            self.endpoints, where = [path], ""
        shown = f"?unix_socket={path}" if path is not None else ""
        self.url = f"{self.scheme}://{where}/{self.database}{shown}"

    def named(self, endpoint: Endpoint) -> str:
        """One of the servers, without secrets; which one is said only if there are several."""
        if len(self.endpoints) == 1:
            return self.url
        place = self.targets[self.endpoints.index(endpoint)]
        return f"{self.scheme}://{place}/{self.database}"

    def _checked(self, options: dict[str, str]) -> dict[str, str]:
        named = {_TLS.get(name, name): value for name, value in options.items()}
        if named.get("ssl", "true").lower() != "true":
            raise Misuse(
                "ssl is true, or left out: then nothing is encrypted unless ssl_ca or ssl_cert is there"
            )
        checked = super()._checked(named)
        self.tls = any(name.startswith("ssl") for name in checked) and "unix_socket" not in checked
        return checked
