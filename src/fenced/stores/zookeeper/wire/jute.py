"""ZooKeeper's wire format (jute): requests to bytes, replies from bytes. Nothing here does I/O."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fenced.errors import Indeterminate

EPHEMERAL = 1
EPHEMERAL_SEQUENTIAL = 3
PERSISTENT = 0
ANY_VERSION = -1

OK = 0
NO_NODE = -101
NO_AUTH = -102
BAD_VERSION = -103
NODE_EXISTS = -110
NOT_EMPTY = -111
SESSION_EXPIRED = -112
AUTH_FAILED = -115

XID_EVENT = -1
XID_AUTH = -4
DELETED, CHANGED = 2, 3
"""Types of watch events: the node is gone; its data were written."""

_CREATE, _CREATE2, _DELETE, _GET_DATA, _SET_DATA = 1, 15, 2, 4, 5
_SYNC, _GET_CHILDREN2, _CHECK, _MULTI, _CREATE_CONTAINER, _AUTH, _CLOSE = 9, 12, 13, 14, 19, 100, -11
_CONTAINER = 4
_BY_LEADER = {_CREATE2, _CREATE_CONTAINER, _DELETE, _SET_DATA, _MULTI, _SYNC}

_INT = struct.Struct(">i")
_OP = struct.Struct(">i?i")
_REPLY = struct.Struct(">iqi")
_CONNECT = struct.Struct(">iqiq")
_CONNECTED = struct.Struct(">iiq")
_STAT = struct.Struct(">qqqqiiiqiiq")
_END = _OP.pack(-1, True, -1)


class MalformedJute(Indeterminate):
    """These bytes are not from a ZooKeeper server, so what the request has done is unknown."""


class Stat(NamedTuple):
    """The server's metadata of a node. Times are milliseconds of the leader's wall clock."""

    czxid: int
    mzxid: int
    ctime: int
    mtime: int
    version: int
    cversion: int
    aversion: int
    ephemeral_owner: int
    data_length: int
    num_children: int
    pzxid: int


class Reply(NamedTuple):
    zxid: int
    error: int
    body: bytes


class WatchEvent(NamedTuple):
    kind: int
    path: str


class Connected(NamedTuple):
    """The server's reply to a connect. `timeout` 0: the session does not exist (any more)."""

    timeout: int
    session: int
    password: bytes


class Done(NamedTuple):
    """The outcome of one operation of a multi. Servers leave out the stat of a created node."""

    error: int
    path: str = ""
    stat: Stat | None = None


def _buffer(value: bytes) -> bytes:
    return _INT.pack(len(value)) + value


def _string(value: str) -> bytes:
    return _buffer(value.encode())


def acl(entries: Iterable[tuple[str, str]]) -> bytes:
    """An access list that gives every right to each (scheme, id)."""
    packed = [_INT.pack(31) + _string(scheme) + _string(who) for scheme, who in entries]
    return _INT.pack(len(packed)) + b"".join(packed)


def frame(payload: bytes) -> bytes:
    return _buffer(payload)


# Requests: the type, then the body. The connection puts the length and a number before them.


def create(path: str, data: bytes, acls: bytes, flags: int = PERSISTENT) -> bytes:
    return _INT.pack(_CREATE2) + _string(path) + _buffer(data) + acls + _INT.pack(flags)


def create_container(path: str, acls: bytes) -> bytes:
    """A node that the server deletes some time after its last child is gone."""
    return _INT.pack(_CREATE_CONTAINER) + _string(path) + _buffer(b"") + acls + _INT.pack(_CONTAINER)


def delete(path: str, version: int = ANY_VERSION) -> bytes:
    return _INT.pack(_DELETE) + _string(path) + _INT.pack(version)


def set_data(path: str, data: bytes, version: int = ANY_VERSION) -> bytes:
    return _INT.pack(_SET_DATA) + _string(path) + _buffer(data) + _INT.pack(version)


def check(path: str, version: int) -> bytes:
    """For a multi: the node has this version."""
    return _INT.pack(_CHECK) + _string(path) + _INT.pack(version)


def get_data(path: str, *, watch: bool = False) -> bytes:
    return _INT.pack(_GET_DATA) + _string(path) + bytes([watch])


