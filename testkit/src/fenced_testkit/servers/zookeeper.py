"""ZooKeeper: one server, or an ensemble whose members can be cut off from each other; with or without TLS."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from fenced.drills.relay.ports import HOST, free_port
from fenced_testkit.servers.base import MissingProgram, Server, ServerFailed, Startable, find_program
from fenced_testkit.servers.certificates import make_certificates

if TYPE_CHECKING:
    from fenced.drills.relay import Proxy

SETTINGS = {
    "tickTime": "100",  # sessions end on ticks, and a new leader is found within a few of them
    "initLimit": "10",  # so long a new leader waits for followers who came before it listened, and went again
    "syncLimit": "10",
    "minSessionTimeout": "100",
    "maxSessionTimeout": str(48 * 3600 * 1000),
    "maxClientCnxns": "0",
    "admin.enableServer": "false",
    "4lw.commands.whitelist": "*",
    "preAllocSize": "64",
    "standaloneEnabled": "true",
}
JARS = Path("/usr/share/java")
JAR = JARS / "zookeeper.jar"
NETTY = ("codec", "resolver", "transport-native-unix-common")
"""Parts of Netty that Debian's package forgets to name, and that TLS needs."""
WORD_SECONDS = 0.5
"""A server that is about to start accepts connections, and then may never answer on them."""
MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
JAVA_OPTIONS = (
    "-Xms32m",
    "-Xmx128m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dzookeeper.nio.numSelectorThreads=1",
    "-Dzookeeper.nio.numWorkerThreads=2",
    "-Dzookeeper.commitProcessor.numWorkerThreads=1",
    "-Dznode.container.checkIntervalMs=1000",  # idle names go within seconds; by default within minutes
)


class ZooKeeperServer(Server):
    """One member, alone or of an ensemble. `settings` are lines of zoo.cfg, by their first word.

    With `tls` it accepts only TLS, with a certificate signed by `ca_path`.
    """

    name = "zookeeper"

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        folder: str | os.PathLike[str] | None = None,
        *,
        tls: bool = False,
        number: int | None = None,
    ) -> None:
        super().__init__(folder)
        self.settings = {**SETTINGS, **(settings or {})}
        self.tls = tls
        self.number = number
        self.data = self.folder / "data"
        self.ca_path = self.folder / "tls" / "ca.crt"

    def url(self, chroot: str = "") -> str:
        options = f"?ssl_ca_certs={self.ca_path}" if self.tls else ""
        scheme = "zookeepers" if self.tls else "zookeeper"
        return f"{scheme}://{self.host}:{self.port}{chroot}{options}"

    def four_letter(self, word: str) -> str:
        """Its reply to a four-letter command."""
        with contextlib.ExitStack() as stack:
            link = stack.enter_context(socket.create_connection((self.host, self.port), timeout=WORD_SECONDS))
            if self.tls:
                context = ssl.create_default_context(cafile=str(self.ca_path))
                link = stack.enter_context(context.wrap_socket(link, server_hostname=self.host))
            link.sendall(word.encode())
            said = b""
            while data := link.recv(65536):
                said += data
        return said.decode()

    @property
    def mode(self) -> str:
        """`standalone`, `leader`, `follower`, or `` while it does not serve."""
        try:
            lines = self.four_letter("srvr").splitlines()
        except OSError:
            return ""
        return next((line.partition(": ")[2] for line in lines if line.startswith("Mode:")), "")

    @property
    def version(self) -> str:
        return self.four_letter("srvr").partition("version: ")[2].partition("-")[0]

    # Backups.

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Copy the data of the stopped server to a new folder, for `restore`."""
        if self.running:
            raise ServerFailed("stop the server first: its files change while they are copied")
        shutil.copytree(self.data, path)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Put the data of a backup in the place of the stopped server's. The backup stays usable."""
        if self.running:
            raise ServerFailed("stop the server first: it would not see the change")
        shutil.rmtree(self.data, ignore_errors=True)
        shutil.copytree(path, self.data)

    # The process.

    def prepare(self) -> None:
        self.data.mkdir(exist_ok=True)
        if self.number is not None:
            (self.data / "myid").write_text(f"{self.number}\n")
        port = {"clientPort": str(self.port), "clientPortAddress": HOST}
        if self.tls:
            if not self.ca_path.exists():
                _make_certificates(self.ca_path.parent)
            port = {
                "secureClientPort": str(self.port),
                "secureClientPortAddress": HOST,
                "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
                "ssl.keyStore.location": str(self.ca_path.parent / "server.pem"),
                "ssl.keyStore.type": "PEM",
                "ssl.trustStore.location": str(self.ca_path),
                "ssl.trustStore.type": "PEM",
                "ssl.clientAuth": "want",
            }
        settings = {"dataDir": str(self.data), **port, **self.settings}
        lines = [f"{name}={value}" for name, value in settings.items()]
        (self.folder / "zoo.cfg").write_text("\n".join(lines) + "\n")

    def command(self) -> list[str]:
        java = find_program("java", "default-jre-headless")
        if not JAR.exists():
            raise MissingProgram(
                "zookeeper is not installed here; this does it: apt-get install -y zookeeper"
            )
        classpath = ":".join([str(JAR), *(str(JARS / f"netty-{part}.jar") for part in NETTY)])
        return [java, *JAVA_OPTIONS, "-cp", classpath, MAIN, str(self.folder / "zoo.cfg")]

    def answers(self) -> bool:
        return self.mode != ""


