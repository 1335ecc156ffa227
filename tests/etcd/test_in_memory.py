"""The in-memory etcd answers as a real one does: the same random requests, the same replies."""

from __future__ import annotations

import random
import secrets
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from fenced.stores.etcd.wire import http2, messages
from fenced.stores.etcd.wire.http2 import GrpcConnection, GrpcStatus
from fenced.stores.etcd.wire.messages import delete, get, put, txn
from fenced.stores.etcd.wire.protobuf import data, fields, integer, message, raw, signed, whole
from fenced_testkit.runtime.world import World
from fenced_testkit.servers import EtcdServer
from fenced_testkit.worlds.etcd_cluster import EXPIRY_CHECK_SECONDS, InMemoryEtcd

pytestmark = pytest.mark.xdist_group("etcd in memory")  # one server for all

COMPACT = "/etcdserverpb.KV/Compact"
LEASE_REVOKE = "/etcdserverpb.Lease/LeaseRevoke"
SECONDS = 10_000
"""Leases are granted in these steps, and what is left of them is compared in them: a slow machine changes nothing."""
HISTORIES = 12
REQUESTS = 60

# What replies consist of. "revision" is compared relative to the beginning of the history.
HEADER: dict[int, Any] = {3: "revision"}
KV: dict[int, Any] = {1: "bytes", 2: "revision", 3: "revision", 4: "number", 5: "bytes", 6: "number"}
RANGE: dict[int, Any] = {1: HEADER, 2: KV, 3: "number", 4: "number"}
OPERATION: dict[int, Any] = {1: RANGE, 2: {1: HEADER}, 3: {1: HEADER, 2: "number"}}
REPLIES: dict[str, dict[int, Any]] = {
    messages.TXN: {1: HEADER, 2: "number", 3: OPERATION},
    messages.LEASE_GRANT: {1: HEADER, 2: "number", 3: "number"},
    messages.LEASE_KEEP_ALIVE: {1: HEADER, 2: "number", 3: "number"},
    messages.LEASE_TIME_TO_LIVE: {1: HEADER, 2: "number", 3: "seconds", 4: "number", 5: "any order"},
    messages.WATCH: {2: "number", 3: "number", 4: "number", 5: "revision", 11: {1: "number", 2: KV}},
    LEASE_REVOKE: {1: HEADER},
    COMPACT: {1: HEADER},
}


