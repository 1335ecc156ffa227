"""Certificates that cannot be used, and addresses with the wrong scheme: a sentence for each."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import fenced
from fenced.drills.relay.ports import free_port
from fenced.errors import FencedError, Misconfigured, Unavailable
from fenced.proxy.server import FencingProxy, ProxyOptions
from fenced.runtime import clocks
from fenced.service.api import Api
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced_testkit.servers import ServiceServer
from fenced_testkit.servers.certificates import make_certificates
from tests.service.test_values import Program

pytestmark = pytest.mark.xdist_group("service")
PATIENCE = 100.0


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("one", "two"):
        make_certificates(folder / name)
    return folder


@pytest.fixture(scope="module")
def plain() -> Iterator[ServiceServer]:
    with ServiceServer() as server:
        yield server


def expired(folder: Path) -> tuple[Path, Path]:
    """A certificate of yesterday, for loopback, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now - datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    chain, secret = folder / "old.crt", folder / "old.key"
    pem = serialization.Encoding.PEM
    chain.write_bytes(made.public_bytes(pem))
    kind, no = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    secret.write_bytes(key.private_bytes(pem, kind, no))
    return chain, secret


def refused(folder: Path, *options: str) -> str:
    """What `fenced serve` says when it does not start."""
    command = [
        sys.executable,
        "-m",
        "fenced",
        "serve",
        "--store",
        f"ledger:///{folder / 'l.ledger'}",
        *options,
    ]
    if "--listen" not in options:
        command += ["--listen", f"127.0.0.1:{free_port()}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 78, done.stderr
    assert "listening on" not in done.stderr and done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize(
    ("chain", "key", "says"),
    [
        ("nope.crt", "one/server.key", "the certificate {0}/nope.crt: No such file"),
        ("one/server.crt", "nope.key", "the key {0}/nope.key: No such file"),
        ("one/server.crt", "two/server.key", "the key {0}/two/server.key does not belong to the certificate"),
        ("one/server.key", "one/server.key", "cannot be used"),
    ],
)
def test_files_that_cannot_be_used_are_named_before_it_listens(
    files: Path, tmp_path: Path, chain: str, key: str, says: str
) -> None:
    given = str(files / chain), str(files / key)
    assert says.format(files) in refused(tmp_path, "--cert", given[0], "--key", given[1])
    options = ProxyOptions("http://127.0.0.1:1", ("a",), "memory:", certificate=given)
    with pytest.raises(Misconfigured, match=says.split("{0}")[0].strip()):
        asyncio.run(FencingProxy(options).start())


def test_a_missing_file_or_a_taken_address_is_refused(
    files: Path, plain: ServiceServer, tmp_path: Path
) -> None:
    pair = ("--cert", str(files / "one/server.crt"), "--key", str(files / "one/server.key"))
    assert "/nope: No such file" in refused(tmp_path, *pair, "--client-ca", "/nope")
    taken = f"127.0.0.1:{plain.port}"
    assert f"cannot listen on {taken}: Address already in use" in refused(tmp_path, "--listen", taken)
    assert "/nope/socket: No such file" in refused(tmp_path, "--socket", "/nope/socket")


def message(url: str) -> FencedError:
    with fenced.Client(url) as client, pytest.raises(FencedError) as found:
        client.acquire("a", wait=0)
    return found.value


def test_clients_are_told_what_is_wrong(files: Path, plain: ServiceServer, tmp_path: Path) -> None:
    """An expired certificate, one that is not trusted, https:// to a plain port and http:// to a port with TLS."""
    chain, key = expired(tmp_path)
    with ServiceServer(options=("--cert", str(chain), "--key", str(key))) as server:
        assert "old.crt has expired: clients refuse it" in server.log.read_text().splitlines()[0]
        error = message(f"https://127.0.0.1:{server.port}?ssl_ca_certs={chain}")
        assert isinstance(error, Misconfigured) and "its certificate has expired" in str(error)
        assert "not trusted" not in str(error)
        error = message(f"http://127.0.0.1:{server.port}")
        assert isinstance(error, Unavailable) and "https://" in str(error).partition(": ")[2]
        for ciphers, shakes in (("ECDHE+AESGCM", True), ("AES256-GCM-SHA384", False)):
            assert handshake(server.port, ciphers) is shakes, ciphers
    ca = files / "one/ca.crt"
    error = message(f"https://127.0.0.1:{plain.port}?ssl_ca_certs={ca}")
    assert isinstance(error, Misconfigured) and "does not speak TLS" in str(error)
    with ServiceServer(
        options=("--cert", str(files / "two/server.crt"), "--key", str(files / "two/server.key"))
    ) as other:
        assert "not trusted" in str(message(f"https://127.0.0.1:{other.port}?ssl_ca_certs={ca}"))


def handshake(port: int, ciphers: str) -> bool:
    """Whether TLS 1.2 with these ciphers is spoken."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(ciphers)
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as link:
        try:
            context.wrap_socket(link).close()
        except (ssl.SSLError, ConnectionError):
            return False
    return True


async def test_a_page_without_tls_is_another_site() -> None:
    """The scheme of an Origin counts, also behind a gateway that terminates TLS."""
    store = MemoryStore(clocks.now)
    api = Api(lambda runtime, _: MemoryAuthority(store, runtime))
    await api.namespaces.opened("default", create=True)
    gateway = {"x-forwarded-proto": "https"}
    for scheme, more, origin, status in (
        ("http", {}, "http://service", 200),
        ("http", {}, "https://service", 403),
        ("https", {}, "https://service", 200),
        ("https", {}, "http://service", 403),
        ("http", gateway, "https://service", 200),
        ("http", gateway, "http://service", 403),
        ("http", {}, "null", 403),
    ):
        api.scheme = scheme
        program = Program(api)
        found = await program.http.get("/v1", headers={"origin": origin, **more})
        assert found.status_code == status, (scheme, more, origin)
        await program.http.aclose()
    await api.close()
