"""A clock that can be moved on."""

from __future__ import annotations

import ssl

from fenced.runtime import sockets
from fenced.runtime.aio import LoopSocketStream
from fenced.values.contracts import (
    ByteStream,
    Colour,
    Endpoint,
    Readable,
    Runtime,
    Selector,
    SocketLike,
    Wakeup,
)


class Shifted:
    """A runtime whose clock can be moved on."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.ahead = 0.0
        self.colour: Colour = runtime.colour
        self.random, self.secret, self.whoami = runtime.random, runtime.secret, runtime.whoami
        self.wakeup, self.lock, self.call, self.runs_here = (
            runtime.wakeup,
            runtime.lock,
            runtime.call,
            runtime.runs_here,
        )
        self.spawn, self.deliver, self.pulse = runtime.spawn, runtime.deliver, runtime.pulse

    def now(self) -> float:
        return self._runtime.now() + self.ahead

    async def wait(self, wakeup: Wakeup, until: float | None) -> bool:
        return await self._runtime.wait(wakeup, None if until is None else until - self.ahead)

    async def readable(self, source: Readable, until: float) -> bool:
        return await self._runtime.readable(source, until - self.ahead)

    async def writable(self, source: Readable, until: float) -> bool:
        return await self._runtime.writable(source, until - self.ahead)

    async def connect(
        self, endpoint: Endpoint, until: float, context: ssl.SSLContext | None = None
    ) -> SocketLike:
        return await sockets.connect(endpoint, self, until, context)

    def stream(self, link: SocketLike) -> ByteStream:
        return (LoopSocketStream if self.colour == "asyncio" else sockets.SocketStream)(link, self)

    def selector(self) -> Selector:
        return sockets.SocketSelector(self)
