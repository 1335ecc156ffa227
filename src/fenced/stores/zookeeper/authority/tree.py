"""The paths of the nodes and the format of their data. Nothing here does I/O or reads a clock.

    CHROOT/fenced/NAMESPACE      the realm, and by how much tokens are above transaction numbers
        a/ID                     an attempt, by its public id: names, ttl, holder; ephemeral. A withdrawn one stays
        n/NAME/ID-NUMBER         its place in the queue of a name; ephemeral. The lowest number holds the name
        n/NAME/~ID               a lease with a lock_delay holds or held the name; stays until the delay is over
        t/ID                     an attempt was withdrawn by a client that did not make it; when this may be deleted
        clock                    written to read the leader's clock
        spent                    the attempt that got the last token

A token is the number of the transaction (zxid) that queued the attempt, plus the amount that applied at that time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from fenced.errors import Misconfigured
from fenced.leases.rules import NOBODY, holder_fields, holder_of
from fenced.stores.zookeeper.wire.jute import ANY_VERSION, Stat
from fenced.values import timing
from fenced.values.model import TOKEN_MAX, Holder
from fenced.values.schema import check_readable, parsed_schema

SCHEMA = 1
RAISES_MAX = 64
"""How many raises of the floor are kept, so that views can show the tokens of earlier grants."""

_WRAP = 2**31
_DELAY = "~"
_ID = 32


class Paths:
    """The paths of a namespace. A name is one segment, so no name's path is below another's."""

    def __init__(self, chroot: str, namespace: str) -> None:
        self.parents = [chroot[:at] for at in range(1, len(chroot)) if chroot[at] == "/"]
        self.parents += [chroot] if chroot else []
        self.parents.append(f"{chroot}/fenced")
        self.root = f"{chroot}/fenced/{quote(namespace, safe='')}"
        self.attempts = f"{self.root}/a"
        self.names = f"{self.root}/n"
        self.tombs = f"{self.root}/t"
        self.clock = f"{self.root}/clock"
        self.spent = f"{self.root}/spent"
        self.keep = f"{self.root}/keep"
        """Not a node: the path of the `sync` that keeps a session alive, recognizable in captured traffic."""

    def attempt(self, public: str) -> str:
        return f"{self.attempts}/{public}"

    def tomb(self, public: str) -> str:
        return f"{self.tombs}/{public}"

    def name(self, name: str) -> str:
        return f"{self.names}/{quote(name, safe='')}"

    def new_place(self, name: str, public: str) -> str:
        """The path of a new place; the server appends a number."""
        return f"{self.names}/{quote(name, safe='')}/{public}-"

    def place(self, name: str, child: str) -> str:
        return f"{self.names}/{quote(name, safe='')}/{child}"

    def delay(self, name: str, public: str) -> str:
        return f"{self.names}/{quote(name, safe='')}/{_DELAY}{public}"


def name_of(child: str) -> str:
    return unquote(child, errors="strict")


# The namespace.


class NamespaceView(NamedTuple):
    """The data of a namespace's root. `raises`: from which transaction on how much is added."""

    realm: str
    raises: tuple[tuple[int, int], ...]
    changed: int
    version: int
    fields: Mapping[str, Any] = MappingProxyType({})
    """All fields of the root, also those of a later version, which are written back unchanged."""

    def added(self, zxid: int) -> int:
        """The amount to add to a transaction number to get its token."""
        return next((added for since, added in reversed(self.raises) if since < zxid), 0)

    def token(self, zxid: int) -> int:
        """The token of a transaction; the last token if the numbers are used up."""
        return min(zxid + self.added(zxid), TOKEN_MAX)

    def raised(self, added: int) -> bytes:
        """The root's data with a new amount. The node's own mzxid shows since when it applies."""
        kept = self.raises[-RAISES_MAX:]
        return _dump({**self.fields, "raises": kept, "added": added})


def new_space(realm: str) -> bytes:
    return _dump({"schema": SCHEMA, "realm": realm, "raises": [], "added": 0})


