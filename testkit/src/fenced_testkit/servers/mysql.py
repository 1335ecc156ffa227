"""MySQL, run from a folder into which its packages and all that they need were unpacked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fenced_testkit.servers.base import MissingProgram, run_program
from fenced_testkit.servers.mariadb import MariadbServer

MYSQL_VARIABLE = "FENCED_MYSQL"
"""The folder of an unpacked MySQL, which then takes the place of MariaDB in tests and bench."""
LOADER = "usr/lib64/ld-linux-x86-64.so.2"
SETTINGS = {
    "mysqlx": "OFF",
    "innodb_redo_log_capacity": "32M",
    "performance_schema": "ON",  # says which transaction a session is in
}
_NOT_ITS = ("innodb_log_file_size",)


class MysqlServer(MariadbServer):
    """MySQL with the superuser `root`, who has no password, and default durability: its binary log is synced, too.

    `root` is the folder of the unpacked packages. They need not be installed, nor be of this distribution's version:
    the program is started by its own loader, with its own libraries.
    """

    name = "mysql"

    def __init__(
        self,
        root: str | os.PathLike[str],
        settings: Mapping[str, str] | None = None,
        folder: str | os.PathLike[str] | None = None,
        *,
        tls: bool = False,
    ) -> None:
        super().__init__({**SETTINGS, **(settings or {})}, folder, tls=tls)
        self.root = Path(root).absolute()
        for name in _NOT_ITS:
            del self.settings[name]

    def initialize(self) -> None:
        files = [f"--datadir={self.data}", f"--user={self._runs_as}"]
        run_program([*self.program(), "--initialize-insecure", *files])

    def program(self) -> list[str]:
        if not (self.root / LOADER).exists():
            raise MissingProgram(f"{self.root} has no unpacked MySQL; `python -m evidence.mysql` unpacks one")
        usr = self.root / "usr"
        libraries = usr / "lib/x86_64-linux-gnu"
        folders = {
            "basedir": usr,
            "lc_messages_dir": usr / "share/mysql",
            "plugin_dir": usr / "lib/mysql/plugin",
        }
        options = [f"--{name}={folder}" for name, folder in folders.items()]
        loader = [str(self.root / LOADER), "--library-path", str(libraries)]
        no_files = "--secure_file_priv="  # by default a folder that an installation makes
        return [*loader, str(usr / "sbin/mysqld"), "--no-defaults", *options, no_files]


def mariadb_or_mysql(settings: Mapping[str, str] | None = None, *, tls: bool = False) -> MariadbServer:
    """MariaDB, or the MySQL that the environment names."""
    if root := os.environ.get(MYSQL_VARIABLE):
        return MysqlServer(root, settings, tls=tls)
    return MariadbServer(settings, tls=tls)
