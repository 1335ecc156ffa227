"""RedisGuard: commands on the program's own Redis client, behind the fence in one atomic step."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine, Sequence
from typing import Any, overload
from weakref import WeakKeyDictionary

from fenced.client import registry

try:
    import redis
    import redis.asyncio
except ImportError as error:
    raise registry.needs_package("fenced.redis", error) from error

from fenced.client.announcing import GuardOn
from fenced.client.guarding import EnteredOnce, Fences, is_announced, stamp_of
from fenced.errors import Misconfigured, Misuse, Unsupported, shown
from fenced.runtime.blocking import step
from fenced.stores.redis.guard.clients import (
    AnyClient,
    AsyncRedisClient,
    ClientChannel,
    RedisClient,
    channel_of,
    words_of,
)
from fenced.stores.redis.guard.fence import KIND, TAG, Compared, FenceOptions, Guarantee, Word
from fenced.stores.redis.guard.scripts import GuardLibrary, GuardScript, wrapped, wrapped_library
from fenced.stores.redis.guard.slots import RedisFences
from fenced.stores.redis.guard.values import SLOT_TRAITS, TRAITS
from fenced.stores.redis.wire.routes import slot_of
from fenced.values.decision import Rule
from fenced.values.model import Stamp

__all__ = ["AsyncRedisTransaction", "GuardedLibrary", "GuardedScript", "RedisGuard", "RedisTransaction"]

_CALLBACKS: dict[str, Any] = dict(redis.Redis(protocol=2).response_callbacks)
"""Scripts reply as RESP2 does, whatever protocol the client speaks; these make Python values of it."""
_NOT_FOR_CALLBACKS = ("keys", "NEVER_DECODE", "EMPTY_RESPONSE")


class _Collected(EnteredOnce):
    """What a transaction has collected: the commands, and the values that it expects."""

    command_stack: list[Any]
    results: list[Any]
    """What the commands returned, in their order, once the block has ended."""

    def _begin(
        self,
        client: AnyClient,
        fences: RedisFences,
        guard: RedisGuard,
        fence: Fences | None,
        names: tuple[str, ...],
    ) -> None:
        self.results = []
        self._compared: list[Compared] = []
        self._guarded = client, fences, guard, fence, names

    def expect(self, key: str | bytes, value: Any, *, field: str | bytes | None = None) -> None:
        """Run only if this string, or this field of a hash, has this value; None: if there is none. Else Conflict."""
        words = ("GET", key) if field is None else ("HGET", key, field)
        if isinstance(value, bool) or not isinstance(value, str | bytes | int | float | None):
            raise Misuse(f"an expected value is bytes, a str or a number, not {shown(value)}")
        self._compared.append(Compared(words, value))

    async def _announce(self) -> None:
        """Raise the marks before the block reads anything, unless this guard object has done it for this lease."""
        self._enter()
        _client, fences, _guard, fence, names = self._guarded
        if fence is None or is_announced(fence, names, fences):
            return
        stamp, names = _stamped(fence, names, announcing=True)
        opened = await fences.of(names, stamp)
        await opened.step(stamp, names, announce=True, quiet=True)

    async def _commit(self) -> None:
        _client, fences, guard, fence, names = self._guarded  # the fences do not keep the client
        commands, compared = [words_of(args) for args, _ in self.command_stack], self._compared
        stamp, names = _stamped(fence, names)
        channel: Any = fences.channel
        keys: list[str | bytes] = []
        if channel.in_cluster:
            keys = await channel.keys([*commands, *(each.words for each in compared)])
            guard._check_slots(keys, fences.prefix_of(names))
        opened = await fences.of(names, stamp)
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


class RedisGuard:
    """Commands on Redis keys. The marks of its names are on the same server, and one script checks and writes.

        guard = RedisGuard()
        with client.hold("stock/42") as lease:
            with guard.transaction(r, lease, "stock/42") as tx:  # announced: from here on an older holder is refused
                left = int(r.get("stock:42"))
                tx.set("stock:42", left - 1)
                tx.rpush("sold", "42")

    `r` is the program's own redis.Redis, or a redis.asyncio.Redis with `async with` and `await`. An operation of a
    stale holder raises StaleToken, and no command of it has run. Threads and tasks may share a guard.

    In a cluster the guard has one slot, that of its `tag`: the keys of its commands have this tag too, `{stock}:42`.
    With `name="stock/{tag}"` each name has its own: the keys of stock/42 are like `{42}:left`.
    """

    def __init__(
        self,
        *,
        tag: str = TAG,
        rule: Rule | None = None,
        mode: str = "enforce",
        guarantee: Guarantee = "strict",
        name: str | None = None,
    ) -> None:
        self._options = FenceOptions(tag, rule, mode, guarantee, name)
        self.traits = TRAITS if name is None else SLOT_TRAITS
        self._on: WeakKeyDictionary[AnyClient, RedisFences] = WeakKeyDictionary()

    @overload
    def transaction(self, client: RedisClient, fence: Fences | None, *names: str) -> RedisTransaction: ...
    @overload
    def transaction(
        self, client: AsyncRedisClient, fence: Fences | None, *names: str
    ) -> AsyncRedisTransaction: ...
    def transaction(self, client: AnyClient, fence: Fences | None, *names: str) -> Any:
        """A block whose commands run at its end, in one step, if every name is admitted; otherwise none of them runs.

        Entering it announces the lease, unless that was done before: an older holder does not change any more what the
        block reads with the client. Without names it is about all names of the lease. If a command fails (a wrong
        type), those before it stay, those after it do not run, and the client's own error is raised.
        """
        fences = self._fences(client)
        kind: Any = RedisTransaction if isinstance(fences.channel, ClientChannel) else AsyncRedisTransaction
        transaction = kind(getattr(client, "connection_pool", None), {}, False, None)
        transaction._begin(client, fences, self, fence, names)
        return transaction

    @overload
    def announce(self, client: RedisClient, fence: Fences, *names: str) -> None: ...
    @overload
    def announce(self, client: AsyncRedisClient, fence: Fences, *names: str) -> Coroutine[Any, Any, None]: ...
    def announce(self, client: AnyClient, fence: Fences, *names: str) -> Any:
        """Raise the marks before anything is read: from now on an older holder's operations are refused."""
        blocking = isinstance(self._fences(client).channel, ClientChannel)
        work = self._announce(client, fence, names)
        return step(work) if blocking else work

    async def _announce(self, client: AnyClient, fence: Fences, names: tuple[str, ...]) -> None:
        stamp, names = _stamped(fence, names, announcing=True)
        fences = self._fences(client)
        for group in fences.groups(names):
            opened = await fences.of(group, stamp)
            await opened.step(stamp, group, announce=True)

    def on(self, client: AnyClient) -> GuardOn:
        """This guard on this client, for `hold(guards=[guard.on(client)])`, which announces each new lease."""
        return GuardOn(self, client)

    def wrap(self, script: str) -> GuardedScript:
        """The program's own Lua script with the check in front. Its KEYS and ARGV are as without a guard."""
        return GuardedScript(self, wrapped(script))

    def wrap_library(self, library: str) -> GuardedLibrary:
        """The program's own library of functions (`#!lua name=...`), with the check in front of each function.

        `load` it where it is to run; `function(name)` is called as a script of `wrap` is.
        """
        return GuardedLibrary(self, wrapped_library(library))

    async def _run(
        self,
        client: AnyClient,
        script: GuardScript,
        fence: Fences | None,
        names: tuple[str, ...],
        keys: Sequence[str],
        arguments: Sequence[Word],
    ) -> Any:
        stamp, names = _stamped(fence, names)
        fences = self._fences(client)
        if fences.channel.in_cluster:
            self._check_slots(keys, fences.prefix_of(names))
        opened = await fences.of(names, stamp)
        try:
            return await opened.run(script, stamp, names, arguments, keys)
        except redis.ResponseError as error:
            if script.words[0] != "FCALL" or "Function not found" not in str(error):
                raise
            raise Misconfigured(
                f"{fences.channel.where}: there is no function {script.words[1]} here: load() the guarded library, "
                "with this version of fenced"
            ) from error

    def _fences(self, client: AnyClient) -> RedisFences:
        """The fences on a client; Misuse if it is none. They exist as long as the client does."""
        try:
            return self._on[client]
        except (KeyError, TypeError):  # TypeError: not an object that could be a client
            return self._on.setdefault(client, RedisFences(channel_of(client), self._options))

    def _check_slots(self, keys: Sequence[str | bytes], prefix: str) -> None:
        """A script runs on one node, and would fail in the middle at a key of another one."""
        if all(slot_of(key) == slot_of(prefix) for key in keys):
            return
        tag, name = self._options.tag, self._options.name
        if name is None:
            raise Unsupported(
                f"in a cluster the keys of a guarded operation have the guard's tag {tag!r}, so that they are in "
                f"the slot of its marks: name them {{{tag}}}:..., or give the guard the tag of the keys"
            )
        raise Unsupported(
            f"in a cluster the keys of a guarded operation have the tag of its name: with name={name!r} the keys of "
            f"{name.replace('{tag}', '42')} are named {{42}}:..."
        )


