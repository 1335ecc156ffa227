"""The Redis of the worlds answers as a real one does: the same random requests to both, and every reply compared."""

from __future__ import annotations

import random
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fenced.stores.redis.authority import answers
from fenced.stores.redis.authority.scripts import KEYS, SCRIPTS, source_of
from fenced.stores.redis.wire.resp import ErrorReply, Incomplete, RespReader, command
from fenced.values.model import Holder
from fenced_testkit.servers import RedisServer
from fenced_testkit.worlds.redis_node import RedisNode, requests

REALM = "00000000000000aa"
HOLDER = Holder("1", "label", "host", 1)
Word = str | bytes | int


class Both:
    """A real server and one in memory."""

    def __init__(self, server: RedisServer) -> None:
        self._link = socket.create_connection((server.host, server.port), timeout=30)
        self._reader = RespReader()
        self.node = RedisNode("node", lambda: 0, lambda: secrets.token_hex(20))
        self.keys = [f"fenced:{{{secrets.token_hex(8)}}}:{key}" for key in KEYS]

    def close(self) -> None:
        self._link.close()

    def real(self, *words: Word) -> Any:
        self._link.sendall(command(*words))
        while True:
            try:
                return self._reader.next()
            except Incomplete:
                self._reader.feed(self._link.recv(65536))

    def in_memory(self, *words: Word) -> Any:
        (request,) = requests(bytearray(command(*words)))
        reader = RespReader()
        reader.feed(self.node.execute("client", request))
        return reader.next()

    def same(self, *words: Word) -> Any:
        real, in_memory = self.real(*words), self.in_memory(*words)
        if isinstance(real, ErrorReply) and isinstance(in_memory, ErrorReply):
            real, in_memory = real.code, in_memory.code
        assert in_memory == real, words
        return real

    def run(self, script: str, now_us: int, *arguments: Word) -> Any:
        """A shipped script, on a clock that both servers share."""
        seconds, us = divmod(now_us, 1_000_000)
        pinned = f"local clock = {{ '{seconds}', '{us}' }}"
        source = source_of(script)
        assert source.count("local clock = call('TIME')") == 1
        source = source.replace("local clock = call('TIME')", pinned)
        return self.same("EVAL", source, len(self.keys), *self.keys, *arguments)

    def token(self) -> int:
        """The last token that was minted."""
        return int(self.same("HGET", self.keys[0], "token") or 0)

    def same_data(self) -> None:
        """The same keys, to the last byte, except for the replication id."""
        for key in self.keys:
            held = self.node.keyspace.data.get(key.encode(), {})
            if isinstance(held, dict):
                flat = self.real("HGETALL", key)
                real = dict(zip(flat[::2], flat[1::2], strict=True))
                assert {**held, b"lineage": b""} == {**real, b"lineage": b""}
            else:
                flat = self.real("ZRANGE", key, 0, -1, "WITHSCORES")
                assert [
                    (float(score), member) for member, score in zip(flat[::2], flat[1::2], strict=True)
                ] == (held.order)


@pytest.fixture
def both(redis_server: RedisServer) -> Any:
    made = Both(redis_server)
    yield made
    made.real("DEL", *made.keys)
    made.close()


def _range(rng: random.Random) -> tuple[str, str]:
    bounds = [rng.choice("[(") + rng.choice("abcd") * rng.randint(0, 2) for _ in range(2)]
    return rng.choice((bounds[0], "-")), rng.choice((bounds[1], "+"))


def _random_command(rng: random.Random, hashed: str, ordered: str) -> Sequence[Word]:
    field, member = rng.choice("abc"), rng.choice("abcd") * rng.randint(1, 2)
    limit = rng.choice(((), ("LIMIT", rng.randint(0, 2), rng.randint(-1, 3))))
    low, high = _range(rng)
    makers: list[Callable[[], Sequence[Word]]] = [
        lambda: ("HSET", hashed, field, rng.randint(0, 9), rng.choice("abc"), rng.randint(0, 9)),
        lambda: ("HSETNX", hashed, field, rng.randint(0, 9)),
        lambda: ("HGET", hashed, field),
        lambda: ("HMGET", hashed, "a", "b", "z"),
        lambda: ("HINCRBY", hashed, field, rng.randint(-5, 5)),
        lambda: ("HDEL", hashed, field, rng.choice("abc")),
        lambda: ("ZADD", ordered, 0, member),
        lambda: ("ZREM", ordered, member, "zz"),
        lambda: ("ZRANGEBYLEX", ordered, low, high, *limit),
        lambda: ("ZREVRANGEBYLEX", ordered, high, low, *limit),
        lambda: ("ZLEXCOUNT", ordered, low, high),
        lambda: ("ZRANGEBYSCORE", ordered, "-inf", rng.randint(-1, 1), *limit),
        lambda: ("TYPE", rng.choice((hashed, ordered, "nothing"))),
        lambda: ("HGET", ordered, field),
        lambda: ("ZADD", hashed, 0, member),
        lambda: ("EVALSHA", "0" * 40, 0),
    ]
    return rng.choice(makers)()


