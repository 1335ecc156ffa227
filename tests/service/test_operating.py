"""Operating an instance: its service manager, a new certificate without a restart, clients of other versions."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import ssl
from pathlib import Path

import pytest

from fenced.cli.serve import serve
from fenced.runtime import clocks
from fenced.service.namespaces import OWN_MEMORY, ServedNamespaces
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced.values.contracts import Trait
from fenced_testkit.servers import ServiceServer
from fenced_testkit.servers.certificates import make_certificates

pytestmark = pytest.mark.xdist_group("service")
PATIENCE = 100.0
DEPLOY = Path(__file__).parents[2] / "deploy"


class TlsConnection:
    """One connection, and the certificate that the instance showed."""

    def __init__(self, port: int) -> None:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        plain = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self._link = context.wrap_socket(plain)
        self.certificate = ssl.DER_cert_to_PEM_cert(self._link.getpeercert(binary_form=True) or b"")

    def answers(self) -> bool:
        self._link.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"alive\n"):
            answer += (piece := self._link.recv(65536))
            if not piece:
                return False
        return answer.startswith(b"HTTP/1.1 200")

    def close(self) -> None:
        self._link.close()


def test_a_certificate_is_replaced_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New connections see the new one, old connections live; a certificate without its key is not used."""
    one, two, used = tmp_path / "one", tmp_path / "two", tmp_path / "used"
    make_certificates(one)
    make_certificates(two)
    used.mkdir()

    def install(certificate: Path, key: Path) -> None:
        shutil.copyfile(certificate / "server.crt", used / "server.crt")
        shutil.copyfile(key / "server.key", used / "server.key")

    install(one, one)
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(PATIENCE)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    files = ("--cert", str(used / "server.crt"), "--key", str(used / "server.key"))
    with ServiceServer(options=files) as server:
        assert manager.recv(100) == b"READY=1"
        first = TlsConnection(server.port)
        assert first.certificate == (one / "server.crt").read_text() and first.answers()

        install(two, one)
        os.kill(server.pid, signal.SIGHUP)
        server.wait_until(lambda: "old certificate stays" in server.log.read_text(), "refuses them")
        still = TlsConnection(server.port)
        assert still.certificate == first.certificate and still.answers()

        install(two, two)
        os.kill(server.pid, signal.SIGHUP)
        shown = (two / "server.crt").read_text()

        def is_new() -> bool:
            made = TlsConnection(server.port)
            made.close()
            return made.certificate == shown

        server.wait_until(is_new, "shows the new certificate")
        assert first.answers() and still.answers()
        os.kill(server.pid, signal.SIGTERM)
        assert manager.recv(100) == b"STOPPING=1"
        first.close()
        still.close()
    manager.close()


class Forgetful(MemoryAuthority):
    traits = (Trait("own-memory", "As ZooKeeper."),)


def test_a_store_whose_clients_alone_remember_is_warned_of() -> None:
    """In GET /v1, in the log, and by every client."""

    async def opened() -> tuple[str, ...]:
        store = MemoryStore(clocks.now)
        namespaces = ServedNamespaces(lambda runtime, _: Forgetful(store, runtime), lambda *_: None)
        _, standing = await namespaces.opened("default", create=True)
        await namespaces.close()
        return standing.warnings

    assert asyncio.run(opened()) == (OWN_MEMORY,)


def test_the_unit_and_the_container_start_what_there_is() -> None:
    """`fenced serve` knows every option that they pass."""
    (unit,) = re.findall(r"^ExecStart=(.*)$", (DEPLOY / "fenced.service").read_text(), re.MULTILINE)
    container = (DEPLOY / "Containerfile").read_text()
    entry, command = (
        json.loads(re.findall(rf"^{word} (.*)$", container, re.MULTILINE)[0])
        for word in ("ENTRYPOINT", "CMD")
    )
    for program, name, *options in (unit.split(), entry + command):
        assert (program, name) == ("/opt/fenced/bin/fenced", "serve")
        context = serve.make_context(
            "serve", options, auto_envvar_prefix=None, default_map={"store": "memory:"}
        )
        assert context.params["tokens"] == "/etc/fenced/tokens.toml"
