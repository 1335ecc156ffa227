"""One member of a ZooKeeper ensemble, as its clients see it: connections, sessions, watches, replies.

Reads are answered from this member's tree, which may lag behind the leader's. Writes and syncs go to the leader.
The requests of a connection are answered in order.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections import deque
from typing import TYPE_CHECKING, Protocol

from fenced_testkit.worlds.zookeeper_tree import (
    AUTH,
    CLOSE_SESSION,
    CREATE_SESSION,
    GET_CHILDREN,
    GET_DATA,
    NO_IDS,
    SESSION_MOVED,
    SYNC,
    UNIMPLEMENTED,
    WRITES,
    Denied,
    Entry,
    Ids,
    Outcome,
    Reader,
    packed,
)

if TYPE_CHECKING:
    from fenced_testkit.worlds.zookeeper_ensemble import Replica

XID_EVENT, XID_AUTH = -1, -4
CONNECTED = 3
PASSWORD_BYTES = 16


class Connection(Protocol):
    """The server's end of a stream."""

    def send(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class Request:
    """A request that is not answered yet."""

    __slots__ = ("body", "client", "kind", "outcome", "xid")

    def __init__(self, client: ClientConnection, xid: int, kind: int, body: bytes) -> None:
        self.client = client
        self.xid = xid
        self.kind = kind
        self.body = body
        self.outcome: Outcome | None = None
        """The outcome by the leader and the log; a read needs neither."""


class ClientConnection:
    """A member's state of one connection."""

    def __init__(self, member: Member, stream: Connection) -> None:
        self.member = member
        self.stream = stream
        self.data = b""
        self.session = 0
        self.greeting = self.greeted = False
        """It has asked for a session; it has one."""
        self.ids: Ids = NO_IDS
        self.watches: set[str] = set()

    def frame(self, payload: bytes) -> None:
        self.stream.send(packed(payload))


class Member:
    """Serves clients while its replica has a leader; otherwise it closes their connections."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.clients: dict[Connection, ClientConnection] = {}
        self.requests: dict[int, deque[Request]] = {}
        """By session, what is not answered yet. A session that connects again waits for what it sent before."""

    # Connections.

    def on_open(self, stream: Connection) -> None:
        if self.replica.serving:
            self.clients[stream] = ClientConnection(self, stream)
        else:
            stream.close()

    def on_close(self, stream: Connection) -> None:
        self.clients.pop(stream, None)

    def drop(self, client: ClientConnection) -> None:
        if self.clients.pop(client.stream, None) is not None:
            client.stream.close()

    def drop_all(self) -> None:
        self.requests.clear()
        for client in list(self.clients.values()):
            self.drop(client)

    def on_bytes(self, stream: Connection, data: bytes) -> None:
        client = self.clients.get(stream)
        if client is None:
            return
        client.data += data
        while stream in self.clients and len(client.data) >= 4 and client.greeting == client.greeted:
            size = struct.unpack_from(">i", client.data)[0]
            if len(client.data) < 4 + size:
                break
            payload, client.data = client.data[4 : 4 + size], client.data[4 + size :]
            if client.greeted:
                self._request(client, payload)
            else:
                self._greet(client, payload)

    # Sessions.

    def _greet(self, client: ClientConnection, payload: bytes) -> None:
        reader = Reader(payload)
        _, seen, timeout, session = reader.take(">iqiq")
        password = reader.buffer()
        client.greeting = True
        if seen > self.replica.tree.zxid:  # this client has seen transactions that this member lacks
            self.drop(client)
            return
        timeout = self.replica.negotiated(timeout)
        if not session:
            client.session, password = self.replica.new_session()
            request = Request(client, 0, CREATE_SESSION, struct.pack(">i", timeout) + packed(password))
            self.replica.forward(request, client.session, NO_IDS)
            return
        for other in list(self.clients.values()):
            if other.session == session:
                self.drop(other)
        client.session = session
        self.replica.revalidate(
            session, password, lambda valid: self._greeted(client, timeout, password, valid)
        )

    def _greeted(self, client: ClientConnection, timeout: int, password: bytes, valid: bool) -> None:
        """Reply to the greeting: the session goes on here, or has ended. Then process what the client sent after it."""
        if client.stream not in self.clients:
            return
        session = (timeout, client.session, password) if valid else (0, 0, b"\0" * PASSWORD_BYTES)
        client.frame(struct.pack(">iiq", 0, *session[:2]) + packed(session[2]) + b"\0")
        if not valid:
            self.drop(client)
            return
        client.greeted = True
        self.on_bytes(client.stream, b"")

    # Requests.

    def _request(self, client: ClientConnection, payload: bytes) -> None:
        xid, kind = struct.unpack_from(">ii", payload)
        if kind == AUTH:
            reader = Reader(payload[12:])
            scheme, secret = reader.string(), reader.buffer()
            digest = base64.b64encode(hashlib.sha1(secret, usedforsecurity=False).digest()).decode()
            client.ids |= {(scheme, f"{secret.decode().partition(':')[0]}:{digest}")}
            client.frame(struct.pack(">iqi", XID_AUTH, 0, 0))
            return
        if not self.replica.touch(client.session):
            return  # as ZooKeeper: never answered
        request = Request(client, xid, kind, payload[8:])
        self.requests.setdefault(client.session, deque()).append(request)
        if kind in WRITES or kind == SYNC:
            self.replica.forward(request, client.session, client.ids)
        self._answer(client.session)

    def _answer(self, session: int) -> None:
        """Reply as far as possible, in order: a read waits for the earlier writes of its session."""
        waiting = self.requests.get(session, deque())
        while waiting:
            request = waiting[0]
            if request.outcome is None and request.kind in (*WRITES, SYNC):
                return
            waiting.popleft()
            client = request.client
            if client.stream not in self.clients:  # its connection has ended
                continue
            outcome = request.outcome or self._read(client, request)
            if outcome.error == SESSION_MOVED:
                self.drop(client)
                continue
            head = struct.pack(">iqi", request.xid, self.replica.tree.zxid, outcome.error)
            client.frame(head + (outcome.body if not outcome.error else b""))
            if request.kind == CLOSE_SESSION:
                self.drop(client)

    def _read(self, client: ClientConnection, request: Request) -> Outcome:
        if request.kind not in (GET_DATA, GET_CHILDREN):
            return Outcome(UNIMPLEMENTED)
        reader = Reader(request.body)
        path, (watch,) = reader.string(), reader.take(">?")
        try:
            body = self.replica.tree.read(request.kind, path, client.ids)
        except Denied as denied:
            return Outcome(denied.error)
        if watch:
            client.watches.add(path)
        return Outcome(0, body)

    # Called by the replica.

    def applied(self, entry: Entry, outcome: Outcome) -> None:
        """Send events before the reply, and before any reply that could show the change."""
        for kind, path in outcome.events:
            event = struct.pack(">iqiii", XID_EVENT, -1, 0, kind, CONNECTED) + packed(path.encode())
            for client in list(self.clients.values()):
                if path in client.watches:
                    client.watches.discard(path)
                    client.frame(event)
        request = entry.origin
        if isinstance(request, Request) and request.client.member is self:
            self.answered(request, outcome)
        if entry.kind == CLOSE_SESSION:
            self.requests.pop(entry.session, None)
            for client in list(self.clients.values()):
                if client.session == entry.session:
                    self.drop(client)

    def answered(self, request: Request, outcome: Outcome) -> None:
        if request.kind == CREATE_SESSION:
            reader = Reader(request.body)
            self._greeted(request.client, reader.number(), reader.buffer(), not outcome.error)
        else:
            request.outcome = outcome
            self._answer(request.client.session)