def told(reply: bytes, shape: dict[int, Any], base: int) -> tuple[Any, ...]:
    """A reply as nested tuples; fields that nobody uses are left out."""
    found: list[Any] = []
    for number, value in fields(reply):
        kind = shape.get(number)
        if isinstance(kind, dict):
            found.append((number, told(raw(value), kind, base)))
        elif kind == "revision":
            found.append((number, whole(value) - base))
        elif kind == "seconds":
            found.append((number, signed(whole(value)) // SECONDS))
        elif kind is not None:
            found.append((number, value))
    return tuple(sorted(found, key=lambda each: (each[0], each[1] if shape[each[0]] == "any order" else b"")))


class GrpcClient:
    """Calls over one connection, whichever end it has."""

    def __init__(self) -> None:
        self._grpc = GrpcConnection()
        self._hello = self._grpc.hello()

    def send(self, data: bytes) -> None:
        raise NotImplementedError

    def receive(self) -> bytes:
        raise NotImplementedError

    def begin(self, path: str, requests: list[bytes], *, end: bool = True) -> None:
        head = http2.head("http", "etcd", path, (("hasleader", "true"),), "")
        hello, self._hello = self._hello, b""
        self.send(hello + self._grpc.begin(head, requests, end=end))

    def say(self, request: bytes) -> None:
        self.send(self._grpc.send([request]))

    def _take(self) -> None:
        answers = self._grpc.receive(self.receive()) + self._grpc.pings
        self._grpc.pings = b""
        if answers:
            self.send(answers)

    def messages(self, count: int) -> list[bytes]:
        """So many more messages of the call."""
        while len(self._grpc.messages) < count and self._grpc.status is None:
            self._take()
        return [self._grpc.messages.popleft() for _ in range(min(count, len(self._grpc.messages)))]

    def call(self, path: str, *requests: bytes) -> list[bytes] | GrpcStatus:
        self.begin(path, list(requests))
        while self._grpc.status is None:
            self._take()
        return list(self._grpc.messages) if self._grpc.status.code == 0 else self._grpc.status


class RealClient(GrpcClient):
    def __init__(self, port: int) -> None:
        super().__init__()
        self._link = socket.create_connection(("127.0.0.1", port), timeout=60)

    def send(self, data: bytes) -> None:
        self._link.sendall(data)

    def receive(self) -> bytes:
        data = self._link.recv(2**16)
        assert data, "the server closed the connection"
        return data

    def close(self) -> None:
        self._link.close()


class InMemoryClient(GrpcClient):
    """Connected to an in-memory member; what the member sends is kept until it is received."""

    def __init__(self, cluster: InMemoryEtcd, member: int = 0) -> None:
        super().__init__()
        self._member = cluster.members[member]
        self._end = _ClientEnd()

    def send(self, data: bytes) -> None:
        middle = len(data) // 2  # a frame may come in pieces
        self._member.on_bytes(self._end, data[:middle])
        self._member.on_bytes(self._end, data[middle:])

    def receive(self) -> bytes:
        assert self._end.sent, "the in-memory server has nothing to say"
        return self._end.sent.pop(0)

    def unread(self) -> int:
        """How many messages the server has sent and nobody has read."""
        while self._end.sent:
            self._grpc.receive(self.receive())
        return len(self._grpc.messages)


class _ClientEnd:
    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        raise AssertionError("the in-memory server did not understand the client")


class History:
    """One random history: makes the next request from what is known so far, for the real server and the other."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.prefix = secrets.token_bytes(6).hex().encode() + b"/"
        self.leases = [1 << 62 | secrets.randbits(62) for _ in range(3)]
        self.revisions = 0
        """The latest revision, relative to the beginning."""
        self.watches = 0

    def key(self) -> bytes:
        return self.prefix + self.rng.choice((b"a", b"b", b"c", b"d"))

    def end(self) -> bytes:
        return self.rng.choice((b"", self.prefix + b"c", self.prefix + b"z"))

    def lease(self, none: int = 2) -> int:
        return self.rng.choice([0] * none + self.leases)

    def revision(self, base: int) -> int:
        return base + self.rng.randint(-1, self.revisions + 1)

    def compare(self, base: int) -> bytes:
        rng, key, end = self.rng, self.key(), self.end()
        result, target = rng.randrange(4), rng.randrange(5)
        given = {
            0: integer(4, rng.randrange(3)),
            1: integer(5, rng.choice((0, self.revision(base)))),
            2: integer(6, rng.choice((0, self.revision(base)))),
            3: message(7, rng.choice((b"", b"x", b"y"))),
            4: integer(8, self.lease()),
        }[target]
        return integer(1, result) + integer(2, target) + data(3, key) + given + data(64, end)

    def operation(self, base: int) -> bytes:
        rng, key, end = self.rng, self.key(), self.end()
        match rng.randrange(6):
            case 0 | 1:
                return put(key, rng.choice((b"", b"x", b"y")), self.lease())
            case 2:
                return delete(key) if rng.random() < 0.5 else message(3, data(1, key) + data(2, end))
            case 3:
                order = integer(3, rng.randrange(3)) + integer(5, rng.choice((0, 1, 2)))
                return message(1, data(1, key) + data(2, end) + order + integer(7, rng.random() < 0.2))
            case 4:
                past = integer(4, self.revision(base) if rng.random() < 0.5 else 0)
                return message(1, data(1, key) + data(2, end) + past)
        return get(key, end, last=rng.random() < 0.5, count=rng.random() < 0.5)

    def txn(self, base: int) -> bytes:
        rng = self.rng
        compares = [self.compare(base) for _ in range(rng.choice((0, 0, 1, 2)))]
        then = [self.operation(base) for _ in range(rng.randint(0, 3))]
        otherwise = [self.operation(base) for _ in range(rng.randint(0, 2))]
        return txn(compares, then, otherwise)

    def request(self, base: int) -> tuple[str, bytes]:
        match self.rng.randrange(16):
            case 0 | 1:
                return messages.LEASE_GRANT, messages.lease_grant(
                    self.lease(0), SECONDS // 2 + SECONDS * self.rng.randint(1, 3)
                )
            case 2:
                return LEASE_REVOKE, messages.lease_id(self.lease(0))
            case 3:
                return messages.LEASE_KEEP_ALIVE, messages.lease_id(self.lease(0))
            case 4 | 5:
                return messages.LEASE_TIME_TO_LIVE, messages.time_to_live(
                    self.lease(0), keys=self.rng.random() < 0.7
                )
            # A watch of the past is served a little later: a compaction in between would end it, or not.
            case 6 if not self.watches:
                return COMPACT, integer(1, self.revision(base))
            case 7 | 8 | 9:
                return messages.WATCH, self.watch(base)
        return messages.TXN, self.txn(base)

    def watch(self, base: int) -> bytes:
        rng = self.rng
        if self.watches and rng.random() < 0.3:
            return messages.watch_cancel(rng.randint(1, self.watches + 1))
        self.watches += rng.random() < 0.9
        start = integer(3, rng.choice((0, 0, 0, self.revision(base))))
        filters = data(5, rng.choice((b"", b"\0", b"\1")))
        watch = integer(7, max(1, self.watches))
        return message(1, data(1, self.key()) + data(2, self.end()) + start + filters + watch)


class Side:
    """A server in a history: the connection for calls, the stream for watches, the revision at its beginning."""

    def __init__(self, calls: GrpcClient, stream: GrpcClient) -> None:
        self.calls, self.stream = calls, stream
        first = calls.call(messages.TXN, txn((), [put(b"first", b"")]))
        assert isinstance(first, list)
        self.base = messages.TxnReply(first[0]).header.revision
        # Earlier histories on the same server may have been compacted up to their ends.
        assert isinstance(calls.call(COMPACT, integer(1, self.base)), list)
        stream.begin(messages.WATCH, [], end=False)
        self.watched: dict[int, list[Any]] = {}

    def ask(self, path: str, request: bytes) -> Any:
        if path == messages.WATCH:
            self.stream.say(request)
            return None
        reply = self.calls.call(path, request)
        return reply if isinstance(reply, GrpcStatus) else told(reply[0], REPLIES[path], self.base)

    def read_watches(self, count: int) -> None:
        """Replies of one watch are in order; how events are spread over them is up to the server."""
        for reply in self.stream.messages(count):
            parts = told(reply, REPLIES[messages.WATCH], self.base)
            watch = dict(parts).get(2, 0)
            self.watched.setdefault(watch, []).extend(part for part in parts if part[0] != 2)

    def events(self) -> int:
        return sum(len(parts) for parts in self.watched.values())


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    """Its own: no lease of another test expires here and takes a revision."""
    with EtcdServer() as server:
        yield server


def in_memory(world: World, size: int = 1) -> InMemoryEtcd:
    return InMemoryEtcd(size, lambda: world.now, world.at, world.rng)


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_the_same_requests_have_the_same_replies(seed: int, server: EtcdServer) -> None:
    history, cluster = History(seed), in_memory(World(seed))
    calls, stream = RealClient(server.port), RealClient(server.port)
    real = Side(calls, stream)
    watched = InMemoryClient(cluster)
    ours = Side(InMemoryClient(cluster), watched)
    for _ in range(REQUESTS):
        state = history.rng.getstate(), history.watches
        path, request = history.request(real.base)
        history.rng.setstate(state[0])
        history.watches = state[1]
        same_path, same_request = history.request(ours.base)
        assert same_path == path
        answers = real.ask(path, request), ours.ask(path, same_request)
        assert answers[0] == answers[1], (path, request)
        history.revisions = cluster.store.revision - ours.base
        # Before the next request, so that a watch that has begun late sees the same on both sides.
        ours.read_watches(watched.unread())
        while real.events() < ours.events():
            real.read_watches(1)
        assert real.watched == ours.watched
    calls.close()
    stream.close()


def test_a_lease_expires_as_on_a_real_server(server: EtcdServer) -> None:
    """Its keys are deleted in one revision, a watch says so, and later requests find it gone."""
    world, lease = World(1), 1 << 62 | secrets.randbits(62)
    cluster = in_memory(world)
    real, ours = RealClient(server.port), InMemoryClient(cluster)
    real_stream, our_stream = RealClient(server.port), InMemoryClient(cluster)
    outcomes: list[list[Any]] = []
    for calls, stream in ((real, real_stream), (ours, our_stream)):
        side = Side(calls, stream)
        side.ask(messages.WATCH, message(1, data(1, b"k") + data(2, b"l") + integer(7, 1)))
        side.read_watches(1)
        outcome = [side.ask(messages.LEASE_GRANT, messages.lease_grant(lease, 1))]
        outcome.append(side.ask(messages.TXN, txn((), [put(b"k1", b"", lease), put(b"k2", b"", lease)])))
        world.run(world.now + 10.0)  # the real server waits by itself
        while side.events() < 5:
            side.read_watches(1)
        outcome += [
            side.watched,
            side.ask(messages.LEASE_KEEP_ALIVE, messages.lease_id(lease)),
            side.ask(messages.LEASE_TIME_TO_LIVE, messages.time_to_live(lease, keys=True)),
            side.ask(messages.TXN, txn((), [get(b"k", b"l")])),
        ]
        outcomes.append(outcome)
    assert outcomes[0] == outcomes[1]
    real.close()
    real_stream.close()


def test_a_slow_leader_is_not_slow_for_ever_about_the_leases_of_that_time() -> None:
    for seed in range(20):
        world = World(seed)
        cluster = in_memory(world)
        client = InMemoryClient(cluster)
        cluster.expiry_delay_max = 60.0
        client.call(messages.LEASE_GRANT, messages.lease_grant(7, 2))
        cluster.expiry_delay_max = EXPIRY_CHECK_SECONDS
        world.run(world.now + 2.0 + 2 * EXPIRY_CHECK_SECONDS)
        assert not cluster.store.leases


# A cluster of three.


def test_a_lagging_member_answers_serializable_reads_from_its_past() -> None:
    world = World(1)
    cluster = in_memory(world, 3)
    leader, follower = InMemoryClient(cluster), InMemoryClient(cluster, 1)
    cluster.members[1].lag = 1.0
    leader.call(messages.TXN, txn((), [put(b"k", b"new")]))
    found = []
    for serializable in (1, 0):
        read = message(1, data(1, b"k") + integer(7, serializable))
        replies = follower.call(messages.TXN, txn((), [read]))
        assert isinstance(replies, list)
        reply = messages.TxnReply(replies[0])
        found.append((reply.header.revision, reply.found[0].total))
    assert found == [(1, 0), (2, 1)]
    world.run(2.0)
    assert cluster.members[1].applied == 2


def test_a_request_that_meets_an_election_fails_and_may_have_been_carried_out() -> None:
    carried_out = set()
    for seed in range(20):
        world = World(seed)
        cluster = in_memory(world, 3)
        client = InMemoryClient(cluster, 1)
        cluster.members[0].leave(1)  # the leader, and nobody has noticed yet
        client.begin(messages.TXN, [txn((), [put(b"k", b"")])])
        world.run(5.0)
        status = client.call(messages.TXN, txn((), [get(b"k")]))
        assert isinstance(status, list)
        carried_out.add(cluster.store.revision)
        assert cluster.leader is not cluster.members[0] and cluster.term == 3
    assert carried_out == {1, 2}


def test_a_member_without_its_peers_says_that_it_knows_no_leader() -> None:
    world = World(1)
    cluster = in_memory(world, 3)
    cut_off, others = InMemoryClient(cluster, 2), InMemoryClient(cluster)
    cluster.members[2].leave(1)
    world.run(5.0)
    assert cut_off.call(messages.TXN, txn((), [get(b"k")])) == GrpcStatus(14, "etcdserver: no leader")
    assert isinstance(others.call(messages.TXN, txn((), [get(b"k")])), list)
    cluster.members[2].come_back(1)
    assert isinstance(cut_off.call(messages.TXN, txn((), [get(b"k")])), list)
