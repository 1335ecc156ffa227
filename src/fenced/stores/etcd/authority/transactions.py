"""The transactions of an attempt's life, as bytes. Pure.

    grant      if there is no key under its names: claim them
    enqueue    after a refused grant: take a place under each name
    promote    if there is no key ahead of its places: claim the names
    finish     if it has its claim or its place: delete its keys, and record how it ended
    hand_over  the same, and claim the name for the waiter directly behind
    keep_taken the same, and leave keys that block its names for a while

Requests are templates, built once for many attempts: all public ids have the same length and are filled in.

`floor`: all places with an earlier ticket are known to be gone. Until a compaction, etcd walks through every key that
ever was in a range, so the range starts at this ticket.
"""

from __future__ import annotations

from functools import lru_cache

from fenced.stores.etcd.authority.keys import EXPIRED, GRANTED, ClaimInfo, KeyRecord, Keys
from fenced.stores.etcd.wire.messages import (
    TXN_OPS_MAX,
    KeyValue,
    absent,
    delete,
    get,
    modified_at,
    present,
    put,
    txn,
    unmodified_since,
    valued,
)

_ANYBODY = "\x7f" * 32
"""Placeholder for a public id. Neither names nor the values that we write contain this character."""


def grant(
    keys: Keys,
    public: str,
    record: KeyRecord,
    memory: int,
    raw: bytes,
    floor: int = 0,
    *,
    learn: bool = False,
) -> bytes:
    """`learn`: also read the lowest live ticket that other clients have stored."""
    return public.encode().join(_grant(keys, record, memory, raw, floor, learn))


def _nothing_ahead(keys: Keys, name: str, end: bytes, floor: int) -> list[bytes]:
    if not floor:
        return [absent(keys.under(name), end)]
    return [absent(keys.under(name), keys.places(name)), absent(keys.places(name, floor), end)]


@lru_cache(maxsize=256)
def _grant(keys: Keys, record: KeyRecord, memory: int, raw: bytes, floor: int, learn: bool) -> list[bytes]:
    mine = keys.attempt(_ANYBODY)
    free = [proof for name in record.names for proof in _nothing_ahead(keys, name, keys.behind(name), floor)]
    return txn(
        [absent(mine), valued(keys.meta, raw), *free],
        _claims(keys, _ANYBODY, record, memory) + [get(keys.floor(name)) for name in record.names if learn],
        [get(mine), get(keys.meta)],
    ).split(_ANYBODY.encode())


def enqueue(keys: Keys, public: str, record: KeyRecord, memory: int, blocker: KeyValue) -> bytes:
    """`blocker`: the key that was directly ahead when the ticket was taken, and must still exist.

    While it exists, nobody with a later ticket is granted, so no client has stored a higher lowest ticket. The attempt
    must not have been granted meanwhile.
    """
    mine, about = keys.attempt(public), ClaimInfo.of(public, record).written()
    writes = [put(mine, record.written(), memory)]
    writes += [
        put(place, about, record.queue) for place in keys.places_of(record.names, record.ticket, public)
    ]
    blocked = keys.spot(blocker.key).name
    others = [unmodified_since(keys.claim(name), record.ticket) for name in record.names if name != blocked]
    return txn([absent(mine), modified_at(blocker.key, blocker.modified), *others], writes)


def promote(
    keys: Keys,
    public: str,
    record: KeyRecord,
    memory: int,
    raw: bytes,
    floor: int = 0,
    *,
    store: bool = False,
) -> bytes:
    """Claims, delays and earlier places sort before a place; so would its own claim."""
    mine, places = keys.attempt(public), keys.places_of(record.names, record.ticket, public)
    ahead = zip(record.names, places, strict=True)
    first = [proof for name, place in ahead for proof in _nothing_ahead(keys, name, place, floor)]
    return txn(
        [valued(keys.meta, raw), present(places[0]), *first],
        [*_claims(keys, public, record, memory), *_store_ticket(keys, record, memory, store), get(places[0])],
        [get(mine), get(keys.meta), get(places[0])],
    )


def _store_ticket(keys: Keys, record: KeyRecord, memory: int, store: bool) -> list[bytes]:
    """Store the lowest live ticket, for clients that do not know this queue yet."""
    return [put(keys.floor(name), b"%d" % record.ticket, memory) for name in record.names if store]


def _claims(keys: Keys, public: str, record: KeyRecord, memory: int) -> list[bytes]:
    """The writes of a grant: the record, and for each name a claim that is attached to the session's etcd lease."""
    about = ClaimInfo.of(public, record).written()
    writes = [put(keys.attempt(public), record.written(), memory)]
    writes += [put(keys.claim(name), about, record.hold) for name in record.names]
    if record.delayed:
        writes += [put(keys.delay(name), about, record.delayed) for name in record.names]
    return writes


def finish(
    keys: Keys,
    public: str,
    record: KeyRecord,
    revision: int,
    state: str,
    memory: int,
    carrier: KeyValue | None = None,
) -> tuple[bytes, list[bytes]]:
    """The transaction, and deletes that do not fit into it and may be sent before. With memory 0 it only deletes.

    `carrier`: requires that this key has not changed, so that no other client has taken the attempt over.
    """
    if record.state == GRANTED and not record.ticket and len(record.names) == 1 and carrier is None:
        return public.encode().join(_finish_plain(keys, record, state, memory)), []
    mine, writes = keys.attempt(public), ends(keys, public, record, state, memory)
    if record.state == GRANTED:
        proof = holds(keys, public, record)
    else:
        place = keys.place(record.names[0], record.ticket, public)
        proof = [present(place), modified_at(mine, revision)]
    if carrier is not None:
        proof.append(modified_at(carrier.key, carrier.modified))
    return txn(proof, writes[:TXN_OPS_MAX], [get(mine)]), writes[TXN_OPS_MAX:]


