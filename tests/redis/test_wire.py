"""One connection to a server, over a simulated network: whose reply is whose, and what is noticed."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fenced.net.pool import ConnectionBroken
from fenced.stores.redis.address import RedisAddress
from fenced.stores.redis.wire.connection import RedisWire
from fenced.stores.redis.wire.finding import DirectRoute
from fenced.stores.redis.wire.resp import ErrorReply, Incomplete, RespReader, command
from fenced_testkit.runtime.network import SimulatedConnection, SimulatedNetwork
from fenced_testkit.runtime.simulated import SimulatedRuntime
from fenced_testkit.runtime.world import Process, World


class Scripted:
    """Answers each request with the next of its replies."""

    def __init__(self, *replies: bytes) -> None:
        self._replies = list(replies)

    def on_open(self, connection: SimulatedConnection) -> None:
        self._requests = RespReader()

    def on_bytes(self, connection: SimulatedConnection, data: bytes) -> None:
        self._requests.feed(data)
        with contextlib.suppress(Incomplete):
            while self._requests.next():
                connection.send(self._replies.pop(0))

    def on_close(self, connection: SimulatedConnection) -> None: ...


def play(server: Scripted, work: Callable[[RedisWire], Awaitable[Any]], split: float = 0.0) -> Any:
    world = World(1)
    network = SimulatedNetwork(world)
    network.split = split
    network.listen(Process(world, "server"), ("h", 6379), server)
    runtime = SimulatedRuntime(Process(world, "client"), network)
    results: list[Any] = []

    async def all_of_it() -> None:
        results.append(await work(RedisWire(RedisAddress("redis://h"), DirectRoute(("h", 6379)), runtime)))

    runtime.spawn(all_of_it, "play")
    world.run(until=60)
    return results[0]


def test_replies_in_pieces_belong_to_their_requests() -> None:
    async def work(wire: RedisWire) -> list[Any]:
        return [
            await wire.exchange(command("A"), 30.0),
            await wire.pipeline([command("B"), command("C")], 30.0),
        ]

    server = Scripted(b"$3\r\none\r\n", b"*2\r\n:1\r\n$1\r\nx\r\n", b"-ERR no\r\n")
    assert play(server, work, split=1.0) == [b"one", [[1, b"x"], ErrorReply("ERR no")]]


def test_a_second_reply_is_not_taken_for_the_next_request() -> None:
    async def work(wire: RedisWire) -> Any:
        assert await wire.exchange(command("A"), 30.0) == b"OK"
        with pytest.raises(ConnectionBroken, match="more than one reply"):
            await wire.exchange(command("B"), 30.0)
        wire.close()
        return await wire.exchange(command("C"), 30.0)

    assert play(Scripted(b"+OK\r\n+ODD\r\n", b"+C\r\n"), work) == b"C"


def test_a_message_that_comes_with_the_subscription_is_not_lost() -> None:
    async def work(wire: RedisWire) -> list[Any]:
        subscribed = await wire.exchange(command("S"), 30.0)
        return [subscribed, await wire.next_message(30.0), await wire.next_message(31.0)]

    confirmed, message = b"*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n", b"*1\r\n$2\r\nhi\r\n"
    assert play(Scripted(confirmed + message), work) == [[b"subscribe", b"c", 1], [b"hi"], None]
