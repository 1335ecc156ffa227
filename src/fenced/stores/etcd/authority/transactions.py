"""The transactions of an attempt's life, as bytes. Pure.

    grant      if there is no key under its names: claim them
    enqueue    after a refused grant: take a place under each name
    promote    if there is no key ahead of its places: claim the names
    finish     if it has its claim or its place: delete its keys, and record how it ended
    hand_over  the same, and claim the name for the waiter directly behind
    keep_taken the same, and leave keys that block its names for a while

`record_lease` is the id of the etcd lease of the record; `raw` is the counting state that the client knows.
"""

from __future__ import annotations

from functools import lru_cache

from fenced.stores.etcd.authority.keys import ClaimInfo, KeyRecord, Keys, Phase
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
"""Placeholder for a public id in the requests of the usual pair, which are built once for many attempts.

All public ids have this length. Neither names nor the values that we write contain this character.
"""


def grant(keys: Keys, public: str, record: KeyRecord, record_lease: int, raw: bytes) -> bytes:
    return public.encode().join(_grant(keys, record, record_lease, raw))


@lru_cache(maxsize=256)
def _grant(keys: Keys, record: KeyRecord, record_lease: int, raw: bytes) -> list[bytes]:
    stored = keys.attempt(_ANYBODY)
    free = [absent(keys.under(name), keys.behind(name)) for name in record.names]
    return txn(
        [absent(stored), valued(keys.meta, raw), *free],
        _claims(keys, _ANYBODY, record, record_lease),
        [get(stored), get(keys.meta)],
    ).split(_ANYBODY.encode())


def enqueue(keys: Keys, public: str, record: KeyRecord, record_lease: int, blocker: KeyValue) -> bytes:
    """`blocker`: the key that was directly ahead when the ticket was taken, and must still exist.

    While it exists, nobody with a later ticket is granted: so whoever is granted has nobody ahead of it, and nobody
    takes a place ahead of it later. The attempt must not have been granted meanwhile.
    """
    stored, about = keys.attempt(public), ClaimInfo.of(public, record).written()
    writes = [put(stored, record.written(), record_lease)]
    writes += [
        put(place, about, record.queue) for place in keys.places_of(record.names, record.ticket, public)
    ]
    blocked = keys.spot(blocker.key).name
    others = [unmodified_since(keys.claim(name), record.ticket) for name in record.names if name != blocked]
    return txn([absent(stored), modified_at(blocker.key, blocker.modified), *others], writes)


def promote(keys: Keys, public: str, record: KeyRecord, record_lease: int, raw: bytes) -> bytes:
    """Claims, delays and earlier places sort before a place; so would its own claim."""
    stored, places = keys.attempt(public), keys.places_of(record.names, record.ticket, public)
    first = [absent(keys.under(name), place) for name, place in zip(record.names, places, strict=True)]
    return txn(
        [valued(keys.meta, raw), present(places[0]), *first],
        _claims(keys, public, record, record_lease),
        [get(stored), get(keys.meta), get(places[0])],
    )


def _claims(keys: Keys, public: str, record: KeyRecord, record_lease: int) -> list[bytes]:
    """The writes of a grant: the record, and for each name a claim that is attached to the attempt's etcd lease."""
    about = ClaimInfo.of(public, record).written()
    writes = [put(keys.attempt(public), record.written(), record_lease)]
    writes += [put(keys.claim(name), about, record.hold) for name in record.names]
    if record.delayed:
        writes += [put(keys.delay(name), about, record.delayed) for name in record.names]
    return writes


def finish(
    keys: Keys, public: str, record: KeyRecord, revision: int, phase: Phase, record_lease: int
) -> tuple[bytes, list[bytes]]:
    """The transaction, and deletes that do not fit into it and may be sent before.

    Without a `record_lease` it only deletes.
    """
    if record.phase is Phase.GRANTED and not record.ticket and len(record.names) == 1:
        return public.encode().join(_finish_plain(keys, record, phase, record_lease)), []
    stored, writes = keys.attempt(public), ends(keys, public, record, phase, record_lease)
    if record.phase is Phase.GRANTED:
        proof = holds(keys, public, record)
    else:
        place = keys.place(record.names[0], record.ticket, public)
        proof = [present(place), modified_at(stored, revision)]
    return txn(proof, writes[:TXN_OPS_MAX], [get(stored)]), writes[TXN_OPS_MAX:]