class ZooKeeperEnsemble(Startable):
    """Three members, or another odd number, with a proxy between each two of them.

    Members follow their leader through the proxies. They elect it over other connections, which cannot be cut: a member
    that is cut off knows the leader but cannot follow it.

    Those proxies run in this process, and a busy process delays them until followers are given up. An ensemble that
    nobody cuts is `cuttable=False`: its members are connected to each other directly.
    """

    def __init__(
        self, count: int = 3, settings: Mapping[str, str] | None = None, *, cuttable: bool = True
    ) -> None:
        from fenced.drills.relay import Proxy  # which itself needs this package

        ports = [(free_port(), free_port()) for _ in range(count)]
        self.members = []
        self._proxies: dict[tuple[int, int], Proxy] = {}
        for mine in range(count):
            lines = {}
            for other, (following, electing) in enumerate(ports):
                if cuttable and other != mine:
                    self._proxies[mine, other] = Proxy(HOST, following)
                proxy = self._proxies.get((mine, other))
                lines[f"server.{other + 1}"] = f"{HOST}:{proxy.port if proxy else following}:{electing}"
            self.members.append(ZooKeeperServer({**(settings or {}), **lines}, number=mine + 1))

    def url(self, chroot: str = "") -> str:
        listed = ",".join(f"{member.host}:{member.port}" for member in self.members)
        return f"zookeeper://{listed}{chroot}"

    def start(self, *members: ZooKeeperServer) -> None:
        """Start these members, or all that do not run, together: one alone has no quorum and does not answer."""
        chosen = members or [member for member in self.members if not member.running]
        with ThreadPoolExecutor(len(chosen) or 1) as threads:
            list(threads.map(ZooKeeperServer.start, chosen))

    def restart(self) -> None:
        for member in self.members:
            member.stop()
        self.start()

    def leader(self) -> ZooKeeperServer:
        """The leader; waits until there is one."""
        self.members[0].wait_until(lambda: self._with_mode("leader") != [], "there is a leader")
        return self._with_mode("leader")[0]

    def followers(self) -> list[ZooKeeperServer]:
        return self._with_mode("follower")

    def _with_mode(self, mode: str) -> list[ZooKeeperServer]:
        return [member for member in self.members if member.running and member.mode == mode]

    def cut_off(self, member: ZooKeeperServer) -> None:
        """Stop all traffic between this member and the others; connections stay open."""
        for proxy in self._proxies_of(member):
            proxy.black_hole(drop=True)

    def lag(self, member: ZooKeeperServer, seconds: float) -> None:
        """Delay all traffic between this member and the others."""
        for proxy in self._proxies_of(member):
            proxy.delay(seconds)

    def heal(self, member: ZooKeeperServer) -> None:
        for proxy in self._proxies_of(member):
            proxy.heal()
            proxy.reset()

    def _proxies_of(self, member: ZooKeeperServer) -> list[Proxy]:
        if not self._proxies:
            raise ServerFailed(
                "this ensemble was made with cuttable=False: no proxy stands between its members"
            )
        mine = self.members.index(member)
        return [proxy for ends, proxy in self._proxies.items() if mine in ends]

    def close(self) -> None:
        for member in self.members:
            member.close()
        for proxy in self._proxies.values():
            proxy.stop()


def _make_certificates(folder: Path) -> None:
    """Make a CA, and a certificate of it for loopback in one file with its key."""
    make_certificates(folder)
    both = (folder / "server.key").read_text() + (folder / "server.crt").read_text()
    (folder / "server.pem").write_text(both)
