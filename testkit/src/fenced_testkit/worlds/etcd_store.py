"""The data of an etcd cluster: keys with their revisions, and leases. Requests and replies are etcd's messages.

All of it is deterministic and immediate. The cluster decides how long things take, and what each member knows.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from fenced.stores.etcd.wire.protobuf import data, fields, integer, message, raw, signed, whole

TXN_OPS_MAX = 128
LEASE_SECONDS_MAX = 9_000_000_000

INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION, OUT_OF_RANGE, UNIMPLEMENTED = 3, 5, 9, 11, 12

RANGE, PUT, DELETE = 1, 2, 3
"""Operations of a transaction."""
_VERSION, _CREATE, _MOD, _VALUE, _LEASE = range(5)
_NONE, _ASCENDING, _DESCENDING = range(3)


class EtcdFailed(Exception):
    """A request fails with a gRPC status, and changes nothing."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


class StoredKey(NamedTuple):
    """A key and its value, as of the revision that modified it last."""

    key: bytes
    created: int
    modified: int
    version: int
    value: bytes
    lease: int

    def written(self) -> bytes:
        return (
            data(1, self.key)
            + integer(2, self.created)
            + integer(3, self.modified)
            + integer(4, self.version)
            + data(5, self.value)
            + integer(6, self.lease)
        )


class KeyChange(NamedTuple):
    """A put, or with `put` None a deletion."""

    revision: int
    key: bytes
    put: StoredKey | None

    def written(self) -> bytes:
        """As an event of a watch."""
        if self.put is not None:
            return message(2, self.put.written())
        return integer(1, 1) + message(2, data(1, self.key) + integer(3, self.revision))


@dataclass
class StoredLease:
    id: int
    ttl: int
    expires: float
    keys: set[bytes] = field(default_factory=set)


class _Fields(dict[int, "int | bytes"]):
    """A message whose missing fields are zero or empty."""

    def __init__(self, request: bytes) -> None:
        super().__init__(fields(request))

    def number(self, which: int) -> int:
        return signed(whole(self.get(which, 0)))

    def bytes(self, which: int) -> bytes:
        return raw(self.get(which, b""))


def in_range(key: bytes, start: bytes, end: bytes) -> bool:
    """Whether a request for the range from `start` to `end` covers this key."""
    if not end:
        return key == start
    return key >= start and (end == b"\0" or key < end)


class EtcdTxn:
    """A transaction: its compares, and the operations of its two branches."""

    def __init__(self, request: bytes) -> None:
        self.compares: list[_Fields] = []
        self.then: list[tuple[int, _Fields]] = []
        self.otherwise: list[tuple[int, _Fields]] = []
        for number, value in fields(request):
            if number == 1:
                self.compares.append(_Fields(raw(value)))
            else:
                branch = self.then if number == 2 else self.otherwise
                branch += [(kind, _Fields(raw(part))) for kind, part in fields(raw(value))]

    @property
    def is_serializable(self) -> bool:
        """Whether it only reads, and all its reads are serializable: the member's own state is good enough."""
        operations = self.then + self.otherwise
        return bool(operations) and all(kind == RANGE and step.number(7) for kind, step in operations)

    def check(self) -> None:
        if max(len(self.compares), len(self.then), len(self.otherwise)) > TXN_OPS_MAX:
            raise EtcdFailed(INVALID_ARGUMENT, "etcdserver: too many operations in txn request")
        for branch in (self.then, self.otherwise):
            if any(kind not in (RANGE, PUT, DELETE) for kind, _ in branch):
                raise EtcdFailed(UNIMPLEMENTED, "a transaction inside a transaction")
            if any(not step.bytes(1) for _, step in branch):
                raise EtcdFailed(INVALID_ARGUMENT, "etcdserver: key is not provided")
            puts = [step.bytes(1) for kind, step in branch if kind == PUT]
            deletes = [(step.bytes(1), step.bytes(2)) for kind, step in branch if kind == DELETE]
            # A branch may put a key only once, and may not also delete it.
            if len(set(puts)) < len(puts) or any(in_range(key, *each) for key in puts for each in deletes):
                raise EtcdFailed(INVALID_ARGUMENT, "etcdserver: duplicate key given in txn request")


