"""What is kept under which key, and how it is written. Pure.

All keys of a namespace begin with `fenced/NAMESPACE` and a zero byte, which no name contains:

    meta                          realm, lineage and offset: counting state, never deleted
    a 0 PUBLIC                    an attempt: what became of it, remembered for a while
    n 0 NAME 0 c                  who holds the name
    n 0 NAME 0 d                  it stays free until this is gone (lock_delay)
    n 0 NAME 0 q TICKET PUBLIC    a place in the queue; a holder that came through the queue keeps it to the end
    f 0 NAME                      lowest live ticket, cached for new clients; expires with the attempt records

So all that stands in the way of a place is what lies before it under the same name, and a name under which
there is no key is free. No name is a prefix of another one's keys, and names sort by their bytes. A claim has the
same key whosever it is: until a compaction etcd goes through all keys of a range that there ever were.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from fenced.authorities.shared.rules import holder_fields, holder_of
from fenced.errors import InvariantBroken
from fenced.model import Holder

ROOT = b"fenced/"
CLAIM, DELAY, PLACE = b"c", b"d", b"q"
GRANTED, WAITING, EXPIRED = "granted", "waiting", "expired"


class KeyKind(NamedTuple):
    """What a key under a name says."""

    name: str
    kind: bytes


class Keys:
    """The keys of one namespace."""

    def __init__(self, namespace: str) -> None:
        self.start = ROOT + namespace.encode() + b"\0"
        self.end = ROOT + namespace.encode() + b"\1"
        self.meta = self.start + b"meta"
        self._attempts = self.start + b"a\0"
        self._names = self.start + b"n\0"
        self.names_end = self.start + b"n\1"

    def attempt(self, public: str) -> bytes:
        return self._attempts + public.encode()

    def floor(self, name: str) -> bytes:
        return b"%bf\0%b" % (self.start, name.encode())

    def under(self, name: str) -> bytes:
        """Where the keys of a name begin."""
        return b"%b%b\0" % (self._names, name.encode())

    def behind(self, name: str) -> bytes:
        """The first key that is behind all of a name; of the empty one, where names begin."""
        return b"%b%b\1" % (self._names, name.encode()) if name else self._names

    def claim(self, name: str) -> bytes:
        return b"%b%b\0c" % (self._names, name.encode())

    def delay(self, name: str) -> bytes:
        return b"%b%b\0d" % (self._names, name.encode())

    def place(self, name: str, ticket: int, public: str) -> bytes:
        return b"%b%b\0q%016x%b" % (self._names, name.encode(), ticket, public.encode())

    def places_of(self, names: tuple[str, ...], ticket: int, public: str) -> list[bytes]:
        return [self.place(name, ticket, public) for name in names]

    def places(self, name: str, ticket: int = 0) -> bytes:
        """Where the queue of a name begins, or the part of it from a ticket on."""
        return b"%b%b\0q%b" % (self._names, name.encode(), b"%016x" % ticket if ticket else b"")

    def spot(self, key: bytes) -> KeyKind:
        """What a key under a name means."""
        name, _, rest = key[len(self._names) :].rpartition(b"\0")
        if not key.startswith(self._names) or rest[:1] not in (CLAIM, DELAY, PLACE):
            raise InvariantBroken(f"a key that fenced did not make: {key!r}")
        return KeyKind(name.decode(), rest[:1])


def is_claim(key: bytes) -> bool:
    return key.endswith(b"\0" + CLAIM)


# Values. They are JSON, for people who look with etcdctl.


def _json(value: dict[str, Any]) -> bytes:
    """In ASCII, and without the one character of it that is not printed but that JSON leaves as it is."""
    return json.dumps(value, separators=(",", ":")).replace("\x7f", "\\u007f").encode()


class Meta(NamedTuple):
    """A namespace's counting state, beside etcd's own revision."""

    realm: str
    lineage: str
    """The id of the cluster whose history this is; with a mark in front, one that went back."""
    offset: int
    """Added to a revision, it makes a token."""
    raised: int = 0
    schema: int = 1
    more: Mapping[str, Any] = MappingProxyType({})
    """The fields of a later version, which stay as they are."""

    def written(self) -> bytes:
        told = self._asdict()
        return _json({**told.pop("more"), **told})

    @classmethod
    def read(cls, value: bytes) -> Meta:
        told = json.loads(value)
        known = {field: told.pop(field) for field in ("realm", "lineage", "offset", "raised", "schema")}
        return cls(**known, more=told)


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An attempt as it is stored. The token of a granted one is the revision that wrote it, plus `offset`."""

    state: str
    names: tuple[str, ...]
    ttl: float
    delay: float = 0.0
    holder: Holder | None = None
    hold: int = 0
    """The lease that its claims hang on, and for how long the server gave it."""
    seconds: int = 0
    queue: int = 0
    ticket: int = 0
    delayed: int = 0
    offset: int = 0

    def written(self) -> bytes:
        told: dict[str, Any] = {"state": self.state, "names": self.names, "ttl": self.ttl}
        if self.holder is not None:
            told["holder"] = holder_fields(self.holder)
            for field in ("delay", "hold", "seconds", "queue", "ticket", "delayed", "offset"):
                if value := getattr(self, field):
                    told[field] = value
        return _json(told)

    @classmethod
    def read(cls, value: bytes) -> KeyRecord:
        told = json.loads(value)
        told["names"] = tuple(told["names"])
        if "holder" in told:
            told["holder"] = holder_of(told["holder"])
        return cls(**told)

    def ended(self, state: str) -> KeyRecord:
        """What is remembered of it; not who it was."""
        return KeyRecord(state, self.names, self.ttl)


class ClaimInfo(NamedTuple):
    """What a claim or a place says of its attempt. Its names, if they are many, are in the attempt's record."""

    public: str
    holder: Holder
    ttl: float
    many: bool
    offset: int = 0
    ticket: int = 0
    """Of its place in the queue, if it has or had one."""

    @classmethod
    def of(cls, public: str, record: KeyRecord) -> ClaimInfo:
        """What is written under each name of an attempt; always the same."""
        assert record.holder is not None
        many = len(record.names) > 1
        return cls(public, record.holder, record.ttl, many, record.offset, record.ticket)

    def written(self) -> bytes:
        told: dict[str, Any] = {"holder": holder_fields(self.holder), "ttl": self.ttl}
        for field in ("many", "offset", "ticket"):
            if value := getattr(self, field):
                told[field] = value
        return b'{"grant":"%b",%b' % (self.public.encode(), _json(told)[1:])

    @classmethod
    def read(cls, value: bytes) -> ClaimInfo:
        told = json.loads(value)
        return cls(
            told["grant"],
            holder_of(told["holder"]),
            told["ttl"],
            told.get("many", False),
            told.get("offset", 0),
            told.get("ticket", 0),
        )
