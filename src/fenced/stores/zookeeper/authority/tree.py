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
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from fenced.errors import Misconfigured
from fenced.stores.zookeeper.wire.jute import Stat
from fenced.values.model import TOKEN_MAX
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
        return dump({**self.fields, "raises": kept, "added": added})


def new_space(realm: str) -> bytes:
    return dump({"schema": SCHEMA, "realm": realm, "raises": [], "added": 0})


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


# Queues.


class Queue(NamedTuple):
    """The places at one name, in order, and the ids of attempts with lock_delay nodes."""

    publics: list[str]
    children: list[str]
    delays: list[str]
    changed: int
    """The transaction that made the name, or in which it was last taken by force."""

    def before(self, public: str) -> list[str]:
        """The attempts ahead of this one: all, if it has no place here."""
        return self.publics[: self.publics.index(public)] if public in self.publics else self.publics

    def orphans(self, mine: str) -> list[str]:
        """The ids of attempts whose lock_delay nodes exist but whose places are gone."""
        return [public for public in self.delays if public != mine and public not in self.publics]


class QueueLook(NamedTuple):
    """The queues of some names, and the namespace: read together."""

    queues: dict[str, Queue]
    space: NamespaceView

    def ahead(self, public: str) -> int:
        """How many are ahead of this attempt, in the longest queue. It has a place at all these names."""
        return max(queue.publics.index(public) for queue in self.queues.values())

    def too_old(self, zxid: int) -> bool:
        """Whether this number is below a token that may have been granted: only a newer one may be granted."""
        forced = max(queue.changed for queue in self.queues.values())
        return zxid < max(forced, self.space.changed if self.space.version else 0)


def queue_of(children: Sequence[str], stat: Stat) -> Queue:
    places = []
    delays = []
    for child in children:
        if child.startswith(_DELAY):
            delays.append(child[1:])
        else:
            places.append((int(child[_ID + 1 :]), child[:_ID], child))
    places.sort()
    if places and places[-1][0] - places[0][0] > _WRAP:  # the server's 32-bit counter went on below zero
        places.sort(key=lambda place: place[0] if place[0] >= 0 else place[0] + 2 * _WRAP)
    return Queue([place[1] for place in places], [place[2] for place in places], delays, stat.mzxid)


# Delays.


class Delay(NamedTuple):
    """A lock_delay: its length, and its end by the leader's clock once a client has detected that it began."""

    seconds: float
    until: float | None
    version: int


def delay_text(seconds: float, until: float | None = None) -> bytes:
    return dump({"delay": seconds, "until": until})


def delay_of(data: bytes, stat: Stat) -> Delay:
    fields = json.loads(data)
    return Delay(fields["delay"], fields["until"], stat.version)


def tomb_text(seconds: float) -> bytes:
    return dump({"remember": seconds})


def tomb_seconds(data: bytes) -> float:
    return float(json.loads(data)["remember"])


def dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()


def chunks(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    return (items[at : at + size] for at in range(0, len(items), size))
