"""The replicated data of a ZooKeeper ensemble: nodes and sessions. Pure: a request in, an outcome out.

A request that changes something becomes an entry of the log. Its changes to the tree are computed once, and every
member that applies the entry makes the same changes. Only requests that the shipped client sends are supported; others
are refused as UNIMPLEMENTED. A test compares all this with a real server.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

NOT_DONE, UNIMPLEMENTED = -2, -6
NO_NODE, NO_AUTH, BAD_VERSION, NO_CHILDREN = -101, -102, -103, -108
NODE_EXISTS, NOT_EMPTY, SESSION_EXPIRED, INVALID_ACL, SESSION_MOVED = -110, -111, -112, -114, -118
CREATE_SESSION, CLOSE_SESSION, DELETE_CONTAINER, AUTH = -10, -11, 20, 100
CREATE, CREATE_CONTAINER, DELETE, SET_DATA, MULTI = 15, 19, 2, 5, 14
GET_DATA, GET_CHILDREN, SYNC = 4, 12, 9
CREATE_WITHOUT_STAT, STAT_BYTES = 1, 68
WRITES = frozenset((CREATE, CREATE_CONTAINER, DELETE, SET_DATA, MULTI, CREATE_SESSION, CLOSE_SESSION))
NODE_DELETED, NODE_CHANGED = 2, 3
MAY_READ, MAY_WRITE, MAY_CREATE, MAY_DELETE = 1, 2, 4, 8
EPHEMERAL, SEQUENTIAL = 1, 2
CONTAINER_OWNER = -(2**63)

Ids = frozenset[tuple[str, str]]
NO_IDS: Ids = frozenset()
AccessRule = tuple[int, tuple[str, str]]
"""Rights, and who has them."""
WORLD = ("world", "anyone")


class Denied(Exception):
    """A request is not carried out; `error` is the reason."""

    def __init__(self, error: int) -> None:
        super().__init__(error)
        self.error = error


class Reader:
    """Reads jute from bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values

    def number(self) -> int:
        return self.take(">i")[0]

    def buffer(self) -> bytes:
        size = max(self.number(), 0)
        self._at += size
        return self._data[self._at - size : self._at]

    def string(self) -> str:
        return self.buffer().decode()

    def operation(self, kind: int) -> TreeOperation:
        path = self.string()
        data = self.buffer() if kind != DELETE else b""
        acl = self._acl() if kind in (CREATE, CREATE_CONTAINER) else []
        return TreeOperation(kind, path, data, acl, self.number())

    def operations(self) -> list[TreeOperation]:
        """Those of a multi."""
        found = []
        while not (header := self.take(">i?i"))[1]:
            if header[0] not in (CREATE, CREATE_CONTAINER, DELETE, SET_DATA):
                raise Denied(UNIMPLEMENTED)
            found.append(self.operation(header[0]))
        return found

    def _acl(self) -> list[AccessRule]:
        return [(self.number(), (self.string(), self.string())) for _ in range(self.number())]


class TreeOperation(NamedTuple):
    """One write, alone or in a multi."""

    kind: int
    path: str
    data: bytes
    acl: list[AccessRule]
    number: int
    """The flags of a create, the expected version of others."""


def packed(value: bytes) -> bytes:
    return struct.pack(">i", len(value)) + value


class Node(NamedTuple):
    data: bytes
    acl: tuple[AccessRule, ...]
    owner: int = 0
    """The session that owns it; 0: none; CONTAINER_OWNER: the server may delete it when it is empty."""
    czxid: int = 0
    ctime: int = 0
    mzxid: int = 0
    mtime: int = 0
    pzxid: int = 0
    version: int = 0
    created: int = 0
    """How many children were ever made."""
    children: frozenset[str] = frozenset()

    def stat(self) -> bytes:
        return struct.pack(
            ">qqqqiiiqiiq",
            self.czxid,
            self.mzxid,
            self.ctime,
            self.mtime,
            self.version,
            self.created * 2 - len(self.children),  # every creation and every deletion of a child counts
            0,
            0 if self.owner == CONTAINER_OWNER else self.owner,
            len(self.data),
            len(self.children),
            self.pzxid,
        )


