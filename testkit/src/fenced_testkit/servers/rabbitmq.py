"""RabbitMQ: one node that nothing else on the machine can meet."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from fenced.drills.relay.ports import HOST, free_port
from fenced_testkit.servers.base import Server, find_program, user_unless_root

FOLDER = Path("/usr/lib/rabbitmq/bin")
"""Where the programs are that do not insist on a user."""
ERLANG_OPTIONS = (
    "+S 1:1 +SDcpu 1:1 +SDio 1",  # one core is enough, and the tests need the other one
    "+sbwt none +sbwtdcpu none +sbwtdio none",  # an idle scheduler sleeps
    "-kernel inet_dist_use_interface {127,0,0,1}",
)
SETTINGS = """\
[{rabbit, [{tcp_listeners, [{"%s", %d}]}, {loopback_users, []}, {log, [{console, [{level, warning}]}]}]}].
"""
"""In the old form: reading the new one takes longer."""


class RabbitmqServer(Server):
    """One node, with its own epmd, which ends with it: the supervisor ends what a server leaves behind."""

    name = "rabbitmq"

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        super().__init__(folder, user=user_unless_root("rabbitmq", "nobody"))
        self._epmd_port, self._node_port = free_port(), free_port()

    def url(self) -> str:
        return f"amqp://guest:guest@{self.host}:{self.port}/"

    def prepare(self) -> None:
        (self.folder / "rabbitmq.config").write_text(SETTINGS % (self.host, self.port))
        (self.folder / "plugins").write_text("[].\n")
        self.own(self.folder)

    def command(self) -> list[str]:
        variables = {
            "HOME": self.folder,  # of the cookie that nodes know each other by
            "ERL_EPMD_ADDRESS": HOST,
            "ERL_EPMD_PORT": self._epmd_port,
            "RABBITMQ_DIST_PORT": self._node_port,
            "RABBITMQ_NODENAME": f"fenced{self.port}@localhost",
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_CONFIG_FILE": self.folder / "rabbitmq.config",
            "RABBITMQ_ENABLED_PLUGINS_FILE": self.folder / "plugins",
            "RABBITMQ_MNESIA_BASE": self.folder / "data",
            "RABBITMQ_LOG_BASE": self.folder / "logs",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": " ".join(ERLANG_OPTIONS),
        }
        program = find_program("rabbitmq-server", "rabbitmq-server", FOLDER)
        return ["/usr/bin/env", *(f"{name}={value}" for name, value in variables.items()), program]

    def answers(self) -> bool:
        """Whether it begins a conversation: it listens before it serves."""
        try:
            with socket.create_connection((self.host, self.port), timeout=5) as link:
                link.sendall(b"AMQP\0\0\x09\x01")
                return link.recv(1) == b"\x01"  # a method frame: connection.start
        except OSError:
            return False
