"""Taking over attempts that another client has asked for, or has renewed last.

Only its own client keeps an etcd lease alive, and that client has a sign of life for each attempt on it. So an attempt
ends by its own ttl, wherever the other requests of its holder go. A client that renews an attempt of another client
therefore attaches the attempt's keys to its own etcd leases first. Their values and the attempt's record stay as they
are, and so does the token, which comes from the revision of the record. The revisions of the keys change: a client
that wants to end the attempt as expired compares them, so that it ends nothing that was taken over meanwhile.
"""

from __future__ import annotations

from fenced.stores.etcd.authority import transactions
from fenced.stores.etcd.authority.keys import ClaimInfo, KeyRecord
from fenced.stores.etcd.authority.known import EtcdAttempt, Known
from fenced.stores.etcd.authority.leases import EtcdLease
from fenced.stores.etcd.wire.cluster import LeaseGone, NoSpace
from fenced.stores.etcd.wire.messages import KeyValue, get
from fenced.values import timing


class Carrying(Known):
    """Which client carries an attempt."""

    def carries(self, mine: EtcdAttempt) -> bool:
        """Whether its keys are on etcd leases of this client, as far as it knows."""
        return mine.lease in self._sessions.made

    def carrier_key(self, public: str, record: KeyRecord) -> bytes:
        """The key whose etcd lease shows who carries a live attempt."""
        return self._keys.claim_or_place(record.names[0], public, record)

    def carried_by(self, mine: EtcdAttempt, key: KeyValue | None) -> None:
        """Note which etcd lease the attempt is on. If the key is another attempt's, or gone, it is on none."""
        if key is None or ClaimInfo.read(key.value).public != mine.public:
            return
        mine.carrier = key
        if mine.granted:
            mine.hold = EtcdLease(key.lease, mine.record.seconds)
        else:
            mine.queue = EtcdLease(key.lease, 0)

    async def load(self, public: str, until: float) -> tuple[EtcdAttempt | None, KeyRecord | None]:
        """The attempt, if it is live by its record, and its record, if there is one."""
        if (mine := self.live.get(public)) is not None:
            return mine, mine.record
        return await self.stored_now(public, until)

    async def stored_now(self, public: str, until: float) -> tuple[EtcdAttempt | None, KeyRecord | None]:
        reply = await self._space.read([get(self._keys.attempt(public))], until)
        found = reply.found[0].first
        if found is None:
            return None, None
        record = KeyRecord.read(found.value)
        mine = self.adopt(public, record, found)
        if mine is not None:
            reply = await self._space.read([get(self.carrier_key(public, record))], until)
            self.carried_by(mine, reply.found[0].first)
        return mine, record

    async def take_over(self, mine: EtcdAttempt, until: float) -> bool:
        """Attach its keys to our etcd leases. False: it has lost a key, or its record has changed.

        Without space nothing can be attached: then the attempt stays on the leases of the other client.
        """
        while True:
            try:
                taken = await self._attach(mine, until)
            except NoSpace:
                return True
            except LeaseGone:
                self._sessions.forget_all()
                if self._now() >= until:
                    raise
                continue
            if taken:
                self.live[mine.public] = mine
                self.signs.taken_over(mine.public, _seconds(mine))
            return taken

    async def _attach(self, mine: EtcdAttempt, until: float) -> bool:
        record, sessions = mine.record, self._sessions
        assert record.holder is not None
        if not mine.granted:
            queue = await sessions.queueing(record.holder, record.ttl, until)
            request = transactions.attach_places(self._keys, mine.public, record, mine.revision, queue.id)
            taken = (await self._space.run(request, until)).succeeded
            if taken:
                mine.queue = queue
            return taken
        session = await sessions.holding(record.holder, record.ttl, record.delay, until)
        delayed = session.delayed.id if session.delayed is not None else 0
        for request in transactions.attach_claims(self._keys, mine.public, record, session.hold.id, delayed):
            if not (await self._space.run(request, until)).succeeded:
                return False
        mine.hold, mine.delayed, mine.queue = session.hold, session.delayed, None
        self._held.update(dict.fromkeys(record.names, mine.public))
        return True


def _seconds(mine: EtcdAttempt) -> float:
    """How long it lives without a renewal."""
    return float(mine.record.seconds) if mine.granted else timing.waiter_ttl(mine.record.ttl)
