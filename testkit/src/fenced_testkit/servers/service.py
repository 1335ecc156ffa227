"""An instance of `fenced serve`."""

from __future__ import annotations

import os
import socket
import sys

from fenced_testkit.servers.base import Server


class ServiceServer(Server):
    """One instance before a store; by default before a ledger in its folder."""

    name = "service"
    on_disk = True  # a ledger in memory is best-effort, and clients are strict

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, store: str = "", options: tuple[str, ...] = ()
    ) -> None:
        super().__init__(folder)
        self.store = store or f"ledger://{self.folder}/leases.db"
        self._options = options

    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def command(self) -> list[str]:
        listen = f"{self.host}:{self.port}"
        return [
            sys.executable, "-m", "fenced", "serve", "--store", self.store, "--listen", listen, *self._options,
        ]  # fmt: skip

    def answers(self) -> bool:
        """It listens after it has opened its store."""
        try:
            socket.create_connection((self.host, self.port), timeout=5).close()
        except OSError:
            return False
        return True