@lru_cache(maxsize=256)
def _finish_plain(keys: Keys, record: KeyRecord, phase: Phase, record_lease: int) -> list[bytes]:
    return txn(
        holds(keys, _ANYBODY, record),
        ends(keys, _ANYBODY, record, phase, record_lease),
        [get(keys.attempt(_ANYBODY))],
    ).split(_ANYBODY.encode())


def hand_over(
    keys: Keys,
    public: str,
    record: KeyRecord,
    record_lease: int,
    heir: tuple[str, KeyRecord, int],
    raw: bytes,
) -> bytes:
    """Requires that only the keys that are given back are ahead of the heir's place. For one name without a delay.

    `heir`: its public id, the record of its grant, and the etcd lease of that record.

    If the holder came through the queue, its own place is the first of all (see `enqueue`), so the range begins behind
    it. That also keeps hand-overs fast: until a compaction etcd walks through every key that ever was in a range.
    """
    waiter, granted, its_record_lease = heir
    (name,) = record.names
    stored, place = keys.attempt(public), keys.place(name, granted.ticket, waiter)
    start = keys.places(name)
    writes = [
        put(stored, record.ended(Phase.RELEASED).written(), record_lease),
        *_claims(keys, waiter, granted, its_record_lease),
    ]
    if record.ticket:
        own = keys.place(name, record.ticket, public)
        start = own + b"\0"
        writes.append(delete(own))
    proof = [
        *holds(keys, public, record),
        valued(keys.meta, raw),
        present(place),
        absent(start, place),
    ]
    return txn(proof, writes, [get(stored)])


def holds(keys: Keys, public: str, record: KeyRecord) -> list[bytes]:
    """Compares that prove that it has all its claims."""
    about = ClaimInfo.of(public, record).written()
    return [valued(keys.claim(name), about) for name in record.names]


def ends(keys: Keys, public: str, record: KeyRecord, phase: Phase, record_lease: int) -> list[bytes]:
    """The writes that end a live attempt: put its final record, delete all its keys."""
    writes = [put(keys.attempt(public), record.ended(phase).written(), record_lease)] if record_lease else []
    if record.phase is Phase.GRANTED:
        writes += [delete(keys.claim(name)) for name in record.names]
        if record.delayed:
            writes += [delete(keys.delay(name)) for name in record.names]
    if record.ticket:
        writes += [delete(place) for place in keys.places_of(record.names, record.ticket, public)]
    return writes


def keep_taken(keys: Keys, public: str, record: KeyRecord, record_lease: int, lease: int) -> list[bytes]:
    """The transactions that release it and leave lock_delay keys on `lease`. The last one decides.

    If one does not hold them all, the delays are written first: while its claims exist they change nothing, and if it
    loses a claim before the last one, they end with `lease`.
    """
    proof, stored = holds(keys, public, record), keys.attempt(public)
    about = ClaimInfo.of(public, record).written()
    first = [put(keys.delay(name), about, lease) for name in record.names]
    if record.ticket:
        first += [delete(place) for place in keys.places_of(record.names, record.ticket, public)]
    last = [put(stored, record.ended(Phase.RELEASED).written(), record_lease)]
    last += [delete(keys.claim(name)) for name in record.names]
    if len(first) + len(last) <= TXN_OPS_MAX:
        return [txn(proof, first + last, [get(stored)])]
    return [txn(proof, first), txn(proof, last, [get(stored)])]


def clear(keys: Keys, public: str, record: KeyRecord, name: str) -> bytes:
    """Delete what is left under a name of an attempt that has lost a key. Lock_delay keys stay."""
    writes = [delete(keys.place(name, record.ticket, public))] if record.ticket else []
    if record.phase is not Phase.GRANTED:
        return txn((), writes)
    about = ClaimInfo.of(public, record).written()
    return txn([valued(keys.claim(name), about)], [delete(keys.claim(name)), *writes], writes)
