"""An in-memory Redis: the commands and the Lua that the shipped scripts need, on a clock that is passed in.

Bytes in, bytes out: `requests` splits what a connection sent, `RedisNode.execute` carries one request out. The shipped
scripts run unchanged, in Lua 5.1 (the package `lupa`). A test sends random requests to it and to a real server. Not
modelled: memory limits, eviction, expiry of keys (the scripts use none), transactions, RESP3, and every command that is
not in `COMMANDS`.
"""

from __future__ import annotations

import bisect
import hashlib
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

Reply = Any
"""What a command answers: int, bytes, None, a list of those, Status or ErrorText."""
NO_ID = "0" * 40


class SimpleString(bytes):
    """A simple string."""


class ErrorText(Exception):
    """An error reply; the first word is a code."""


class SortedSet:
    """Members by score, then by their bytes."""

    def __init__(self) -> None:
        self.scores: dict[bytes, float] = {}
        self.order: list[tuple[float, bytes]] = []

    def add(self, member: bytes, score: float) -> int:
        before = self.scores.get(member)
        if before is not None:
            self.order.remove((before, member))
        self.scores[member] = score
        bisect.insort(self.order, (score, member))
        return int(before is None)

    def remove(self, member: bytes) -> int:
        score = self.scores.pop(member, None)
        if score is None:
            return 0
        self.order.remove((score, member))
        return 1

    def by_bytes(self, low: bytes, high: bytes) -> list[bytes]:
        """Members between two bounds as ZRANGEBYLEX takes them; all scores are the same."""
        return [member for _, member in self.order[self._index(low, low=True) : self._index(high, low=False)]]

    def _index(self, bound: bytes, *, low: bool) -> int:
        if bound in (b"-", b"+"):
            return 0 if bound == b"-" else len(self.order)
        if bound[:1] not in (b"[", b"("):
            raise ErrorText("ERR min or max not valid string range item")
        score = self.order[0][0] if self.order else 0.0
        find = bisect.bisect_left if (bound[:1] == b"[") == low else bisect.bisect_right
        return find(self.order, (score, bound[1:]))


class Keyspace:
    """The data of one node, and the commands that scripts may call on it."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self.data: dict[bytes, dict[bytes, bytes] | SortedSet] = {}
        self._now_us = now_us

    def copy(self, other: Keyspace) -> None:
        """Copy another node's data: the first synchronisation of a replica."""
        self.data.clear()
        for key, value in other.data.items():
            if isinstance(value, dict):
                self.data[key] = dict(value)
            else:
                for score, member in value.order:
                    self._zset(key).add(member, score)

    def _hash(self, key: bytes) -> dict[bytes, bytes]:
        found = self.data.setdefault(key, {})
        if not isinstance(found, dict):
            raise ErrorText(WRONG_TYPE)
        return found

    def _zset(self, key: bytes) -> SortedSet:
        found = self.data.setdefault(key, SortedSet())
        if isinstance(found, dict):
            raise ErrorText(WRONG_TYPE)
        return found

    def run(self, name: bytes, arguments: Sequence[bytes]) -> Reply:
        reply = COMMANDS[name](self, *arguments)
        if name in KEYED and not self._size(arguments[0]):
            self.data.pop(arguments[0], None)  # Redis keeps no empty collections
        return reply

    def _size(self, key: bytes) -> int:
        found = self.data.get(key, {})
        return len(found) if isinstance(found, dict) else len(found.order)

    def time(self) -> Reply:
        seconds, us = divmod(self._now_us(), 1_000_000)
        return [b"%d" % seconds, b"%d" % us]

    def type(self, key: bytes) -> Reply:
        found = self.data.get(key)
        return SimpleString(b"none" if found is None else b"hash" if isinstance(found, dict) else b"zset")

    def hget(self, key: bytes, field: bytes) -> Reply:
        return self._hash(key).get(field)

    def hmget(self, key: bytes, *fields: bytes) -> Reply:
        found = self._hash(key)
        return [found.get(field) for field in fields]

    def hset(self, key: bytes, *pairs: bytes) -> Reply:
        found = self._hash(key)
        before = len(found)
        found.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(found) - before

    def hsetnx(self, key: bytes, field: bytes, value: bytes) -> Reply:
        found = self._hash(key)
        if field in found:
            return 0
        found[field] = value
        return 1

    def hincrby(self, key: bytes, field: bytes, by: bytes) -> Reply:
        found = self._hash(key)
        value = int(found.get(field, b"0")) + int(by)
        found[field] = b"%d" % value
        return value

    def hdel(self, key: bytes, *fields: bytes) -> Reply:
        found = self._hash(key)
        return sum(found.pop(field, None) is not None for field in fields)

    def zadd(self, key: bytes, *pairs: bytes) -> Reply:
        found = self._zset(key)
        return sum(
            found.add(member, float(score)) for score, member in zip(pairs[::2], pairs[1::2], strict=True)
        )

    def zrem(self, key: bytes, *members: bytes) -> Reply:
        found = self._zset(key)
        return sum(found.remove(member) for member in members)

    def zrangebylex(self, key: bytes, low: bytes, high: bytes, *limit: bytes) -> Reply:
        return _limited(self._zset(key).by_bytes(low, high), limit)

    def zrevrangebylex(self, key: bytes, high: bytes, low: bytes, *limit: bytes) -> Reply:
        return _limited(self._zset(key).by_bytes(low, high)[::-1], limit)

    def zlexcount(self, key: bytes, low: bytes, high: bytes) -> Reply:
        return len(self._zset(key).by_bytes(low, high))

    def zrangebyscore(self, key: bytes, low: bytes, high: bytes, *limit: bytes) -> Reply:
        least, most = float(low), float(high)
        found = [member for score, member in self._zset(key).order if least <= score <= most]
        return _limited(found, limit)


WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
COMMANDS: dict[bytes, Callable[..., Reply]] = {
    name.upper().encode(): getattr(Keyspace, name)
    for name in (
        "time type hget hmget hset hsetnx hincrby hdel zadd zrem zrangebylex zrevrangebylex zlexcount zrangebyscore"
    ).split()
}
KEYED = frozenset(COMMANDS) - {b"TIME", b"TYPE"}
WRITES = frozenset((b"HSET", b"HSETNX", b"HINCRBY", b"HDEL", b"ZADD", b"ZREM"))


def _limited(members: list[bytes], limit: Sequence[bytes]) -> list[bytes]:
    if not limit:
        return members
    skip, count = int(limit[1]), int(limit[2])
    return members[skip:] if count < 0 else members[skip : skip + count]


class RedisNode:
    """One server: its data, role, script cache and subscribers. To the scripts it looks like a real one."""

    def __init__(self, name: str, now_us: Callable[[], int], draw_id: Callable[[], str]) -> None:
        self.name = name
        self.keyspace = Keyspace(now_us)
        self.settings = {
            "appendonly": "yes",
            "appendfsync": "always",
            "no-appendfsync-on-rewrite": "no",
            "maxmemory": "0",
            "maxmemory-policy": "noeviction",
        }
        self.master = True
        self.replicas: list[RedisNode] = []
        self.redirect: Callable[[bytes], str] = lambda key: ""
        """The MOVED or ASK error for a key that another node of a cluster serves; empty if this one does."""
        self.send: Callable[[object, bytes], None] = lambda session, data: None
        """Sends bytes to a connection that is subscribed."""
        self.effects: list[tuple[bytes, tuple[bytes, ...]]] = []
        """Every write, in order: what replicas receive."""
        self.applied = 0
        """How many effects of its primary a replica has."""
        self._draw_id = draw_id
        self.replication_id, self.former_id = draw_id(), NO_ID
        self.scripts: dict[bytes, bytes] = {}
        self.subscribers: dict[bytes, dict[object, None]] = {}

    def restarted(self) -> None:
        """The process was restarted: the data was on the disk, scripts, subscribers and replication id were not."""
        self.scripts.clear()
        self.subscribers.clear()
        self.replication_id, self.former_id = self._draw_id(), NO_ID

    def follow(self, primary: RedisNode) -> None:
        """Become a replica that has everything up to now."""
        self.master = False
        self.keyspace.copy(primary.keyspace)
        self.applied = len(primary.effects)
        self.replication_id, self.former_id = primary.replication_id, primary.former_id
        if self not in primary.replicas:
            primary.replicas.append(self)

    def promoted(self) -> None:
        """A replica becomes the primary: it has a new replication id and remembers the former one."""
        self.master, self.effects = True, []
        self.former_id, self.replication_id = self.replication_id, self._draw_id()

    def replicate(self, primary: RedisNode, upto: int) -> None:
        """Apply the effects of the primary that have arrived."""
        for name, arguments in primary.effects[self.applied : upto]:
            self.keyspace.run(name, arguments)
        self.applied = max(self.applied, upto)

    # Requests.

    def execute(self, session: object, words: Sequence[bytes]) -> bytes:
        """Carry out one request; returns its reply, packed."""
        try:
            return packed(self._reply(session, words[0].upper(), words[1:]))
        except ErrorText as error:
            return b"-%b\r\n" % str(error).encode()

    def _reply(self, session: object, name: bytes, words: Sequence[bytes]) -> Reply:
        match name:
            case b"EVALSHA" | b"EVAL":
                return self._evaluate(name, words)
            case b"SCRIPT" if words[0].upper() == b"LOAD":
                return self._keep(words[1])
            case b"SUBSCRIBE":
                self.subscribers.setdefault(words[0], {})[session] = None
                return [b"subscribe", words[0], 1]
            case b"CONFIG" if words[0].upper() == b"GET":
                setting = self.settings.get(words[1].decode())
                return [] if setting is None else [words[1], setting.encode()]
            case b"PING":
                return SimpleString(b"PONG")
            case b"AUTH" | b"SELECT" | b"CLIENT" | b"ASKING" | b"READONLY":
                return SimpleString(b"OK")
            case _:
                return self.call(name, words)

    def _evaluate(self, name: bytes, words: Sequence[bytes]) -> Reply:
        count = int(words[1])
        keys, arguments = words[2 : 2 + count], words[2 + count :]
        for key in keys:
            if error := self.redirect(key):
                raise ErrorText(error)
        source = self.scripts.get(self._keep(words[0]) if name == b"EVAL" else words[0])
        if source is None:
            raise ErrorText("NOSCRIPT No matching script. Please use EVAL.")
        return lua().run(self, source, keys, arguments)

    def _keep(self, source: bytes) -> bytes:
        sha = _sha_of(source)
        self.scripts[sha] = source
        return sha

    def call(self, name: bytes, words: Sequence[bytes]) -> Reply:
        """A command, sent by a client or called by a script."""
        if name == b"INFO":
            return self._info(words[0] if words else b"")
        if name == b"PUBLISH":
            return self._publish(words[0], words[1])
        if name not in COMMANDS:
            raise ErrorText(f"ERR unknown command '{name.decode(errors='replace')}'")
        if name not in WRITES:
            return self.keyspace.run(name, words)
        if not self.master:
            raise ErrorText("READONLY You can't write against a read only replica.")
        reply = self.keyspace.run(name, words)
        self.effects.append((name, tuple(words)))
        return reply

    def _publish(self, channel: bytes, message: bytes) -> int:
        sessions = self.subscribers.get(channel, {})
        for session in sessions:
            self.send(session, packed([b"message", channel, message]))
        return len(sessions)

    def _info(self, section: bytes) -> bytes:
        if section.lower() == b"cluster":
            return b"# Cluster\r\ncluster_enabled:0\r\n"
        role = "master" if self.master else "slave"
        return (
            f"# Replication\r\nrole:{role}\r\nconnected_slaves:{len(self.replicas)}\r\n"
            f"master_failover_state:no-failover\r\nmaster_replid:{self.replication_id}\r\n"
            f"master_replid2:{self.former_id}\r\n"
        ).encode()

    def forget(self, session: object) -> None:
        """The connection has ended."""
        for sessions in self.subscribers.values():
            sessions.pop(session, None)


