"""PgBouncer in front of a PostgreSQL server."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

from fenced_testkit.servers.base import Endpoint, Server, find_program, user_unless_root

ADMINISTRATION = "pgbouncer"
"""The database that is PgBouncer itself."""


class Pgbouncer(Server):
    """All databases and all users of a server, or of a proxy in front of it, without passwords."""

    name = "pgbouncer"

    def __init__(
        self,
        server: Endpoint,
        pool_mode: str = "transaction",
        pool_size: int = 10,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(user=user_unless_root("postgres", "nobody"))
        self.server = server
        self.settings = {
            "listen_addr": self.host,
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "trust",
            "auth_user": "postgres",  # asks the server which users there are
            "auth_file": str(self.folder / "users"),
            "admin_users": "postgres",
            "pool_mode": pool_mode,
            "default_pool_size": str(pool_size),
            "max_client_conn": "500",
            "server_login_retry": "0.1",  # the default keeps clients waiting for 15 s after a restart
            **(settings or {}),
        }
        self._configuration = self.folder / "pgbouncer.ini"

    def url(self, database: str = "postgres", user: str = "postgres") -> str:
        return f"postgresql://{quote(user)}@{self.host}:{self.port}/{quote(database)}"

    def prepare(self) -> None:
        lines = ["[databases]", f"* = host={self.server.host} port={self.server.port}", "[pgbouncer]"]
        lines += [f"{name} = {value}" for name, value in self.settings.items()]
        self._configuration.write_text("\n".join(lines) + "\n")
        (self.folder / "users").write_text('"postgres" ""\n')
        self.own(self.folder)

    def command(self) -> list[str]:
        return [find_program("pgbouncer", "pgbouncer"), str(self._configuration)]

    def answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url(ADMINISTRATION)).close()
        except psycopg.OperationalError:
            return False
        return True
