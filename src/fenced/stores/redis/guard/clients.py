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
from fenced.stores.redis.wire.resp import ErrorReply, command
from fenced.stores.redis.wire.routes import REDIRECTS_MAX, redirection

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


class _ClientChannel:
    """What both kinds of clients share.

    A guard keeps a channel for each client as long as the client exists, so the channel must not keep it: every
    operation does.
    """

    doubts: tuple[str, ...] = ()

    def __init__(self, client: AnyClient, in_cluster: bool) -> None:
        self._client = weakref.ref(client)
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


_LOST = (exceptions.ConnectionError, exceptions.TimeoutError)


class ClientChannel(_ClientChannel):
    """A blocking client. The methods never suspend."""

    async def ask(self, questions: Sequence[tuple[Word, ...]], key: bytes) -> list[Any]:
        return [self._reply(words, key) for words in questions]

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
        reply = self._reply((*script.words, *tail), keys[0], confirm)
        if type(reply) is ErrorReply and reply.code == "NOSCRIPT":
            reply = self._reply(("EVAL", script.source, *tail), keys[0], confirm)
        return reply

    async def keys(self, commands: Sequence[tuple[Word, ...]]) -> list[bytes]:
        """The keys of the commands, as the client encodes them."""
        cluster = self.client
        node, encode = cluster.get_redis_connection(cluster.get_default_node()), cluster.get_encoder().encode
        found: list[bytes] = []
        for words in commands:
            with _no_keys(words):
                found += map(encode, cluster.commands_parser.get_keys(node, *words) or _none(words))
        return list(dict.fromkeys(found))

    def _reply(self, words: tuple[Word, ...], key: str | bytes, confirm: bool = False) -> Any:
        client = self.client
        if not self.in_cluster:
            return self._sent(client, words, confirm)
        asked = None
        for _ in range(REDIRECTS_MAX):
            try:
                node = asked or client.get_node_from_key(key)
                reply = self._sent(client.get_redis_connection(node), words, confirm, asked is not None)
                redirected = redirection(reply, (node.host, node.port))
                if redirected is None:
                    break
                # The node did nothing. The client follows MOVED with another command, and remembers it.
                asked = client.get_node(*redirected[0]) if redirected[1] else None
                if asked is None:
                    client.exists(key)
            except _LOST as error:
                raise self.unreachable(error) from error
        return reply

    def _sent(self, client: Any, words: tuple[Word, ...], confirm: bool, asking: bool = False) -> Any:
        pool = client.connection_pool
        try:
            connection = pool.get_connection()
        except _LOST as error:
            raise self.unreachable(error) from error
        try:
            return self._exchanged(connection, words, confirm, asking)
        finally:
            pool.release(connection)

    def _exchanged(self, connection: Any, words: tuple[Word, ...], confirm: bool, asking: bool) -> Any:
        try:
            connection.send_packed_command(_packed(connection, words, confirm, asking))
            if asking:
                connection.read_response()
            if not confirm:
                return connection.read_response()
            reply, confirmations = self._read(connection), self._read(connection)
        except exceptions.RedisError as error:
            return self.replied(error)
        except BaseException:
            connection.disconnect()  # a reply may still come
            raise
        return self.confirmed(reply, confirmations)

    def _read(self, connection: Any) -> Any:
        try:
            return connection.read_response()
        except exceptions.RedisError as error:
            return self.replied(error)


class AsyncClientChannel(_ClientChannel):
    """An asyncio client."""

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
        await cluster.initialize()
        encode = cluster.get_encoder().encode
        found: list[bytes] = []
        for words in commands:
            with _no_keys(words):
                found += map(encode, await cluster.commands_parser.get_keys(*words) or _none(words))
        return list(dict.fromkeys(found))

    async def _reply(self, words: tuple[Word, ...], key: str | bytes, confirm: bool = False) -> Any:
        if self.in_cluster:
            return await self._routed(words, key, confirm)
        pool = self.client.connection_pool
        try:
            connection = await pool.get_connection()
        except _LOST as error:
            raise self.unreachable(error) from error
        try:
            return await self._exchanged(connection, words, confirm)
        finally:
            await pool.release(connection)

    async def _routed(self, words: tuple[Word, ...], key: str | bytes, confirm: bool) -> Any:
        client, asked = self.client, None
        for _ in range(REDIRECTS_MAX):
            try:
                await client.initialize()
                node = asked or client.get_node_from_key(key)
                connection = node.acquire_connection()
                try:
                    reply = await self._exchanged(connection, words, confirm, asked is not None)
                finally:
                    node.release(connection)
                redirected = redirection(reply, (node.host, node.port))
                if redirected is None:
                    break
                # The node did nothing. The client follows MOVED with another command, and remembers it.
                asked = client.get_node(*redirected[0]) if redirected[1] else None
                if asked is None:
                    await client.exists(key)
            except _LOST as error:
                raise self.unreachable(error) from error
        return reply

    async def _exchanged(
        self, connection: Any, words: tuple[Word, ...], confirm: bool, asking: bool = False
    ) -> Any:
        try:
            await connection.send_packed_command(_packed(connection, words, confirm, asking))
            if asking:
                await connection.read_response()
            if not confirm:
                return await connection.read_response()
            reply, confirmations = await self._read(connection), await self._read(connection)
        except exceptions.RedisError as error:
            return self.replied(error)
        except BaseException:
            await connection.disconnect(nowait=True)  # cancelled, perhaps: a reply may still come
            raise
        return self.confirmed(reply, confirmations)

    async def _read(self, connection: Any) -> Any:
        try:
            return await connection.read_response()
        except exceptions.RedisError as error:
            return self.replied(error)


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


def channel_of(client: Any) -> ClientChannel | AsyncClientChannel:
    """The channel of a client of redis-py; Misuse if it is none."""
    kind, in_cluster = _kind_of(type(client))  # type: ignore[arg-type]
    if kind is None:
        raise Misuse(f"give the guard a redis.Redis or a redis.asyncio.Redis, not {shown(client)}")
    return kind(client, in_cluster)


@lru_cache(maxsize=64)
def _kind_of(client: type) -> tuple[type[ClientChannel] | type[AsyncClientChannel] | None, bool]:
    """Cached, because redis-py's classes are protocols, of which Python takes long to find out."""
    pipelines = redis.client.Pipeline | redis.asyncio.client.Pipeline | redis.cluster.ClusterPipeline
    if issubclass(client, pipelines):
        return None, False
    if issubclass(client, RedisClient):
        return ClientChannel, issubclass(client, redis.cluster.RedisCluster)
    if issubclass(client, AsyncRedisClient):
        return AsyncClientChannel, issubclass(client, redis.asyncio.cluster.RedisCluster)
    return None, False


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
