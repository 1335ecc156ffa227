"""MariaDB, and MySQL where its program is given: one server, with or without TLS."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from fenced_testkit.servers.base import Server, find_program, run_program
from fenced_testkit.servers.certificates import make_certificates

PACKAGE = "mariadb-server-core"
SETTINGS = {
    "bind_address": "127.0.0.1",
    "skip_name_resolve": "ON",
    "character_set_server": "utf8mb4",
    "max_connections": "300",
    "innodb_buffer_pool_size": "32M",
    "innodb_log_file_size": "16M",
    "performance_schema": "OFF",  # its memory alone takes as long to set up as everything else
}
_EVERYBODY = """CREATE USER IF NOT EXISTS root@'%';
GRANT ALL ON *.* TO root@'%' WITH GRANT OPTION;
"""


class MariadbServer(Server):
    """MariaDB with the superuser `root`, who has no password, and default durability.

    `settings` are options of the server; an empty value is an option without one. Its socket file is `socket`. With
    `tls` it also speaks TLS, with a certificate that `ca_path` has signed.
    """

    name = "mariadb"

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        folder: str | os.PathLike[str] | None = None,
        *,
        tls: bool = False,
    ) -> None:
        super().__init__(folder)
        self.settings = {**SETTINGS, **(settings or {})}
        self.tls = tls
        self.data = self.folder / "data"
        self._temporary = self.folder / "tmp"
        """Its own: a server that starts deletes the temporary tables in there, whosever they are."""
        self.socket = self.folder / "socket"
        self.ca_path = self.folder / "tls" / "ca.crt"

    def url(
        self,
        database: str = "mysql",
        user: str = "root",
        password: str | None = None,
        scheme: str = "mariadb",
        **query: str,
    ) -> str:
        secret = "" if password is None else f":{quote(password, safe='')}"
        options = f"?{urlencode(query)}" if query else ""
        who = f"{quote(user, safe='')}{secret}"
        return f"{scheme}://{who}@{self.host}:{self.port}/{quote(database, safe='')}{options}"

    def execute(self, sql: str, database: str | None = None, user: str = "root") -> list[tuple[Any, ...]]:
        """Run one statement on a new connection and commit it; returns the rows, if any."""
        import pymysql

        connection = pymysql.connect(
            host=self.host, port=self.port, user=user, database=database, autocommit=True, ssl_disabled=True
        )
        with connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())

    def create_database(self, name: str | None = None) -> str:
        name = name or f"test_{secrets.token_hex(6)}"
        self.execute(f"CREATE DATABASE `{name}` CHARACTER SET utf8mb4")
        return name

    # The process.

    def prepare(self) -> None:
        if self.tls and not self.ca_path.exists():
            make_certificates(self.ca_path.parent)
        (self.folder / "init.sql").write_text(_EVERYBODY)
        self._temporary.mkdir(exist_ok=True)
        if not self.data.exists():
            try:
                self.initialize()
            except BaseException:
                shutil.rmtree(self.data, ignore_errors=True)
                raise

    def initialize(self) -> None:
        """Make the folder of its data."""
        how = ["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"]
        where = [f"--datadir={self.data}", f"--tmpdir={self._temporary}", f"--user={self._runs_as}"]
        run_program([find_program("mariadb-install-db", PACKAGE), *how, *where, "--skip-name-resolve"])

    @property
    def _runs_as(self) -> str:
        """It refuses to run as root unless it is told to."""
        return "root" if os.geteuid() == 0 else str(os.getuid())

    def program(self) -> list[str]:
        """With the options that it needs even to make its data."""
        return [find_program("mariadbd", PACKAGE), "--no-defaults"]

    def command(self) -> list[str]:
        where = [f"--datadir={self.data}", f"--socket={self.socket}", f"--port={self.port}"]
        settings = [f"--{name}={value}" if value else f"--{name}" for name, value in self.settings.items()]
        tls = self.ca_path.parent
        names = {"ssl_ca": "ca.crt", "ssl_cert": "server.crt", "ssl_key": "server.key"} if self.tls else {}
        secure = [f"--{option}={tls / file}" for option, file in names.items()]
        first = [
            f"--user={self._runs_as}",
            f"--init-file={self.folder / 'init.sql'}",
            f"--tmpdir={self._temporary}",
        ]
        return [*self.program(), *first, *where, *settings, *secure]

    def answers(self) -> bool:
        import pymysql

        try:
            return self.execute("SELECT 1") == [(1,)]
        except pymysql.OperationalError:
            return False
