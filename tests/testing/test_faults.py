"""The proxy's faults, each with a real Redis behind it that tells what has arrived."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from fenced.drills.relay import Fault, Proxy
from fenced.drills.relay.ports import free_port
from fenced_testkit.servers import RedisServer

SILENCE_SECONDS = 0.15
"""Long enough for a loopback round trip, on a busy machine too."""

RESET, SILENT = "reset", "silent"


class Client:
    """Redis' inline commands on a plain socket: nothing is hidden, nothing is sent twice."""

    def __init__(self, proxy: Proxy) -> None:
        self.socket = socket.create_connection((proxy.host, proxy.port), timeout=10)

    def send(self, text: str) -> None:
        self.socket.sendall(f"{text}\r\n".encode())

    def receive(self, timeout: float = 10) -> str:
        """The reply, or what came instead of one; "" is an orderly end."""
        self.socket.settimeout(timeout)
        try:
            return self.socket.recv(65536).decode().strip()
        except TimeoutError:
            return SILENT
        except ConnectionResetError:
            return RESET

    def ask(self, text: str, timeout: float = 10) -> str:
        self.send(text)
        return self.receive(timeout)


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    redis_server.execute("DEL", "n")
    with Proxy(redis_server.host, redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def connect(proxy: Proxy) -> Iterator[Callable[[], Client]]:
    clients: list[Client] = []

    def make() -> Client:
        clients.append(Client(proxy))
        return clients[-1]

    yield make
    for client in clients:
        client.socket.close()


def count(server: RedisServer) -> int:
    return int(server.execute("GET", "n") or 0)


def eventually(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_passed_bytes_are_unchanged_and_counted(proxy: Proxy, connect: Callable[[], Client]) -> None:
    client = connect()
    value = os.urandom(5_000_000)
    client.socket.sendall(b"*3\r\n$3\r\nSET\r\n$3\r\nbig\r\n$%d\r\n%b\r\n" % (len(value), value))
    assert client.receive() == "+OK"
    client.send("GET big")
    time.sleep(SILENCE_SECONDS)  # nobody reads: the proxy holds back, and loses nothing
    reply = b""
    while len(reply) < len(value) + 12:
        reply += client.socket.recv(1 << 20)
    assert reply == b"$%d\r\n%b\r\n" % (len(value), value)
    assert connect().ask("DEL big") == ":1"
    assert (proxy.connections, proxy.requests) == (2, 3)


def test_both_sides_ends_are_passed_on(
    proxy: Proxy, redis_server: RedisServer, connect: Callable[[], Client]
) -> None:
    client = connect()
    client.send("INCR n")
    client.socket.shutdown(socket.SHUT_WR)
    assert (client.receive(), client.receive()) == (":1", "")
    client = connect()
    assert client.ask("CLIENT SETNAME rude") == "+OK"
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.socket.close()
    eventually(lambda: "rude" not in _names(redis_server))


def _names(server: RedisServer) -> set[str]:
    return {client["name"] for client in server.execute("CLIENT LIST")}


@pytest.mark.parametrize(
    "fault,heard,done,heard_later",
    [
        (Fault.CUT_BEFORE, RESET, 0, None),
        (Fault.LOSE_REPLY, RESET, 1, None),
        (Fault.CUT_AFTER, RESET, 1, None),
        (Fault.SWALLOW, SILENT, 0, SILENT),
        (Fault.SWALLOW_REPLY, SILENT, 1, SILENT),
        (Fault.HOLD_REPLY, SILENT, 1, ":1"),
        (Fault.HOLD, SILENT, 0, ":1"),
    ],
)
def test_a_fault_at_one_request(
    proxy: Proxy,
    redis_server: RedisServer,
    connect: Callable[[], Client],
    fault: Fault,
    heard: str,
    done: int,
    heard_later: str | None,
) -> None:
    client = connect()
    trigger = proxy.on(b"INCR n", fault)
    assert client.ask("PING") == "+PONG"
    assert trigger.fired == 0
    client.send("INCR n")
    trigger.wait()
    assert client.receive(SILENCE_SECONDS) == heard
    eventually(lambda: count(redis_server) == done)
    if heard_later is not None:
        trigger.deliver()
        assert client.receive(SILENCE_SECONDS) == heard_later
    before = count(redis_server)
    assert connect().ask("INCR n") == f":{before + 1}"  # once only
    assert trigger.fired == 1


def test_when_a_reply_was_lost_the_server_has_done_its_work(
    proxy: Proxy, redis_server: RedisServer, connect: Callable[[], Client]
) -> None:
    for number, fault in enumerate([Fault.LOSE_REPLY, Fault.SWALLOW_REPLY, Fault.HOLD_REPLY], 1):
        trigger = proxy.on(b"INCR n", fault)
        connect().send("INCR n")
        trigger.wait()
        assert count(redis_server) == number  # no waiting


def test_a_request_of_a_client_that_was_cut_off_arrives_late(
    proxy: Proxy, redis_server: RedisServer, connect: Callable[[], Client]
) -> None:
    trigger = proxy.on(b"INCR n", Fault.CUT_AND_HOLD)
    client = connect()
    client.send("INCR n")
    assert client.receive() == RESET
    assert (count(redis_server), trigger.fired) == (0, 0)
    trigger.deliver()
    trigger.wait()
    assert count(redis_server) == 1


def test_a_match_in_pieces_counts_once(proxy: Proxy, connect: Callable[[], Client]) -> None:
    trigger = proxy.on(b"INCR n", Fault.HOLD_REPLY, times=2)
    client = connect()
    for byte in b"INCR n\r\n":
        client.socket.sendall(bytes([byte]))
        time.sleep(0.002)
    trigger.wait()
    trigger.deliver()
    assert client.receive() == ":1"
    assert client.ask("PING") == "+PONG"
    assert (trigger.fired, trigger.left) == (1, 1)


def test_times_and_disarming(proxy: Proxy, connect: Callable[[], Client]) -> None:
    trigger = proxy.on(b"INCR", Fault.CUT_BEFORE, times=3)
    for _ in range(2):
        assert connect().ask("INCR n") == RESET
    trigger.wait(times=2)
    trigger.disarm()
    assert connect().ask("INCR n") == ":1"
    with pytest.raises(TimeoutError, match="CUT_BEFORE"):
        trigger.wait(0.01, times=3)


@pytest.mark.parametrize("up,down,done", [(True, False, 0), (False, True, 1), (True, True, 0)])
@pytest.mark.parametrize("drop", [False, True])
def test_a_black_hole_and_after(
    proxy: Proxy,
    redis_server: RedisServer,
    connect: Callable[[], Client],
    up: bool,
    down: bool,
    done: int,
    drop: bool,
) -> None:
    client, idle = connect(), connect()
    assert client.ask("PING") == idle.ask("PING") == "+PONG"
    proxy.black_hole(up=up, down=down, drop=drop)
    assert client.ask("INCR n", SILENCE_SECONDS) == SILENT
    assert connect().ask("PING", SILENCE_SECONDS) == SILENT
    assert count(redis_server) == done
    proxy.heal()
    if drop:
        assert client.receive(SILENCE_SECONDS) == SILENT
        assert client.ask("PING", SILENCE_SECONDS) == SILENT
        assert count(redis_server) == done
    else:
        assert client.receive() == ":1"
    assert idle.ask("PING") == "+PONG"
    assert connect().ask("PING") == "+PONG"


def test_a_close_is_held_by_a_black_hole_too(
    proxy: Proxy, redis_server: RedisServer, connect: Callable[[], Client]
) -> None:
    client = connect()
    assert client.ask("CLIENT SETNAME gone") == "+OK"
    proxy.black_hole()
    client.socket.close()
    time.sleep(SILENCE_SECONDS)
    assert "gone" in _names(redis_server)
    proxy.heal()
    eventually(lambda: "gone" not in _names(redis_server))


def test_a_delay_is_each_way(proxy: Proxy, connect: Callable[[], Client]) -> None:
    old = connect()
    proxy.delay(0.25, only_new=True)
    new = connect()
    assert _seconds(old) < 0.25
    assert _seconds(new) >= 0.5
    proxy.delay(0.25)
    assert _seconds(old) >= 0.5
    proxy.delay(30)
    old.send("PING")
    proxy.heal()
    assert old.receive() == "+PONG"  # what was under way comes at once
    assert _seconds(old) < 0.25


def _seconds(client: Client) -> float:
    """The quicker of two round trips."""

    def once() -> float:
        start = time.monotonic()
        assert client.ask("PING") == "+PONG"
        return time.monotonic() - start

    return min(once(), once())


def test_refusing_resetting_and_cutting(proxy: Proxy, connect: Callable[[], Client]) -> None:
    client = connect()
    assert client.ask("PING") == "+PONG"
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        connect()
    assert client.ask("PING") == "+PONG"
    proxy.heal()
    other = connect()
    assert other.ask("PING") == "+PONG"
    proxy.reset()
    assert client.receive() == other.receive() == RESET
    client = connect()
    assert client.ask("PING") == "+PONG"
    proxy.cut()
    assert client.receive() == ""
    proxy.stop()
    proxy.stop()
    with pytest.raises(RuntimeError, match="stopped"):
        proxy.heal()


def test_a_server_that_is_not_there() -> None:
    with (
        Proxy("127.0.0.1", free_port()) as proxy,
        pytest.raises(ConnectionResetError),
        socket.create_connection((proxy.host, proxy.port), timeout=10) as client,
    ):
        client.recv(1)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_keeps_no_connection_open(proxy: Proxy, connect: Callable[[], Client]) -> None:
    client = connect()
    assert client.ask("PING") == "+PONG"
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        proxy.reset()
        assert client.receive() == RESET
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
