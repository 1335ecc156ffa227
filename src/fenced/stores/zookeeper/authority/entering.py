"""Taking places in queues, alone or behind others, and finding out who is ahead."""

from __future__ import annotations

from collections.abc import Sequence

from fenced.leases.rules import reused_attempt
from fenced.stores.zookeeper.authority.adopting import Adopting
from fenced.stores.zookeeper.authority.errors import refused
from fenced.stores.zookeeper.authority.session import ZooKeeperSession
from fenced.stores.zookeeper.authority.tree import (
    NamespaceView,
    NodeRecord,
    Queue,
    ZooKeeperAttempt,
    record_text,
)
from fenced.stores.zookeeper.wire import jute
from fenced.values.model import AskAnswer, Busy, Ended, HeldBy, Waiting


class Entering(Adopting):
    async def _enter(
        self, home: ZooKeeperSession, mine: ZooKeeperAttempt, wait: bool, until: float
    ) -> AskAnswer | tuple[dict[str, Queue], NamespaceView | None]:
        """Take a place in every queue. Without `wait` the queues are read before: usually Busy has written nothing."""
        if not home.id:
            await home.exchange(until=until)  # connects: the server decides the session's ttl
        if not wait and not mine.sent:  # if it was, only a further write shows whether it is carried out
            queues, space = await self._look(home, mine.names, until, newest=True)
            entered = any(mine.public in queue.publics for queue in queues.values())  # by another client
            taken = any(queue.publics for queue in queues.values())
            if not entered and (taken or await self._delayed(home, mine.public, queues, until)):
                (reply,) = await home.exchange(jute.get_data(self._paths.attempt(mine.public)), until=until)
                if self._record(reply) is not None:  # withdrawn before it arrived
                    return await self._recognise(home, mine, wait, until)
                held_by, ahead, _ = await self._whom(home, mine, queues, space, [], until)
                self._forget(mine)
                return Busy(ahead, held_by)
        home.expect(mine, self._runtime.now() + home.place_seconds)
        changes = home.changes
        mine.sent = True
        replies = await self._write_places(home, mine, until)
        if replies is None:
            return await self._recognise(home, mine, wait, until)
        return self._looked(home, mine.names, replies, changes)

    async def _write_places(
        self, session: ZooKeeperSession, mine: ZooKeeperAttempt, until: float
    ) -> list[jute.Reply] | None:
        """Make the attempt and its places, in one transaction.

        Returns the replies to the reads of the queues that were sent with it. None: the attempt exists already.
        """
        paths, acl, public = self._paths, self._acl, mine.public
        text = record_text(mine, session.ttl)
        while True:
            # In a multi, only the reply to set_data contains the transaction's number.
            nodes = [
                jute.create(paths.attempt(public), b"", acl, jute.EPHEMERAL),
                jute.set_data(paths.attempt(public), text),
            ]
            new = [name for name in mine.names if name not in self._known]
            nodes += [jute.create_container(paths.name(name), acl) for name in new]
            first = len(nodes)
            for name in mine.names:
                nodes.append(jute.create(paths.new_place(name, public), b"", acl, jute.EPHEMERAL_SEQUENTIAL))
            done, *replies = await session.exchange(
                jute.multi(nodes), *self._looking(session, mine.names), until=until
            )
            results = self._results(done)
            failed = jute.failure(results)
            if failed is None:
                break
            index, error = failed
            if index == 0 and error == jute.NODE_EXISTS:
                return None
            if index < 2 or error not in (jute.NODE_EXISTS, jute.NO_NODE):
                raise refused(error, self.url)
            if len(mine.names) == 1:  # our knowledge of the one name was wrong
                if self._known.pop(mine.names[0], self) is self:
                    self._know(mine.names)
            else:
                made = [jute.create_container(paths.name(name), acl) for name in mine.names]
                await session.exchange(*made, until=until)
                self._know(mine.names)
        assert results[1].stat is not None
        mine.zxid, mine.version = results[1].stat.mzxid, results[1].stat.version
        mine.places = {name: made.path for name, made in zip(mine.names, results[first:], strict=True)}
        self._know(mine.names)
        # Since `expect`, another caller may have found the session expired, which removed this attempt from it; the
        # request was then carried out in the next session. So register the attempt again.
        session.carry(mine)
        if mine.over:  # withdrawn while it was under way
            session.leftovers.append(jute.multi(self._deletions(mine)))
        return replies

    async def _recognise(
        self, home: ZooKeeperSession, mine: ZooKeeperAttempt, wait: bool, until: float
    ) -> AskAnswer | tuple[dict[str, Queue], NamespaceView | None]:
        """The attempt's node exists already: ours (the reply was lost), another client's, or a tombstone."""
        (reply,) = await home.exchange(jute.get_data(self._paths.attempt(mine.public)), until=until)
        record = self._record(reply)
        if record is None:
            return await self._enter(home, mine, wait, until)
        if record.owner == 0:
            self._forget(mine)
            mine.end("withdrawn", self._runtime.now())
            mine.names = ()
            self._remember(mine)
            return Ended("withdrawn")
        if (record.names, record.asked) != (mine.names, mine.ttl):
            self._forget(mine)
            raise reused_attempt()
        queues, space = await self._look(home, mine.names, until)
        if not self._ours(mine, record):
            self._forget(mine)
            if len(self._places(mine, queues)) < len(mine.names):
                return Ended("revoked")
            await self._take_over(home, mine.public, record, until)
            mine.taken = True  # the caller asks again: for the attempt that we carry now
            return Waiting(0.0)
        self._found(home, mine, record, queues)
        home.expect(mine, home.confirmed + home.place_seconds)
        return queues, space

    async def _whom(
        self,
        session: ZooKeeperSession,
        mine: ZooKeeperAttempt,
        queues: dict[str, Queue],
        space: NamespaceView,
        watches: Sequence[str],
        until: float,
    ) -> tuple[HeldBy | None, int, float]:
        """Watch these nodes. Who holds, how many wait ahead, and after how long to ask again if no event comes."""
        now = self._runtime.now()
        heads = {name: queue.publics[0] for name, queue in queues.items() if queue.publics}
        heads = {name: head for name, head in heads.items() if head != mine.public}
        remote = [head for head in dict.fromkeys(heads.values()) if self._live(head) is None]
        reads = [jute.get_data(self._paths.attempt(head)) for head in remote]
        records: dict[str, NodeRecord] = {}
        if watches or reads:
            watched = [(mine, watches)] if watches else []
            replies = await self._watch_and(session, watched, reads, until)
            found = zip(remote, map(self._record, replies), strict=True)
            records = {head: record for head, record in found if record is not None}
        held_by, ahead, check_in = None, 0, 0.0
        for name, queue in queues.items():
            head = heads.get(name)
            if head is None:
                continue
            at = queue.publics.index(mine.public) if mine.places else len(queue.publics)
            known = self._live(head)
            if known is not None and known.state == "waiting":
                ahead = max(ahead, at)
            else:
                ahead = max(ahead, at - 1)
                held_by = held_by or self._held_by(head, records.get(head), space, now)
            for public in queue.publics[:at]:
                if (other := self._live(public)) is not None:
                    check_in = max(check_in, other.expires - now)
                else:
                    record = records.get(public)
                    check_in = max(check_in, record.ttl if record else 0.0)
        return held_by, ahead, check_in
