"""PostgreSQL that is silent, frozen or dripping: a call ends by its caller's deadline, and leaves nothing behind."""

import asyncio
import contextlib
import gc
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import fenced
from fenced.drills.relay import Proxy
from fenced.errors import Indeterminate, Misconfigured, Unavailable
from fenced.runtime.aio import AioRuntime
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.postgresql.authority.authority import PostgresqlAuthority
from fenced.testing import COLOURS
from fenced.testing.kit import CheckFailed, asking, ensure, granted, raises
from fenced.values.contracts import Colour, Readable, Runtime
from fenced.values.model import Granted, Kept, ReleaseAnswer, Released
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

    def processes(self) -> int:
        """How many server processes work for clients of ours."""
        ((count,),) = self.server.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'fenced'"
        )
        return int(count)


def play(
    story: Callable[[Scene], Awaitable[None]],
    server: PostgresqlServer,
    colour: Colour,
    runtime: BlockingRuntime | None = None,
) -> None:
    if colour == "blocking":
        step(_play(story, server, runtime or BlockingRuntime()))
    else:
        asyncio.run(_in_loop(story, server))


async def _in_loop(story: Callable[[Scene], Awaitable[None]], server: PostgresqlServer) -> None:
    runtime = AioRuntime()
    try:
        await _play(story, server, runtime)
    finally:
        runtime.close()


async def _play(
    story: Callable[[Scene], Awaitable[None]], server: PostgresqlServer, runtime: Runtime
) -> None:
    scene = Scene(server, runtime)
    try:
        await story(scene)
    finally:
        for client in scene.made:
            await client.close()
        scene.proxy.stop()


# Deadlines.


def silent(scene: Scene) -> None:
    scene.proxy.black_hole()


def dripping(scene: Scene) -> None:
    scene.proxy.drip(0.5)


def frozen(scene: Scene) -> None:
    scene.server.freeze()


@contextlib.asynccontextmanager
async def broken(scene: Scene, fault: Callable[[Scene], None]) -> AsyncIterator[None]:
    fault(scene)
    try:
        yield
    finally:
        scene.server.thaw()
        scene.proxy.heal()


async def deadlines(scene: Scene, fault: Callable[[Scene], None], kind: type[PostgresqlAuthority]) -> None:
    client, held = await scene.opened(kind), asking(scene.runtime, "orders")
    await granted(client, held)
    await client.renew([held.secret])
    calls: list[Callable[[float], Awaitable[object]]] = [
        lambda until: client.ask(asking(scene.runtime, "another"), until),  # on a connection that is open
        lambda until: client.ask(asking(scene.runtime, "another"), until),  # and on one that has to be made
        lambda until: client.renew([held.secret], until),
        lambda until: client.release(held.secret, until),
        lambda until: client.withdraw(held.secret, until),
        lambda until: scene.client(kind).open(until=until),
    ]
    async with broken(scene, fault):
        for number, call in enumerate(calls):
            until = scene.runtime.now() + SECONDS
            await raises((Indeterminate, Unavailable), call(until))
            late = scene.runtime.now() - until
            ensure(late < LATE, f"call {number} ended {late:.1f} s late")
    await client.release(held.secret)


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("fault", [silent, dripping, frozen])
def test_every_call_ends_by_its_deadline(
    fault: Callable[[Scene], None], colour: Colour, server: PostgresqlServer
) -> None:
    play(lambda scene: deadlines(scene, fault, PostgresqlAuthority), server, colour)


class DeadlineForgotten(PostgresqlAuthority):
    """Each statement has a limit of its own, and the caller's is not asked for."""

    async def release(self, secret: str, until: float | None = None, *, keep: float = 0.0) -> ReleaseAnswer:
        return await super().release(secret, keep=keep)


def test_a_forgotten_deadline_is_noticed(server: PostgresqlServer) -> None:
    with pytest.raises(CheckFailed, match="call 3 ended"):
        play(lambda scene: deadlines(scene, silent, DeadlineForgotten), server, "blocking")


