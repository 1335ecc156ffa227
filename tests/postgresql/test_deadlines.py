"""PostgreSQL that is silent, frozen or dripping: a call ends by its caller's deadline, and leaves nothing behind."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from fenced.drills.relay import Proxy
from fenced.errors import Indeterminate, Misconfigured, Unavailable
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.postgresql.authority.authority import PostgresqlAuthority
from fenced.testing.kit import CheckFailed, asking, ensure, granted, raises
from fenced.values.contracts import Readable, Runtime
from fenced.values.model import Granted, Kept, Released
from fenced_testkit.servers import PostgresqlServer

pytestmark = pytest.mark.xdist_group("postgresql")

SECONDS = 0.2
LATE = 3.0
"""How much later a call may end on a machine that is busy with other things; a call without a deadline takes longer."""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with PostgresqlServer() as server:
        yield server


class Scene:
    """A server, a proxy in front of it, and clients on the way through the proxy."""

    def __init__(self, server: PostgresqlServer, runtime: Runtime) -> None:
        self.server = server
        self.runtime = runtime
        self.proxy = Proxy(server.host, server.port)
        self.namespace = secrets.token_hex(8)
        self.made: list[PostgresqlAuthority] = []

    def client(self, kind: type[PostgresqlAuthority] = PostgresqlAuthority) -> PostgresqlAuthority:
        url = self.server.url().replace(f":{self.server.port}/", f":{self.proxy.port}/")
        self.made.append(kind(url, self.runtime, namespace=self.namespace))
        return self.made[-1]

    async def opened(self, kind: type[PostgresqlAuthority] = PostgresqlAuthority) -> PostgresqlAuthority:
        client = self.client(kind)
        await client.open()
        return client

    async def __aenter__(self) -> Scene:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.made:
            await client.close()
        self.proxy.stop()


in_blocking = pytest.mark.parametrize("colour", ["blocking"])
"""What is looked at is the server's."""


# Deadlines.


