"""RedisGuard: commands on the program's own Redis client, behind the fence in one atomic step."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import isawaitable
from typing import Any, ClassVar, TypeVar

from fenced.client import registry

try:
    import redis
    import redis.asyncio
except ImportError as error:
    raise registry.needs_package("fenced.redis", error) from error

from fenced.client.guarding import ClientGuard, Fences
from fenced.errors import Misconfigured, Misuse, Unsupported, shown
from fenced.runtime.blocking import step
from fenced.stores.redis.guard.clients import (
    AnyClient,
    AsyncRedisClient,
    ClientChannel,
    RedisClient,
    channel_of,
)
from fenced.stores.redis.guard.marks import TAG, Guarantee, MarkOptions, Word
from fenced.stores.redis.guard.scripts import GuardLibrary, GuardScript, wrapped, wrapped_library
from fenced.stores.redis.guard.slots import RedisMarksBySlot
from fenced.stores.redis.guard.transactions import AsyncRedisTransaction, RedisTransaction, stamped
from fenced.stores.redis.guard.values import SLOT_TRAITS, TRAITS
from fenced.stores.redis.wire.finding import slot_of
from fenced.values.contracts import Colour
from fenced.values.decision import Rule

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


class _OnRedis(ClientGuard[RedisMarksBySlot]):
    """What both guards share: the options, and the slots on each client."""

    _colour: ClassVar[Colour]

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
        self._options = MarkOptions(tag, rule, mode, guarantee, name)
        self.traits = TRAITS if name is None else SLOT_TRAITS

    def _made(self, client: Any) -> RedisMarksBySlot:
        return RedisMarksBySlot(self._channel_of(client), self._options)

    def _channel_of(self, client: Any) -> ClientChannel:
        channel = channel_of(client)
        if channel.colour != self._colour:
            raise Misuse(
                "RedisGuard is for a redis.Redis, AsyncRedisGuard for a redis.asyncio.Redis, "
                f"and this is {type(self).__name__} with {shown(client)}"
            )
        return channel

    async def _announce(self, client: AnyClient, fence: Fences, names: tuple[str, ...]) -> None:
        stamp, names = stamped(fence, names, announcing=True)
        slots = self._of(client)
        for group in slots.groups(names):
            opened = await slots.of(group, stamp)
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
        stamp, names = stamped(fence, names)
        slots = self._of(client)
        if slots.channel.in_cluster:
            self._check_slots(keys, slots.prefix_of(names))
        opened = await slots.of(names, stamp)
        try:
            return await opened.run(script, stamp, names, arguments, keys)
        except redis.ResponseError as error:
            if script.words[0] != "FCALL" or "Function not found" not in str(error):
                raise
            raise Misconfigured(
                f"{slots.channel.where}: there is no function {script.words[1]} here: load() the guarded library, "
                "with this version of fenced"
            ) from error

    async def _load(self, client: Any, source: str) -> None:
        self._channel_of(client)
        loading = client.function_load(source, replace=True)
        if isawaitable(loading):
            await loading

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


class AsyncRedisGuard(_OnRedis):
    """Commands on Redis keys. The marks of its names are on the same server, and one script checks and writes.

        guard = AsyncRedisGuard()
        async with client.hold("stock/42") as lease:
            async with guard.transaction(r, lease, "stock/42") as tx:  # announced: an older holder is refused now
                left = int(await r.get("stock:42"))
                tx.set("stock:42", left - 1)
                tx.rpush("sold", "42")

    `r` is the program's own redis.asyncio.Redis. An operation of a stale holder raises StaleToken, and no command of
    it has run. Tasks may share a guard.

    In a cluster the guard has one slot, that of its `tag`: the keys of its commands have this tag too, `{stock}:42`.
    With `name="stock/{tag}"` each name has its own: the keys of stock/42 are like `{42}:left`.
    """

    _colour = "asyncio"

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


class AsyncGuardedLibrary:
    """A library of functions that run only if their names are admitted: the check and the function are one step."""

    def __init__(self, guard: AsyncRedisGuard, library: GuardLibrary) -> None:
        self._guard = guard
        self._library = library
        self.name = library.name
        """Under which the server has it: FUNCTION DELETE takes this name."""

    async def load(self, client: AsyncRedisClient) -> None:
        """Load the library, in a cluster on every primary; replaces one that was loaded before under its name."""
        await self._guard._load(client, self._library.source)

    def function(self, name: str) -> AsyncGuardedScript:
        """One of its functions, by the name under which the library registers it."""
        return AsyncGuardedScript(self._guard, self._library.function(name))


# generated: the blocking twins of the asyncio classes above, by `python -m release.twins`


class RedisGuard(_OnRedis):
    """Commands on Redis keys. The marks of its names are on the same server, and one script checks and writes.

        guard = RedisGuard()
        with client.hold("stock/42") as lease:
            with guard.transaction(r, lease, "stock/42") as tx:  # announced: an older holder is refused now
                left = int(r.get("stock:42"))
                tx.set("stock:42", left - 1)
                tx.rpush("sold", "42")

    `r` is the program's own redis.Redis. An operation of a stale holder raises StaleToken, and no command of
    it has run. Threads may share a guard.

    In a cluster the guard has one slot, that of its `tag`: the keys of its commands have this tag too, `{stock}:42`.
    With `name="stock/{tag}"` each name has its own: the keys of stock/42 are like `{42}:left`.
    """

    _colour = "blocking"

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


class GuardedLibrary:
    """A library of functions that run only if their names are admitted: the check and the function are one step."""

    def __init__(self, guard: RedisGuard, library: GuardLibrary) -> None:
        self._guard = guard
        self._library = library
        self.name = library.name
        """Under which the server has it: FUNCTION DELETE takes this name."""

    def load(self, client: RedisClient) -> None:
        """Load the library, in a cluster on every primary; replaces one that was loaded before under its name."""
        step(self._guard._load(client, self._library.source))

    def function(self, name: str) -> GuardedScript:
        """One of its functions, by the name under which the library registers it."""
        return GuardedScript(self._guard, self._library.function(name))


# end


def _collecting(
    kind: type[T], client: AnyClient, guard: _OnRedis, fence: Fences | None, names: tuple[str, ...]
) -> T:
    slots = guard._of(client)
    made: Any = kind
    transaction = made(getattr(client, "connection_pool", None), {}, False, None)
    transaction._begin(client, slots, guard, fence, names)
    return transaction  # type: ignore[no-any-return]


def __dir__() -> list[str]:
    return __all__