def space_of(data: bytes, stat: Stat, where: str) -> NamespaceView:
    try:
        fields = json.loads(data)
        schema, realm, added = parsed_schema(fields), fields["realm"], fields["added"]
        raises = tuple((since, more) for since, more in fields["raises"])
    except (ValueError, KeyError, TypeError):
        raise Misconfigured(f"{where} is used by another program, or damaged") from None
    check_readable(where, schema, SCHEMA)
    if stat.version:
        raises += ((stat.mzxid, added),)
    return NamespaceView(realm, raises, stat.mzxid, stat.version, fields)


# Attempts.


@dataclass(slots=True)
class ZooKeeperAttempt:
    """One attempt of this client, from before its ask is sent until it is forgotten."""

    public: str
    names: tuple[str, ...]
    ttl: float
    lock_delay: float = 0.0
    holder: Holder = NOBODY
    state: str = "waiting"  # waiting, granted, or how it ended
    places: dict[str, str] = field(default_factory=dict)
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
    sent: bool = False
    """A request that makes its places may have been sent."""
    queued: bool = False
    """Its caller got the answer to wait."""
    watched: bool = False
    """The server notifies us of changes: while it waits, of the places directly ahead and of its own node; then of its
    own places."""
    taken: bool = False
    """A take-over has replaced it: nothing here describes the attempt any more."""
    delaying: bool = False
    """Its lock_delay nodes were made."""
    doubted: bool = False
    """A request to end it may have been carried out."""

    @property
    def over(self) -> bool:
        return self.state not in ("waiting", "granted")

    def end(self, state: str, now: float) -> None:
        if self.over:
            return
        self.state = state
        if state == "expired" and math.isfinite(self.expires):
            now = self.expires + self.lock_delay
        self.forget = now + timing.remember_for(self.ttl)


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


def record_text(attempt: ZooKeeperAttempt, ttl: float) -> bytes:
    """On take-over the zxid is written explicitly, because the node's own mzxid changes."""
    fields = {
        "names": attempt.names,
        "ttl": ttl,
        "asked": attempt.ttl,
        "delay": attempt.lock_delay,
        "holder": holder_fields(attempt.holder),
    }
    return _dump({**fields, "zxid": attempt.zxid} if attempt.zxid else fields)


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


# Queues.


class Queue(NamedTuple):
    """The places at one name, in order, and the ids of attempts with lock_delay nodes."""

    publics: list[str]
    children: list[str]
    delays: list[str]
    changed: int
    """The transaction that made the name, or in which it was last taken by force."""

    def orphans(self, mine: str) -> list[str]:
        """The ids of attempts whose lock_delay nodes exist but whose places are gone."""
        return [public for public in self.delays if public != mine and public not in self.publics]


def queue_of(children: Sequence[str], stat: Stat) -> Queue:
    places = []
    delays = []
    for child in children:
        if child.startswith(_DELAY):
            delays.append(child[1:])
        else:
            places.append((int(child[_ID + 1 :]), child[:_ID], child))
    if places:
        places.sort()
        if (
            places[-1][0] - places[0][0] > _WRAP
        ):  # the server's 32-bit counter wrapped around to negative numbers
            places.sort(key=lambda place: place[0] if place[0] >= 0 else place[0] + 2 * _WRAP)
    return Queue([place[1] for place in places], [place[2] for place in places], delays, stat.mzxid)


# Delays.


class Delay(NamedTuple):
    """A lock_delay: its length, and its end by the leader's clock once a client has detected that it began."""

    seconds: float
    until: float | None
    version: int


def delay_text(seconds: float, until: float | None = None) -> bytes:
    return _dump({"delay": seconds, "until": until})


def delay_of(data: bytes, stat: Stat) -> Delay:
    fields = json.loads(data)
    return Delay(fields["delay"], fields["until"], stat.version)


def tomb_text(seconds: float) -> bytes:
    return _dump({"remember": seconds})


def tomb_seconds(data: bytes) -> float:
    return float(json.loads(data)["remember"])


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()


def chunks(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    return (items[at : at + size] for at in range(0, len(items), size))
