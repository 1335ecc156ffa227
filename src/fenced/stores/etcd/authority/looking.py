"""Reading queues: which keys are ahead of a waiter, and views of names for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fenced.stores.etcd.authority.keys import CLAIM, DELAY, PLACE, ClaimInfo, KeyRecord
from fenced.stores.etcd.authority.leases import LeasePool
from fenced.stores.etcd.authority.namespace import Namespace
from fenced.stores.etcd.wire.messages import TXN_OPS_MAX, Found, KeyValue, get
from fenced.values.model import HeldBy, NameView, Waiter

PAGE = 500
LOOK_OPS = 3
"""How many range reads one name takes."""


@dataclass(slots=True)
class QueueView:
    """What is ahead of an attempt in its queues."""

    blocker: KeyValue | None = None
    """The key directly ahead, under the first name that is not free; None: all names are free."""
    revision: int = 0
    claim: KeyValue | None = None
    ahead: int = 0


class QueueReader:
    """The reading side of a namespace."""

    def __init__(self, space: Namespace, pool: LeasePool) -> None:
        self._space = space
        self._pool = pool

    async def ahead(self, names: Sequence[str], ends: Sequence[bytes], until: float) -> QueueView:
        """Read the keys of each name up to the given end."""
        keys, view = self._space.keys, QueueView()
        at_once = TXN_OPS_MAX // LOOK_OPS
        for start in range(0, len(names), at_once):
            part = range(start, min(start + at_once, len(names)))
            gets: list[bytes] = []
            for index in part:
                name, queue = names[index], keys.places(names[index])
                gets += [
                    get(keys.under(name), keys.places(name)),
                    get(queue, ends[index], last=True),
                    get(queue, ends[index], count=True),
                ]
            reply = await self._space.read(gets, until)
            for held, last, places in zip(*[iter(reply.found)] * LOOK_OPS, strict=True):
                self._add(view, held, last.first, reply.header.revision)
                view.ahead = max(view.ahead, places.total - self._holds_a_place(held))
        return view

    def _add(self, view: QueueView, held: Found, last: KeyValue | None, revision: int) -> None:
        blocker = last or (held.kvs[-1] if held.kvs else None)
        if blocker is not None and view.blocker is None:
            view.blocker, view.revision = blocker, revision
        view.claim = view.claim or self._claim(held)

    def _claim(self, held: Found) -> KeyValue | None:
        kv = held.first
        return kv if kv is not None and self._space.keys.spot(kv.key).kind == CLAIM else None

    def _holds_a_place(self, held: Found) -> bool:
        """Whether the counted places include the holder's: it came through the queue and kept its place."""
        claim = self._claim(held)
        return claim is not None and ClaimInfo.read(claim.value).ticket > 0

    async def held_by(self, claim: KeyValue | None, until: float) -> HeldBy | None:
        """The holder; None if its lease has just ended."""
        if claim is None:
            return None
        left = await self._pool.leases.left(claim.lease, until)
        return None if left < 0 else _held_by(claim, left)

    # Views.

    async def observe(self, name: str, until: float) -> NameView:
        keys = self._space.keys
        reply = await self._space.read([get(keys.under(name), keys.behind(name))], until)
        found = await self._views(reply.found[0].kvs, until)
        return found[0] if found else NameView(name, None, (), None, 0.0, ())

    async def survey(self, after: str, limit: int, until: float) -> list[NameView]:
        keys = self._space.keys
        views: list[NameView] = []
        start = keys.behind(after)
        while len(views) < limit:
            reply = await self._space.read([get(start, keys.names_end, limit=PAGE)], until)
            kvs = reply.found[0].kvs
            if len(kvs) < PAGE:
                views += await self._views(kvs, until)
                break
            last = keys.spot(kvs[-1].key).name
            whole = [kv for kv in kvs if keys.spot(kv.key).name != last]
            if whole:
                views += await self._views(whole, until)
                start = keys.under(last)
            else:  # a queue that fills more than a page
                views.append(await self.observe(last, until))
                start = keys.behind(last)
        return views[:limit]

    async def _views(self, kvs: Iterable[KeyValue], until: float) -> list[NameView]:
        """The names of these keys, in their order."""
        names: dict[str, list[KeyValue]] = {}
        for kv in kvs:
            names.setdefault(self._space.keys.spot(kv.key).name, []).append(kv)
        left: dict[int, int] = {}
        for kv in (kv for group in names.values() for kv in group):
            if kv.lease not in left:
                left[kv.lease] = await self._pool.leases.left(kv.lease, until)
        records = await self._records((kv for group in names.values() for kv in group), until)
        return [self._view(name, group, left, records) for name, group in names.items()]

    async def _records(self, kvs: Iterable[KeyValue], until: float) -> dict[str, KeyValue]:
        """The records of attempts that have several names."""
        keys = self._space.keys
        publics = sorted({about.public for kv in kvs if (about := ClaimInfo.read(kv.value)).many})
        found: dict[str, KeyValue] = {}
        for start in range(0, len(publics), TXN_OPS_MAX):
            part = publics[start : start + TXN_OPS_MAX]
            reply = await self._space.read([get(keys.attempt(public)) for public in part], until)
            for public, answer in zip(part, reply.found, strict=True):
                if answer.first is not None:
                    found[public] = answer.first
        return found

    def _view(
        self, name: str, kvs: list[KeyValue], left: dict[int, int], records: dict[str, KeyValue]
    ) -> NameView:
        held_by: HeldBy | None = None
        names: tuple[str, ...] = ()
        ttl: float | None = None
        free_in = 0.0
        waiters: list[Waiter] = []
        covered = {public: KeyRecord.read(kv.value).names for public, kv in records.items()}
        for kv in kvs:
            kind, about = self._space.keys.spot(kv.key).kind, ClaimInfo.read(kv.value)
            seconds = float(max(0, left[kv.lease]))
            if kind == CLAIM:
                held_by = _held_by(kv, seconds)
                names, ttl = covered.get(about.public, (name,)), about.ttl
            elif kind == PLACE and (held_by is None or about.public != held_by.grant):
                waiters.append(Waiter(about.holder, covered.get(about.public, (name,)), seconds))
            if kind in (CLAIM, DELAY):
                free_in = max(free_in, seconds)
        return NameView(name, held_by, names, ttl, free_in, tuple(waiters))


def _held_by(claim: KeyValue, left: float) -> HeldBy:
    """The token comes from the revision of the claim: only a grant writes one."""
    about = ClaimInfo.read(claim.value)
    return HeldBy(about.holder, claim.modified + about.offset, about.public, max(0.0, float(left)))
