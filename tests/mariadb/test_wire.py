"""Connections to MariaDB in both colours: results, refusals, deadlines, TLS, and which of several servers is taken."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

import pytest

from fenced.drills.relay import Proxy
from fenced.errors import Misconfigured, Unavailable
from fenced.net.pool import ConnectionBroken
from fenced.stores.mariadb.address import MariadbAddress
from fenced.stores.mariadb.wire.connection import MariadbConnection, connect, literal
from fenced.stores.mariadb.wire.failures import ServerRefusal
from fenced.testing import COLOURS
from fenced.values.contracts import Colour, Runtime
from fenced_testkit.servers import MariadbServer
from tests.colours import play

Use = Callable[[MariadbConnection, Runtime], Awaitable[None]]
both_colours = pytest.mark.parametrize("colour", COLOURS)


def using(url: str, colour: Colour, use: Use) -> None:
    async def work(runtime: Runtime) -> None:
        connection = await connect(MariadbAddress(url), runtime, runtime.now() + 5)
        try:
            await use(connection, runtime)
        finally:
            connection.close()

    play(work, colour)


@both_colours
def test_a_script_is_one_round_trip(colour: Colour, mariadb_url: str) -> None:
    """Each statement has its result, and its own time. Those before a refused one were carried out."""

    async def use(connection: MariadbConnection, runtime: Runtime) -> None:
        async def rows(*statements: str) -> list[object]:
            return [result.rows for result in await connection.run(statements, runtime.now() + 5)]

        first, _, then = await rows("SELECT UTC_TIMESTAMP(6)", "DO SLEEP(0.01)", "SELECT UTC_TIMESTAMP(6)")
        assert first < then  # type: ignore[operator]
        await rows("CREATE TABLE t (id bigint AUTO_INCREMENT PRIMARY KEY, v varbinary(200))")
        texts = ["plain", 'a "b" ; c', "it's", "back\\slash", "", "é\n\0"]
        made = await connection.run(
            [f"INSERT INTO t (v) VALUES ({literal(text)})" for text in texts], runtime.now() + 5
        )
        assert [result.insert_id for result in made] == [1, 2, 3, 4, 5, 6]
        for mode in ("''", "'NO_BACKSLASH_ESCAPES,ANSI_QUOTES'"):
            await rows(f"SET sql_mode = {mode}")
            (found,) = await rows("SELECT v FROM t ORDER BY id")
            assert found == tuple((text.encode(),) for text in texts)
        with pytest.raises(ServerRefusal, match=r"nowhere.*1146") as refused:
            await rows("DELETE FROM t", "SELECT * FROM nowhere", "DROP TABLE t")
        assert (refused.value.code, refused.value.at) == (1146, 1)
        assert await rows("SELECT count(*) FROM t") == [((0,),)]

    using(mariadb_url, colour, use)


@both_colours
def test_a_deadline_is_for_all_of_an_answer(colour: Colour, mariadb_server: MariadbServer) -> None:
    async def silent(connection: MariadbConnection, runtime: Runtime) -> None:
        with pytest.raises(ConnectionBroken, match="in time"):
            await connection.run(["SELECT SLEEP(10)"], runtime.now() + 0.1)

    async def late(connection: MariadbConnection, runtime: Runtime) -> None:
        with pytest.raises(Unavailable, match="before the request was sent"):
            await connection.run(["SELECT 1"], runtime.now())

    async def closed(connection: MariadbConnection, runtime: Runtime) -> None:
        # MySQL says first that the statement was interrupted.
        with contextlib.suppress(ServerRefusal, ConnectionBroken):
            await connection.run(["KILL CONNECTION_ID()"], runtime.now() + 5)
        with pytest.raises(ConnectionBroken):
            await connection.run(["SELECT 1"], runtime.now() + 5)

    for use in (silent, late, closed):
        using(mariadb_server.url(), colour, use)
    with Proxy(mariadb_server.host, mariadb_server.port) as proxy:

        async def dripping(connection: MariadbConnection, runtime: Runtime) -> None:
            proxy.drip(0.05)
            began = runtime.now()
            with pytest.raises(ConnectionBroken, match="in time"):
                await connection.run(["SELECT REPEAT('x', 1000)"], began + 0.3)
            assert runtime.now() - began < 5, "every byte comes in time, and all of them do not"

        using(f"mariadb://root@{proxy.host}:{proxy.port}/mysql", colour, dripping)


@both_colours
def test_a_silent_server_leaves_time_for_the_next(colour: Colour, mariadb_server: MariadbServer) -> None:
    with Proxy(mariadb_server.host, mariadb_server.port) as proxy:
        proxy.black_hole()
        place = f"{proxy.host}:{proxy.port},{mariadb_server.host}:{mariadb_server.port}"

        async def work(runtime: Runtime) -> None:
            address = MariadbAddress(f"mariadb://root@{place}/mysql")
            connection = await connect(address, runtime, runtime.now() + 2)
            assert connection.endpoint == (mariadb_server.host, mariadb_server.port)
            connection.close()

        play(work, colour)


@both_colours
def test_by_tls_and_by_socket(colour: Colour, mariadb_tls_server: MariadbServer) -> None:
    server = mariadb_tls_server
    for url, secure in (
        (server.url(ssl_ca=str(server.ca_path)), True),
        (f"mariadb://root@/mysql?unix_socket={server.socket}", False),
        (server.url(), False),
    ):

        async def use(connection: MariadbConnection, runtime: Runtime, secure: bool = secure) -> None:
            (found,) = await connection.run(["SHOW STATUS LIKE 'Ssl_version'"], runtime.now() + 5)
            assert found.rows == (("Ssl_version", "TLSv1.3" if secure else ""),)

        using(url, colour, use)


@both_colours
@pytest.mark.parametrize(
    ("part", "instead", "error", "message"),
    [
        ("root@", "root:wrong@", Misconfigured, "1045.*correct the user or the password"),
        ("/mysql", "/nowhere", Misconfigured, "1049.*correct its name"),
        ("/mysql", "/mysql?ssl=true", Misconfigured, "certificate is not trusted"),
    ],
)
def test_an_error_that_a_retry_cannot_mend_is_misconfigured(
    colour: Colour,
    part: str,
    instead: str,
    error: type[Exception],
    message: str,
    mariadb_tls_server: MariadbServer,
) -> None:
    url = mariadb_tls_server.url().replace(part, instead)

    async def use(connection: MariadbConnection, runtime: Runtime) -> None:
        raise AssertionError("it connected")

    with pytest.raises(error, match=message) as caught:
        using(url, colour, use)
    assert "wrong@" not in str(caught.value)


def test_nobody_there_is_unavailable(mariadb_server: MariadbServer) -> None:
    async def use(connection: MariadbConnection, runtime: Runtime) -> None:
        raise AssertionError("it connected")

    with Proxy(mariadb_server.host, mariadb_server.port) as proxy:
        proxy.refuse()
        for colour in COLOURS:
            with pytest.raises(Unavailable, match=r"Errno 111|in time|Lost"):
                using(f"mariadb://root@{proxy.host}:{proxy.port}/mysql", colour, use)
