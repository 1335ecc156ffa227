"""etcd: one member or a cluster of them, its snapshots; with or without TLS and users."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self
from urllib.parse import quote, urlencode

from fenced.drills.relay.ports import HOST, free_port
from fenced.errors import FencedError
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.etcd.address import EtcdAddress
from fenced.stores.etcd.wire import messages
from fenced.stores.etcd.wire.protobuf import fields, raw, whole
from fenced_testkit.servers.base import (
    PATIENCE_SECONDS,
    POLL_SECONDS,
    Server,
    ServerFailed,
    Startable,
    find_program,
    run_program,
)
from fenced_testkit.servers.certificates import make_certificates

SETTINGS = {"heartbeat-interval": "50", "election-timeout": "500", "logger": "zap"}
"""Half of etcd's defaults: elections are faster, and a lease may be as short as a second."""

USER = "root"
STATUS_SECONDS = 2.0
"""How long a member may take to report its status."""


class EtcdStatus(NamedTuple):
    """What a member reports of itself."""

    member: int
    version: str
    leader: int


class EtcdServer(Server):
    """One member of etcd 3.4 or later: alone, or of an `EtcdCluster`.

    `settings` are options of etcd without their dashes. With `tls` it accepts only TLS, with a certificate signed
    by `ca_path`, and only clients with a certificate of the same CA. With `password` clients log in as the user root.
    """

    name = "etcd"

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        folder: str | os.PathLike[str] | None = None,
        tls: bool = False,
        password: str | None = None,
    ) -> None:
        super().__init__(folder)
        self.settings = {**SETTINGS, **(settings or {})}
        self.member = "default"
        self.peer_port = free_port()
        self.peers = {self.member: f"http://{HOST}:{self.peer_port}"}
        self.token = f"fenced-{self.port}"
        self.tls = tls
        self.password = password
        self.data = self.folder / "data"
        self.ca_path = self.folder / "tls" / "ca.crt"
        self._alone = True
        self._users = False

    def url(self) -> str:
        return url_of([self])

    @property
    def client_url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}"

    # Asking it.

    def execute(self, *command: str) -> str:
        """One command of etcdctl; what it printed."""
        options = [f"--endpoints={self.client_url}", "--dial-timeout=2s", "--command-timeout=5s"]
        if self.tls:
            folder = self.ca_path.parent
            options += [
                f"--cacert={self.ca_path}",
                f"--cert={folder / 'client.crt'}",
                f"--key={folder / 'client.key'}",
            ]
        if self._users:
            options.append(f"--user={USER}:{self.password}")
        done = subprocess.run(
            [find_program("etcdctl", "etcd-client"), *options, *command],
            env={**os.environ, "ETCDCTL_API": "3"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ServerFailed(f"etcdctl {command[0]} failed: {done.stderr.strip()}")
        return done.stdout

    def status(self) -> EtcdStatus | None:
        """The status that it reports; None if it does not answer, or knows no leader."""
        from fenced.stores.etcd.wire.cluster import EtcdWire  # needs hpack; starting a server does not

        runtime = BlockingRuntime()
        wire = EtcdWire(EtcdAddress(url_of([self], login=self._users)), runtime)
        try:
            reply = step(wire.call(messages.STATUS, b"", runtime.now() + STATUS_SECONDS))
        except FencedError:
            return None
        finally:
            wire.close()
        found = dict(fields(reply))
        header = dict(fields(raw(found[1])))
        return EtcdStatus(whole(header[2]), raw(found[2]).decode(), whole(found[4]))

    def leads(self) -> bool:
        status = self.status()
        return status is not None and status.leader == status.member

    # Snapshots.

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Save a snapshot of the running server to a new file, for `restored`."""
        self.execute("snapshot", "save", str(path))

    @classmethod
    def restored(
        cls, path: str | os.PathLike[str], settings: Mapping[str, str] | None = None, like: Self | None = None
    ) -> Self:
        """A running server made from a snapshot; with `like`, under the name, addresses and token of that one.

        etcd makes the cluster's id of the addresses of its members and their token.
        """
        server = cls(settings)
        try:
            if like is not None:
                server.port, server.peer_port, server.peers = like.port, like.peer_port, like.peers
                server.token = like.token
            cluster = ",".join(f"{name}={where}" for name, where in server.peers.items())
            run_program(
                [
                    "/usr/bin/env",
                    "ETCDCTL_API=3",
                    find_program("etcdctl", "etcd-client"),
                    "snapshot",
                    "restore",
                    str(path),
                    f"--name={server.member}",
                    f"--data-dir={server.data}",
                    f"--initial-cluster={cluster}",
                    f"--initial-cluster-token={server.token}",
                    f"--initial-advertise-peer-urls={server.peers[server.member]}",
                ]
            )
            server.start()
        except BaseException:
            server.close()
            raise
        return server

    # The process.

    def prepare(self) -> None:
        if self.tls and not self.ca_path.exists():
            make_certificates(self.ca_path.parent, clients=("client",))

    def command(self) -> list[str]:
        cluster = ",".join(f"{name}={where}" for name, where in self.peers.items())
        options = {
            "name": self.member,
            "data-dir": str(self.data),
            "listen-client-urls": self.client_url,
            "advertise-client-urls": self.client_url,
            "listen-peer-urls": f"http://{HOST}:{self.peer_port}",
            "initial-advertise-peer-urls": self.peers[self.member],
            "initial-cluster": cluster,
            "initial-cluster-token": self.token,
            **self.settings,
        }
        if self.tls:
            folder = self.ca_path.parent
            options |= {
                "cert-file": str(folder / "server.crt"),
                "key-file": str(folder / "server.key"),
                "trusted-ca-file": str(self.ca_path),
                "client-cert-auth": "true",
            }
        return [
            find_program("etcd", "etcd-server"),
            *(f"--{name}={value}" for name, value in options.items()),
        ]

    def answers(self) -> bool:
        if not self._alone:
            return True  # a member may have to wait for the others; the cluster looks
        if not self.leads():
            return False
        if self.password is not None and not self._users:
            self.execute("user", "add", f"{USER}:{self.password}")
            self.execute("user", "grant-role", USER, "root")
            self.execute("auth", "enable")
            self._users = True
        return True


class EtcdCluster(Startable):
    """Several members. They reach each other through a proxy in front of each, so that one can be cut off.

    Those proxies run in this process, and a busy process delays them until members miss their heartbeats. A cluster
    that nobody cuts is `cuttable=False`: its members are connected to each other directly.
    """

    def __init__(
        self, settings: Mapping[str, str] | None = None, size: int = 3, *, cuttable: bool = True
    ) -> None:
        from fenced.drills.relay import Proxy, Trigger  # it needs the servers itself

        self.members = [EtcdServer(settings) for _ in range(size)]
        self._proxies = [Proxy(HOST, member.peer_port) for member in self.members if cuttable]
        self._swallowing: list[Trigger] = []
        ports = [proxy.port for proxy in self._proxies] or [member.peer_port for member in self.members]
        for number, member in enumerate(self.members):
            member.member = f"m{number}"
            member.peers = {f"m{at}": f"http://{HOST}:{port}" for at, port in enumerate(ports)}
            member.token = f"fenced-{self.members[0].port}"
            member._alone = False

    def url(self) -> str:
        return url_of(self.members)

    def start(self) -> None:
        """Start the members that do not run, and return when one of them leads."""
        for member in self.members:
            if not member.running:
                member.start()
        self.leader()

    def leader(self, but: EtcdServer | None = None) -> EtcdServer:
        """Wait for a member that reports itself as leader; never `but`."""
        limit = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < limit:
            for member in self.members:
                if member is not but and member.running and member.leads():
                    return member
            time.sleep(POLL_SECONDS)
        raise ServerFailed(f"etcd has no leader:\n{self.members[0].log_tail()}")

    def followers(self) -> list[EtcdServer]:
        leader = self.leader()
        return [member for member in self.members if member is not leader]

    def cut_off(self, member: EtcdServer) -> None:
        """Cut this member off from the others, in both directions. Clients still reach it.

        A member names itself when it connects to another; the proxies there swallow that from now on.
        """
        from fenced.drills.relay import Fault

        if not self._proxies:
            raise ServerFailed(
                "this cluster was made with cuttable=False: no proxy stands between its members"
            )
        status = member.status()
        if status is None:
            raise ServerFailed("a member that does not answer cannot be cut off")
        itself = self._proxies[self.members.index(member)]
        itself.black_hole()
        sign = f"X-Server-From: {status.member:x}".encode()
        for proxy in self._proxies:
            if proxy is not itself:
                self._swallowing.append(proxy.on(sign, Fault.SWALLOW, times=1_000_000))
            proxy.reset()

    def heal(self) -> None:
        """End all cuts: members reach each other again."""
        while self._swallowing:
            self._swallowing.pop().disarm()
        for proxy in self._proxies:
            proxy.heal()
            proxy.reset()

    def close(self) -> None:
        for member in self.members:
            member.close()
        for proxy in self._proxies:
            proxy.stop()


def url_of(members: Sequence[EtcdServer], *, login: bool = True) -> str:
    """The address of these members, with credentials (unless `login` is False) and certificates."""
    first = members[0]
    who = f"{USER}:{quote(first.password, safe='')}@" if first.password is not None and login else ""
    places = ",".join(f"{member.host}:{member.port}" for member in members)
    if not first.tls:
        return f"etcd://{who}{places}"
    folder = first.ca_path.parent
    files = {
        "ssl_ca_certs": first.ca_path,
        "ssl_certfile": folder / "client.crt",
        "ssl_keyfile": folder / "client.key",
    }
    return f"etcds://{who}{places}?{urlencode(files)}"
