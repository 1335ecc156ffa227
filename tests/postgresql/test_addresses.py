"""Where PostgreSQL is: what psql takes is taken here, from the address, the environment, service and password files."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import fenced
from fenced.client.reaching import connected
from fenced.drills.relay import Proxy
from fenced.errors import FencedError, Misconfigured, Misuse, Unavailable, redacted
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.postgresql import address
from fenced.stores.postgresql.authority.authority import PostgresqlAuthority
from fenced_testkit.servers import PostgresqlServer
from fenced_testkit.servers.certificates import make_certificates

pytestmark = pytest.mark.xdist_group("postgresql")
RUNTIME = BlockingRuntime()
VARIABLES = (
    "PGHOST",
    "PGHOSTADDR",
    "PGPORT",
    "PGUSER",
    "PGDATABASE",
    "PGPASSWORD",
    "PGPASSFILE",
    "PGSERVICE",
)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    """With a socket file in its folder, TLS, and a role that has to say its password."""
    with PostgresqlServer() as server:
        server.stop()
        certificates = server.folder / "tls"
        make_certificates(certificates)
        server.own(certificates)
        server.settings |= {
            "unix_socket_directories": str(server.folder),
            "ssl": "on",
            "ssl_cert_file": str(certificates / "server.crt"),
            "ssl_key_file": str(certificates / "server.key"),
        }
        rules = server.data / "pg_hba.conf"
        rules.write_text("host all keyholder 127.0.0.1/32 scram-sha-256\n" + rules.read_text())
        server.start()
        server.execute("CREATE ROLE keyholder LOGIN SUPERUSER PASSWORD 'hunter2'")
        server.execute("CREATE DATABASE shop")
        yield server


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def realm(url: str) -> str:
    authority = PostgresqlAuthority(url, RUNTIME)
    try:
        return step(authority.open()).realm
    finally:
        step(authority.close())


def test_addresses_that_psql_takes_are_taken(
    server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, port = server.folder, server.port
    there = realm(f"postgresql://postgres@127.0.0.1:{port}/shop")
    quoted = str(folder).replace("/", "%2F")
    for url in (
        f"postgres://postgres@127.0.0.1:{port}/shop",
        f"postgresql://postgres@{quoted}:{port}/shop",
        f"postgresql:///shop?host={folder}&port={port}&user=postgres",
        f"postgresql://postgres@localhost:{port}/shop",  # which may have two addresses, and one of them nobody at it
        f"postgresql://?hostaddr=127.0.0.1&port={port}&user=postgres&dbname=shop",
        f"postgresql://postgres@127.0.0.1:1,127.0.0.1:{port}/shop",
    ):
        assert realm(url) == there, url

    services = tmp_path / ".pg_service.conf"
    services.write_text(f"[shop]\nhost=127.0.0.1\nport={port}\nuser=keyholder\ndbname=shop\n")
    passwords = tmp_path / "passwords"
    passwords.write_text(f"127.0.0.1:{port}:*:keyholder:hunter2\n")
    passwords.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    assert realm("postgresql://?service=shop") == there
    assert realm("postgresql:///?service=shop&listen=off") == there
    monkeypatch.setenv("PGSERVICEFILE", str(services.rename(tmp_path / "services")))
    monkeypatch.setenv("PGSERVICE", "shop")
    assert realm("postgresql://") == there
    monkeypatch.delenv("PGSERVICE")

    monkeypatch.setenv("PGHOST", str(folder))
    monkeypatch.setenv("PGPORT", str(port))
    monkeypatch.setenv("PGUSER", "postgres")
    assert realm("postgresql:///shop") == there
    monkeypatch.setenv("PGHOST", "localhost")
    monkeypatch.setenv("PGUSER", "keyholder")
    passwords.write_text(f"localhost:{port}:*:keyholder:hunter2\n")
    assert realm("postgresql:///shop") == there, "a password file names hosts as the address does"


def test_a_name_is_looked_up_here_and_checked_by_tls(server: PostgresqlServer, tmp_path: Path) -> None:
    """The connection goes to a number; the certificate is compared with the name all the same."""
    trusted = f"sslmode=verify-full&sslrootcert={server.folder}/tls/ca.crt"
    assert realm(f"postgresql://postgres@localhost:{server.port}/shop?{trusted}")
    with pytest.raises(Misconfigured, match="does not match host name"):
        realm(f"postgresql://postgres@db.internal:{server.port}/shop?hostaddr=127.0.0.1&{trusted}")
    other = tmp_path / "other"
    make_certificates(other)
    with pytest.raises(Misconfigured, match="sslrootcert"):
        realm(
            f"postgresql://postgres@localhost:{server.port}/shop?sslmode=verify-ca&sslrootcert={other}/ca.crt"
        )


def test_without_a_host_it_is_the_default_socket() -> None:
    """Not refused, and not looked for elsewhere: nobody listens there."""
    with pytest.raises(Unavailable, match=r"on socket .*\.s\.PGSQL\.1\b"):
        realm("postgresql:///shop?port=1")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://?service=none", "service file|not found"),
        ("postgresql:///shop?sslmode=perhaps", "invalid sslmode"),
        ("postgresql:///shop?connect_timeout=soon", "connect_timeout is a number|invalid integer"),
        ("postgresql://one,two/shop?hostaddr=127.0.0.1", "could not match"),
    ],
)
def test_an_address_that_libpq_rejects_is_misconfigured(url: str, message: str) -> None:
    with pytest.raises(Misconfigured, match=message):
        realm(url)


def test_passwords_that_are_missing_or_wrong_are_misconfigured(
    server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = f"127.0.0.1:{server.port}/shop"
    with pytest.raises(Misconfigured, match=r"no password supplied.*PGPASSWORD.*\.pgpass"):
        realm(f"postgresql://keyholder@{where}")
    for url in (
        f"postgresql://keyholder:hunter3@{where}",
        f"postgresql://keyholder:hunter3@{where}?sslmode=disable",
    ):
        with pytest.raises(Misconfigured, match="Correct the password") as caught:
            realm(url)
        assert "hunter" not in str(caught.value)
    with pytest.raises(Misconfigured, match="Correct the address"):
        realm(f"postgresql://nobody@{where}")
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    assert realm(f"postgresql://keyholder@{where}")


def test_every_server_that_was_tried_is_named(server: PostgresqlServer) -> None:
    with Proxy(server.host, server.port) as proxy:
        proxy.black_hole()
        authority = PostgresqlAuthority(
            f"postgresql://postgres@127.0.0.1:1,127.0.0.1:{proxy.port}/shop", RUNTIME
        )
        with pytest.raises(Unavailable, match=r"port 1 failed.*no connection in time"):
            step(authority.open(until=RUNTIME.now() + 0.3))


def test_a_silent_address_of_a_name_does_not_use_up_the_time_of_the_next(
    server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name may have several addresses, as hosts may be several."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in ("127.0.0.2", "127.0.0.1")]
    with socket.create_server(
        ("127.0.0.2", server.port)
    ) as silent:  # takes connections, and never says a word
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: list(found))
        realm(f"postgresql://postgres@db.internal:{server.port}/shop?connect_timeout=1")
        silent.accept()[0].close()  # it was tried


# Everywhere that an address of PostgreSQL is read.


def test_the_short_scheme_is_taken_by_clients_guards_and_commands(server: PostgresqlServer) -> None:
    url = f"postgres://postgres@127.0.0.1:{server.port}/shop"
    with fenced.Client(url) as client, client.hold("orders") as lease, fenced.Values(url) as guard:
        guard.write(lease, "orders", b"1")
    with connected(url) as (_, connection):
        assert connection.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("scheme", ["postgresql+psycopg", "postgres+asyncpg", "sqlite+aiosqlite"])
def test_an_address_in_the_style_of_sqlalchemy_gets_advice(scheme: str) -> None:
    plain = scheme.partition("+")[0]
    for use in (fenced.Client, fenced.Values):
        with pytest.raises(FencedError, match=rf"write {plain}://") as caught:
            use(f"{scheme}://app:hunter2@db.internal/shop")
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgres://app:hunter2@db.internal/shop?sslmode=require", "postgresql://db.internal/shop"),
        ("postgresql:///shop?user=app&password=hunter2", "postgresql:///shop"),
        ("postgresql://?service=shop&password=hunter2", "postgresql://?service=shop"),
        ("postgresql:///shop?host=/run/pg&port=1", "postgresql:///shop?host=/run/pg&port=1"),
    ],
)
def test_the_shown_address_has_no_secret(url: str, shown: str) -> None:
    assert address.parse(url).shown == shown


def test_a_guards_address_is_shown_without_its_password() -> None:
    where = "postgresql:///shop?user=app&password=hunter2&sslpassword=hunter2&host=db.internal"
    assert "hunter2" not in str(redacted(where))
    assert "db.internal" in str(redacted(where))


def test_a_scheme_without_slashes_is_misuse() -> None:
    with pytest.raises(Misuse):
        address.parse("postgresql:shop")
