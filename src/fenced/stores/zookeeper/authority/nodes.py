"""The nodes of one namespace: what every operation reads from them and writes to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fenced.errors import FencedError, Misconfigured, Unavailable
from fenced.stores.zookeeper.address import ZooKeeperAddress
from fenced.stores.zookeeper.authority.attempt import NodeRecord, ZooKeeperAttempt, ZooKeeperPhase, record_of
from fenced.stores.zookeeper.authority.session import SessionCall
from fenced.stores.zookeeper.authority.tree import (
    NamespaceView,
    Paths,
    Queue,
    QueueLook,
    chunks,
    delay_of,
    delay_text,
    name_of,
    queue_of,
    space_of,
)
from fenced.stores.zookeeper.wire import jute
from fenced.values.contracts import Runtime

AT_ONCE = 200
"""How many nodes are read at once."""
_MISCONFIGURED = {
    jute.NO_NODE: "the nodes of this namespace are gone; somebody deleted them",
    jute.NO_AUTH: "no right to read, create or delete here: the namespace belongs to other credentials",
    jute.AUTH_FAILED: "the server does not know who we are; see its authProvider settings",
    -114: "the server does not know who we are; see its authProvider settings",
    -6: "this server knows no container nodes; ZooKeeper 3.5 or later does",
}


def refused(error: int, where: str) -> FencedError:
    """The exception for an error that the caller does not expect. The request was not carried out."""
    if error in _MISCONFIGURED:
        return Misconfigured(f"{where}: {_MISCONFIGURED[error]}")
    return Unavailable(f"{where}: the server refused with error {error}")


class Written(NamedTuple):
    """The outcome of a transaction. `failed`: nothing was carried out; which operation was refused, and why."""

    results: list[jute.Done]
    failed: tuple[int, int] | None


class Nodes:
    """The paths of a namespace, and requests about its nodes."""

    def __init__(self, address: ZooKeeperAddress, namespace: str) -> None:
        self.url = address.url
        self.paths = Paths(address.chroot, namespace)
        # Only we may access the nodes, if the server knows who we are. ZooKeeper inherits no ACL from parent nodes.
        self.acl = jute.acl([("auth", "") if address.authenticated else ("world", "anyone")])

    def check(self, *replies: jute.Reply) -> None:
        for reply in replies:
            if reply.error:
                raise refused(reply.error, self.url)

    # Reading.

    def looking(self, names: Sequence[str]) -> list[bytes]:
        lists = [jute.get_children(self.paths.name(name)) for name in names]
        return [*lists, jute.get_data(self.paths.root)]

    def looked(self, names: Sequence[str], replies: Sequence[jute.Reply]) -> QueueLook:
        """Parse the replies to `looking`."""
        *lists, root = replies
        queues = {name: self._queue(reply) for name, reply in zip(names, lists, strict=True)}
        return QueueLook(queues, self.space(root))

    async def look(self, call: SessionCall, names: Sequence[str]) -> QueueLook:
        """The queues and the namespace, including all that was done before this call."""
        ahead, *replies = await call.exchange(jute.sync(self.paths.root), *self.looking(names))
        self.check(ahead)
        return self.looked(names, replies)

    def space(self, reply: jute.Reply) -> NamespaceView:
        self.check(reply)
        return space_of(*jute.data_of(reply.body), self.url)

    def _queue(self, reply: jute.Reply) -> Queue:
        if reply.error == jute.NO_NODE:
            return Queue([], [], [], 0)
        self.check(reply)
        return queue_of(*jute.children_of(reply.body))

    def places(self, mine: ZooKeeperAttempt, look: QueueLook) -> dict[str, str]:
        """By name, the places that it has: fewer than names, if somebody deleted some."""
        return {
            name: self.paths.place(name, queue.children[queue.publics.index(mine.public)])
            for name, queue in look.queues.items()
            if mine.public in queue.publics
        }

    def record(self, reply: jute.Reply) -> NodeRecord | None:
        if reply.error == jute.NO_NODE:
            return None
        self.check(reply)
        return record_of(*jute.data_of(reply.body))

    async def stored(self, call: SessionCall, public: str) -> NodeRecord | None:
        """The attempt's record, including what any client has done before this call."""
        ahead, reply = await call.exchange(
            jute.sync(self.paths.root), jute.get_data(self.paths.attempt(public))
        )
        self.check(ahead)
        return self.record(reply)

    async def names(self, call: SessionCall) -> list[str]:
        """All names that have a node, including those of all that was done before this call."""
        _, reply = await call.exchange(jute.sync(self.paths.root), jute.get_children(self.paths.names))
        self.check(reply)
        return [name_of(child) for child in jute.children_of(reply.body)[0]]

    # Writing.

    async def write(self, call: SessionCall, steps: Sequence[bytes], *expected: int) -> Written:
        """Carry out all steps or none. An error that is not `expected` is raised."""
        (reply,) = await call.exchange(jute.multi(steps))
        return self.written(reply, *expected)

    def written(self, reply: jute.Reply, *expected: int) -> Written:
        self.check(reply)
        results = jute.results_of(reply.body)
        failed = jute.failure(results)
        if failed is not None and failed[1] not in expected:
            raise refused(failed[1], self.url)
        return Written(results, failed)

    def deletions(self, mine: ZooKeeperAttempt) -> list[bytes]:
        """Operations that delete all its nodes, if it is still ours. An expiry keeps its lock_delay nodes."""
        paths = list(mine.places.values())
        if mine.delaying and mine.phase is not ZooKeeperPhase.EXPIRED:
            paths += [self.paths.delay(name, mine.public) for name in mine.names]
        own = jute.delete(self.paths.attempt(mine.public), mine.version)
        return [own, *(jute.delete(path) for path in paths)]

    def tick(self) -> bytes:
        """A write: its reply has the leader's time, and comes after all earlier requests of its session have been
        carried out, or never will be.

        That is not so of a sync: if the session has moved to the leader, the leader answers it at once, although an
        earlier request, which came through a follower, is still waiting for a majority.
        """
        return jute.set_data(self.paths.clock, b"")

    def time(self, reply: jute.Reply) -> float:
        """The leader's time, from the reply to `tick`."""
        self.check(reply)
        return jute.stat_of(reply.body).mtime / 1000


