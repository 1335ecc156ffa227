"""The user's own clients: redis.Redis and redis.asyncio.Redis, and those of clusters.

Commands are sent on a connection of the client's pool, not by `execute_command`: that repeats a command whose reply was
lost, and an operation could be carried out twice without anybody knowing. A client with `single_connection_client` has
a pool, too, and the guard takes a second connection from it: the lock of the first is private in asyncio.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from inspect import isawaitable
from types import SimpleNamespace
from typing import Any, NoReturn

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.cluster
from redis import exceptions

from fenced.errors import Indeterminate, Misuse, Unavailable, Unsupported, shown
from fenced.stores.redis.guard.marks import RIGHTS, WAIT, Word, unconfirmed
from fenced.stores.redis.guard.scripts import GuardScript
from fenced.stores.redis.wire import refusals
from fenced.stores.redis.wire.finding import REDIRECTS_MAX, redirection
from fenced.stores.redis.wire.resp import ErrorReply, command
from fenced.values.contracts import Colour

RedisClient = redis.Redis | redis.cluster.RedisCluster
AsyncRedisClient = redis.asyncio.Redis | redis.asyncio.cluster.RedisCluster
AnyClient = RedisClient | AsyncRedisClient
_WAIT = command(*WAIT)
_ASKING = command("ASKING")
_CODES: tuple[tuple[type[Exception], str], ...] = (
    (exceptions.NoScriptError, "NOSCRIPT"),
    (exceptions.ReadOnlyError, "READONLY"),
    (exceptions.BusyLoadingError, "LOADING"),
    (exceptions.NoPermissionError, "NOPERM"),
    (exceptions.AuthenticationError, "NOAUTH"),
    (exceptions.OutOfMemoryError, "OOM"),
    (exceptions.TryAgainError, "TRYAGAIN"),
    (exceptions.MovedError, "MOVED"),
    (exceptions.AskError, "ASK"),
    (exceptions.MasterDownError, "MASTERDOWN"),
    (exceptions.ClusterDownError, "CLUSTERDOWN"),
)
"""redis-py takes these codes away from the text of an error."""


def error_reply(error: Exception) -> ErrorReply | None:
    """What the server replied; None if the error is not a reply."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return ErrorReply(f"{code} {error}")
    return ErrorReply(str(error)) if isinstance(error, exceptions.ResponseError) else None


class ClientChannel:
    """A client of redis-py. What a blocking one does is done when its method returns, and so nothing here suspends.

    A guard keeps a channel for each client as long as the client exists, so the channel must not keep it: every
    operation does.
    """

    doubts: tuple[str, ...] = ()

    def __init__(self, client: AnyClient, colour: Colour, in_cluster: bool) -> None:
        self._client = weakref.ref(client)
        self.colour = colour
        self.in_cluster = in_cluster

    @property
    def client(self) -> Any:
        return self._client()

    @property
    def where(self) -> str:
        """Where the client connects to, without secrets."""
        pool = getattr(self.client, "connection_pool", None)
        if pool is None:
            return "the Redis cluster"
        if hasattr(pool, "service_name"):
            return f"the primary of {pool.service_name}"
        options = pool.connection_kwargs
        if "path" in options:
            return f"unix://{options['path']}"
        return (
            f"redis://{options.get('host', 'localhost')}:{options.get('port', 6379)}/{options.get('db', 0)}"
        )

    def unreachable(self, error: Exception) -> Unavailable:
        return Unavailable(f"{self.where} cannot be reached: {error}")

    def replied(self, error: exceptions.RedisError) -> ErrorReply:
        """The reply of the server. Without a reply nobody knows whether the request was carried out."""
        reply = error_reply(error)
        if reply is not None:
            return reply
        if isinstance(error, _LOST):
            unknown = f"{self.where}: the reply was lost, and the outcome is unknown: {error}"
            raise Indeterminate(unknown) from error
        raise error

    @property
    def promotes(self) -> bool:
        pool = getattr(self.client, "connection_pool", None)
        return pool is None or hasattr(pool, "service_name")

    def confirmed(self, reply: Any, confirmations: Any) -> Any:
        """The reply. Indeterminate if no replica has what was written."""
        if error := unconfirmed(self.where, reply, confirmations):
            raise error
        return reply

    def refused(self, error: ErrorReply) -> Exception:
        """An error for what the server cannot do now, or may not do; otherwise redis-py's own."""
        known = refusals.refused(error, self.where, RIGHTS)
        if isinstance(known, Unavailable) or error.code in ("NOPERM", "NOAUTH"):
            return known
        return exceptions.ResponseError(str(error))

    async def _done(self, result: Any) -> Any:
        """What a method of the client has returned, or what it will return."""
        return await result if self.colour == "asyncio" and isawaitable(result) else result

    async def ask(self, questions: Sequence[tuple[Word, ...]], key: bytes) -> list[Any]:
        return [await self._reply(words, key) for words in questions]

    async def run(
        self,
        script: GuardScript,
        keys: Sequence[str | bytes],
        arguments: Sequence[Word],
        *,
        again: bool,
        confirm: bool = False,
    ) -> Any:
        tail = (len(keys), *keys, *arguments)
        reply = await self._reply((*script.words, *tail), keys[0], confirm)
        if type(reply) is ErrorReply and reply.code == "NOSCRIPT":
            reply = await self._reply(("EVAL", script.source, *tail), keys[0], confirm)
        return reply

    async def keys(self, commands: Sequence[tuple[Word, ...]]) -> list[bytes]:
        """The keys of the commands, as the client encodes them."""
        cluster = self.client
        by: tuple[Any, ...] = ()
        if self.colour == "asyncio":
            await cluster.initialize()
        else:  # its parser may ask a node
            by = (cluster.get_redis_connection(cluster.get_default_node()),)
        encode = cluster.get_encoder().encode
        found: list[bytes] = []
        for words in commands:
            with _no_keys(words):
                named = await self._done(cluster.commands_parser.get_keys(*by, *words))
                found += map(encode, named or _none(words))
        return list(dict.fromkeys(found))

    async def _reply(self, words: tuple[Word, ...], key: str | bytes, confirm: bool = False) -> Any:
        client, asked = self.client, None
        if not self.in_cluster:
            return await self._sent(client.connection_pool, words, confirm)
        for _ in range(REDIRECTS_MAX):
            try:
                if self.colour == "asyncio":
                    await client.initialize()
                node = asked or client.get_node_from_key(key)
                reply = await self._sent(self._pool_of(node), words, confirm, asked is not None)
                redirected = redirection(reply, (node.host, node.port))
                if redirected is None:
                    break
                # The node did nothing. The client follows MOVED with another command, and remembers it.
                asked = client.get_node(*redirected[0]) if redirected[1] else None
                if asked is None:
                    await self._done(client.exists(key))
            except _LOST as error:
                raise self.unreachable(error) from error
        return reply

    def _pool_of(self, node: Any) -> Any:
        """Whence the connections to a node of the cluster come."""
        if self.colour == "asyncio":
            return SimpleNamespace(get_connection=node.acquire_connection, release=node.release)
        return self.client.get_redis_connection(node).connection_pool

    async def _sent(self, pool: Any, words: tuple[Word, ...], confirm: bool, asking: bool = False) -> Any:
        try:
            connection = await self._done(pool.get_connection())
        except _LOST as error:
            raise self.unreachable(error) from error
        try:
            return await self._exchanged(connection, words, confirm, asking)
        finally:
            await self._done(pool.release(connection))

    async def _exchanged(self, connection: Any, words: tuple[Word, ...], confirm: bool, asking: bool) -> Any:
        try:
            await self._done(connection.send_packed_command(_packed(connection, words, confirm, asking)))
            if asking:
                await self._done(connection.read_response())
            if not confirm:
                return await self._done(connection.read_response())
            reply, confirmations = await self._read(connection), await self._read(connection)
        except exceptions.RedisError as error:
            return self.replied(error)
        except BaseException:
            # Interrupted or cancelled: a reply may still come, which would be taken for the next.
            await self._done(connection.disconnect(**_AT_ONCE[self.colour]))
            raise
        return self.confirmed(reply, confirmations)

    async def _read(self, connection: Any) -> Any:
        try:
            return await self._done(connection.read_response())
        except exceptions.RedisError as error:
            return self.replied(error)


