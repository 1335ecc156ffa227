"""An attempt: what its node says, and what its client knows about it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from fenced.leases.rules import NOBODY, holder_fields, holder_of
from fenced.stores.zookeeper.authority.tree import dump
from fenced.stores.zookeeper.wire.jute import ANY_VERSION, Stat
from fenced.values import timing
from fenced.values.model import Holder


class ZooKeeperPhase(StrEnum):
    """How far an attempt has come. It never goes back."""

    NEW = "new"
    """No request that makes its places was sent."""
    SENT = "sent"
    """One was sent, and its reply has not arrived: its places may exist."""
    PLACED = "placed"
    """It has its places. Its caller has no answer yet, and may be turned away."""
    WAITING = "waiting"
    """Its caller was told to wait."""
    GRANTED = "granted"
    RELEASED = "released"
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"
    REVOKED = "revoked"
    ELSEWHERE = "elsewhere"
    """A take-over has replaced it: nothing here describes the attempt any more."""


_ORDER = {phase: min(at, 5) for at, phase in enumerate(ZooKeeperPhase)}
"""All ends are equal: the first one counts."""
_OVER = _ORDER[ZooKeeperPhase.RELEASED]


@dataclass(slots=True, eq=False)
class ZooKeeperAttempt:
    """One attempt of this client, from before its ask is sent until it is forgotten."""

    public: str
    names: tuple[str, ...]
    ttl: float
    lock_delay: float
    holder: Holder
    lock: AbstractContextManager[object]
    phase: ZooKeeperPhase = ZooKeeperPhase.NEW
    places: Mapping[str, str] = field(default_factory=dict)
    """By name, its node in the queue."""
    zxid: int = 0
    """The transaction that its token comes from."""
    token: int = 0
    version: int = ANY_VERSION
    """The version of its own node; if it has another one, another client has taken the attempt over."""
    expires: float = math.inf
    forget: float = math.inf
    asks: int = 0
    """How many asks for it have begun."""
    asking: int = 0
    """How many of them are running."""
    watched: bool = False
    """The server notifies us of changes: while it waits, of the places directly ahead and of its own node; then of its
    own places."""
    delaying: bool = False
    """Its lock_delay nodes were made."""
    announcing: bool = False
    """A request that makes them was sent, and its reply has not arrived: they may exist."""
    ending: bool = False
    """A request to end it may have been carried out."""

    @property
    def over(self) -> bool:
        return _ORDER[self.phase] == _OVER

    @property
    def granted(self) -> bool:
        return self.phase is ZooKeeperPhase.GRANTED

    def advance(self, phase: ZooKeeperPhase) -> bool:
        """False: it has come further already."""
        # Threads may ask, renew and end one attempt at once. Compared and set under one lock, so no answer to a late
        # request brings an ended attempt back.
        with self.lock:
            if _ORDER[phase] <= _ORDER[self.phase]:
                return False
            self.phase = phase
            return True

    def end(self, how: ZooKeeperPhase, now: float) -> None:
        if self.advance(how):
            if how is ZooKeeperPhase.EXPIRED and math.isfinite(self.expires):
                now = self.expires + self.lock_delay
            self.forget = now + timing.remember_for(self.ttl)

    def text(self, ttl: float, zxid: int = 0) -> bytes:
        """For its node. On take-over the zxid is written explicitly, because the node's own mzxid changes."""
        fields = {
            "names": self.names,
            "ttl": ttl,
            "asked": self.ttl,
            "delay": self.lock_delay,
            "holder": holder_fields(self.holder),
        }
        return dump({**fields, "zxid": zxid} if zxid else fields)


class NodeRecord(NamedTuple):
    """An attempt as stored in its node."""

    names: tuple[str, ...]
    ttl: float
    asked: float
    lock_delay: float
    holder: Holder
    zxid: int
    """The transaction that its token comes from."""
    owner: int
    """The session that owns it; 0: none, it was withdrawn before its ask arrived."""
    version: int


def record_of(data: bytes, stat: Stat) -> NodeRecord:
    if not stat.ephemeral_owner:
        return NodeRecord((), 0.0, 0.0, 0.0, NOBODY, stat.mzxid, 0, stat.version)
    fields = json.loads(data)
    return NodeRecord(
        tuple(fields["names"]),
        fields["ttl"],
        fields["asked"],
        fields["delay"],
        holder_of(fields["holder"]),
        fields.get("zxid", stat.mzxid),
        stat.ephemeral_owner,
        stat.version,
    )
