"""The keys of a namespace, and the format of their values. Pure.

All keys of a namespace begin with `fenced/NAMESPACE` and a zero byte, which no name contains:

    meta                          realm, lineage and offset: counting state, never deleted
    a 0 PUBLIC                    the record of an attempt, kept for a while after its end
    n 0 NAME 0 c                  the claim of the holder
    n 0 NAME 0 d                  a lock_delay: nobody is granted the name while this key exists
    n 0 NAME 0 q TICKET PUBLIC    a place in the queue; a holder that came through the queue keeps it to the end

So a place is blocked exactly by the keys that sort before it under the same name, and a name without keys is free.
No name is a prefix of another name's keys, and names sort by their bytes. All claims of a name have the same key:
until a compaction, etcd walks through every key that ever was in a range.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from fenced.errors import InvariantBroken
from fenced.leases.rules import holder_fields, holder_of
from fenced.stores.etcd.claimkeys import ROOT, ClaimKeys, claimed_by
from fenced.values.model import Holder

CLAIM, DELAY, PLACE = b"c", b"d", b"q"


class Phase(StrEnum):
    """Where an attempt is in its life. It only moves forward: waiting, granted, one of the others."""

    WAITING = "waiting"
    GRANTED = "granted"
    RELEASED = "released"
    WITHDRAWN = "withdrawn"
    REVOKED = "revoked"
    EXPIRED = "expired"

    @property
    def is_live(self) -> bool:
        return self in (Phase.WAITING, Phase.GRANTED)


class KeyKind(NamedTuple):
    """The name of a key, and what kind of key it is."""

    name: str
    kind: bytes


class Keys(ClaimKeys):
    """The keys of one namespace."""

    def __init__(self, namespace: str) -> None:
        super().__init__(namespace)
        self.end = ROOT + namespace.encode() + b"\1"
        self.meta = self.start + b"meta"
        self._attempts = self.start + b"a\0"
        self.names_end = self.start + b"n\1"

    def attempt(self, public: str) -> bytes:
        return self._attempts + public.encode()

    def under(self, name: str) -> bytes:
        """Where the keys of a name begin."""
        return b"%b%b\0" % (self._names, name.encode())

    def behind(self, name: str) -> bytes:
        """The end of a name's range of keys; for "", where names begin."""
        return b"%b%b\1" % (self._names, name.encode()) if name else self._names

    def delay(self, name: str) -> bytes:
        return b"%b%b\0d" % (self._names, name.encode())

    def place(self, name: str, ticket: int, public: str) -> bytes:
        return b"%b%b\0q%016x%b" % (self._names, name.encode(), ticket, public.encode())

    def places_of(self, names: tuple[str, ...], ticket: int, public: str) -> list[bytes]:
        return [self.place(name, ticket, public) for name in names]

    def places(self, name: str) -> bytes:
        """Where the queue of a name begins."""
        return b"%b%b\0q" % (self._names, name.encode())

    def spot(self, key: bytes) -> KeyKind:
        """Parse a key under a name."""
        name, _, rest = key[len(self._names) :].rpartition(b"\0")
        if not key.startswith(self._names) or rest[:1] not in (CLAIM, DELAY, PLACE):
            raise InvariantBroken(f"a key that fenced did not make: {key!r}")
        return KeyKind(name.decode(), rest[:1])


def is_claim(key: bytes) -> bool:
    return key.endswith(b"\0" + CLAIM)


# Values. They are JSON, so that people can read them with etcdctl.


def _json(value: dict[str, Any]) -> bytes:
    """Printable ASCII: json.dumps leaves DEL (0x7f) unescaped, so escape it here."""
    return json.dumps(value, separators=(",", ":")).replace("\x7f", "\\u007f").encode()


class Meta(NamedTuple):
    """A namespace's counting state, in addition to etcd's revision."""

    realm: str
    lineage: str
    """The id of the cluster that minted the tokens; with a mark in front if its revision went back."""
    offset: int
    """A token is a revision plus this."""
    raised: int = 0
    schema: int = 1
    more: Mapping[str, Any] = MappingProxyType({})
    """Fields of a later version, which are written back unchanged."""

    def written(self) -> bytes:
        fields = self._asdict()
        return _json({**fields.pop("more"), **fields})

    @classmethod
    def read(cls, value: bytes) -> Meta:
        fields = json.loads(value)
        known = {field: fields.pop(field) for field in ("realm", "lineage", "offset", "raised", "schema")}
        return cls(**known, more=fields)


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An attempt as it is stored. The token of a granted one is the revision that wrote it, plus `offset`."""

    phase: Phase
    names: tuple[str, ...]
    ttl: float
    delay: float = 0.0
    holder: Holder | None = None
    hold: int = 0
    """The etcd lease that its claims are attached to; `seconds` is the ttl that the server granted it."""
    seconds: int = 0
    queue: int = 0
    ticket: int = 0
    delayed: int = 0
    offset: int = 0

    def written(self) -> bytes:
        fields: dict[str, Any] = {"state": self.phase, "names": self.names, "ttl": self.ttl}
        if self.holder is not None:
            fields["holder"] = holder_fields(self.holder)
            for field in ("delay", "hold", "seconds", "queue", "ticket", "delayed", "offset"):
                if value := getattr(self, field):
                    fields[field] = value
        return _json(fields)

    @classmethod
    def read(cls, value: bytes) -> KeyRecord:
        fields = json.loads(value)
        fields["phase"], fields["names"] = Phase(fields.pop("state")), tuple(fields["names"])
        if "holder" in fields:
            fields["holder"] = holder_of(fields["holder"])
        return cls(**fields)

    def granted(self, hold: int, seconds: int, delayed: int, offset: int) -> KeyRecord:
        """The record of a grant of this attempt, on these etcd leases."""
        return KeyRecord(
            Phase.GRANTED,
            self.names,
            self.ttl,
            self.delay,
            self.holder,
            hold,
            seconds,
            self.queue,
            self.ticket,
            delayed,
            offset,
        )

    def ended(self, phase: Phase) -> KeyRecord:
        """The record that is kept after its end; without the holder."""
        return KeyRecord(phase, self.names, self.ttl)


class ClaimInfo(NamedTuple):
    """The value of a claim or a place. If the attempt has several names, they are in its own record."""

    public: str
    holder: Holder
    ttl: float
    many: bool
    offset: int = 0
    ticket: int = 0
    """The ticket of its place in the queue, if it has or had one."""

    @classmethod
    def of(cls, public: str, record: KeyRecord) -> ClaimInfo:
        """The value that is written under each name of an attempt, the same for all of them."""
        assert record.holder is not None
        many = len(record.names) > 1
        return cls(public, record.holder, record.ttl, many, record.offset, record.ticket)

    def written(self) -> bytes:
        fields: dict[str, Any] = {"holder": holder_fields(self.holder), "ttl": self.ttl}
        for field in ("many", "offset", "ticket"):
            if value := getattr(self, field):
                fields[field] = value
        return claimed_by(self.public) + _json(fields)[1:]

    @classmethod
    def read(cls, value: bytes) -> ClaimInfo:
        fields = json.loads(value)
        return cls(
            fields["grant"],
            holder_of(fields["holder"]),
            fields["ttl"],
            fields.get("many", False),
            fields.get("offset", 0),
            fields.get("ticket", 0),
        )
