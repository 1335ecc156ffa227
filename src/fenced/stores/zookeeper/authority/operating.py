"""Opening a namespace, viewing it, and the operators' functions."""

from __future__ import annotations

from collections.abc import Sequence

from fenced.errors import Indeterminate
from fenced.leases.rules import no_namespace, tokens_used_up
from fenced.stores.zookeeper.authority.base import Base, _inherited
from fenced.stores.zookeeper.authority.errors import refused
from fenced.stores.zookeeper.authority.session import ZooKeeperSession
from fenced.stores.zookeeper.authority.tree import (
    NamespaceView,
    NodeRecord,
    Queue,
    ZooKeeperAttempt,
    chunks,
    name_of,
    new_space,
    space_of,
    tomb_seconds,
)
from fenced.stores.zookeeper.wire import jute
from fenced.values import timing
from fenced.values.model import TOKEN_MAX, NameView, Standing, Waiter, check_floor, check_name
from fenced.values.schema import parsed_schema

AT_ONCE = 200
"""How many nodes are read at once."""


class Operating(Base):
    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        until = timing.call_until(self._runtime.now(), until)
        session = self._any_session()

        async def work() -> Standing:
            while True:
                (reply,) = await session.exchange(jute.get_data(self._paths.root), until=until)
                if not reply.error:
                    space = space_of(*jute.data_of(reply.body), self.url)
                    last = min(reply.zxid + space.added(reply.zxid + 1), TOKEN_MAX)
                    return Standing(space.realm, last, schema=parsed_schema(space.fields))
                if reply.error != jute.NO_NODE:
                    raise refused(reply.error, self.url)
                if not create:
                    raise no_namespace(self.url, self._namespace)
                await self._create(session, until)

        return await session.request(work, until)

    async def _create(self, session: ZooKeeperSession, until: float) -> None:
        paths, acl = self._paths, self._acl
        parents = [jute.create(path, b"", acl) for path in paths.parents]
        nodes = [jute.create(paths.root, new_space(self._runtime.secret()[:16]), acl)]
        nodes += [
            jute.create(path, b"", acl) for path in (paths.attempts, paths.names, paths.tombs, paths.clock)
        ]
        *made, reply = await session.exchange(*parents, jute.multi(nodes), until=until)
        failed = jute.failure(self._results(reply))
        if failed is not None and failed[1] != jute.NODE_EXISTS:  # another client may have been quicker
            worst = next((each.error for each in made if each.error not in (0, jute.NODE_EXISTS)), failed[1])
            raise refused(worst, self.url)

    # Looking.

    async def survey(
        self, *, after: str = "", limit: int = 1000, until: float | None = None
    ) -> list[NameView]:
        until = timing.call_until(self._runtime.now(), until)
        await self._settle(self._runtime.now(), until)
        session = self._any_session()

        async def work() -> list[NameView]:
            _, reply = await session.exchange(
                jute.sync(self._paths.root), jute.get_children(self._paths.names), until=until
            )
            if reply.error:
                raise refused(reply.error, self.url)
            names = sorted(map(name_of, jute.children_of(reply.body)[0]), key=str.encode)
            names = [name for name in names if name.encode() > after.encode()]
            views: list[NameView] = []
            for some in chunks(names, AT_ONCE):
                found = await self._views(session, some, until)
                views += [view for view in found if view.held_by or view.waiters or view.free_in > 0]
                if len(views) >= limit:
                    break
            return views[:limit]

        return await session.request(work, until)

    async def observe(self, name: str, until: float | None = None) -> NameView:
        until = timing.call_until(self._runtime.now(), until)
        await self._settle(self._runtime.now(), until)
        session, names = self._any_session(), (check_name(name),)

        async def work() -> NameView:
            (view,) = await self._views(session, names, until)
            return view

        return await session.request(work, until)

    async def _views(self, session: ZooKeeperSession, names: Sequence[str], until: float) -> list[NameView]:
        queues, space = await self._look(session, names, until, newest=True)
        records: dict[str, NodeRecord] = {}
        publics = dict.fromkeys(public for queue in queues.values() for public in queue.publics)
        for some in chunks(list(publics), AT_ONCE):
            reads = [jute.get_data(self._paths.attempt(public)) for public in some]
            replies = await session.exchange(*reads, until=until)
            found = zip(some, map(self._record, replies), strict=True)
            records |= {public: record for public, record in found if record is not None}
        return [await self._view(session, name, queues[name], records, space, until) for name in names]

    async def _view(
        self,
        session: ZooKeeperSession,
        name: str,
        queue: Queue,
        records: dict[str, NodeRecord],
        space: NamespaceView,
        until: float,
    ) -> NameView:
        now = self._runtime.now()
        held_by = free_in = None
        waiting = [public for public in queue.publics if public in records]
        if waiting and (held_by := self._held_by(waiting[0], records[waiting[0]], space, now)) is not None:
            holder = records[waiting.pop(0)]
            free_in = held_by.remaining + holder.lock_delay
        else:
            free_in = await self._delayed(session, "", {name: queue}, until)
        waiters = []
        for public in waiting:
            record, mine = records[public], self._live(public)
            left = record.ttl if mine is None else max(0.0, mine.expires - now)
            waiters.append(Waiter(record.holder, record.names, left))
        return NameView(
            name,
            held_by,
            holder.names if held_by else (),
            holder.ttl if held_by else None,
            free_in,
            tuple(waiters),
        )

    # Operating.

    async def force_release(self, name: str, token: int, until: float | None = None) -> int | None:
        until = timing.call_until(self._runtime.now(), until)
        await self._settle(self._runtime.now(), until)
        session, name = self._any_session(), check_name(name)
        # Not repeatable: a repetition would answer that nothing was done.
        return await session.request(
            lambda: self._force(session, name, token, until), until, repeatable=False
        )

    async def _force(self, session: ZooKeeperSession, name: str, token: int, until: float) -> int | None:
        while self._runtime.now() < until:
            queues, space = await self._look(session, (name,), until, newest=True)
            if not queues[name].publics:
                return None
            public = queues[name].publics[0]
            mine = self._live(public)
            if mine is not None and mine.state != "granted":
                return None
            (reply,) = await session.exchange(jute.get_data(self._paths.attempt(public)), until=until)
            record = self._record(reply)
            # If somebody deleted the attempt's node, nobody can see its token: any token takes the name.
            held_by = self._held_by(public, record, space, self._runtime.now())
            if record is not None and (held_by is None or held_by.token != token):
                return None
            if reply.zxid + space.added(reply.zxid) >= TOKEN_MAX - 1:
                raise tokens_used_up()
            names = record.names if record is not None else (name,)
            forced = ZooKeeperAttempt(public, names, 0.0)
            queues, _ = await self._look(session, names, until)
            forced.places = self._places(forced, queues)
            forced.delaying = any(public in queue.delays for queue in queues.values())
            # A write to the names records that they were taken: the waiters behind need a newer number.
            marks = [jute.set_data(self._paths.name(each), b"") for each in names]
            ends = self._deletions(forced) if record is not None else self._deletions(forced)[1:]
            done, after = await session.exchange(
                jute.multi([*marks, *ends]), jute.get_data(self._paths.root), until=until
            )
            results = self._results(done)
            failed = jute.failure(results)
            if failed is None and results[0].stat is not None:
                if mine is not None:
                    self._drop(mine, "revoked", done=True)
                space = space_of(*jute.data_of(after.body), self.url)
                zxid = results[0].stat.mzxid
                return zxid + space.added(zxid)
            if failed is not None and failed[1] != jute.NO_NODE:
                raise refused(failed[1], self.url)
        raise Indeterminate(f"{self.url}: {name} changes hands too quickly")

    async def raise_floor(self, above: int, until: float | None = None) -> int:
        above = check_floor(above)
        until = timing.call_until(self._runtime.now(), until)
        session = self._any_session()

        async def work() -> int:
            while True:
                _, reply = await session.exchange(
                    jute.sync(self._paths.root), jute.get_data(self._paths.root), until=until
                )
                if reply.error:
                    raise refused(reply.error, self.url)
                space = space_of(*jute.data_of(reply.body), self.url)
                added = space.added(reply.zxid + 1)
                if reply.zxid + added >= above:
                    return min(reply.zxid + added, TOKEN_MAX - 1)
                # Every later transaction has a greater number than the one that we have just seen.
                text = space.raised(above - reply.zxid)
                (done,) = await session.exchange(
                    jute.set_data(self._paths.root, text, space.version), until=until
                )
                if done.error not in (jute.OK, jute.BAD_VERSION):
                    raise refused(done.error, self.url)

        return await session.request(work, until)

    async def tidy(self, until: float | None = None) -> int:
        now = self._runtime.now()
        until = now + 12 * timing.CALL_SECONDS if until is None else until
        await self._settle(now, until)
        session = self._any_session()

        async def work() -> int:
            tombs = await self._tidy_tombs(session, until)
            return tombs + await self._tidy_delays(session, until)

        ended = await session.request(work, until)
        return ended + self._forget_old(now)  # last: the remembered attempts show when a delay began

    async def _tidy_tombs(self, session: ZooKeeperSession, until: float) -> int:
        clock, reply = await session.exchange(
            jute.set_data(self._paths.clock, b""), jute.get_children(self._paths.tombs), until=until
        )
        if clock.error or reply.error:
            raise refused(clock.error or reply.error, self.url)
        now, forgotten = jute.stat_of(clock.body).mtime / 1000, 0
        for some in chunks(jute.children_of(reply.body)[0], AT_ONCE):
            reads = [jute.get_data(self._paths.tomb(public)) for public in some]
            replies = await session.exchange(*reads, until=until)
            old = []
            for public, each in zip(some, replies, strict=True):
                if not each.error:
                    data, stat = jute.data_of(each.body)
                    if stat.ctime / 1000 + tomb_seconds(data) <= now:
                        old.append(public)
            ends = [
                jute.multi([jute.delete(self._paths.attempt(public)), jute.delete(self._paths.tomb(public))])
                for public in old
            ]
            if ends:
                await session.exchange(*ends, until=until)
            forgotten += len(old)
        return forgotten

    async def _tidy_delays(self, session: ZooKeeperSession, until: float) -> int:
        """End lock_delays of names that nobody has asked for since the last holder expired."""
        (reply,) = await session.exchange(jute.get_children(self._paths.names), until=until)
        ended = 0
        for some in chunks(jute.children_of(reply.body)[0], AT_ONCE):
            names = [name_of(child) for child in some]
            queues, _ = await self._look(session, names, until)
            for name in names:
                before = len(queues[name].orphans(""))
                if before and not await self._delayed(session, "", {name: queues[name]}, until):
                    ended += before
        return ended

    # The end, and forks.

    async def close(self) -> None:
        for session in list(self._sessions.values()):
            session.farewell()
        self.abandon()

    def abandon(self) -> None:
        for session in list(self._sessions.values()):
            session.close()
        self._sessions.clear()
        self._hub.close()

    def before_fork(self) -> None:
        """Does nothing: the child does not use the parent's connections."""

    def forked(self) -> None:
        _inherited.extend((self._hub, *self._sessions.values()))
        self._begin()