@pytest.mark.parametrize("seed", range(5))
def test_commands(both: Both, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        both.same(*_random_command(rng, both.keys[0], both.keys[2]))
    both.same_data()


def test_lua_results_are_converted_as_by_redis(both: Both) -> None:
    for source in (
        "return 3.9",
        "return {1, 'a', {2, {}}, nil, 5}",
        "return {1, false, true}",
        "return false",
        "return redis.call('TYPE', KEYS[1])",
        "return redis.call('HMGET', KEYS[1], 'a', 'b')",
        "return {struct.unpack('>I8c1I8', struct.pack('>I8c1I8', 9007199254740991, 'x', 7))}",
        "return {#ARGV, ARGV[1], redis.call('HSET', KEYS[1], 'n', 1700000000000000)}",
        "return redis.call('HGET', KEYS[1], 'n')",
    ):
        both.same("EVAL", source, 1, both.keys[0], "argument")


@pytest.mark.parametrize("seed", range(8))
def test_the_shipped_scripts(both: Both, seed: int) -> None:
    """Long histories of leases: every reply and, in the end, every byte that is stored."""
    rng = random.Random(seed)
    now = 1_700_000_000_000_000
    publics = [f"{number:032x}" for number in range(12)]
    used: set[str] = set()
    both.run("open", now, REALM, 1, 1)
    for _ in range(150):
        now += rng.choice((0, 1, 1_000, 400_000, 900_000, rng.randint(0, 2_000_000)))
        if rng.random() < 0.01:
            now += 700_000_000  # attempts are forgotten
        public = rng.choice(publics)
        names = tuple(sorted(rng.sample(("a", "b", "b/c"), rng.choice((1, 1, 2)))))
        ask = (REALM, 1_000_000, rng.choice((0, 0, 300_000)), rng.choice("01"))
        script, arguments = rng.choice(
            (
                *[("ask", (*ask, answers.about(names, "channel", HOLDER), public))] * 4,
                ("renew", (REALM, *rng.sample(publics, 4))),
                *[("release", (public, rng.choice("rd")))] * 2,
                *[("force_release", (REALM, rng.choice("ab"), both.token() - rng.choice((0, 0, 1))))] * 2,
                ("raise_floor", (REALM, rng.randint(0, 200))),
                ("survey", ("", 10)),
                ("survey", ("", 0, "a")),
                ("tidy", (20,)),
                ("open", (REALM, 1, 1)),
            )
        )
        used.add(script)
        both.run(script, now, *arguments)
    both.same_data()
    assert used == set(SCRIPTS)


def test_a_replica_refuses_and_a_promoted_one_has_another_history() -> None:
    primary, replica = (RedisNode(name, lambda: 0, lambda: secrets.token_hex(20)) for name in ("one", "two"))
    primary.call(b"HSET", (b"key", b"field", b"before"))
    replica.follow(primary)
    primary.call(b"HSET", (b"key", b"field", b"after"))
    assert replica.keyspace.hget(b"key", b"field") == b"before"  # it lags
    replica.replicate(primary, len(primary.effects))
    assert replica.keyspace.hget(b"key", b"field") == b"after"
    assert replica.execute("client", [b"HSET", b"key", b"field", b"x"]).startswith(b"-READONLY")
    replica.promoted()
    info = replica.call(b"INFO", (b"replication",))
    assert b"role:master" in info
    assert f"master_replid2:{primary.replication_id}".encode() in info


def test_a_node_of_a_cluster_redirects() -> None:
    node = RedisNode("one", lambda: 0, lambda: secrets.token_hex(20))
    node.redirect = lambda key: "MOVED 42 other:6379" if key == b"elsewhere" else ""
    assert node.execute("client", [b"EVAL", b"return 1", b"1", b"elsewhere"]) == b"-MOVED 42 other:6379\r\n"
    assert node.execute("client", [b"EVAL", b"return 1", b"1", b"here"]) == b":1\r\n"


def test_requests_in_any_pieces() -> None:
    sent = command("SET", b"a\r\nb", "") + command("PING")
    for at in range(len(sent)):
        data = bytearray(sent[:at])
        found = requests(data)
        data += sent[at:]
        assert [*found, *requests(data)] == [[b"SET", b"a\r\nb", b""], [b"PING"]]