@dataclass(frozen=True)
class LockDelays:
    """The nodes that block a name for a while after its holder has expired."""

    nodes: Nodes
    runtime: Runtime
    known: Callable[[str], ZooKeeperAttempt | None]

    async def announce(self, call: SessionCall, mine: ZooKeeperAttempt) -> bool:
        """Before it is granted: if its client dies afterwards, the next one finds them. False: it has lost a place."""
        text, paths = delay_text(mine.lock_delay), self.nodes.paths
        nodes = [jute.create(paths.delay(name, mine.public), text, self.nodes.acl) for name in mine.names]
        mine.announcing = True
        # They exist if an earlier reply was lost. The node of a name goes only after all that was under it.
        done = await self.nodes.write(call, nodes, jute.NODE_EXISTS, jute.NO_NODE)
        mine.announcing = False
        mine.delaying = done.failed is None or done.failed[1] == jute.NODE_EXISTS
        return mine.delaying

    async def endings(self, call: SessionCall, mine: ZooKeeperAttempt, keep: float) -> list[bytes]:
        """Operations that release it. With `keep` they make lock_delay nodes that end so many seconds from now."""
        if not keep or not mine.granted:
            return self.nodes.deletions(mine)
        (clock,) = await call.exchange(self.nodes.tick())
        text, paths = delay_text(keep, self.nodes.time(clock) + keep), self.nodes.paths
        steps = [jute.delete(paths.attempt(mine.public), mine.version)]
        for name, path in mine.places.items():
            delay = paths.delay(name, mine.public)
            steps.append(jute.delete(path))
            steps.append(
                jute.set_data(delay, text) if mine.delaying else jute.create(delay, text, self.nodes.acl)
            )
        return steps

    async def left(self, call: SessionCall, queues: dict[str, Queue], mine: str = "") -> float:
        """How long a lock_delay of an expired attempt still blocks one of these names; 0: not at all."""
        found = [(public, name) for name, queue in queues.items() for public in queue.orphans(mine)]
        if not found:
            return 0.0
        paths = [self.nodes.paths.delay(name, public) for public, name in found]
        # Before the leader's clock is read: a slow reply must not shorten the delay.
        here = self.runtime.now()
        *replies, clock = await call.exchange(*map(jute.get_data, paths), self.nodes.tick())
        there = self.nodes.time(clock)
        remaining, writes = 0.0, []
        for (public, _), path, reply in zip(found, paths, replies, strict=True):
            if reply.error:
                continue
            delay = delay_of(*jute.data_of(reply.body))
            ends = delay.until
            if ends is None:  # nobody has noticed the expiry before us
                known = self.known(public)
                began = known.expires if known and known.phase is ZooKeeperPhase.EXPIRED else here
                ends = there - (here - began) + delay.seconds
                writes.append(jute.set_data(path, delay_text(delay.seconds, ends), delay.version))
            if ends <= there:
                writes.append(jute.delete(path))
            remaining = max(remaining, ends - there)
        if writes:
            await call.exchange(*writes)
        return remaining

    async def tidy(self, call: SessionCall) -> int:
        """End lock_delays of names that nobody has asked for since the last holder expired."""
        ended = 0
        for names in chunks(await self.nodes.names(call), AT_ONCE):
            for name, queue in (await self.nodes.look(call, names)).queues.items():
                before = len(queue.orphans(""))
                if before and not await self.left(call, {name: queue}):
                    ended += before
        return ended
