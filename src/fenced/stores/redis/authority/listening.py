"""Receiving wake-ups: one connection per client, subscribed to that client's channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fenced.errors import Unavailable
from fenced.net.heartbeat import Heartbeat
from fenced.net.pool import ConnectionBroken
from fenced.stores.redis.authority.answers import refused
from fenced.stores.redis.authority.scripts import tag
from fenced.stores.redis.wire.connection import RedisWire
from fenced.stores.redis.wire.resp import ErrorReply, command
from fenced.values.contracts import Runtime

_PING = command("PING")


class RedisWakeups:
    """Subscribes when the first attempt waits. After each subscription the authority checks all waiters once."""

    def __init__(self, make: Callable[[], RedisWire], runtime: Runtime, namespace: str, where: str) -> None:
        self._make = make
        self._runtime = runtime
        self._prefix = f"fenced:{{{tag(namespace)}}}:wake:"
        self._where = where
        self.forked()

    def forked(self) -> None:
        """Take a new channel and start without a connection; a parent's connection is left as it is."""
        self.address = self._runtime.secret()[:16]
        self._wire: RedisWire | None = None

    @property
    def open(self) -> bool:
        return self._wire is not None

    async def listen(self, until: float) -> None:
        """Connect and subscribe. Only the task that calls `next_wakeups` does that."""
        wire = self._make()
        await wire.connect(until)
        try:
            reply = await wire.exchange(command("SUBSCRIBE", self._prefix + self.address), until)
            if isinstance(reply, ErrorReply):
                raise refused(reply, self._where)
        except ConnectionBroken as error:
            wire.close()
            raise Unavailable(f"{self._where}: cannot subscribe to wake-ups: {error}") from error
        except BaseException:
            wire.close()
            raise
        self._heartbeat = Heartbeat(self._runtime.now())
        self._wire = wire

    async def next_wakeups(self, until: float) -> list[str]:
        wire = self._wire
        if wire is None:
            return []
        try:
            message = await self._message(wire, until)
        except ConnectionBroken:
            self.close()
            return []
        except BaseException:
            self.close()
            raise
        if not isinstance(message, list) or message[:1] != [b"message"]:
            return []  # nothing, or the reply to a ping
        return [message[2].decode("ascii", "replace")]

    async def _message(self, wire: RedisWire, until: float) -> Any:
        """The next message, or None. ConnectionBroken also if an idle connection does not reply to a ping."""
        heartbeat, now = self._heartbeat, self._runtime.now()
        if now >= heartbeat.due and not heartbeat.pinged:
            heartbeat.ping_sent(now)
            await wire.send(_PING, heartbeat.due)
        message = await wire.next_message(min(until, heartbeat.due))
        if message is not None:  # also an error, if the user may not ping
            heartbeat.received(self._runtime.now())
        elif heartbeat.is_dead(self._runtime.now()):
            raise ConnectionBroken(f"{self._where}: no reply to a ping")
        return message

    def interrupt(self) -> None:
        if (wire := self._wire) is not None:
            wire.interrupt()

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
