"""The messages of etcd's gRPC API that leases and guards need, by their field numbers in etcd's rpc.proto. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from fenced.stores.etcd.wire.protobuf import (
    MalformedMessage,
    data,
    fields,
    integer,
    message,
    number,
    raw,
    signed,
    whole,
)

TXN = "/etcdserverpb.KV/Txn"
LEASE_GRANT = "/etcdserverpb.Lease/LeaseGrant"
LEASE_KEEP_ALIVE = "/etcdserverpb.Lease/LeaseKeepAlive"
LEASE_TIME_TO_LIVE = "/etcdserverpb.Lease/LeaseTimeToLive"
WATCH = "/etcdserverpb.Watch/Watch"
STATUS = "/etcdserverpb.Maintenance/Status"
AUTHENTICATE = "/etcdserverpb.Auth/Authenticate"

TXN_OPS_MAX = 128
"""etcd's default limit (--max-txn-ops), for comparisons and for operations separately."""

_EQUAL, _GREATER, _LESS = 0, 1, 2
_CREATE, _MOD, _VALUE = 1, 2, 3
_DESCENDING = 2
IF, THEN, ELSE = 1, 2, 3
"""The fields of a transaction: its comparisons, and the operations of both branches."""
_RANGE_REPLY = b"\x0a"
"""The first byte of a range reply inside a transaction's reply; replies to other operations are not needed."""


_VARINT = rb"([\x80-\xff]{0,9}[\x00-\x7f])"
_PASSED = _VARINT.replace(b"(", b"(?:")
_USUAL = re.compile(
    rb"\x0a[\x00-\x7f]\x08%b\x10%b\x18%b\x20%b\x10\x01" % (_VARINT, _PASSED, _VARINT, _PASSED)
)
"""The beginning of the reply to a transaction that succeeded: cluster, member, revision, term, succeeded."""


class Header(NamedTuple):
    """Which cluster replied, and at which revision."""

    cluster: int
    revision: int


class KeyValue(NamedTuple):
    key: bytes
    created: int
    modified: int
    value: bytes
    lease: int


class Found(NamedTuple):
    """The reply to one range request."""

    kvs: list[KeyValue]
    total: int

    @property
    def first(self) -> KeyValue | None:
        return self.kvs[0] if self.kvs else None


class TxnReply:
    """The reply to a transaction."""

    __slots__ = ("_header", "_raw", "_usual", "succeeded")

    def __init__(self, reply: bytes) -> None:
        self._raw = reply
        self._header: Header | None = None
        self._usual = _USUAL.match(reply)
        if self._usual is not None:
            self.succeeded = True
            return
        values = dict(fields(reply))
        header = dict(fields(raw(values.get(1, b""))))
        self._header = Header(whole(header.get(1, 0)), signed(whole(header.get(3, 0))))
        self.succeeded = bool(values.get(2, 0))
        if not self._header.revision:
            raise MalformedMessage("the reply to a transaction has no revision")

    @property
    def header(self) -> Header:
        if self._header is None:  # read when it is first asked for: most transactions of a guard only compare
            assert self._usual is not None
            self._header = Header(number(self._usual[1]), number(self._usual[2]))
        return self._header

    @property
    def found(self) -> list[Found]:
        """The replies to the range requests of the branch that was taken, in their order."""
        return [
            found_in(raw(part))
            for field, value in fields(self._raw)
            if field == 3 and raw(value)[:1] == _RANGE_REPLY
            for _, part in fields(raw(value))
        ]


class WatchReply(NamedTuple):
    watch: int
    canceled: bool
    deleted: bool
    """Whether a key was deleted. We watch only for deletions."""


# Comparisons.


def absent(key: bytes, end: bytes = b"") -> bytes:
    """No such key; with `end`, no key in the whole range."""
    return _compare(_EQUAL, _CREATE, key, b"", end)


def present(key: bytes) -> bytes:
    return _compare(_GREATER, _CREATE, key, b"", b"")


def modified_at(key: bytes, revision: int) -> bytes:
    return _compare(_EQUAL, _MOD, key, integer(6, revision), b"")


def unmodified_since(key: bytes, revision: int) -> bytes:
    """No write after this revision; the key may be deleted."""
    return _compare(_LESS, _MOD, key, integer(6, revision + 1), b"")


