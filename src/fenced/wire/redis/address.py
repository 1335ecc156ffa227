"""Addresses of Redis servers: a host or a socket file, a user, and a database."""

from __future__ import annotations

from urllib.parse import unquote

from fenced.contracts import Endpoint
from fenced.errors import Misuse
from fenced.wire.address import AddressForm, ServerAddress


class RedisAddress(ServerAddress):
    """Where a server is and how to connect to it."""

    form = AddressForm(
        kind="a Redis server",
        example="redis://user:password@host:port/db or unix:///run/redis.sock?db=0",
        schemes={"redis": False, "rediss": True, "unix": False},
        port=6379,
        several=False,
        default_host="localhost",
        options=frozenset("db username password client_name".split()),
        ignored=frozenset(
            "socket_timeout socket_connect_timeout timeout retry_on_timeout retry_on_error health_check_interval "
            "max_connections socket_read_size socket_keepalive protocol decode_responses encoding "
            "legacy_responses".split()
        ),
    )

    def __init__(self, url: str) -> None:
        super().__init__(url)
        options, path = self.options, unquote(self.path)
        self.user = self.user or options.get("username", "")
        self.password = self.password or options.get("password", "")
        self.client_name = options.get("client_name", "")
        self.endpoint: Endpoint = path if self.scheme == "unix" else self.members[0]
        if not self.endpoint:
            raise self.wrong()
        self.db = self._number(options.get("db", "0"))
        if self.scheme != "unix":
            self.db = self._number(path[1:] or str(self.db))
        self.url += f"{path}?db={self.db}" if self.scheme == "unix" else f"/{self.db}"

    def _has_hosts(self, url: str) -> bool:
        return not url.startswith("unix:")

    def _number(self, db: str) -> int:
        if not (db.isascii() and db.isdigit()):
            raise Misuse(f"the database of a Redis server is a number, as in {self.form.example}")
        return int(db)