# The protocol.


def packed(reply: Reply) -> bytes:
    """A reply as RESP2 writes it."""
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, SimpleString):
        return b"+%b\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if reply is None:
        return b"$-1\r\n"
    return b"*%d\r\n" % len(reply) + b"".join(map(packed, reply))


def requests(data: bytearray) -> list[list[bytes]]:
    """Take the complete requests from the front of what a connection has sent."""
    found: list[list[bytes]] = []
    while (taken := _request(data)) is not None:
        words, end = taken
        found.append(words)
        del data[:end]
    return found


def _request(data: bytearray) -> tuple[list[bytes], int] | None:
    end = data.find(b"\r\n")
    if end < 0:
        return None
    words: list[bytes] = []
    for _ in range(int(data[1:end])):
        at = end + 2
        end = data.find(b"\r\n", at)
        if end < 0:
            return None
        size, at = int(data[at + 1 : end]), end + 2
        end = at + size
        if len(data) < end + 2:
            return None
        words.append(bytes(data[at:end]))
    return words, end + 2


# The scripts.


class ScriptEngine:
    """Lua 5.1 with `redis.call` and `struct`, shared by all nodes: a script runs alone."""

    def __init__(self) -> None:
        try:
            from lupa.lua51 import LuaError, LuaRuntime
        except ImportError as error:
            raise RuntimeError("the in-memory Redis runs Lua scripts: pip install lupa") from error
        self._error_type: type[Exception] = LuaError
        self._lua = LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self._node: RedisNode | None = None
        self._compiled: dict[bytes, Any] = {}
        lua_globals = self._lua.globals()
        lua_globals[b"redis"] = self._lua.table_from({b"call": self._call})
        lua_globals[b"struct"] = self._lua.table_from({b"pack": _pack, b"unpack": _unpack})

    def run(self, node: RedisNode, source: bytes, keys: Sequence[bytes], arguments: Sequence[bytes]) -> Reply:
        function = self._compiled.get(source)
        if function is None:
            function = self._compiled[source] = self._lua.execute(
                b"return function(KEYS, ARGV) " + source + b"\nend"
            )
        self._node = node
        try:
            result = function(self._lua.table_from(keys), self._lua.table_from(arguments))
        except self._error_type as error:
            raise ErrorText(f"ERR {error}") from error
        return self._from_lua(result[0] if isinstance(result, tuple) else result)

    def _call(self, name: bytes, *words: bytes | float) -> Any:
        assert self._node is not None
        return self._to_lua(self._node.call(name, [_word(word) for word in words]))

    def _to_lua(self, reply: Reply) -> Any:
        if reply is None:
            return False
        if isinstance(reply, SimpleString):
            return self._lua.table_from({b"ok": bytes(reply)})
        if isinstance(reply, list):
            return self._lua.table_from([self._to_lua(item) for item in reply])
        return reply

    def _from_lua(self, value: Any) -> Reply:
        if value is None or value is False:
            return None
        if value is True:
            return 1
        if isinstance(value, int | float):
            return int(value)
        if isinstance(value, bytes):
            return value
        if (status := value[b"ok"]) is not None:
            return SimpleString(status)
        items: list[Reply] = []
        while (item := value[len(items) + 1]) is not None:
            items.append(self._from_lua(item))
        return items


@cache
def lua() -> ScriptEngine:
    return ScriptEngine()


@cache
def _sha_of(source: bytes) -> bytes:
    return hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()


def _word(word: bytes | float) -> bytes:
    return word if isinstance(word, bytes) else b"%d" % word if word == int(word) else b"%.17g" % word


@cache
def _format(text: bytes) -> struct.Struct:
    return struct.Struct(text.decode().replace("I8", "Q").replace("c1", "1s"))


def _pack(text: bytes, *values: bytes | float) -> bytes:
    return _format(text).pack(*(value if isinstance(value, bytes) else int(value) for value in values))


def _unpack(text: bytes, data: bytes) -> tuple[Any, ...]:
    form = _format(text)
    return (*form.unpack_from(data), form.size + 1)
