"""A Redis cluster in a world: the slot of the clients' keys moves from node to node, and clients follow.

Two primaries, each with a replica that confirms grants. While the slot moves, its owner sends clients to the other node
for single requests (ASK); afterwards for good (MOVED). A client whose connection is old meets both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fenced_testkit.runtime.world import Process
from fenced_testkit.worlds.redis import NodeServer, RedisBackend
from fenced_testkit.worlds.redis_node import RedisNode, Reply

if TYPE_CHECKING:
    from fenced_testkit.worlds.site import Site

PORT = 7000
SLOT = 1000
LAST_SLOT = 16_383


class ClusterNode(RedisNode):
    """A node that knows which node has the slot. While the slot moves to it, it serves requests only after ASKING."""

    slots: Callable[[], Reply]
    redirect_to: Callable[[bool], str]
    """The error for a request, given whether ASKING came before it; empty if this node serves it."""

    def __init__(self, name: str, now_us: Callable[[], int], draw_id: Callable[[], str]) -> None:
        super().__init__(name, now_us, draw_id)
        self.others: list[RedisNode] = []
        self.asking: dict[object, bool] = {}

    def execute(self, session: object, words: Sequence[bytes]) -> bytes:
        asking = self.asking.pop(session, False)
        if words[0].upper() == b"ASKING":
            self.asking[session] = True
        self.redirect = lambda key: self.redirect_to(asking)
        return super().execute(session, words)

    def _reply(self, session: object, name: bytes, words: Sequence[bytes]) -> Reply:
        if name == b"ROLE":
            return [b"master" if self.master else b"slave", 0, []]
        if name == b"CLUSTER":
            return self.slots()
        return super()._reply(session, name, words)

    def _publish(self, channel: bytes, message: bytes) -> int:
        """In a cluster every node forwards a message to its subscribers."""
        count = super()._publish(channel, message)
        for other in self.others:
            count += RedisNode._publish(other, channel, message)
        return count


class ClusterServer(NodeServer):
    node_type = ClusterNode


class RedisClusterBackend(RedisBackend):
    """Two primaries with a replica each."""

    name = "redis-cluster"
    guarantee = "best-effort"
    url = f"redis+cluster://node-1:{PORT},node-2:{PORT}"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.guarantee, self.replica = "best-effort", None
        self.servers = [ClusterServer(self, f"node-{number}", (f"node-{number}", PORT)) for number in (1, 2)]
        self.primary: NodeServer = self.servers[0]
        """The node that has the slot."""
        self._moving_to: NodeServer | None = None
        for server in self.servers:
            node = server.node
            assert isinstance(node, ClusterNode)
            node.others = [other.node for other in self.servers if other is not server]
            node.slots = self._slots
            node.redirect_to = lambda asking, server=server: self._redirect(server, asking)  # type: ignore[misc]
            replica = ClusterNode(f"{server.process.name}-copy", self.now_us, node._draw_id)
            replica.follow(node)
            server.listen()

    def is_primary(self, server: NodeServer) -> bool:
        return server in self.servers

    def processes(self) -> Sequence[Process]:
        return [server.process for server in self.servers]

    def _slots(self) -> Reply:
        host, port = self.primary.endpoint
        return [[0, LAST_SLOT, [host.encode(), port, host.encode()]]]

    def _redirect(self, server: NodeServer, asking: bool) -> str:
        owner, target = self.primary, self._moving_to
        if server is owner:
            return f"ASK {SLOT} {_where(target)}" if target is not None else ""
        return "" if server is target and asking else f"MOVED {SLOT} {_where(owner)}"

    # Faults.

    def faults(self) -> Sequence[Callable[[], None]]:
        return [self._restart, self._freeze, self._forget_scripts, self._move, self._move]

    def heal(self) -> None:
        if self._moving_to is not None:
            self._moved()
        super().heal()

    def _move(self) -> None:
        """Move all keys to the other node in one step; some time later it owns the slot."""
        if self._moving_to is not None or not all(server.process.alive for server in self.servers):
            return
        source = self.primary
        target = next(server for server in self.servers if server is not source)
        self.site.judge.say(f"the slot moves to {target.process.name}")
        target.node.keyspace.copy(source.node.keyspace)
        source.node.keyspace.data.clear()
        for server in (source, target):
            for replica in server.node.replicas:
                replica.follow(server.node)
        self._moving_to = target
        self.world.after(self.world.rng.uniform(0.05, self.site.pace), self._moved)

    def _moved(self) -> None:
        if self._moving_to is not None:
            self.primary, self._moving_to = self._moving_to, None
            self.site.judge.say(f"{self.primary.process.name} has the slot")

    def holds(self, grant: str, names: tuple[str, ...]) -> bool | None:
        return None if self._moving_to is not None else super().holds(grant, names)


def _where(server: NodeServer) -> str:
    return f"{server.endpoint[0]}:{server.endpoint[1]}"
