"""Callbacks for the clients of brokers: each finds the fence, calls `apply`, and settles the message by the outcome."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fenced.errors import ForeignRealm, MissingStamp, Refused, Uncovered
from fenced.messages.outcomes import (
    Headers,
    MessageFence,
    Settlement,
    fence_of,
    required_fence_of,
    settlement,
    stops_the_consumer,
)

DELAY_SECONDS = 1.0
log = logging.getLogger("fenced")


def _todo(error: Refused) -> str:
    """What somebody must do before messages can be applied again. No stamp is in it."""
    if isinstance(error, ForeignRealm):
        return "Move the guard to the authority of the producers, or the producers to that of the guard"
    if isinstance(error, Uncovered):
        return "The consumer writes a row of another table; take a lease for it, and pass [fence, lease]"
    if isinstance(error, MissingStamp):
        return "The consumer writes without the fence of the message; write in guard.transaction(db, fence)"
    return "The lease of the consumer itself was refused; take it again"


class _Attempt:
    """One delivery: `with attempt:` around everything that can fail. Afterwards it knows what to answer."""

    def __init__(self) -> None:
        self.fence: MessageFence | None = None
        self.answer = Settlement.RETRY
        self._error: Exception | None = None

    def take_fence(self, headers: Headers, unstamped: bool) -> MessageFence | None:
        self.fence = fence_of(headers) if unstamped else required_fence_of(headers)
        return self.fence

    def __enter__(self) -> _Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False  # a cancellation, or Ctrl-C: not settled, so the broker delivers it again
        self._error = error
        self.answer = settlement(error, self.fence)
        if isinstance(error, Refused):
            name = error.name or "no name"
            if self.answer is Settlement.REJECT:
                log.warning("a message was rejected: %s (%s)", error.kind, name)
            elif self.answer is Settlement.RETRY:
                said = "a message goes back to its queue, and the consumer stops: %s (%s). %s"
                log.error(said, error.kind, name, _todo(error))
        return True

    def raise_if_stopped(self) -> None:
        if self.answer is Settlement.RETRY and self._error is not None and stops_the_consumer(self._error):
            raise self._error


def on_pika(
    apply: Callable[[Any, Any, Any, bytes], object], *, delay: float = DELAY_SECONDS, unstamped: bool = False
) -> Callable[[Any, Any, Any, bytes], None]:
    """A callback for `basic_consume` of pika's BlockingConnection. It calls `apply(fence, method, properties, body)`.

    `delay`: after how many seconds a message that could not be applied returns to the queue. `unstamped`: messages
    without a stamp are not rejected; their fence is None.
    """

    def on_message(channel: Any, method: Any, properties: Any, body: bytes) -> None:
        with _Attempt() as attempt:
            apply(attempt.take_fence(properties.headers, unstamped), method, properties, body)
        tag = method.delivery_tag

        def give_back() -> None:
            if channel.is_open:  # otherwise the broker has already put it back
                channel.basic_nack(tag, requeue=True)

        match attempt.answer:
            case Settlement.ACK:
                channel.basic_ack(tag)
            case Settlement.REJECT:
                channel.basic_reject(tag, requeue=False)
            case Settlement.RETRY:
                # Until then it counts against the prefetch limit: a message cannot come back at full speed.
                channel.connection.call_later(delay, give_back)
        attempt.raise_if_stopped()

    return on_message


def on_aio_pika(
    apply: Callable[[Any, Any], Awaitable[object]], *, delay: float = DELAY_SECONDS, unstamped: bool = False
) -> Callable[[Any], Awaitable[None]]:
    """A callback for `queue.consume` of aio-pika. It awaits `apply(fence, message)`; see `on_pika` for the options."""

    async def on_message(message: Any) -> None:
        import asyncio

        with _Attempt() as attempt:
            await apply(attempt.take_fence(message.headers, unstamped), message)
        match attempt.answer:
            case Settlement.ACK:
                await message.ack()
            case Settlement.REJECT:
                await message.reject(requeue=False)
            case Settlement.RETRY:
                await asyncio.sleep(delay)  # until then it counts against the prefetch limit
                await message.nack(requeue=True)
        attempt.raise_if_stopped()

    return on_message


def on_nats(
    apply: Callable[[Any, Any], Awaitable[object]], *, delay: float = DELAY_SECONDS, unstamped: bool = False
) -> Callable[[Any], Awaitable[None]]:
    """A callback for JetStream subscriptions of nats-py with `manual_ack=True`. It awaits `apply(fence, message)`.

    A rejected message is terminated: JetStream does not deliver it again, and keeps it in the stream. See `on_pika` for
    the options.
    """

    async def on_message(message: Any) -> None:
        with _Attempt() as attempt:
            await apply(attempt.take_fence(message.headers, unstamped), message)
        match attempt.answer:
            case Settlement.ACK:
                await message.ack()
            case Settlement.REJECT:
                await message.term()
            case Settlement.RETRY:
                await message.nak(delay=delay)
        attempt.raise_if_stopped()

    return on_message
