"""Redis: a primary, its replicas, its backups; with or without TLS."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import quote, urlencode

from fenced.testing.servers.base import HOST, Endpoint, Server, ServerFailed, find_program
from fenced.testing.servers.certificates import make_certificates

SETTINGS = {
    "bind": HOST,
    "appendonly": "yes",
    "appendfsync": "always",
    "save": '""',
    "repl-diskless-sync-delay": "0",  # by default a replica waits for others to come along, for 5 s
}
APPEND_ONLY_FOLDER = "appendonlydir"


class RedisServer(Server):
    """Redis 7 or later that has every acknowledged write on its disk, unless `settings` say otherwise.

    `settings` are lines of redis.conf, by their first word. With `tls` it speaks nothing else, under a
    certificate of its own that `ca_path` vouches for.
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
        """Where it is; with the server's own password unless a user or another one is given."""
        if user is None and password is None:
            password = self.password
        secret = f":{quote(password, safe='')}" if password is not None else ""
        who = f"{quote(user or '', safe='')}{secret}@" if user or secret else ""
        address = f"{who}{self.host}:{self.port}/{db}"
        if self.tls:
            return f"rediss://{address}?{urlencode({'ssl_ca_certs': self.ca_path})}"
        return f"redis://{address}"

    def execute(self, *command: str | bytes | int | float) -> Any:
        """One command on a connection of its own, never sent twice; the reply as redis-py gives it.

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
        """Make a replica a primary, also over restarts."""
        self.execute("REPLICAOF", "NO", "ONE")
        self.settings.pop("replicaof", None)

    def caught_up_with(self, primary: RedisServer) -> None:
        """Return when this replica has everything that the primary did before the call."""
        offset = primary._replication()["master_repl_offset"]
        self.wait_until(
            lambda: self._replication().get("slave_repl_offset", -1) >= offset, f"it has come to {offset}"
        )

    def _replication(self) -> dict[str, Any]:
        """INFO replication; the replica's own view tells more than the primary's, which says online early."""
        told: dict[str, Any] = self.execute("INFO", "replication")
        return told

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
        told = self.execute("INFO", "persistence")
        return not told["aof_rewrite_in_progress"] and not told["aof_rewrite_scheduled"]

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
        """As of every server; while Redis rewrites the files of a new replica it would refuse."""
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


def _quoted(text: str) -> str:
    """A value with blanks or odd characters, as redis.conf takes it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
