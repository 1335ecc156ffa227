"""NATS with JetStream."""

from __future__ import annotations

import socket

from fenced_testkit.servers.base import Server, find_program


class NatsServer(Server):
    """One server; its streams are in its folder."""

    name = "nats"

    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    def command(self) -> list[str]:
        program = find_program("nats-server", "nats-server")
        return [
            program,
            "--addr",
            self.host,
            "--port",
            str(self.port),
            "--jetstream",
            "--store_dir",
            str(self.folder),
        ]

    def answers(self) -> bool:
        try:
            with socket.create_connection((self.host, self.port), timeout=5) as link:
                return link.recv(4) == b"INFO"
        except OSError:
            return False
