"""Addresses of Redis: one server, the sentinels that name it, or the nodes of a cluster."""

from __future__ import annotations

from urllib.parse import unquote

from fenced.errors import Misuse
from fenced.net.address import AddressForm, ServerAddress
from fenced.values.contracts import Endpoint

_IGNORED = frozenset(
    "socket_timeout socket_connect_timeout timeout retry_on_timeout retry_on_error health_check_interval "
    "max_connections socket_read_size socket_keepalive protocol decode_responses encoding legacy_responses".split()
)
_OPTIONS = frozenset("db username password client_name".split())


class RedisAddress(ServerAddress):
    """Where a server is and how to connect to it."""

    form = AddressForm(
        kind="a Redis server",
        example="redis://user:password@host:port/db or unix:///run/redis.sock?db=0",
        schemes={"redis": False, "rediss": True, "unix": False},
        port=6379,
        several=False,
        default_host="localhost",
        options=_OPTIONS,
        ignored=_IGNORED,
    )

    def __init__(self, url: str) -> None:
        super().__init__(url)
        options = self.options
        self.user = self.user or options.get("username", "")
        self.password = self.password or options.get("password", "")
        self.client_name = options.get("client_name", "")
        self.db = self._number(options.get("db", "0"))
        self._read_path(unquote(self.path))

    def _read_path(self, path: str) -> None:
        self.endpoint: Endpoint = path if self.scheme == "unix" else self.members[0]
        if not self.endpoint:
            raise self.wrong()
        if self.scheme != "unix":
            self.db = self._number(path[1:] or str(self.db))
        self.url += f"{path}?db={self.db}" if self.scheme == "unix" else f"/{self.db}"

    @property
    def login(self) -> tuple[str, ...]:
        """The arguments of AUTH; none: it is not sent."""
        return _login(self.user, self.password)

    def _has_hosts(self, url: str) -> bool:
        return not url.startswith("unix:")

    def _number(self, db: str) -> int:
        if not (db.isascii() and db.isdigit()):
            raise Misuse(f"the database of a Redis server is a number, as in {self.form.example}")
        return int(db)


class SentinelAddress(RedisAddress):
    """The sentinels that watch a set of servers. User and password are those of the servers."""

    form = AddressForm(
        kind="a set of Redis servers behind sentinels",
        example="redis+sentinel://user:password@sentinel1:26379,sentinel2,sentinel3/mymaster/db",
        schemes={"redis+sentinel": False, "rediss+sentinel": True},
        port=26379,
        options=_OPTIONS | {"sentinel_username", "sentinel_password"},
        ignored=_IGNORED,
    )

    def _read_path(self, path: str) -> None:
        self.set, _, db = path[1:].partition("/")
        if not self.set:
            raise self.wrong()
        self.db = self._number(db or str(self.db))
        self.url += f"/{self.set}/{self.db}"
        options = self.options
        self.sentinel_login = _login(
            options.get("sentinel_username", ""), options.get("sentinel_password", "")
        )


class ClusterAddress(RedisAddress):
    """Some nodes of a cluster; the client finds the others through them."""

    form = AddressForm(
        kind="a Redis cluster",
        example="redis+cluster://user:password@node1:6379,node2,node3",
        schemes={"redis+cluster": False, "rediss+cluster": True},
        port=6379,
        options=_OPTIONS - {"db"},
        ignored=_IGNORED,
    )

    def _read_path(self, path: str) -> None:
        if path not in ("", "/", "/0"):
            raise Misuse(f"a Redis cluster has one database; leave the number out, as in {self.form.example}")


def _login(user: str, password: str) -> tuple[str, ...]:
    if not user and not password:
        return ()
    return (user, password) if user else (password,)


def redis_address(url: str) -> RedisAddress:
    """The address behind a URL, by its scheme."""
    scheme = url.partition("://")[0]
    kinds: tuple[type[RedisAddress], ...] = (SentinelAddress, ClusterAddress)
    return next((kind for kind in kinds if scheme in kind.form.schemes), RedisAddress)(url)