class GuardedScript:
    """A Lua script or function that runs only if its names are admitted: the check and the script are one step."""

    def __init__(self, guard: RedisGuard, script: GuardScript) -> None:
        self._guard = guard
        self._script = script

    @overload
    def __call__(
        self,
        client: RedisClient,
        fence: Fences | None,
        *names: str,
        keys: Sequence[str] = (),
        args: Sequence[Any] = (),
    ) -> Any: ...
    @overload
    def __call__(
        self,
        client: AsyncRedisClient,
        fence: Fences | None,
        *names: str,
        keys: Sequence[str] = (),
        args: Sequence[Any] = (),
    ) -> Coroutine[Any, Any, Any]: ...
    def __call__(
        self,
        client: AnyClient,
        fence: Fences | None,
        *names: str,
        keys: Sequence[str] = (),
        args: Sequence[Any] = (),
    ) -> Any:
        """Run it; returns what the script returns. If it fails, the client's own error is raised."""
        blocking = isinstance(self._guard._fences(client).channel, ClientChannel)
        work = self._guard._run(client, self._script, fence, names, keys, args)
        return step(work) if blocking else work


class GuardedLibrary:
    """A library of functions that run only if their names are admitted: the check and the function are one step."""

    def __init__(self, guard: RedisGuard, library: GuardLibrary) -> None:
        self._guard = guard
        self._library = library
        self.name = library.name
        """Under which the server has it: FUNCTION DELETE takes this name."""

    @overload
    def load(self, client: RedisClient) -> None: ...
    @overload
    def load(self, client: AsyncRedisClient) -> Coroutine[Any, Any, None]: ...
    def load(self, client: AnyClient) -> Any:
        """Load the library, in a cluster on every primary; replaces one that was loaded before under its name."""
        channel_of(client)  # Misuse if it is no client
        loading: Any = client.function_load(self._library.source, replace=True)
        return _finished(loading) if inspect.isawaitable(loading) else None

    def function(self, name: str) -> GuardedScript:
        """One of its functions, by the name under which the library registers it."""
        return GuardedScript(self._guard, self._library.function(name))


async def _finished(work: Any) -> None:
    await work


def _stamped(
    fence: Fences | None, names: tuple[str, ...], *, announcing: bool = False
) -> tuple[Stamp | None, tuple[str, ...]]:
    """The stamp that the operation carries, and the names that it is about."""
    if fence is None:
        if not names:
            raise Misuse("name what an operation without a lease is about")
        return None, names
    stamp = stamp_of(fence, KIND, announcing=announcing)
    return stamp, names or stamp.names


def __dir__() -> list[str]:
    return __all__
