"""Leases in ZooKeeper: ephemeral nodes in queues, one session for all leases and places of one ttl."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, TypeVar

from fenced.leases.rules import no_namespace
from fenced.net.pool import ConnectionBroken
from fenced.stores.zookeeper.address import ZooKeeperAddress
from fenced.stores.zookeeper.authority.asking import ZooKeeperAsking
from fenced.stores.zookeeper.authority.attempt import ZooKeeperPhase
from fenced.stores.zookeeper.authority.attempts import OwnAttempts
from fenced.stores.zookeeper.authority.ending import ZooKeeperEnding
from fenced.stores.zookeeper.authority.granting import Granting, TakeOver
from fenced.stores.zookeeper.authority.nodes import AT_ONCE, LockDelays, Nodes, refused
from fenced.stores.zookeeper.authority.renewing import ZooKeeperRenewing
from fenced.stores.zookeeper.authority.session import SessionCall, ZooKeeperSession
from fenced.stores.zookeeper.authority.tree import chunks, new_space
from fenced.stores.zookeeper.authority.watching import PlaceWatch
from fenced.stores.zookeeper.wire import jute
from fenced.stores.zookeeper.wire.connection import Hub
from fenced.stores.zookeeper.wire.sides import Sides
from fenced.values import timing
from fenced.values.contracts import Runtime, Trait
from fenced.values.model import (
    TOKEN_MAX,
    Ask,
    AskAnswer,
    NameView,
    ReleaseAnswer,
    RenewAnswer,
    Standing,
    check_floor,
    check_name,
    grant_id,
)
from fenced.values.schema import parsed_schema

T = TypeVar("T")
_inherited: list[object] = []
"""The parent's connections in a forked child. Kept referenced, so that no finalizer touches the shared sockets."""


