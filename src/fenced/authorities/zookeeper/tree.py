"""What the nodes are called and what they say. Nothing here does I/O or reads a clock.

    CHROOT/fenced/NAMESPACE      the realm, and by how much tokens are above transaction numbers
        a/ID                     an attempt, by its public id: names, ttl, holder; ephemeral. A withdrawn one stays
        n/NAME/ID-NUMBER         its place in the queue of a name; ephemeral. The lowest number holds the name
        n/NAME/ID~-NUMBER        the same, of one with a lock_delay
        n/NAME/~ID               a lease with a lock_delay holds or held the name; stays until the delay is over
        t/ID                     an attempt was withdrawn by somebody who did not make it; when it may be forgotten
        clock                    written to read the leader's clock
        spent                    the last token was handed out, and to whom

A token is the number of the transaction (zxid) that put the attempt into its queues, plus what was added by then.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from fenced import timing
from fenced.authorities.shared.rules import NOBODY, holder_fields, holder_of
from fenced.contracts import Wakeup
from fenced.errors import Misconfigured
from fenced.model import TOKEN_MAX, Holder
from fenced.schema import check_readable, parsed_schema
from fenced.wire.jute import ANY_VERSION, Stat

SCHEMA = 1
RAISES_MAX = 64
"""How many raises are kept, so that tokens of before them can still be told to onlookers."""

_WRAP = 2**31
_DELAY = "~"
_ID = 32


class Paths:
    """Where everything of a namespace is. No name is a path of another's: a name is one segment."""

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
        """Not a node: what is synchronised on when a session is kept alive, for whoever reads the traffic."""

    def attempt(self, public: str) -> str:
        return f"{self.attempts}/{public}"

    def tomb(self, public: str) -> str:
        return f"{self.tombs}/{public}"

    def name(self, name: str) -> str:
        return f"{self.names}/{quote(name, safe='')}"

    def new_place(self, name: str, public: str, delays: bool) -> str:
        """What the server completes by a number. It tells those behind whether a lock_delay may follow."""
        return f"{self.names}/{quote(name, safe='')}/{public}{_DELAY if delays else ''}-"

    def place(self, name: str, child: str) -> str:
        return f"{self.names}/{quote(name, safe='')}/{child}"

    def delay(self, name: str, public: str) -> str:
        return f"{self.names}/{quote(name, safe='')}/{_DELAY}{public}"


def name_of(child: str) -> str:
    return unquote(child, errors="strict")


# The namespace.


class NamespaceView(NamedTuple):
    """What the root of a namespace says. `raises`: from which transaction on how much is added."""

    realm: str
    raises: tuple[tuple[int, int], ...]
    changed: int
    version: int
    told: Mapping[str, Any] = MappingProxyType({})
    """What the root says, with the fields of a later version, which stay as they are."""

    def added(self, zxid: int) -> int:
        """What makes a token of a transaction number."""
        return next((added for since, added in reversed(self.raises) if since < zxid), 0)

    def token(self, zxid: int) -> int:
        """The token that a transaction stands for; the last one, if the numbers are used up."""
        return min(zxid + self.added(zxid), TOKEN_MAX)

    def raised(self, added: int) -> bytes:
        """The same, with so much added from now on. Since when, the node itself will tell."""
        kept = self.raises[-RAISES_MAX:]
        return _dump({**self.told, "raises": kept, "added": added})


def new_space(realm: str) -> bytes:
    return _dump({"schema": SCHEMA, "realm": realm, "raises": [], "added": 0})


def space_of(data: bytes, stat: Stat, where: str) -> NamespaceView:
    try:
        told = json.loads(data)
        schema, realm, added = parsed_schema(told), told["realm"], told["added"]
        raises = tuple((since, more) for since, more in told["raises"])
    except (ValueError, KeyError, TypeError):
        raise Misconfigured(f"{where} is used by another program, or damaged") from None
    check_readable(where, schema, SCHEMA)
    if stat.version:
        raises += ((stat.mzxid, added),)
    return NamespaceView(realm, raises, stat.mzxid, stat.version, told)


# Attempts.


