"""Transactions on the program's own Redis client: commands that are collected, and run behind the marks in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import redis
import redis.asyncio

from fenced.client.guarding import EnteredOnce, Fences, is_announced, stamp_of
from fenced.errors import Misuse, shown
from fenced.runtime.blocking import step
from fenced.stores.redis.guard.clients import AnyClient, words_of
from fenced.stores.redis.guard.marks import KIND, Compared
from fenced.stores.redis.guard.slots import RedisMarksBySlot
from fenced.values.model import Stamp

_CALLBACKS: dict[str, Any] = dict(redis.Redis(protocol=2).response_callbacks)
"""Scripts reply as RESP2 does, whatever protocol the client speaks; these make Python values of it."""
_NOT_FOR_CALLBACKS = ("keys", "NEVER_DECODE", "EMPTY_RESPONSE")


class ChecksSlots(Protocol):
    """The part of a guard that its transactions need."""

    def _check_slots(self, keys: Sequence[str | bytes], prefix: str) -> None: ...


class _Collected(EnteredOnce):
    """What a transaction has collected: the commands, and the values that it expects."""

    command_stack: list[Any]
    results: list[Any]
    """What the commands returned, in their order, once the block has ended."""

    def _begin(
        self,
        client: AnyClient,
        slots: RedisMarksBySlot,
        guard: ChecksSlots,
        fence: Fences | None,
        names: tuple[str, ...],
    ) -> None:
        self.results = []
        self._compared: list[Compared] = []
        self._guarded = client, slots, guard, fence, names

    def expect(self, key: str | bytes, value: Any, *, field: str | bytes | None = None) -> None:
        """Run only if this string, or this field of a hash, has this value; None: if there is none. Else Conflict."""
        words = ("GET", key) if field is None else ("HGET", key, field)
        if isinstance(value, bool) or not isinstance(value, str | bytes | int | float | None):
            raise Misuse(f"an expected value is bytes, a str or a number, not {shown(value)}")
        self._compared.append(Compared(words, value))

    async def _announce(self) -> None:
        """Raise the marks before the block reads anything, unless this guard object has done it for this lease."""
        self._enter()
        _client, slots, _guard, fence, names = self._guarded
        if fence is None or is_announced(fence, names, slots):
            return
        stamp, names = stamped(fence, names, announcing=True)
        opened = await slots.of(names, stamp)
        await opened.step(stamp, names, announce=True, quiet=True)

    async def _commit(self) -> None:
        _client, slots, guard, fence, names = self._guarded  # the slots do not keep the client
        commands, compared = [words_of(args) for args, _ in self.command_stack], self._compared
        stamp, names = stamped(fence, names)
        channel: Any = slots.channel
        keys: list[str | bytes] = []
        if channel.in_cluster:
            keys = await channel.keys([*commands, *(each.words for each in compared)])
            guard._check_slots(keys, slots.prefix_of(names))
        opened = await slots.of(names, stamp)
        replies = await opened.step(stamp, names, commands=commands, compared=compared, keys=keys)
        for (args, options), reply in zip(self.command_stack, replies, strict=False):
            self.results.append(_converted(args[0], options, reply))


def _converted(command: str, options: dict[str, Any], reply: Any) -> Any:
    """The Python value that the client would make of a reply. The error of a command is raised."""
    if isinstance(reply, Exception):
        raise reply
    callback = _CALLBACKS.get(command.upper())
    if callback is None:
        return reply
    if options:
        options = {key: value for key, value in options.items() if key not in _NOT_FOR_CALLBACKS}
    return callback(reply, **options)


class RedisTransaction(_Collected, redis.client.Pipeline):
    """Collects commands, as redis-py's pipeline does. They run at the end of the block; then there are `results`."""

    def __enter__(self) -> RedisTransaction:
        step(self._announce())
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            step(self._commit())

    def execute(self, raise_on_error: bool = True) -> Any:
        raise _runs_at_the_end()

    def immediate_execute_command(self, *args: Any, **options: Any) -> Any:
        raise _runs_at_the_end()


class AsyncRedisTransaction(_Collected, redis.asyncio.client.Pipeline):  # type: ignore[misc]
    """Collects commands, as redis-py's pipeline does. They run at the end of the block; then there are `results`."""

    async def __aenter__(self) -> AsyncRedisTransaction:
        await self._announce()
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            await self._commit()

    async def execute(self, raise_on_error: bool = True) -> Any:
        raise _runs_at_the_end()

    async def immediate_execute_command(self, *args: Any, **options: Any) -> Any:
        raise _runs_at_the_end()


def _runs_at_the_end() -> Misuse:
    return Misuse(
        "the commands of a guarded transaction run at the end of its block; expect() compares values"
    )


def stamped(
    fence: Fences | None, names: tuple[str, ...], *, announcing: bool = False
) -> tuple[Stamp | None, tuple[str, ...]]:
    """The stamp that the operation carries, and the names that it is about."""
    if fence is None:
        if not names:
            raise Misuse("name what an operation without a lease is about")
        return None, names
    stamp = stamp_of(fence, KIND, announcing=announcing)
    return stamp, names or stamp.names
