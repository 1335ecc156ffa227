"""The ensemble in memory answers as a real server does: the same random requests get the same replies and events."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import pytest

from fenced.stores.zookeeper.wire import jute
from fenced_testkit.runtime.world import World
from fenced_testkit.servers import ZooKeeperServer
from fenced_testkit.worlds.zookeeper_ensemble import Ensemble

pytestmark = pytest.mark.xdist_group("zookeeper in memory")  # one server for all

SEEDS, STEPS = 12, 60
NAMES = ("a", "b", "c", "a/x", "a/y", "b/x", "c/q-", "none/x")
OPEN, OURS = jute.acl([("world", "anyone")]), jute.acl([("auth", "")])
CLIENTS = 3


class Stream(Protocol):
    def send(self, data: bytes) -> None: ...

    def frame(self) -> bytes | None:
        """The next frame; None: the server has closed the connection."""

    def close(self) -> None: ...


class RealStream:
    def __init__(self, server: ZooKeeperServer) -> None:
        self._link = socket.create_connection((server.host, server.port), timeout=20)

    def send(self, data: bytes) -> None:
        self._link.sendall(data)

    def frame(self) -> bytes | None:
        size = self._exactly(4)
        return None if size is None else self._exactly(struct.unpack(">i", size)[0])

    def _exactly(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            try:
                more = self._link.recv(count - len(data))
            except ConnectionResetError:
                more = b""
            if not more:
                return None
            data += more
        return data

    def close(self) -> None:
        self._link.close()


class InMemoryStream:
    """Both ends of a connection to one member of an ensemble in memory; what the member sends is kept until read."""

    def __init__(self, ensemble: Ensemble, number: int) -> None:
        self._world = ensemble.world
        self._member = ensemble.replicas[number % len(ensemble.replicas)].member
        self._end = InMemoryEnd()
        self._member.on_open(self._end)

    def send(self, data: bytes) -> None:
        self._member.on_bytes(self._end, data)

    def frame(self) -> bytes | None:
        for _ in range(1000):
            if len(self._end.data) >= 4:
                (size,) = struct.unpack_from(">i", self._end.data)
                payload = bytes(self._end.data[4 : 4 + size])
                del self._end.data[: 4 + size]
                return payload
            if self._end.closed:
                return None
            self._world.run(self._world.now + 0.001)
        raise AssertionError("no answer")

    def close(self) -> None:
        self._member.on_close(self._end)


class InMemoryEnd:
    def __init__(self) -> None:
        self.data = bytearray()
        self.closed = False

    def send(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        self.closed = True


class Known(NamedTuple):
    session: jute.Connected
    stream: Stream


class Replayed:
    """Random requests of a few clients to one server, and what came back, in terms that servers have in common."""

    def __init__(self, seed: int, connect: Callable[[int], Stream]) -> None:
        self._rng = random.Random(seed)
        self._connect = connect
        self._root = f"/{seed}"
        self._paths = [f"{self._root}/{name}" for name in NAMES]
        self._sessions: list[int] = []
        self._base = 0
        self._seen = 0
        self.told: list[object] = []
        self.clients = [
            self._greet(number, jute.Connected(60_000, 0, b"\0" * 16)) for number in range(CLIENTS)
        ]

    def run(self) -> list[object]:
        made = self._ask(0, [jute.create(path, b"", OPEN) for path in (self._root, f"{self._root}/probe")])
        self._base = self._seen
        assert [reply.error for reply in made] == [0, 0]
        for _ in range(STEPS):
            # Every client syncs: then each member of an ensemble shows what one server alone would show.
            self.told.append(("events", [self._probe(each) for each in range(CLIENTS)]))
            number = self._rng.randrange(CLIENTS)
            draw = self._rng.random()
            if draw < 0.04:
                self._end(number)
            elif draw < 0.10:
                self._reconnect(number)
            else:
                requests = [self._request(number) for _ in range(self._rng.choice((1, 1, 2, 3)))]
                for request, reply in zip(requests, self._ask(number, requests), strict=True):
                    self._tell(number, request, reply)
        for number in range(CLIENTS):
            self._close(number)
        return self.told

    # What clients do.

    def _request(self, number: int) -> bytes:
        rng = self._rng
        path = rng.choice(self._paths)
        draw = rng.random()
        if draw < 0.25:
            return jute.get_data(path, watch=rng.random() < 0.7)
        if draw < 0.35:
            return jute.get_children(path)
        if draw < 0.4:
            return jute.sync(path)
        if draw < 0.7:
            return self._write(number)
        return jute.multi([self._write(number) for _ in range(rng.choice((1, 2, 3, 5)))])

    def _write(self, number: int) -> bytes:
        rng = self._rng
        path = rng.choice(self._paths)
        draw = rng.random()
        if draw < 0.5:
            flags = 3 if path.endswith("-") else rng.choice((jute.PERSISTENT, jute.EPHEMERAL))
            acl = OURS if number == 1 and rng.random() < 0.5 else OPEN if rng.random() < 0.95 else OURS
            return jute.create(path, b"d" * rng.randrange(4), acl, flags)
        if draw < 0.6:
            return jute.create_container(path, OPEN)
        version = rng.choice((-1, -1, 0, 1))
        if draw < 0.75:
            return jute.set_data(path, b"s" * rng.randrange(4), version)
        return jute.delete(path + f"{rng.randrange(3):010d}" * path.endswith("-"), version)

    def _greet(self, number: int, hello: jute.Connected, seen: int = 0) -> Known:
        stream = self._connect(number)
        stream.send(jute.frame(jute.connect(seen, hello.timeout, hello.session, hello.password)))
        payload = stream.frame()
        if payload is None:
            self.told.append(("refused", number))
            return Known(hello, stream)
        session = jute.connected(payload)
        self.told.append(
            ("connected", number, session.timeout, self._session(session.session), len(session.password))
        )
        if session.timeout > 0 and number == 1:
            stream.send(jute.frame(jute.auth("digest", "user:secret")))
            self.told.append(("auth", stream.frame()))
        return Known(session, stream)

    def _close(self, number: int) -> None:
        before = len(self.told)
        self._ask(number, [jute.close()])
        self.told[before:] = sorted(self.told[before:], key=repr)  # its nodes end in no certain order
        self.told.append(("closes", self.clients[number].stream.frame()))
        self.clients[number].stream.close()

    def _end(self, number: int) -> None:
        self._close(number)
        old = self.clients[number].session
        gone = self._greet(number, old)  # the session is over
        self.told.append(("over", gone.stream.frame()))
        gone.stream.close()
        self.clients[number] = self._greet(number, jute.Connected(60_000, 0, b"\0" * 16))

    def _reconnect(self, number: int) -> None:
        session, stream = self.clients[number]
        wrong = self._greet(number, session._replace(password=b"x" * 16))
        wrong.stream.close()
        ahead = self._greet(number, session, self._seen + 1000)  # it would have to know more than it does
        ahead.stream.close()
        if self._rng.random() < 0.5:
            stream.close()
        self.clients[number] = self._greet(number, session, self._seen)
        stream.close()

    # What comes back.

    def _ask(self, number: int, requests: list[bytes]) -> list[jute.Reply]:
        stream = self.clients[number].stream
        framed = [jute.frame(struct.pack(">i", 100 + at) + request) for at, request in enumerate(requests)]
        stream.send(b"".join(framed))
        replies: list[jute.Reply] = []
        while len(replies) < len(requests):
            payload = stream.frame()
            assert payload is not None
            xid, reply = jute.reply(payload)
            if xid == jute.XID_EVENT:
                self.told.append(("event", number, payload[12:]))
                continue
            assert xid == 100 + len(replies)
            self._seen = max(self._seen, reply.zxid)
            replies.append(reply)
        return replies

    def _probe(self, number: int) -> list[bytes]:
        """The events that came before the reply to a read."""
        before = len(self.told)
        self._ask(number, [jute.sync(self._root), jute.get_data(f"{self._root}/probe")])
        events = [told[2] for told in self.told[before:]]  # type: ignore[index]
        del self.told[before:]
        return sorted(events)

    def _tell(self, number: int, request: bytes, reply: jute.Reply) -> None:
        (kind,) = struct.unpack_from(">i", request)
        body: object = reply.body
        if not reply.error:
            if kind == struct.unpack(">i", jute.multi([])[:4])[0]:
                body = [
                    (done.error, done.path, self._stat(done.stat)) for done in jute.results_of(reply.body)
                ]
            elif kind == struct.unpack(">i", jute.get_data("")[:4])[0]:
                data, stat = jute.data_of(reply.body)
                body = (data, self._stat(stat))
            elif kind == struct.unpack(">i", jute.get_children("")[:4])[0]:
                children, stat = jute.children_of(reply.body)
                body = (sorted(children), self._stat(stat))
            elif kind == struct.unpack(">i", jute.set_data("", b"")[:4])[0]:
                body = self._stat(jute.stat_of(reply.body))
            elif body and kind in (15, 19):
                reader = jute._Reader(reply.body)
                body = (reader.string(), self._stat(reader.stat()))
        self.told.append((number, request, reply.zxid - self._base, reply.error, body))

    def _stat(self, stat: jute.Stat | None) -> object:
        """Without the clock's times, with numbers that count from the beginning of this history."""
        if stat is None or not stat.czxid:
            return None if stat is None else tuple(stat)
        return stat._replace(
            czxid=stat.czxid - self._base,
            mzxid=stat.mzxid - self._base,
            pzxid=stat.pzxid - self._base,
            ctime=0,
            mtime=stat.mtime >= stat.ctime,
            ephemeral_owner=self._session(stat.ephemeral_owner),
        )

    def _session(self, session: int) -> int:
        if session <= 0:
            return session
        if session not in self._sessions:
            self._sessions.append(session)
        return self._sessions.index(session) + 1


class KeepsContainers(ZooKeeperServer):
    """A server that does not delete empty containers by itself: each deletion would take a number."""

    def command(self) -> list[str]:
        return [word.replace("IntervalMs=1000", "IntervalMs=86400000") for word in super().command()]


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    with KeepsContainers() as server:
        yield server


@pytest.mark.parametrize("seed", range(SEEDS))
def test_replies_are_those_of_a_real_server(server: ZooKeeperServer, seed: int) -> None:
    real = Replayed(seed, lambda _: RealStream(server)).run()
    for members in (1, 3):
        ensemble = Ensemble(World(seed), members)
        ensemble.world.run(0.1)
        ours = Replayed(seed, lambda number, ensemble=ensemble: InMemoryStream(ensemble, number)).run()  # type: ignore[misc]
        for at, (theirs, told) in enumerate(zip(real, ours, strict=True)):
            assert told == theirs, (at, real[max(0, at - 5) : at])