@dataclass(slots=True)
class ZooKeeperAttempt:
    """One ask of this client, from before it is sent until it is forgotten."""

    public: str
    names: tuple[str, ...]
    ttl: float
    lock_delay: float = 0.0
    holder: Holder = NOBODY
    state: str = "waiting"  # waiting, granted, or how it ended
    places: dict[str, str] = field(default_factory=dict)
    """By name, the node that stands in its queue."""
    zxid: int = 0
    """The transaction that its token comes from."""
    token: int = 0
    version: int = ANY_VERSION
    """Of its own node; another one says that somebody has taken the attempt over."""
    away: bool = False
    """As far as we know, its nodes are in the session for places; otherwise in the session of its lease."""
    moving: bool = False
    """A request that moves its nodes was sent, and its outcome is unknown."""
    handing: Wakeup | None = None
    """A release that hands its last name over to it is under way; the wakeup is set when that has an outcome."""
    handed: bool = False
    """A release has handed its last name over to it: it is first in all its queues."""
    expires: float = math.inf
    forget: float = math.inf
    asks: int = 0
    """How many asks for it have begun."""
    asking: int = 0
    """How many of them are under way."""
    queued: bool = False
    """It was told to wait."""
    watched: bool = False
    """It will be told of everything that happens to its own places, and while it waits to those directly ahead."""
    behind: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """By name, the node directly ahead, and whether that is the first one in the queue."""
    trusted: set[str] = field(default_factory=set)
    """The nodes in `behind` that belong to waiters of this client: not watched, as this client wakes us itself."""
    moves: list[bytes] = field(default_factory=list)
    """The operations that move it into the session of its lease, prepared while it waits."""
    forced: int = 0
    """The last transaction, as far as it knows, that made one of its names or took it by force."""
    vanished: bool = False
    """A place of its own is gone, and it was not us."""
    delaying: bool = False
    """Nodes of a lock_delay were made for it."""
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
    """An attempt as its node tells it to everybody."""

    names: tuple[str, ...]
    ttl: float
    asked: float
    lock_delay: float
    holder: Holder
    zxid: int
    """The transaction that its token comes from."""
    owner: int
    """The session that it ends with; 0: nobody's, it was withdrawn before it came."""
    version: int


def record_text(attempt: ZooKeeperAttempt, ttl: float) -> bytes:
    """On take-over the zxid is written explicitly, because the node's own mzxid changes."""
    told = {
        "names": attempt.names,
        "ttl": ttl,
        "asked": attempt.ttl,
        "delay": attempt.lock_delay,
        "holder": holder_fields(attempt.holder),
    }
    return _dump({**told, "zxid": attempt.zxid} if attempt.zxid else told)


def record_of(data: bytes, stat: Stat) -> NodeRecord:
    if not stat.ephemeral_owner:
        return NodeRecord((), 0.0, 0.0, 0.0, NOBODY, stat.mzxid, 0, stat.version)
    told = json.loads(data)
    return NodeRecord(
        tuple(told["names"]),
        told["ttl"],
        told["asked"],
        told["delay"],
        holder_of(told["holder"]),
        told.get("zxid", stat.mzxid),
        stat.ephemeral_owner,
        stat.version,
    )


# Queues.


def owner_of(path: str) -> tuple[str, bool]:
    """Whose place a node is, and whether a lock_delay may follow when it is gone."""
    child = path.rpartition("/")[2]
    return child[:_ID], child[_ID] == _DELAY


class Queue(NamedTuple):
    """The places at one name, first come first, and who left a lock_delay behind."""

    publics: list[str]
    children: list[str]
    delays: list[str]
    changed: int
    """The transaction that made the name, or in which it was last taken by force."""

    def orphans(self, mine: str) -> list[str]:
        """Who had a lock_delay and is gone."""
        return [public for public in self.delays if public != mine and public not in self.publics]


def queue_of(children: Sequence[str], stat: Stat) -> Queue:
    places = []
    delays = []
    for child in children:
        if child.startswith(_DELAY):
            delays.append(child[1:])
        else:
            number = child[_ID:].removeprefix(_DELAY)[1:]
            places.append((int(number), child[:_ID], child))
    if places:
        places.sort()
        if places[-1][0] - places[0][0] > _WRAP:  # the server's counter of 32 bits began anew below zero
            places.sort(key=lambda place: place[0] if place[0] >= 0 else place[0] + 2 * _WRAP)
    return Queue([place[1] for place in places], [place[2] for place in places], delays, stat.mzxid)


# Delays.


class Delay(NamedTuple):
    """A lock_delay: how long it is, and until when by the leader's clock, once somebody saw that it began."""

    seconds: float
    until: float | None
    version: int


def delay_text(seconds: float, until: float | None = None) -> bytes:
    return _dump({"delay": seconds, "until": until})


def delay_of(data: bytes, stat: Stat) -> Delay:
    told = json.loads(data)
    return Delay(told["delay"], told["until"], stat.version)


def tomb_text(seconds: float) -> bytes:
    return _dump({"remember": seconds})


def tomb_seconds(data: bytes) -> float:
    return float(json.loads(data)["remember"])


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()


def chunks(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    return (items[at : at + size] for at in range(0, len(items), size))