class Session(NamedTuple):
    timeout: int
    """In milliseconds."""
    password: bytes


@dataclass(slots=True)
class Entry:
    """A request that changes something, at the position in the log that the leader chose."""

    zxid: int
    time: int
    session: int
    kind: int
    body: bytes
    ids: Ids = NO_IDS
    denied: int = 0
    """Why the leader refused it: then the entry only uses up a number. 0: it was not refused."""
    origin: object = None
    """The request itself, for the member that has to reply to it."""
    outcome: Outcome | None = None
    """Computed by the first member that applies the entry. All apply the same ones in the same order."""


class Outcome(NamedTuple):
    """The effects of an entry: the reply, the events for watches, and the changes of the tree."""

    error: int = 0
    body: bytes = b""
    events: Sequence[tuple[int, str]] = ()
    nodes: Mapping[str, Node | None] = {}
    sessions: Mapping[int, Session | None] = {}


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _permit(node: Node, right: int, ids: Ids) -> None:
    if not any(rights & right and (who == WORLD or who in ids) for rights, who in node.acl):
        raise Denied(NO_AUTH)


class Tree:
    """The state of one member, as of its last transaction."""

    def __init__(self) -> None:
        self.zxid = 0
        self.nodes = {"/": Node(b"", ((31, WORLD),))}
        self.sessions: dict[int, Session] = {}

    def apply(self, entry: Entry) -> Outcome:
        outcome = entry.outcome = entry.outcome or self._outcome(entry)
        self.zxid = entry.zxid
        for path, node in outcome.nodes.items():
            if node is None:
                self.nodes.pop(path, None)
            else:
                self.nodes[path] = node
        for session, made in outcome.sessions.items():
            if made is None:
                self.sessions.pop(session, None)
            else:
                self.sessions[session] = made
        return outcome

    def _outcome(self, entry: Entry) -> Outcome:
        if entry.denied:
            return Outcome(entry.denied)
        reader = Reader(entry.body)
        if entry.kind == CREATE_SESSION:
            return Outcome(sessions={entry.session: Session(reader.number(), reader.buffer())})
        draft = Draft(self.nodes, entry)
        if entry.kind == CLOSE_SESSION:
            for path in sorted(path for path, node in self.nodes.items() if node.owner == entry.session):
                draft.remove(path)
            return Outcome(0, b"", draft.events, draft.nodes, {entry.session: None})
        if entry.kind == DELETE_CONTAINER:
            path = reader.string()
            if path in self.nodes and not self.nodes[path].children:
                draft.remove(path)
            return Outcome(0, b"", draft.events, draft.nodes)
        try:
            if entry.kind == MULTI:
                return self._multi(draft, reader.operations())
            body = draft.write(reader.operation(entry.kind))
        except Denied as denied:
            return Outcome(denied.error)
        return Outcome(0, body, draft.events, draft.nodes)

    def _multi(self, draft: Draft, operations: Sequence[TreeOperation]) -> Outcome:
        """All or none. If one fails, its result is its error; results before it are 0, results after it NOT_DONE."""
        end = struct.pack(">i?i", -1, True, -1)
        done: list[bytes] = []
        try:
            for operation in operations:
                made = draft.write(operation)
                if operation.kind == CREATE:  # in a multi, a server leaves out the stat of a created node
                    done.append(struct.pack(">i?i", CREATE_WITHOUT_STAT, False, 0) + made[:-STAT_BYTES])
                else:
                    done.append(struct.pack(">i?i", operation.kind, False, 0) + made)
        except Denied as denied:
            errors = [0] * len(done) + [denied.error] + [NOT_DONE] * (len(operations) - len(done) - 1)
            return Outcome(
                0, b"".join(struct.pack(">i?ii", -1, False, error, error) for error in errors) + end
            )
        return Outcome(0, b"".join(done) + end, draft.events, draft.nodes)

    # Reads.

    def read(self, kind: int, path: str, ids: Ids) -> bytes:
        node = self.nodes.get(path)
        if node is None:
            raise Denied(NO_NODE)
        _permit(node, MAY_READ, ids)
        if kind == GET_DATA:
            return packed(node.data) + node.stat()
        names = sorted(node.children)
        listed = b"".join(packed(name.encode()) for name in names)
        return struct.pack(">i", len(names)) + listed + node.stat()


