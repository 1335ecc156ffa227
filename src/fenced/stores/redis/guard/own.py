"""RedisGuard: commands on the program's own Redis client, behind the fence in one atomic step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from fenced.client import registry

try:
    import redis
    import redis.asyncio
except ImportError as error:
    raise registry.needs_package("fenced.redis", error) from error

from fenced.client.guarding import EnteredOnce, Fences, is_announced, stamp_of
from fenced.client.own import ClientGuard
from fenced.errors import Misconfigured, Misuse, Unsupported, shown
from fenced.runtime.blocking import step
from fenced.stores.redis.guard.clients import (
    AnyClient,
    AsyncClientChannel,
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

__all__ = [
    "AsyncGuardedLibrary",
    "AsyncGuardedScript",
    "AsyncRedisGuard",
    "AsyncRedisTransaction",
    "GuardedLibrary",
    "GuardedScript",
    "RedisGuard",
    "RedisTransaction",
]

T = TypeVar("T")

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
        guard: _OnRedis,
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


class _OnRedis(ClientGuard[RedisFences]):
    """What both guards share: the options, and the fences on each client."""

    _channel: type[ClientChannel] | type[AsyncClientChannel]

    def __init__(
        self,
        *,
        tag: str = TAG,
        rule: Rule | None = None,
        mode: str = "enforce",
        guarantee: Guarantee = "strict",
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._options = FenceOptions(tag, rule, mode, guarantee, name)
        self.traits = TRAITS if name is None else SLOT_TRAITS

    def _made(self, client: Any) -> RedisFences:
        return RedisFences(self._channel_of(client), self._options)

    def _channel_of(self, client: Any) -> ClientChannel | AsyncClientChannel:
        channel = channel_of(client)
        if not isinstance(channel, self._channel):
            raise Misuse(
                "RedisGuard is for a redis.Redis, AsyncRedisGuard for a redis.asyncio.Redis, "
                f"and this is {type(self).__name__} with {shown(client)}"
            )
        return channel

    async def _announce(self, client: AnyClient, fence: Fences, names: tuple[str, ...]) -> None:
        stamp, names = _stamped(fence, names, announcing=True)
        fences = self._of(client)
        for group in fences.groups(names):
            opened = await fences.of(group, stamp)
            await opened.step(stamp, group, announce=True)

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
        fences = self._of(client)
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


class RedisGuard(_OnRedis):
    """Commands on Redis keys. The marks of its names are on the same server, and one script checks and writes.

        guard = RedisGuard()
        with client.hold("stock/42") as lease:
            with guard.transaction(r, lease, "stock/42") as tx:  # announced: from here on an older holder is refused
                left = int(r.get("stock:42"))
                tx.set("stock:42", left - 1)
                tx.rpush("sold", "42")

    `r` is the program's own redis.Redis. An operation of a stale holder raises StaleToken, and no command of it has
    run. Threads may share a guard.

    In a cluster the guard has one slot, that of its `tag`: the keys of its commands have this tag too, `{stock}:42`.
    With `name="stock/{tag}"` each name has its own: the keys of stock/42 are like `{42}:left`.
    """

    _channel = ClientChannel

    def transaction(self, client: RedisClient, fence: Fences | None, *names: str) -> RedisTransaction:
        """A block whose commands run at its end, in one step, if every name is admitted; otherwise none of them runs.

        Entering it announces the lease, unless that was done before: an older holder does not change any more what the
        block reads with the client. Without names it is about all names of the lease. If a command fails (a wrong
        type), those before it stay, those after it do not run, and the client's own error is raised.
        """
        return _collecting(RedisTransaction, client, self, fence, names)

    def announce(self, client: RedisClient, fence: Fences, *names: str) -> None:
        """Raise the marks before anything is read: from now on an older holder's operations are refused."""
        step(self._announce(client, fence, names))

    def wrap(self, script: str) -> GuardedScript:
        """The program's own Lua script with the check in front. Its KEYS and ARGV are as without a guard."""
        return GuardedScript(self, wrapped(script))

    def wrap_library(self, library: str) -> GuardedLibrary:
        """The program's own library of functions (`#!lua name=...`), with the check in front of each function.

        `load` it where it is to run; `function(name)` is called as a script of `wrap` is.
        """
        return GuardedLibrary(self, wrapped_library(library))


