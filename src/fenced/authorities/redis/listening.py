"""Hearing wake-ups: one connection that is subscribed to a channel of this client's own."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from fenced.authorities.redis.replies import refused
from fenced.authorities.redis.scripts import tag
from fenced.errors import Unavailable
from fenced.wire.pool import ConnectionBroken
from fenced.wire.redis.connection import RedisWire
from fenced.wire.resp import ErrorReply, command


class RedisWakeups:
    """Subscribed from the first time on that somebody waits; who begins to listen looks at all waiters once."""

    def __init__(self, make: Callable[[], RedisWire], namespace: str, where: str) -> None:
        self._make = make
        self._prefix = f"fenced:{{{tag(namespace)}}}:wake:"
        self._where = where
        self.forked()

    def forked(self) -> None:
        """An address of our own, and nobody listens there yet; a parent's connection is left as it is."""
        self.address = secrets.token_hex(8)
        self._wire: RedisWire | None = None

    @property
    def open(self) -> bool:
        return self._wire is not None

    async def listen(self, until: float) -> None:
        """Connect and subscribe. Only the one who hears does that."""
        wire = self._make()
        await wire.connect(until)
        try:
            reply = await wire.exchange(command("SUBSCRIBE", self._prefix + self.address), until)
            if isinstance(reply, ErrorReply):
                raise refused(reply, self._where)
        except ConnectionBroken as error:
            wire.close()
            raise Unavailable(f"{self._where} cannot be listened to: {error}") from error
        except BaseException:
            wire.close()
            raise
        self._wire = wire

    async def next_wakeups(self, until: float) -> list[str]:
        wire = self._wire
        if wire is None:
            return []
        try:
            message = await wire.next_message(until)
        except ConnectionBroken:
            self.close()
            return []
        except BaseException:
            self.close()
            raise
        if message is None or message[0] != b"message":
            return []
        return [message[2].decode("ascii", "replace")]

    def interrupt(self) -> None:
        if (wire := self._wire) is not None:
            wire.interrupt()

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