async def test_a_name_that_is_looked_up_for_long_is_not_waited_for(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libpq would wait for the name server without any limit."""
    answered = threading.Event()
    look_up = socket.getaddrinfo
    looked_up: list[str] = []

    def slow(host: str, *args: Any) -> Any:
        if host != "db.internal":  # a thread that another test has left behind
            return look_up(host, *args)
        looked_up.append(host)
        answered.wait()
        raise socket.gaierror("too late")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    client = PostgresqlAuthority("postgresql://db.internal/shop", runtime)
    until = runtime.now() + SECONDS
    try:
        error = await raises(Unavailable, client.open(until=until))
        ensure("no address in time" in str(error) and looked_up == ["db.internal"], f"{error}")
        ensure(runtime.now() - until < LATE, "in time")
    finally:
        answered.set()
    await client.close()


class Stalled(BlockingRuntime):
    """A process that was stopped while it waited: its deadline is over when it looks, and the answer is there."""

    stalled = False

    async def readable(self, source: Readable, until: float) -> bool:
        return await super().readable(source, until) and not self.stalled


def test_an_answer_that_came_in_time_is_taken_however_late(server: PostgresqlServer) -> None:
    runtime = Stalled()

    async def story() -> None:
        async with Scene(server, runtime) as scene:
            client, ask = await scene.opened(), asking(runtime, "stalled")
            await granted(client, ask)
            await client.release(ask.secret)
            runtime.stalled = True
            assert isinstance(await client.ask(asking(runtime, "stalled")), Granted)

    step(story())


# What was given up.


# proves authority postgresql: given-up-ended
@in_blocking
async def test_a_statement_that_was_given_up_ends_on_the_server(
    server: PostgresqlServer, runtime: Runtime
) -> None:
    """Its client is gone: it neither waits for locks any longer, nor keeps those that it has."""
    async with Scene(server, runtime) as scene:
        client = await scene.opened()
        for name in "ab":
            ask = asking(scene.runtime, name)
            await granted(client, ask)
            await client.release(ask.secret)
        server.execute("ALTER FUNCTION fenced.ask SET lock_timeout = 0")  # which would end it, but later
        try:
            with psycopg.connect(server.url()) as other:
                other.execute("SELECT FROM fenced.name WHERE name = 'b' FOR UPDATE")
                until = scene.runtime.now() + SECONDS
                await raises(Indeterminate, client.ask(asking(scene.runtime, "a", "b"), until))
                server.wait_until(
                    lambda: bool(
                        server.execute("SELECT name FROM fenced.name WHERE name = 'a' FOR UPDATE SKIP LOCKED")
                    ),
                    "it lets go of what it has locked",
                )
        finally:
            server.execute("ALTER FUNCTION fenced.ask SET lock_timeout = '4s'")


# Settings.


async def weakened(scene: Scene, kind: type[PostgresqlAuthority]) -> None:
    strict, held = await scene.opened(kind), asking(scene.runtime, "held")
    await granted(strict, held)
    try:
        _set(scene.server, "fsync", "off")
        await _reconnect(scene, strict)
        for _ in range(2):
            error = await raises(Misconfigured, strict.ask(asking(scene.runtime, "orders")))
            ensure("fsync is off" in str(error) and "best-effort" in str(error), str(error))
        (kept,) = await strict.renew([held.secret])
        ensure(isinstance(kept, Kept), f"holders may go on: {kept}")
        ensure(await strict.release(held.secret) == Released(), "and give back")
        told = scene.client()
        ensure(bool((await told.open()).doubts), "a client that comes now is told when it opens")
        await granted(told, asking(scene.runtime, "told"))
    finally:
        _set(scene.server, "fsync", "on")
    await granted(strict, asking(scene.runtime, "orders"))  # on the connection that it had found wanting


# proves authority postgresql: settings-watched
@in_blocking
async def test_a_server_that_is_no_longer_strict_grants_nothing(
    server: PostgresqlServer, runtime: Runtime
) -> None:
    async with Scene(server, runtime) as scene:
        await weakened(scene, PostgresqlAuthority)


class SettingsForgotten(PostgresqlAuthority):
    """What a server is set to is looked at when it is opened, and not again."""

    def _weakened(self, session: object) -> list[str]:
        return []


@in_blocking
async def test_forgotten_settings_are_noticed(server: PostgresqlServer, runtime: Runtime) -> None:
    async with Scene(server, runtime) as scene:
        with pytest.raises(CheckFailed):
            await weakened(scene, SettingsForgotten)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("client_min_messages", "error"), ("default_transaction_isolation", "serializable")],
)
@in_blocking
async def test_a_setting_that_nothing_works_with_is_found_by_the_next_connection(
    setting: str, value: str, server: PostgresqlServer, runtime: Runtime
) -> None:
    async with Scene(server, runtime) as scene:
        client = await scene.opened()
        server.execute(f"ALTER DATABASE postgres SET {setting} = '{value}'")
        try:
            await _reconnect(scene, client)
            error = await raises(Misconfigured, client.ask(asking(scene.runtime, "orders")))
            ensure(setting in str(error), str(error))
        finally:
            server.execute(f"ALTER DATABASE postgres RESET {setting}")


async def _reconnect(scene: Scene, client: PostgresqlAuthority) -> None:
    """The request that finds its connection broken may have been carried out, so it is unknown whatever comes next."""
    scene.proxy.reset()
    await raises(Indeterminate, client.ask(asking(scene.runtime, "broken")))


def _set(server: PostgresqlServer, setting: str, value: str) -> None:
    with psycopg.connect(server.url(), autocommit=True) as old:
        server.execute(f"ALTER SYSTEM SET {setting} = '{value}'")
        server.execute("SELECT pg_reload_conf()")
        show, then = f"SHOW {setting}", f"{setting} is {value}"
        server.wait_until(lambda: server.execute(show) == [(value,)], f"{then} for those to come")
        server.wait_until(
            lambda: old.execute(show).fetchall() == [(value,)], f"{then} for one that runs already"
        )


# Clients that are dropped.


@in_blocking
async def test_using_an_abandoned_connection_fails(server: PostgresqlServer, runtime: Runtime) -> None:
    """Its socket is shut down under it; libpq's own memory is left to the one that uses it."""
    async with Scene(server, runtime) as scene:
        client, ask = await scene.opened(), asking(scene.runtime, "locked")
        await granted(client, ask)
        await client.release(ask.secret)
        with psycopg.connect(server.url()) as other:
            other.execute("SELECT FROM fenced.name WHERE name = 'locked' FOR UPDATE")
            waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = 'fenced'"

            def leave() -> None:
                server.wait_until(lambda: bool(server.execute(waiting)), "the ask waits for the lock")
                client.abandon()

            leaving = threading.Thread(target=leave)
            leaving.start()
            await raises(
                (Unavailable, Indeterminate),
                client.ask(asking(scene.runtime, "locked"), scene.runtime.now() + 60),
            )
            leaving.join()
