"""Hearing wake-ups: one connection that is subscribed to a channel of this client's own."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from fenced.authorities.redis.replies import refused
from fenced.authorities.redis.resp import ErrorReply
from fenced.authorities.redis.scripts import command, tag
from fenced.authorities.redis.wire import Wire
from fenced.contracts import Runtime
from fenced.errors import Unavailable
from fenced.runtime.pool import Broken


class Ears:
    """Subscribed from the first time on that somebody waits; who begins to listen looks at all waiters once."""

    def __init__(self, runtime: Runtime, make: Callable[[], Wire], namespace: str, where: str) -> None:
        self._runtime = runtime
        self._make = make
        self._prefix = f"fenced:{{{tag(namespace)}}}:wake:"
        self._where = where
        self.forked()

    def forked(self) -> None:
        """An address of our own, and nobody listens there yet; a parent's connection is left as it is."""
        self.address = secrets.token_hex(8)
        self._wire: Wire | None = None
        self._lock = self._runtime.lock()

    @property
    def open(self) -> bool:
        return self._wire is not None

    async def listen(self, until: float) -> Wire:
        """The subscribed connection."""
        if (wire := self._wire) is not None:
            return wire
        mine = self._make()
        await mine.connect(until)
        try:
            reply = await mine.exchange(command("SUBSCRIBE", self._prefix + self.address), until)
            if isinstance(reply, ErrorReply):
                raise refused(reply, self._where)
        except Broken as error:
            mine.close()
            raise Unavailable(f"{self._where} cannot be listened to: {error}") from error
        except BaseException:
            mine.close()
            raise
        with self._lock:
            if self._wire is None:
                self._wire = mine
            wire = self._wire
        if wire is not mine:  # another thread or task was faster
            mine.close()
        return wire

    async def hear(self, until: float) -> list[str]:
        wire = await self.listen(until)
        try:
            message = await wire.heard(until)
        except Broken:
            self._drop(wire)
            return []
        except BaseException:
            self._drop(wire)
            raise
        if message is None or message[0] != b"message":
            return []
        return [message[2].decode("ascii", "replace")]

    def _drop(self, wire: Wire) -> None:
        wire.close()
        with self._lock:
            if self._wire is wire:
                self._wire = None

    def interrupt(self) -> None:
        if (wire := self._wire) is not None:
            wire.interrupt()

    def close(self) -> None:
        if (wire := self._wire) is not None:
            self._drop(wire)
