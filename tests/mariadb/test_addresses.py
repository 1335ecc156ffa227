"""Where MariaDB and MySQL are, as their users write it."""

import pymysql
import pytest

from fenced.errors import Misconfigured, Misuse, redacted
from fenced.stores.mariadb.address import MariadbAddress
from fenced_testkit.servers import MariadbServer
from tests.conftest import NewMariadb


@pytest.mark.parametrize(
    ("url", "endpoints", "shown"),
    [
        ("mariadb://app:pw@db.internal/shop", [("db.internal", 3306)], "mariadb://db.internal:3306/shop"),
        ("mysql://app@/shop", [("localhost", 3306)], "mysql://localhost:3306/shop"),
        ("mysql://app@one,[::1]:7/shop", [("one", 3306), ("::1", 7)], "mysql://one:3306,[::1]:7/shop"),
        ("mysql://a%40b:p%2Fw@h/my%20shop?charset=utf8mb4", [("h", 3306)], "mysql://h:3306/my shop"),
        (
            "mariadb://app:pw@/shop?unix_socket=/run/a%20b.sock",
            ["/run/a b.sock"],
            "mariadb:///shop?unix_socket=/run/a b.sock",
        ),
    ],
)
def test_an_address_says_where_and_shows_no_secret(url: str, endpoints: list[object], shown: str) -> None:
    address = MariadbAddress(url)
    assert address.endpoints == endpoints
    assert address.url == shown and "pw" not in repr(address)
    assert not address.tls and "pw" not in str(redacted(url))


def test_user_password_and_database_are_decoded() -> None:
    address = MariadbAddress("mysql://a%40b:p%2Fw%3A@h/my%20shop")
    assert (address.user, address.password, address.database) == ("a@b", "p/w:", "my shop")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mariadb://app:hunter2@db.internal", "names a database"),
        ("mariadb://app:hunter2@db.internal/", "names a database"),
        ("mariadb://app:hunter2@db.internal/a/b", "names a database"),
        ("mariadb://db.internal/hunter2", "names a user"),
        ("mariadb://app:hunter2@h,h/shop", "twice"),
        ("mariadb://app:hunter2@h/shop?ssl=perhaps", "ssl is true"),
        ("mariadb://app:hunter2@h/shop?sslmode=require", "no option 'sslmode'.*ssl_ca_certs"),
        ("mariadb://app:hunter2@h/shop?ssl_key=k", "needs an ssl_certfile"),
        ("mariadb://app:hunter2@h/shop?unix_socket=/run/x", "leave the host out"),
        ("mariadb:app", "one looks like mariadb://user:password@host"),
        ("mariadb://app:hunter2@h:port/shop", "one looks like"),
    ],
)
def test_a_text_that_is_no_address_is_misuse(url: str, message: str) -> None:
    with pytest.raises(Misuse, match=message) as caught:
        MariadbAddress(url)
    assert "hunter" not in str(caught.value)


def test_files_for_tls_have_the_names_that_drivers_use(mariadb_tls_server: MariadbServer) -> None:
    trusted = str(mariadb_tls_server.ca_path)
    for option in ("ssl_ca", "ssl_ca_certs"):
        address = MariadbAddress(mariadb_tls_server.url(**{option: trusted}))
        assert address.tls and address.context is not None and address.context.check_hostname
    assert MariadbAddress("mysql://app@h/shop?ssl=true").tls
    assert not MariadbAddress("mysql://app@/shop?unix_socket=/run/x&ssl=true").tls
    with pytest.raises(Misconfigured, match="ssl_ca_certs"):
        _ = MariadbAddress("mysql://app@h/shop?ssl_ca=/nowhere.pem").context
    with pymysql.connect(
        host=mariadb_tls_server.host, port=mariadb_tls_server.port, user="root", ssl=address.context
    ) as connection:
        cursor = connection.cursor()
        cursor.execute("SHOW STATUS LIKE 'Ssl_version'")
        assert cursor.fetchall() == (("Ssl_version", "TLSv1.3"),)


def test_a_new_database_is_at_its_address(new_mariadb: NewMariadb, mariadb_server: MariadbServer) -> None:
    """By the network and by the socket file."""
    address = MariadbAddress(new_mariadb())
    for place in (
        {"host": mariadb_server.host, "port": mariadb_server.port},
        {"unix_socket": str(mariadb_server.socket)},
    ):
        with pymysql.connect(user=address.user, database=address.database, **place) as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT DATABASE()")
            assert cursor.fetchall() == ((address.database,),)