class Draft:
    """Changes to a tree that are not applied yet."""

    def __init__(self, below: Mapping[str, Node], entry: Entry) -> None:
        self._below = below
        self._entry = entry
        self.nodes: dict[str, Node | None] = {}
        self.events: list[tuple[int, str]] = []

    def _found(self, path: str) -> Node | None:
        return self.nodes[path] if path in self.nodes else self._below.get(path)

    def _node(self, path: str) -> Node:
        node = self._found(path)
        if node is None:
            raise Denied(NO_NODE)
        return node

    def write(self, operation: TreeOperation) -> bytes:
        kind, path, data, acl, number = operation
        if kind == SET_DATA:
            return self._set(path, data, number)
        if kind == DELETE:
            self._delete(path, number)
            return b""
        return self._create(path, data, acl, number, container=kind == CREATE_CONTAINER)

    def _create(
        self, path: str, data: bytes, asked: list[AccessRule], flags: int, *, container: bool
    ) -> bytes:
        zxid, now, ids = self._entry.zxid, self._entry.time, self._entry.ids
        own = [(rights, who) for rights, (scheme, _) in asked if scheme == "auth" for who in sorted(ids)]
        acl = (*(rule for rule in asked if rule[1][0] != "auth"), *own)
        if not acl:
            raise Denied(INVALID_ACL)
        above = self._node(_parent(path))
        _permit(above, MAY_CREATE, ids)
        if flags & SEQUENTIAL:
            path += f"{above.created:010d}"
        if self._found(path) is not None:
            raise Denied(NODE_EXISTS)
        if above.owner not in (0, CONTAINER_OWNER):
            raise Denied(NO_CHILDREN)
        owner = self._entry.session if flags & EPHEMERAL else CONTAINER_OWNER if container else 0
        node = Node(data, acl, owner, zxid, now, zxid, now, zxid)
        children = above.children | {path.rpartition("/")[2]}
        self.nodes[_parent(path)] = above._replace(children=children, created=above.created + 1, pzxid=zxid)
        self.nodes[path] = node
        return packed(path.encode()) + node.stat()

    def _delete(self, path: str, version: int) -> None:
        _permit(self._node(_parent(path)), MAY_DELETE, self._entry.ids)
        node = self._node(path)
        if version not in (-1, node.version):
            raise Denied(BAD_VERSION)
        if node.children:
            raise Denied(NOT_EMPTY)
        self.remove(path)

    def remove(self, path: str) -> None:
        above = self._node(_parent(path))
        children = above.children - {path.rpartition("/")[2]}
        self.nodes[_parent(path)] = above._replace(children=children, pzxid=self._entry.zxid)
        self.nodes[path] = None
        self.events.append((NODE_DELETED, path))

    def _set(self, path: str, data: bytes, version: int) -> bytes:
        node = self._node(path)
        _permit(node, MAY_WRITE, self._entry.ids)
        if version not in (-1, node.version):
            raise Denied(BAD_VERSION)
        changed = node._replace(
            data=data, version=node.version + 1, mzxid=self._entry.zxid, mtime=self._entry.time
        )
        self.nodes[path] = changed
        self.events.append((NODE_CHANGED, path))
        return changed.stat()