@pytest.mark.parametrize("colour", COLOURS)
def test_a_name_that_is_looked_up_for_long_is_not_waited_for(
    colour: Colour, server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
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

    async def story(scene: Scene) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", slow)
        client = PostgresqlAuthority("postgresql://db.internal/shop", scene.runtime)
        until = scene.runtime.now() + SECONDS
        error = await raises(Unavailable, client.open(until=until))
        ensure("no address in time" in str(error) and looked_up == ["db.internal"], f"{error}")
        ensure(scene.runtime.now() - until < LATE, "in time")
        answered.set()

    try:
        play(story, server, colour)
    finally:
        answered.set()


class Stalled(BlockingRuntime):
    """A process that was stopped while it waited: its deadline is over when it looks, and the answer is there."""

    stalled = False

    async def readable(self, source: Readable, until: float) -> bool:
        return await super().readable(source, until) and not self.stalled


def test_an_answer_that_came_in_time_is_taken_however_late(server: PostgresqlServer) -> None:
    runtime = Stalled()

    async def story(scene: Scene) -> None:
        client, ask = await scene.opened(), asking(scene.runtime, "stalled")
        await granted(client, ask)
        await client.release(ask.secret)
        runtime.stalled = True
        ensure(isinstance(await client.ask(asking(scene.runtime, "stalled")), Granted), "granted")

    play(story, server, "blocking", runtime)


# What was given up.


# proves authority postgresql: given-up-ended
def test_a_statement_that_was_given_up_ends_on_the_server(server: PostgresqlServer) -> None:
    """Its client is gone: it neither waits for locks any longer, nor keeps those that it has."""

    async def story(scene: Scene) -> None:
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

    play(story, server, "blocking")


@pytest.mark.parametrize("colour", COLOURS)
def test_a_release_that_a_killed_server_never_answered_frees_the_name_when_repeated(
    colour: Colour, server: PostgresqlServer
) -> None:
    """And it does not touch whoever has the name by then."""

    async def story(scene: Scene) -> None:
        client, held = await scene.opened(), asking(scene.runtime, "killed", ttl=600)
        await granted(client, held)
        server.kill()
        await raises((Indeterminate, Unavailable), client.release(held.secret, scene.runtime.now() + SECONDS))
        server.start()
        ensure(await client.release(held.secret) == Released(), "it is free long before its ttl is over")
        after = asking(scene.runtime, "killed")
        await granted(client, after)
        for again in (client.release, client.withdraw):
            ensure(await again(held.secret) == Released(), "the same answer again")
        (kept,) = await client.renew([after.secret])
        ensure(isinstance(kept, Kept), f"the next holder has it: {kept}")
        await client.release(after.secret)

    play(story, server, colour)


def test_a_release_that_a_killed_server_missed_is_repeated(server: PostgresqlServer) -> None:
    """The block ends while the server is down. Nobody waits for a ttl of ten minutes afterwards."""
    with fenced.Client(server.url()) as client, fenced.Client(server.url()) as other:
        with client.hold("settled", ttl=600) as lease:
            server.kill()
        server.start()
        after = other.acquire("settled", ttl=600, wait=60)
        assert after.token > lease.token
        after.release()


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
def test_a_server_that_is_no_longer_strict_grants_nothing(server: PostgresqlServer) -> None:
    play(lambda scene: weakened(scene, PostgresqlAuthority), server, "blocking")


class SettingsForgotten(PostgresqlAuthority):
    """What a server is set to is looked at when it is opened, and not again."""

    def _weakened(self, session: object) -> list[str]:
        return []


def test_forgotten_settings_are_noticed(server: PostgresqlServer) -> None:
    with pytest.raises(CheckFailed):
        play(lambda scene: weakened(scene, SettingsForgotten), server, "blocking")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("client_min_messages", "error"), ("default_transaction_isolation", "serializable")],
)
def test_a_setting_that_nothing_works_with_is_found_by_the_next_connection(
    setting: str, value: str, server: PostgresqlServer
) -> None:
    async def story(scene: Scene) -> None:
        client = await scene.opened()
        server.execute(f"ALTER DATABASE postgres SET {setting} = '{value}'")
        try:
            await _reconnect(scene, client)
            error = await raises(Misconfigured, client.ask(asking(scene.runtime, "orders")))
            ensure(setting in str(error), str(error))
        finally:
            server.execute(f"ALTER DATABASE postgres RESET {setting}")

    play(story, server, "blocking")


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


def sockets_to(port: int) -> set[str]:
    """The sockets of this process that are connected to a port, also those that the server has closed."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    connected = {f"socket:[{row[9]}]" for row in rows if row[2].endswith(f":{port:04X}")}
    mine = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it
            mine.add(os.readlink(descriptor))
    return mine & connected


async def abandoned(scene: Scene, kind: type[PostgresqlAuthority]) -> None:
    server = scene.server
    server.wait_until(lambda: scene.processes() == 0, "those of other tests are gone")
    before = sockets_to(server.port)
    client, held = (
        kind(server.url(), scene.runtime, namespace=scene.namespace),
        asking(scene.runtime, "orders"),
    )
    await client.open()
    await granted(client, held)
    await client.renew([held.secret])
    await client.ask(asking(scene.runtime, "orders", wait=True))
    await client.next_wakeups(scene.runtime.now() + 0.05)
    ensure(scene.processes() == 3, "one that asks, the keeper's, and one that listens")
    for _ in range(2):
        other = threading.Thread(target=client.abandon)
        other.start()
        other.join()
    ensure(sockets_to(server.port) <= before, "no descriptor is left")
    server.wait_until(lambda: scene.processes() == 0, "no connection is left")
    await raises((Unavailable, Indeterminate), client.ask(asking(scene.runtime, "another")))
    view = await (await scene.opened()).observe("orders")
    ensure(view.held_by is not None, "what was held is held until its ttl is over")


@pytest.mark.parametrize("colour", COLOURS)
def test_an_abandoned_authority_leaves_no_connection_and_releases_nothing(
    colour: Colour, server: PostgresqlServer
) -> None:
    play(lambda scene: abandoned(scene, PostgresqlAuthority), server, colour)


class ListenerForgotten(PostgresqlAuthority):
    """A dropped client goes on listening."""

    def abandon(self) -> None:
        listeners, self._listeners, listener = self._listeners, set(), self._listener
        super().abandon()
        self._listeners, self._listener = listeners, listener


def test_a_forgotten_listener_is_detected(server: PostgresqlServer) -> None:
    with pytest.raises(CheckFailed, match="no descriptor is left"):
        play(lambda scene: abandoned(scene, ListenerForgotten), server, "blocking")
    gc.collect()  # which closes it after all


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_clients_that_are_dropped_keep_no_connection(server: PostgresqlServer) -> None:
    with Proxy(server.host, server.port) as proxy:
        url = server.url().replace(f":{server.port}/", f":{proxy.port}/")
        clients = [fenced.Client(url) for _ in range(20)]
        for number, client in enumerate(clients):
            client.acquire(f"dropped/{number}", ttl=600)
        assert proxy.connections >= 20
        del clients, client
        gc.collect()
        count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'fenced'"
        server.wait_until(lambda: server.execute(count) == [(0,)], "no connection is left")


def test_using_an_abandoned_connection_fails(server: PostgresqlServer) -> None:
    """Its socket is shut down under it; libpq's own memory is left to the one that uses it."""

    async def story(scene: Scene) -> None:
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

    play(story, server, "blocking")