class AsyncRedisGuard(_OnRedis):
    """The same for asyncio, on the program's own redis.asyncio.Redis: `async with guard.transaction(r, lease) as tx`.

    Tasks may share a guard.
    """

    _channel = AsyncClientChannel

    def transaction(
        self, client: AsyncRedisClient, fence: Fences | None, *names: str
    ) -> AsyncRedisTransaction:
        """A block whose commands run at its end, in one step, if every name is admitted; otherwise none of them runs.

        Entering it announces the lease, unless that was done before: an older holder does not change any more what the
        block reads with the client. Without names it is about all names of the lease. If a command fails (a wrong
        type), those before it stay, those after it do not run, and the client's own error is raised.
        """
        return _collecting(AsyncRedisTransaction, client, self, fence, names)

    async def announce(self, client: AsyncRedisClient, fence: Fences, *names: str) -> None:
        """Raise the marks before anything is read: from now on an older holder's operations are refused."""
        await self._announce(client, fence, names)

    def wrap(self, script: str) -> AsyncGuardedScript:
        """The program's own Lua script with the check in front. Its KEYS and ARGV are as without a guard."""
        return AsyncGuardedScript(self, wrapped(script))

    def wrap_library(self, library: str) -> AsyncGuardedLibrary:
        """The program's own library of functions (`#!lua name=...`), with the check in front of each function.

        `load` it where it is to run; `function(name)` is called as a script of `wrap` is.
        """
        return AsyncGuardedLibrary(self, wrapped_library(library))


class GuardedScript:
    """A Lua script or function that runs only if its names are admitted: the check and the script are one step."""

    def __init__(self, guard: RedisGuard, script: GuardScript) -> None:
        self._guard = guard
        self._script = script

    def __call__(
        self,
        client: RedisClient,
        fence: Fences | None,
        *names: str,
        keys: Sequence[str] = (),
        args: Sequence[Any] = (),
    ) -> Any:
        """Run it; returns what the script returns. If it fails, the client's own error is raised."""
        return step(self._guard._run(client, self._script, fence, names, keys, args))


class AsyncGuardedScript:
    """A Lua script or function that runs only if its names are admitted: the check and the script are one step."""

    def __init__(self, guard: AsyncRedisGuard, script: GuardScript) -> None:
        self._guard = guard
        self._script = script

    async def __call__(
        self,
        client: AsyncRedisClient,
        fence: Fences | None,
        *names: str,
        keys: Sequence[str] = (),
        args: Sequence[Any] = (),
    ) -> Any:
        """Run it; returns what the script returns. If it fails, the client's own error is raised."""
        return await self._guard._run(client, self._script, fence, names, keys, args)


class GuardedLibrary:
    """A library of functions that run only if their names are admitted: the check and the function are one step."""

    def __init__(self, guard: RedisGuard, library: GuardLibrary) -> None:
        self._guard = guard
        self._library = library
        self.name = library.name
        """Under which the server has it: FUNCTION DELETE takes this name."""

    def load(self, client: RedisClient) -> None:
        """Load the library, in a cluster on every primary; replaces one that was loaded before under its name."""
        self._guard._channel_of(client)
        client.function_load(self._library.source, replace=True)

    def function(self, name: str) -> GuardedScript:
        """One of its functions, by the name under which the library registers it."""
        return GuardedScript(self._guard, self._library.function(name))


class AsyncGuardedLibrary:
    """A library of functions that run only if their names are admitted: the check and the function are one step."""

    def __init__(self, guard: AsyncRedisGuard, library: GuardLibrary) -> None:
        self._guard = guard
        self._library = library
        self.name = library.name
        """Under which the server has it: FUNCTION DELETE takes this name."""

    async def load(self, client: AsyncRedisClient) -> None:
        """Load the library, in a cluster on every primary; replaces one that was loaded before under its name."""
        self._guard._channel_of(client)
        loading: Any = client.function_load(self._library.source, replace=True)
        await loading

    def function(self, name: str) -> AsyncGuardedScript:
        """One of its functions, by the name under which the library registers it."""
        return AsyncGuardedScript(self._guard, self._library.function(name))


def _collecting(
    kind: type[T], client: AnyClient, guard: _OnRedis, fence: Fences | None, names: tuple[str, ...]
) -> T:
    fences = guard._of(client)
    made: Any = kind
    transaction = made(getattr(client, "connection_pool", None), {}, False, None)
    transaction._begin(client, fences, guard, fence, names)
    return transaction  # type: ignore[no-any-return]


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
