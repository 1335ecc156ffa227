"""One member of the cluster, over gRPC with raw bytes, in either colour. Nothing is repeated or balanced in here."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import grpc
import grpc.aio

from fenced.authorities.etcd.address import Address
from fenced.contracts import Colour

Metadata = tuple[tuple[str, str], ...]

OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.use_local_subchannel_pool", 1),  # a new channel connects at once, whatever an older one has met
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.http2.bdp_probe", 0),  # its pings, and ours below 5 s, would end the connection
    ("grpc.max_receive_message_length", -1),
    ("grpc.primary_user_agent", "fenced"),
)


class Stream(Protocol):
    """A call in which both sides speak when they like."""

    async def send(self, request: bytes) -> None: ...

    async def read(self) -> bytes | None:
        """The next message; None at the end, however it came. Only one reads."""

    def cancel(self) -> None:
        """End it. May be called from another thread, and again."""


class End(Protocol):
    """A connection to one member; made when it is first used.

    Its calls raise grpc.RpcError, and EOFError or ValueError when they ended without an answer.
    """

    async def unary(self, path: str, request: bytes, seconds: float, metadata: Metadata) -> bytes: ...

    async def exchange(
        self, path: str, requests: Sequence[bytes], seconds: float, metadata: Metadata
    ) -> list[bytes]:
        """Send all, and read one reply to each."""

    def stream(self, path: str, metadata: Metadata) -> Stream: ...

    async def close(self) -> None:
        """Connect no more. Calls that are under way end, as broken ones or in their own time."""


class BlockingEnd:
    """For the threads of a blocking client, all of which may use it at once."""

    def __init__(self, target: str, address: Address) -> None:
        if address.tls:
            self._channel = grpc.secure_channel(target, _credentials(address), OPTIONS)
        else:
            self._channel = grpc.insecure_channel(target, OPTIONS)
        self._unary: dict[str, Any] = {}

    async def unary(self, path: str, request: bytes, seconds: float, metadata: Metadata) -> bytes:
        call = self._unary.get(path)
        if call is None:
            call = self._unary[path] = self._channel.unary_unary(path, None, None)
        reply: bytes = call(request, timeout=seconds, metadata=metadata)
        return reply

    async def exchange(
        self, path: str, requests: Sequence[bytes], seconds: float, metadata: Metadata
    ) -> list[bytes]:
        method: Any = self._channel.stream_stream(path, None, None)
        call = method(iter(requests), seconds, metadata)
        try:
            replies: list[Any] = [next(call, None) for _ in requests]
        finally:
            call.cancel()
        if None in replies:
            raise EOFError("the stream ended")
        return replies

    def stream(self, path: str, metadata: Metadata) -> Stream:
        return _BlockingStream(self._channel.stream_stream(path, None, None), metadata)

    async def close(self) -> None:
        self._channel.close()


class _BlockingStream:
    def __init__(self, method: Any, metadata: Metadata) -> None:
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = method(self._requests(), None, metadata)

    def _requests(self) -> Iterator[bytes]:
        while (request := self._out.get()) is not None:
            yield request

    async def send(self, request: bytes) -> None:
        self._out.put(request)

    async def read(self) -> bytes | None:
        try:
            reply: bytes | None = next(self._call, None)
        except grpc.RpcError:
            return None
        return reply

    def cancel(self) -> None:
        self._out.put(None)  # lets gRPC's sending thread go
        self._call.cancel()


class AsyncioEnd:
    """For the tasks of one event loop.

    gRPC ends the calls of a channel that is closed by cancelling whoever awaits them. So it is closed by the last
    of them, each of which has a deadline.
    """

    def __init__(self, target: str, address: Address) -> None:
        if address.tls:
            self._channel = grpc.aio.secure_channel(target, _credentials(address), OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(target, OPTIONS)
        self._unary: dict[str, Any] = {}
        self._streams: WeakSet[_AsyncioStream] = WeakSet()
        self._calls = 0
        self._closing = False

    async def unary(self, path: str, request: bytes, seconds: float, metadata: Metadata) -> bytes:
        call = self._unary.get(path)
        if call is None:
            call = self._unary[path] = self._channel.unary_unary(path, None, None)
        self._calls += 1
        try:
            reply: bytes = await call(request, timeout=seconds, metadata=metadata)
        finally:
            await self._ended()
        return reply

    async def exchange(
        self, path: str, requests: Sequence[bytes], seconds: float, metadata: Metadata
    ) -> list[bytes]:
        method: Any = self._channel.stream_stream(path, None, None)
        call = method(timeout=seconds, metadata=metadata)
        self._calls += 1
        try:
            for request in requests:
                await call.write(request)
            replies = [await call.read() for _ in requests]
        finally:
            call.cancel()
            await self._ended()
        if grpc.aio.EOF in replies:
            raise EOFError("the stream ended")
        return replies

    def stream(self, path: str, metadata: Metadata) -> Stream:
        method: Any = self._channel.stream_stream(path, None, None)
        stream = _AsyncioStream(method(metadata=metadata))
        self._streams.add(stream)
        return stream

    async def _ended(self) -> None:
        self._calls -= 1
        if self._closing and not self._calls:
            await self._channel.close(None)

    async def close(self) -> None:
        self._closing = True
        for stream in list(self._streams):
            stream.cancel()
        if not self._calls:
            await self._channel.close(None)


class _AsyncioStream:
    def __init__(self, call: Any) -> None:
        self._call = call
        self._sending = asyncio.Lock()

    async def send(self, request: bytes) -> None:
        async with self._sending:  # one write at a time, says gRPC
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # the reader is told
                await self._call.write(request)

    async def read(self) -> bytes | None:
        try:
            reply = await self._call.read()
        except grpc.RpcError:
            return None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return None  # the call was cancelled, and not we
        return None if reply is grpc.aio.EOF else reply

    def cancel(self) -> None:
        self._call.cancel()


def _credentials(address: Address) -> Any:
    return grpc.ssl_channel_credentials(*address.certificates())


def new_end(target: str, address: Address, colour: Colour) -> End:
    return BlockingEnd(target, address) if colour == "blocking" else AsyncioEnd(target, address)