def get_children(path: str) -> bytes:
    return _INT.pack(_GET_CHILDREN2) + _string(path) + b"\0"


def sync(path: str) -> bytes:
    """Makes the member catch up: it replies when it has applied all that the leader had committed at the request."""
    return _INT.pack(_SYNC) + _string(path)


def multi(requests: Iterable[bytes]) -> bytes:
    """All of these writes in one transaction, or none."""
    parts = [_INT.pack(_MULTI)]
    for request in requests:
        parts += (_OP.pack(_INT.unpack_from(request)[0], False, -1), request[4:])
    return b"".join((*parts, _END))


def auth(scheme: str, credentials: str) -> bytes:
    """A complete payload, including its number."""
    return struct.pack(">iii", XID_AUTH, _AUTH, 0) + _string(scheme) + _string(credentials)


def close() -> bytes:
    return _INT.pack(_CLOSE)


def connect(last_zxid: int, timeout: int, session: int, password: bytes) -> bytes:
    """The first payload on a connection."""
    return _CONNECT.pack(0, last_zxid, timeout, session) + _buffer(password) + b"\0"


def by_leader(request: bytes) -> bool:
    """Whether the leader handles this request; a read is answered by the member that we are connected to."""
    return _INT.unpack_from(request)[0] in _BY_LEADER


# Replies.


class _Reader:
    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    def _unpacked(self, form: struct.Struct) -> tuple[Any, ...]:
        if self.at + form.size > len(self.data):
            raise MalformedJute("a reply ends too early")
        found = form.unpack_from(self.data, self.at)
        self.at += form.size
        return found

    def number(self) -> int:
        return int(self._unpacked(_INT)[0])

    def buffer(self) -> bytes:
        size = self.number()
        start, self.at = self.at, self.at + max(size, 0)
        if self.at > len(self.data):
            raise MalformedJute("a reply ends too early")
        return self.data[start : self.at]

    def string(self) -> str:
        try:
            return self.buffer().decode()
        except UnicodeDecodeError as error:
            raise MalformedJute(f"a reply has a text that is none: {error}") from error

    def stat(self) -> Stat:
        return Stat._make(self._unpacked(_STAT))

    def op(self) -> tuple[int, bool, int]:
        kind, done, error = self._unpacked(_OP)
        return kind, done, error


def reply(payload: bytes) -> tuple[int, Reply]:
    """The number of the request, and the reply to it."""
    xid, zxid, error = _REPLY.unpack_from(payload)
    return xid, Reply(zxid, error, payload[_REPLY.size :])


def connected(payload: bytes) -> Connected:
    _, timeout, session = _CONNECTED.unpack_from(payload)
    return Connected(timeout, session, _Reader(payload, _CONNECTED.size).buffer())


def event(body: bytes) -> WatchEvent:
    reader = _Reader(body)
    kind, _state = reader.number(), reader.number()
    return WatchEvent(kind, reader.string())


def stat_of(body: bytes) -> Stat:
    return _Reader(body).stat()


def data_of(body: bytes) -> tuple[bytes, Stat]:
    reader = _Reader(body)
    return reader.buffer(), reader.stat()


def children_of(body: bytes) -> tuple[list[str], Stat]:
    reader = _Reader(body)
    children = [reader.string() for _ in range(reader.number())]
    return children, reader.stat()


def results_of(body: bytes) -> list[Done]:
    """The outcomes of a multi. If one failed, none was carried out, and the error of that one says why."""
    reader = _Reader(body)
    results: list[Done] = []
    while True:
        kind, done, error = reader.op()
        if done:
            return results
        if kind == -1:
            results.append(Done(reader.number()))
        elif kind in (_CREATE2, _CREATE_CONTAINER):
            results.append(Done(error, reader.string(), reader.stat()))
        elif kind == _CREATE:
            results.append(Done(error, reader.string()))
        elif kind == _SET_DATA:
            results.append(Done(error, "", reader.stat()))
        else:
            results.append(Done(error))


def failure(results: Sequence[Done]) -> tuple[int, int] | None:
    """Which operation of a multi failed, and why; None: all were carried out."""
    for index, result in enumerate(results):
        if result.error not in (OK, -2):  # -2: another operation of the same multi failed
            return index, result.error
    return None