class EtcdStore:
    """The state that all members agree on, with the history that a lagging member or a watch may ask for."""

    def __init__(self, lease_seconds_min: int = 1) -> None:
        self.revision = 1
        self.compacted = 0
        self.changes: list[KeyChange] = []
        self.leases: dict[int, StoredLease] = {}
        self._lease_seconds_min = lease_seconds_min
        self._live: dict[bytes, StoredKey] = {}
        self._keys: list[bytes] = []
        """The keys of `_live`, in order."""
        self._changed: list[KeyChange] = []
        """The changes of the current transaction."""

    def as_of(self, revision: int) -> EtcdStore:
        """A read-only copy with the keys as of a revision."""
        past = EtcdStore()
        past.revision = revision
        for change in self.changes:
            if change.revision > revision:
                break
            past._keep(change)
        return past

    def get(self, key: bytes) -> StoredKey | None:
        return self._live.get(key)

    def since(self, revision: int) -> list[KeyChange]:
        """All changes from this revision on."""
        return self.changes[bisect.bisect_left(self.changes, revision, key=lambda change: change.revision) :]

    # Transactions.

    def txn(self, request: EtcdTxn) -> bytes:
        """The body of the reply. All operations of the branch that is taken make one revision, or none happens."""
        request.check()
        succeeded = all(self._compares(compare) for compare in request.compares)
        steps = request.then if succeeded else request.otherwise
        leases = [step.number(3) for kind, step in steps if kind == PUT]
        if any(lease and lease not in self.leases for lease in leases):
            raise EtcdFailed(NOT_FOUND, "etcdserver: requested lease not found")
        for kind, step in steps:
            if kind == RANGE:
                self._check_revision(step.number(4))
        return integer(2, succeeded) + self._run(steps)

    def _run(self, steps: list[tuple[int, _Fields]]) -> bytes:
        run: dict[int, Callable[[_Fields], bytes]] = {
            RANGE: self._range,
            PUT: self._put,
            DELETE: self._delete,
        }
        replies = b""
        for kind, step in steps:
            reply = run[kind](step)
            header = message(1, integer(3, self.revision + bool(self._changed)))
            replies += message(3, message(kind, header + reply))
        self._commit()
        return replies

    def _commit(self) -> None:
        if self._changed:
            self.revision += 1
            self.changes += self._changed
            self._changed = []

    def _compares(self, compare: _Fields) -> bool:
        found = self._find(compare.bytes(3), compare.bytes(64))
        target = compare.number(2)
        if not found:
            return target != _VALUE and self._compare(compare, target, StoredKey(b"", 0, 0, 0, b"", 0))
        return all(self._compare(compare, target, each) for each in found)

    def _compare(self, compare: _Fields, target: int, found: StoredKey) -> bool:
        if target == _VALUE:
            return _ordered(compare.number(1), found.value, compare.bytes(7))
        have, field_number = {
            _VERSION: (found.version, 4),
            _CREATE: (found.created, 5),
            _MOD: (found.modified, 6),
            _LEASE: (found.lease, 8),
        }[target]
        return _ordered(compare.number(1), have, compare.number(field_number))

    def _find(self, start: bytes, end: bytes) -> list[StoredKey]:
        if not end:
            return [self._live[start]] if start in self._live else []
        first = bisect.bisect_left(self._keys, start)
        last = len(self._keys) if end == b"\0" else bisect.bisect_left(self._keys, end)
        return [self._live[key] for key in self._keys[first:last]]

    def _check_revision(self, revision: int) -> None:
        if revision > self.revision:
            raise EtcdFailed(OUT_OF_RANGE, "etcdserver: mvcc: required revision is a future revision")
        if 0 < revision < self.compacted:
            raise EtcdFailed(OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted")

    def _range(self, request: _Fields) -> bytes:
        revision = request.number(4)
        keys = self.as_of(revision) if revision else self
        found = keys._find(request.bytes(1), request.bytes(2))
        total, limit = integer(4, len(found)), request.number(3)
        if request.number(9):
            return total
        if request.number(5) == _DESCENDING:
            found.reverse()
        more = bool(limit) and len(found) > limit
        kept = found[:limit] if limit else found
        return b"".join(message(2, each.written()) for each in kept) + integer(3, more) + total

    def _put(self, request: _Fields) -> bytes:
        key, before = request.bytes(1), self._live.get(request.bytes(1))
        revision = self.revision + 1
        put = StoredKey(
            key,
            before.created if before else revision,
            revision,
            before.version + 1 if before else 1,
            request.bytes(2),
            request.number(3),
        )
        self._change(KeyChange(revision, key, put))
        return b""

    def _delete(self, request: _Fields) -> bytes:
        found = self._find(request.bytes(1), request.bytes(2))
        for each in found:
            self._change(KeyChange(self.revision + 1, each.key, None))
        return integer(2, len(found))

    def _change(self, change: KeyChange) -> None:
        self._changed.append(change)
        before = self._live.get(change.key)
        if before is not None and before.lease in self.leases:
            self.leases[before.lease].keys.discard(change.key)
        if change.put is not None and change.put.lease:
            self.leases[change.put.lease].keys.add(change.key)
        self._keep(change)

    def _keep(self, change: KeyChange) -> None:
        known = change.key in self._live
        if change.put is not None:
            self._live[change.key] = change.put
            if not known:
                bisect.insort(self._keys, change.key)
        elif known:
            del self._live[change.key]
            del self._keys[bisect.bisect_left(self._keys, change.key)]

    def compact(self, request: bytes) -> bytes:
        revision = _Fields(request).number(1)
        if revision <= self.compacted:
            raise EtcdFailed(OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted")
        if revision > self.revision:
            raise EtcdFailed(OUT_OF_RANGE, "etcdserver: mvcc: required revision is a future revision")
        self.compacted = revision
        return b""

    # Leases.

    def grant(self, request: bytes, now: float) -> bytes:
        asked = _Fields(request)
        lease, ttl = asked.number(2), asked.number(1)
        if ttl > LEASE_SECONDS_MAX:
            raise EtcdFailed(OUT_OF_RANGE, "etcdserver: too large lease TTL")
        if lease in self.leases:
            raise EtcdFailed(FAILED_PRECONDITION, "etcdserver: lease already exists")
        ttl = max(ttl, self._lease_seconds_min)
        self.leases[lease] = StoredLease(lease, ttl, now + ttl)
        return integer(2, lease) + integer(3, ttl)

    def revoke(self, lease: int) -> bytes:
        """Delete a lease and, in one revision, all keys that are attached to it."""
        found = self.leases.pop(lease, None)
        if found is None:
            raise EtcdFailed(NOT_FOUND, "etcdserver: requested lease not found")
        for key in sorted(found.keys):
            self._change(KeyChange(self.revision + 1, key, None))
        self._commit()
        return b""

    def keep_alive(self, request: bytes, now: float) -> bytes:
        """A time of 0 means that the lease is gone. An expired lease that is not deleted yet is deleted here."""
        lease = _Fields(request).number(1)
        found = self.leases.get(lease)
        if found is not None and found.expires <= now:
            self.revoke(lease)
            found = None
        if found is None:
            return integer(2, lease)
        found.expires = now + found.ttl
        return integer(2, lease) + integer(3, found.ttl)

    def time_to_live(self, request: bytes, now: float) -> bytes:
        asked = _Fields(request)
        lease = asked.number(1)
        found = self.leases.get(lease)
        if found is None:
            return integer(2, lease) + integer(3, -1)
        # Truncated towards zero, as Go converts: an expired lease that still exists has 0 seconds left, later -1.
        reply = integer(2, lease) + integer(3, int(found.expires - now)) + integer(4, found.ttl)
        keys = sorted(found.keys) if asked.number(2) else []
        return reply + b"".join(message(5, key) for key in keys)

    def prolong_all(self, now: float, extra: float) -> None:
        """A new leader restarts the ttl of every lease."""
        for lease in self.leases.values():
            lease.expires = now + lease.ttl + extra


def _ordered(result: int, have: object, given: object) -> bool:
    """Equal, greater, less or not equal."""
    if result in (0, 3):
        return (have == given) == (result == 0)
    return bool(have > given if result == 1 else have < given)  # type: ignore[operator]
