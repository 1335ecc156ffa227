"""Planted bugs in the shipped Redis client that a world must find."""

from __future__ import annotations

from typing import Any

from fenced.errors import Indeterminate
from fenced.net.pool import ConnectionBroken
from fenced.stores.redis.authority.authority import RedisAuthority
from fenced.stores.redis.authority.listening import RedisWakeups
from fenced.stores.redis.wire.connection import RedisWire
from fenced.stores.redis.wire.finding import read_reply
from fenced.values.contracts import ByteStream, Endpoint
from fenced_testkit.worlds.redis import RedisBackend
from fenced_testkit.worlds.redis_cluster import RedisClusterBackend
from tests.simulation.planting import with_authority


class PatientWire(RedisWire):
    async def exchange(self, request: bytes, until: float, *, mints: bool = False) -> Any:
        try:
            return await super().exchange(request, until, mints=mints)
        except ConnectionBroken as error:
            raise Indeterminate(
                str(error)
            ) from error  # for the pool this is an answer: the connection is kept


class LateReplyAnswersTheNext(RedisAuthority):
    """A connection whose reply came too late is used again: the next request takes that reply for its own."""

    def _make(self) -> RedisWire:
        made = PatientWire(self._address, self._route, self._runtime, self._promise)
        self._wires.add(made)
        return made


class DeafWakeups(RedisWakeups):
    subscribed = False

    @property
    def open(self) -> bool:
        return self.subscribed

    async def listen(self, until: float) -> None:
        await super().listen(until)
        self.subscribed = True

    async def next_wakeups(self, until: float) -> list[str]:
        if self._wire is None:
            await self._runtime.wait(self._runtime.wakeup(), until)
        return await super().next_wakeups(until)


class SubscriptionIsNotRenewed(RedisAuthority):
    """When the connection for wake-ups breaks, no other is made: the client receives no wake-ups any more."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._wakeups = DeafWakeups(self._make, self._runtime, self._namespace, self.url)


class TwiceSendingWire(RedisWire):
    redirected = False

    async def _connect_to(self, endpoint: Endpoint, until: float) -> ByteStream:
        self.redirected = self._stream is not None
        return await super()._connect_to(endpoint, until)

    async def _exchange_once(self, request: bytes, until: float, mints: bool) -> Any:
        if self._asking:
            return await super()._exchange_once(request, until, mints)
        stream = self._stream or await self.connect(until)
        sent, self.redirected = request * (2 if self.redirected else 1), False
        try:
            await stream.send(sent, until)
            return await read_reply(stream, self._reader, until)
        except (OSError, ValueError) as error:
            raise self._broken(error) from error


class RedirectIsFollowedTwice(RedisAuthority):
    """A request that a node of a cluster redirects is sent twice to the other: its second reply answers the next."""

    def _make(self) -> RedisWire:
        made = TwiceSendingWire(self._address, self._route, self._runtime, self._promise)
        self._wires.add(made)
        return made


PLANTED = [
    *(with_authority(bug, RedisBackend) for bug in (LateReplyAnswersTheNext, SubscriptionIsNotRenewed)),
    with_authority(RedirectIsFollowedTwice, RedisClusterBackend),
]
