"""PostgreSQL: a primary, its standbys, its backups."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlencode

from fenced_testkit.servers.base import Endpoint, Server, find_program, run_program, user_unless_root

PACKAGE = "postgresql"
PROGRAMS = Path("/usr/lib/postgresql")
"""Where Debian keeps them, one folder for each version."""
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "32MB",
    "dynamic_shared_memory_type": "mmap",  # files in our folder; the others outlive a kill
    "wal_keep_size": "128MB",  # a standby that was cut off finds what it has missed
}


class PostgresqlServer(Server):
    """PostgreSQL with trust authentication, the superuser `postgres` and default durability.

    As root it runs as the system user `postgres`, because it refuses root. Every server is initialised separately, so
    each has its own system identifier. `programs` is a folder with `initdb` and `postgres` of one
    version; by default the newest installed version is used.
    """

    name = "postgresql"
    stop_signal = signal.SIGINT  # "fast": does not wait for the clients

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        folder: str | os.PathLike[str] | None = None,
        programs: Path | None = None,
    ) -> None:
        super().__init__(folder, user=user_unless_root("postgres"))
        self._programs = programs
        self.settings = {**SETTINGS, **(settings or {})}
        self.data = self.folder / "data"
        self._discarded: list[str] = []

    @property
    def standby_name(self) -> str:
        """The application_name with which it streams from a primary."""
        return f"standby_{self.port}"

    def url(self, database: str = "postgres", user: str = "postgres", **query: str) -> str:
        options = f"?{urlencode(query)}" if query else ""
        return f"postgresql://{quote(user)}@{self.host}:{self.port}/{quote(database)}{options}"

    def execute(self, sql: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run SQL on a new connection, each statement in its own transaction; returns the rows, if any."""
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    def create_database(self, name: str | None = None, template: str | None = None) -> str:
        import psycopg

        name = name or f"test_{secrets.token_hex(6)}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            while self._discarded:
                connection.execute(_drop(self._discarded.pop()).encode())
            # Copying the files takes less CPU time than logging every page. PostgreSQL 14 always copies.
            strategy = " STRATEGY FILE_COPY" if connection.info.server_version >= 150000 else ""
            source = f' TEMPLATE "{template}"' if template else ""
            connection.execute(f'CREATE DATABASE "{name}"{source}{strategy}'.encode())
        return name

    def drop_database(self, name: str) -> None:
        """Drop it, and the connections to it."""
        self.execute(_drop(name))

    def discard_database(self, name: str) -> None:
        """Drop it when the next one is created: the connection for that costs as much as the drop."""
        self._discarded.append(name)

    # Replication.

    def standby(self, *, synchronous: bool = False, through: Endpoint | None = None) -> PostgresqlServer:
        """A running standby that streams from this server, or from a proxy in front of it.

        With `synchronous` every commit here waits for it, from now on; until `no_synchronous_standby`.
        """
        source = through or self
        standby = PostgresqlServer(self.settings)
        try:
            where = f"host={source.host} port={source.port} user=postgres"
            _base_backup(
                f"{where} application_name={standby.standby_name}", standby.data, "--write-recovery-conf"
            )
            standby.own(standby.data)
            standby.start()
            state = f"SELECT sync_state FROM pg_stat_replication WHERE state = 'streaming' \
                AND application_name = '{standby.standby_name}'"
            self.wait_until(lambda: bool(self.execute(state)), "the standby streams")
            if synchronous:
                self._set_synchronous(standby.standby_name)
                self.wait_until(lambda: self.execute(state) == [("sync",)], "the standby is synchronous")
        except BaseException:
            standby.close()
            raise
        return standby

    def no_synchronous_standby(self) -> None:
        """Stop commits from waiting for a standby; those that wait now complete."""
        self._set_synchronous("")

    def _set_synchronous(self, name: str) -> None:
        self.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
        self.execute("SELECT pg_reload_conf()")

    def promote(self) -> None:
        """Make a standby a primary; returns when it takes writes."""
        self.execute("SELECT pg_promote(wait => false)")
        self.wait_until(lambda: self.execute("SELECT pg_is_in_recovery()") == [(False,)], "it is promoted")

    def caught_up_with(self, primary: PostgresqlServer) -> None:
        """Return when this standby shows everything that was committed on the primary before the call."""
        ((position,),) = primary.execute("SELECT pg_current_wal_flush_lsn()")
        arrived = f"SELECT pg_last_wal_replay_lsn() >= '{position}'"
        self.wait_until(lambda: self.execute(arrived) == [(True,)], f"it replays up to {position}")

    # Backups.

    def backup(self, folder: str | os.PathLike[str]) -> None:
        """Copy the running server's files to a new or empty folder, for `restored`."""
        _base_backup(f"host={self.host} port={self.port} user=postgres", Path(folder))

    @classmethod
    def restored(
        cls, backup_folder: str | os.PathLike[str], settings: Mapping[str, str] | None = None
    ) -> Self:
        """A running server made from a backup: a primary as of the backup's end. The backup stays usable."""
        server = cls(settings)
        try:
            shutil.copytree(backup_folder, server.data, symlinks=True)
            server.own(server.data)
            server.start()
        except BaseException:
            server.close()
            raise
        return server

    def reset_log(self) -> None:
        """Run pg_resetwal on the stopped or killed server: what was written since the last checkpoint is gone."""
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        run_program([self._program("pg_resetwal"), "--force", f"--pgdata={self.data}"], self._user)

    # The process.

    def prepare(self) -> None:
        if not self.data.exists():
            authentication = ["--auth=trust", "--username=postgres"]
            locale = ["--encoding=UTF8", "--locale=C"]
            flushing = ["--no-sync"] if self._owns_folder else []  # ours has no power cut to outlive
            command = [self._program("initdb"), f"--pgdata={self.data}", *authentication, *locale, *flushing]
            run_program(command, self._user)

    def command(self) -> list[str]:
        settings = [f"--{name}={value}" for name, value in self.settings.items()]
        return [self._program("postgres"), "-D", str(self.data), "-p", str(self.port), *settings]

    def _program(self, name: str) -> str:
        return _program(name) if self._programs is None else str(self._programs / name)

    def answers(self) -> bool:
        import psycopg

        try:
            return self.execute("SELECT 1") == [(1,)]
        except psycopg.OperationalError:
            return False


def _drop(database: str) -> str:
    return f'DROP DATABASE IF EXISTS "{database}" WITH (FORCE)'


def _program(name: str) -> str:
    """A program of the newest version that is installed."""
    versions = [folder for folder in PROGRAMS.glob("*") if folder.name.isdigit()]
    newest = sorted(versions, key=lambda folder: int(folder.name), reverse=True)
    return find_program(name, PACKAGE, *(folder / "bin" for folder in newest))


def _base_backup(source: str, target: Path, *options: str) -> None:
    """A copy of a running server's files; without its standbys, for which the copy would wait in vain."""
    command = [_program("pg_basebackup"), f"--dbname={source}", f"--pgdata={target}", "--checkpoint=fast"]
    run_program([*command, "--wal-method=stream", "--no-sync", *options])
    settings = target / "postgresql.auto.conf"
    text = settings.read_text()
    settings.write_text(re.sub(r"(?m)^synchronous_standby_names .*\n", "", text))