class ZooKeeperAuthority:
    """One client's access to one namespace of an ensemble."""

    session_type: ClassVar[type[ZooKeeperSession]] = ZooKeeperSession
    attempts_type: ClassVar[type[OwnAttempts]] = OwnAttempts
    renewing_type: ClassVar[type[ZooKeeperRenewing]] = ZooKeeperRenewing
    traits: ClassVar[tuple[Trait, ...]] = (
        Trait(
            "per-name-order",
            "A token is minted when the attempt is queued: a waiter's token may be smaller than one that was granted "
            "meanwhile under another name. Tokens of one name rise from grant to grant.",
        ),
        Trait(
            "majority",
            "A token is handed out when a majority has its transaction on disk: a killed leader takes none with it.",
        ),
        Trait(
            "transaction-numbers",
            "A token is the number of a transaction (zxid). An election skips 2**32 of them: there is room for 2**21.",
        ),
        Trait(
            "sessions",
            "Leases of one ttl share a session that lasts a third longer: the server frees a crashed client's then.",
        ),
        Trait(
            "places",
            "Places in queues end with that session, too: a dead waiter holds others up as long as a dead holder.",
        ),
        Trait(
            "server-ttl",
            "The server bounds the time of sessions, 2 to 20 ticks by default; a grant has the ttl that resulted.",
        ),
        Trait(
            "leader-confirmed",
            "Only replies of the leader prolong a lease: a follower that is cut off cannot.",
        ),
        Trait("pushed", "A release or an expiry wakes the head of the queue; idle waiters send no requests."),
        Trait(
            "revoked", "A lease whose nodes are deleted by force is lost as `revoked`, with the next renewal."
        ),
        Trait(
            "own-memory",
            "A client can take an attempt over from another; but only the client that ended it remembers its end.",
        ),
        Trait(
            "delay-noticed",
            "A lock_delay counts from when its own client, or else the next client that asks, detects the expiry.",
        ),
        Trait("idle-names", "Names that nobody uses are removed by the server itself; tokens continue."),
        Trait(
            "own-nodes",
            "With credentials the nodes can be read and written by them alone; without, by everybody.",
        ),
        Trait(
            "settings-unseen",
            "No client can ask whether the members really sync (`forceSync`): it is assumed.",
        ),
        Trait(
            "restore-unnoticed",
            "There is no cluster id: only clients that have seen more detect a restored ensemble. Raise the floor.",
        ),
    )

    def __init__(self, address: ZooKeeperAddress, runtime: Runtime, namespace: str = "default") -> None:
        self.url = address.url
        self._address = address
        self._namespace = check_name(namespace)
        self._nodes = Nodes(address, self._namespace)
        self._begin(Sides(runtime))

    @classmethod
    def at(cls, url: str, runtime: Runtime, namespace: str) -> ZooKeeperAuthority:
        return cls(ZooKeeperAddress(url), runtime, namespace)

    def renewer(self, runtime: Runtime) -> ZooKeeperAuthority:
        """Itself, for the threads of `runtime` too: attempts belong to a session, which belongs to one connection."""
        self._hub.close()
        self._begin(Sides(self._runtime.own, runtime))
        return self

    def _begin(self, runtime: Sides) -> None:
        self._runtime, nodes = runtime, self._nodes
        self._woken: dict[str, None] = {}
        self._wakeup = runtime.own.wakeup()  # only the client's own callers wait for wake-ups
        self._interrupted = False
        self._hub = hub = Hub(runtime)
        self._own = own = self.attempts_type(
            self._address, runtime, nodes, hub, self._wake, self.session_type
        )
        self._delays = delays = LockDelays(nodes, runtime, own.get)
        self._watching = watching = PlaceWatch(nodes, own, delays, hub, runtime)
        granting = Granting(nodes, own, delays, runtime)
        take_over = TakeOver(nodes, own, delays, granting, runtime)
        self._asking = ZooKeeperAsking(nodes, own, delays, watching, granting, take_over, runtime)
        self._renewing = self.renewing_type(nodes, own, delays, watching, take_over, runtime)
        self._ending = ZooKeeperEnding(nodes, own, delays, watching, runtime)

    async def _started(self, until: float | None) -> tuple[float, float]:
        """When a call begins, and when it ends. What is overdue is ended before anything else is done."""
        start = self._runtime.now()
        until = timing.call_until(start, until)
        await self._own.end_overdue(start, until)
        return start, until

    async def _request(
        self, work: Callable[[SessionCall], Awaitable[T]], until: float | None, *, repeatable: bool = True
    ) -> T:
        _, until = await self._started(until)
        return await self._own.request(work, until, repeatable=repeatable)

    # Leases.

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        start, until = await self._started(until)
        return await self._asking.ask(ask, start, until)

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        _, until = await self._started(until)
        return await self._renewing.renew([grant_id(secret) for secret in secrets], until)

    async def release(self, secret: str, until: float | None = None, *, keep: float = 0.0) -> ReleaseAnswer:
        _, until = await self._started(until)
        return await self._ending.finish(grant_id(secret), ZooKeeperPhase.RELEASED, keep, until)

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        _, until = await self._started(until)
        return await self._ending.finish(grant_id(secret), ZooKeeperPhase.WITHDRAWN, 0.0, until)

    # Waking.

    def _wake(self, public: str) -> None:
        # A `next_wakeups` that waits for others to read is woken by this. One that reads for all callers sees it after
        # each event that it has read; whoever calls this for another reason wakes the hub, too.
        self._woken[public] = None
        self._wakeup.set()

    async def next_wakeups(self, until: float) -> list[str]:
        try:
            await self._hub.wait(lambda: bool(self._woken) or self._interrupted, self._wakeup, until)
        except ConnectionBroken:
            return []
        self._interrupted = False
        woken, self._woken = self._woken, {}
        return list(woken)

    def interrupt(self) -> None:
        self._interrupted = True
        self._wakeup.set()
        self._hub.wake()

    # The namespace.

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        async def work(call: SessionCall) -> Standing:
            while True:
                (reply,) = await call.exchange(jute.get_data(self._nodes.paths.root))
                if reply.error != jute.NO_NODE:
                    space = self._nodes.space(reply)
                    last = min(reply.zxid + space.added(reply.zxid + 1), TOKEN_MAX)
                    return Standing(space.realm, last, schema=parsed_schema(space.fields))
                if not create:
                    raise no_namespace(self.url, self._namespace)
                await self._create(call)

        return await self._request(work, until)

    async def _create(self, call: SessionCall) -> None:
        paths, acl = self._nodes.paths, self._nodes.acl
        parents = [jute.create(path, b"", acl) for path in paths.parents]
        nodes = [jute.create(paths.root, new_space(self._runtime.secret()[:16]), acl)]
        nodes += [
            jute.create(path, b"", acl) for path in (paths.attempts, paths.names, paths.tombs, paths.clock)
        ]
        *made, reply = await call.exchange(*parents, jute.multi(nodes))
        for each in made:
            if each.error not in (jute.OK, jute.NODE_EXISTS):  # it says best what is wrong
                raise refused(each.error, self.url)
        self._nodes.written(reply, jute.NODE_EXISTS)  # another client may have been quicker

    async def raise_floor(self, above: int, until: float | None = None) -> int:
        above, root = check_floor(above), self._nodes.paths.root

        async def work(call: SessionCall) -> int:
            while True:
                _, reply = await call.exchange(jute.sync(root), jute.get_data(root))
                space = self._nodes.space(reply)
                added = space.added(reply.zxid + 1)
                if reply.zxid + added >= above:
                    return min(reply.zxid + added, TOKEN_MAX - 1)
                # Every later transaction has a greater number than the one that we have just seen.
                text = space.raised(above - reply.zxid)
                (done,) = await call.exchange(jute.set_data(root, text, space.version))
                if done.error != jute.BAD_VERSION:
                    self._nodes.check(done)

        return await self._request(work, until)

    # Operating.

    async def survey(
        self, *, after: str = "", limit: int = 1000, until: float | None = None
    ) -> list[NameView]:
        async def work(call: SessionCall) -> list[NameView]:
            names = sorted(name.encode() for name in await self._nodes.names(call))
            views: list[NameView] = []
            for some in chunks([name.decode() for name in names if name > after.encode()], AT_ONCE):
                found = await self._watching.views(call, some)
                views += [view for view in found if view.held_by or view.waiters or view.free_in > 0]
                if len(views) >= limit:
                    break
            return views[:limit]

        return await self._request(work, until)

    async def observe(self, name: str, until: float | None = None) -> NameView:
        names = (check_name(name),)
        (view,) = await self._request(lambda call: self._watching.views(call, names), until)
        return view

    async def force_release(self, name: str, token: int, until: float | None = None) -> int | None:
        name = check_name(name)
        # Not repeatable: a repetition would answer that nothing was done.
        return await self._request(
            lambda call: self._ending.force(call, name, token), until, repeatable=False
        )

    async def tidy(self, until: float | None = None) -> int:
        async def work(call: SessionCall) -> int:
            return await self._ending.tidy_tombs(call) + await self._delays.tidy(call)

        start = self._runtime.now()
        ended = await self._request(work, start + 12 * timing.CALL_SECONDS if until is None else until)
        return ended + self._own.forget_old(start)  # last: the remembered attempts show when a delay began

    # The end, and forks.

    async def close(self) -> None:
        for session in list(self._own.sessions.values()):
            session.farewell()
        self.abandon()

    def abandon(self) -> None:
        for session in list(self._own.sessions.values()):
            session.close()
        self._own.sessions.clear()
        self._hub.close()

    def before_fork(self) -> None:
        """Does nothing: the child does not use the parent's connections."""

    def forked(self) -> None:
        _inherited.extend((self._hub, *self._own.sessions.values()))
        self._begin(Sides(self._runtime.own))