_LOST = (exceptions.ConnectionError, exceptions.TimeoutError)
_AT_ONCE: dict[Colour, dict[str, bool]] = {"blocking": {}, "asyncio": {"nowait": True}}


@contextlib.contextmanager
def _no_keys(words: tuple[Word, ...]) -> Iterator[None]:
    try:
        yield
    except exceptions.RedisError as error:
        if isinstance(error, _LOST):
            raise
        raise Unsupported(f"{shown(words[0])} cannot run in a transaction: {error}") from error


def _none(words: tuple[Word, ...]) -> NoReturn:
    raise Unsupported(f"{shown(words[0])} names no key, so no node of a cluster can be told to run it")


def channel_of(client: Any) -> ClientChannel:
    """The channel of a client of redis-py; Misuse if it is none."""
    kind = _kind_of(type(client))  # type: ignore[arg-type]
    if kind is None:
        raise Misuse(f"give the guard a redis.Redis or a redis.asyncio.Redis, not {shown(client)}")
    return ClientChannel(client, *kind)


@lru_cache(maxsize=64)
def _kind_of(client: type) -> tuple[Colour, bool] | None:
    """Its colour, and whether it is a cluster's. Cached: redis-py's classes are protocols, slow to compare with."""
    pipelines = redis.client.Pipeline | redis.asyncio.client.Pipeline | redis.cluster.ClusterPipeline
    if issubclass(client, pipelines):
        return None
    if issubclass(client, RedisClient):
        return "blocking", issubclass(client, redis.cluster.RedisCluster)
    if issubclass(client, AsyncRedisClient):
        return "asyncio", issubclass(client, redis.asyncio.cluster.RedisCluster)
    return None


def _packed(connection: Any, words: tuple[Word, ...], confirm: bool, asking: bool) -> list[bytes]:
    """A request, with the words encoded as the client encodes them; ASKING and WAIT belong to the same connection."""
    encoder = connection.encoder
    encoding, errors = encoder.encoding, encoder.encoding_errors
    raw = []
    for word in words:  # texts and bytes as `encode` does it, without a call for each
        if type(word) is str:
            raw.append(word.encode(encoding, errors))
        else:
            raw.append(word if type(word) is bytes else bytes(encoder.encode(word)))
    request = _ASKING + command(*raw) if asking else command(*raw)
    return [request + _WAIT] if confirm else [request]


def words_of(line: Sequence[Word]) -> tuple[Word, ...]:
    """A command of redis-py as the server gets it: its name may be two words in one text."""
    first = line[0]
    return tuple(line) if " " not in first else (*first.split(), *line[1:])