def hand_over(
    keys: Keys,
    public: str,
    record: KeyRecord,
    memory: int,
    follower: tuple[str, KeyRecord, int],
    raw: bytes,
    floor: int = 0,
    *,
    store: bool = False,
) -> bytes:
    """Requires that only the keys that are given back are ahead of the heir's place. For one name without a delay.

    `follower`: its public id, the record of its grant, and the etcd lease of that record.
    """
    heir, granted, its_memory = follower
    (name,) = record.names
    mine, place = keys.attempt(public), keys.place(name, granted.ticket, heir)
    start = keys.places(name, floor)
    proof = [*holds(keys, public, record), valued(keys.meta, raw), present(place)]
    writes = [
        put(mine, record.ended("released").written(), memory),
        *_claims(keys, heir, granted, its_memory),
        *_store_ticket(keys, granted, its_memory, store),
    ]
    if record.ticket:
        ours = keys.place(name, record.ticket, public)
        proof.append(absent(start, ours))
        start = ours + b"\0"
        writes.append(delete(ours))
    return txn([*proof, absent(start, place)], writes, [get(mine)])


@lru_cache(maxsize=256)
def _finish_plain(keys: Keys, record: KeyRecord, state: str, memory: int) -> list[bytes]:
    return txn(
        holds(keys, _ANYBODY, record),
        ends(keys, _ANYBODY, record, state, memory),
        [get(keys.attempt(_ANYBODY))],
    ).split(_ANYBODY.encode())


def holds(keys: Keys, public: str, record: KeyRecord) -> list[bytes]:
    """Compares that prove that it has all its claims."""
    about = ClaimInfo.of(public, record).written()
    return [valued(keys.claim(name), about) for name in record.names]


def ends(keys: Keys, public: str, record: KeyRecord, state: str, memory: int) -> list[bytes]:
    """The writes that end a live attempt: put its final record, delete all its keys.

    An expiry leaves the lock_delay keys in place.
    """
    writes = [put(keys.attempt(public), record.ended(state).written(), memory)] if memory else []
    if record.state == GRANTED:
        writes += [delete(keys.claim(name)) for name in record.names]
        if record.delayed and state != EXPIRED:
            writes += [delete(keys.delay(name)) for name in record.names]
    if record.ticket:
        writes += [delete(place) for place in keys.places_of(record.names, record.ticket, public)]
    return writes


def keep_taken(keys: Keys, public: str, record: KeyRecord, memory: int, lease: int) -> list[bytes]:
    """The transactions that release it and leave lock_delay keys on `lease`. The last one decides.

    If one does not hold them all, the delays are written first: while its claims exist they change nothing, and if it
    loses a claim before the last one, they end with `lease`.
    """
    proof, mine = holds(keys, public, record), keys.attempt(public)
    about = ClaimInfo.of(public, record).written()
    first = [put(keys.delay(name), about, lease) for name in record.names]
    if record.ticket:
        first += [delete(place) for place in keys.places_of(record.names, record.ticket, public)]
    last = [put(mine, record.ended("released").written(), memory)]
    last += [delete(keys.claim(name)) for name in record.names]
    if len(first) + len(last) <= TXN_OPS_MAX:
        return [txn(proof, first + last, [get(mine)])]
    return [txn(proof, first), txn(proof, last, [get(mine)])]


def attach_places(keys: Keys, public: str, record: KeyRecord, revision: int, queue: int) -> bytes:
    """Attach the places of a waiter to another etcd lease, if it still waits and has them all."""
    about = ClaimInfo.of(public, record).written()
    places = keys.places_of(record.names, record.ticket, public)
    proof = [modified_at(keys.attempt(public), revision), *map(present, places)]
    return txn(proof, [put(place, about, queue) for place in places])


def attach_claims(keys: Keys, public: str, record: KeyRecord, hold: int, delayed: int) -> list[bytes]:
    """The transactions that attach a holder's keys to other etcd leases. The last one decides.

    Its places in queues are deleted: nobody needs them, and so it needs no etcd lease for them.
    """
    proof, about = holds(keys, public, record), ClaimInfo.of(public, record).written()
    writes = (
        [delete(place) for place in keys.places_of(record.names, record.ticket, public)]
        if record.ticket
        else []
    )
    if delayed:
        writes += [put(keys.delay(name), about, delayed) for name in record.names]
    claims = [put(keys.claim(name), about, hold) for name in record.names]
    if len(writes) + len(claims) <= TXN_OPS_MAX:
        return [txn(proof, writes + claims)]
    return [txn(proof, writes), txn(proof, claims)]


def delays(keys: Keys, public: str, record: KeyRecord) -> tuple[tuple[bytes, bytes], ...]:
    """The lock_delay keys of an expired attempt, with their values: nobody is granted its names while they exist."""
    about = ClaimInfo.of(public, record).written()
    return tuple((keys.delay(name), about) for name in record.names)


def clear(keys: Keys, public: str, record: KeyRecord, name: str) -> bytes:
    """Delete what is left under a name of an attempt that has lost a key. Lock_delay keys stay."""
    writes = [delete(keys.place(name, record.ticket, public))] if record.ticket else []
    if record.state != GRANTED:
        return txn((), writes)
    about = ClaimInfo.of(public, record).written()
    return txn([valued(keys.claim(name), about)], [delete(keys.claim(name)), *writes], writes)