def valued(key: bytes, value: bytes) -> bytes:
    return _compare(_EQUAL, _VALUE, key, message(7, value), b"")


def valued_between(key: bytes, low: bytes, high: bytes) -> list[bytes]:
    """The value sorts after `low` and before `high`."""
    return [
        _compare(_GREATER, _VALUE, key, message(7, low), b""),
        _compare(_LESS, _VALUE, key, message(7, high), b""),
    ]


def _compare(result: int, target: int, key: bytes, with_what: bytes, end: bytes) -> bytes:
    return integer(1, result) + integer(2, target) + data(3, key) + with_what + data(64, end)


# Operations of a transaction.


def get(
    key: bytes,
    end: bytes = b"",
    *,
    limit: int = 0,
    last: bool = False,
    count: bool = False,
    keys: bool = False,
) -> bytes:
    """Read a key, or a range in the order of its bytes.

    `last`: the last one only. `count`: how many, only. `keys`: without values.
    """
    order = integer(3, 1) + integer(5, _DESCENDING) if last else integer(3, limit)
    return message(1, data(1, key) + data(2, end) + order + integer(8, keys) + integer(9, count))


def put(key: bytes, value: bytes, lease: int = 0) -> bytes:
    return message(2, message(1, key) + message(2, value) + (integer(3, lease) if lease else b""))


def delete(key: bytes) -> bytes:
    return message(3, data(1, key))


# Requests.


def txn(compares: Iterable[bytes], then: Iterable[bytes], otherwise: Iterable[bytes] = ()) -> bytes:
    """A transaction. Two of them, one after the other, are one transaction that has the parts of both."""
    request = b""
    for field, parts in ((IF, compares), (THEN, then), (ELSE, otherwise)):
        for part in parts:
            request += message(field, part)
    return request


def lease_grant(lease: int, seconds: int) -> bytes:
    return integer(1, seconds) + integer(2, lease)


def lease_id(lease: int) -> bytes:
    """A request to keep a lease alive."""
    return integer(1, lease)


def time_to_live(lease: int, *, keys: bool = False) -> bytes:
    return integer(1, lease) + integer(2, keys)


def watch_deletion(watch: int, key: bytes, revision: int) -> bytes:
    """Watch for the deletion of `key`, from this revision on. Filter 0 (NOPUT): no events for puts."""
    request = data(1, key) + integer(3, revision) + message(5, b"\0") + integer(7, watch)
    return message(1, request)


def watch_cancel(watch: int) -> bytes:
    return message(2, integer(1, watch))


def authenticate(user: str, password: str) -> bytes:
    return data(1, user.encode()) + data(2, password.encode())


# Replies.


def found_in(reply: bytes) -> Found:
    """The reply to a range request, alone or inside a transaction."""
    kvs, count = [], 0
    for field, value in fields(reply):
        if field == 2:
            kvs.append(_key_value(raw(value)))
        elif field == 4:
            count = whole(value)
    return Found(kvs, count)


def _key_value(reply: bytes) -> KeyValue:
    values = dict(fields(reply))
    return KeyValue(
        raw(values.get(1, b"")),
        signed(whole(values.get(2, 0))),
        signed(whole(values.get(3, 0))),
        raw(values.get(5, b"")),
        signed(whole(values.get(6, 0))),
    )


def lease_reply(reply: bytes) -> tuple[int, int]:
    """Which lease, and its time to live in seconds. For a lease that is gone, KeepAlive has 0 and TimeToLive -1."""
    values = dict(fields(reply))
    return signed(whole(values.get(2, 0))), signed(whole(values.get(3, 0)))


def watch_reply(reply: bytes) -> WatchReply:
    watch, canceled, deleted = 0, False, False
    for field, value in fields(reply):
        if field == 2:
            watch = signed(whole(value))
        elif field == 4:
            canceled = bool(value)
        elif field == 11:
            deleted = deleted or any(kind == 1 and part == 1 for kind, part in fields(raw(value)))
    return WatchReply(watch, canceled, deleted)


def text_of(reply: bytes, number: int) -> str:
    """One text field: the version of a server, a token."""
    for field, value in fields(reply):
        if field == number:
            return raw(value).decode(errors="replace")
    return ""
