"""Values under names in ZooKeeper: one node for each name, beside the node of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from urllib.parse import quote, unquote

from fenced.errors import FencedError, Misconfigured, Unavailable, Unsupported
from fenced.guards.cellguard import CellGuard
from fenced.guards.cells import CONFIG, ManyCells, Swapped
from fenced.guards.options import split_options
from fenced.guards.remembered import AUDIT_LAGS
from fenced.stores.zookeeper.address import ZooKeeperAddress
from fenced.stores.zookeeper.wire import jute
from fenced.stores.zookeeper.wire.client import ZooKeeperClient
from fenced.values.contracts import MANY_NAMES, Runtime, Trait

NODE_BYTES_MAX = 1_000_000
"""A longer request is answered by an end of the connection, which looks like a lost reply."""
TRAITS = (
    MANY_NAMES,
    AUDIT_LAGS,
    Trait(
        "one-multi",
        "Marks, configuration and writes are checked and written in one multi: a mode binds at once.",
    ),
    Trait(
        "never-delete", "A mark's node that is deleted and created again counts its versions from 0 again."
    ),
    Trait("cooperative", "Anyone who may write to the nodes can change them without the guard."),
)
_CHANGED = (jute.BAD_VERSION, jute.NODE_EXISTS, jute.NO_NODE)


class NodePaths:
    """The nodes of a guard. A name is one segment, so no name's node is below another's."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.names = f"{root}/n"
        self.parents = [root[:at] for at in range(1, len(root)) if root[at] == "/"] + [root, self.names]

    def node(self, key: str) -> str:
        return f"{self.root}/{CONFIG}" if key == CONFIG else f"{self.names}/{quote(key[2:], safe='')}"

    def key(self, child: str) -> str:
        return "n/" + unquote(child, errors="strict")


def root_below(chroot: str) -> str:
    return f"{chroot}/fenced-guard"


class ZooKeeperCells:
    """Nodes. The version of a cell is that of its node; -1: there is none."""

    def __init__(self, client: ZooKeeperClient, paths: NodePaths, acl: bytes) -> None:
        self._client = client
        self._paths = paths
        self._acl = acl

    async def open(self) -> None:
        for path in self._paths.parents:
            reply = await self._client.write(jute.create(path, b"", self._acl))
            if reply.error not in (jute.OK, jute.NODE_EXISTS):
                raise self._failed(reply.error)

    async def get(self, key: str) -> tuple[int, bytes | None]:
        return (await self.get_many([key]))[0]

    async def get_many(self, keys: Sequence[str]) -> list[tuple[int, bytes | None]]:
        requests = [jute.get_data(self._paths.node(key)) for key in keys]
        return [self._cell(reply) for reply in await self._client.read(self._paths.root, *requests)]

    def _cell(self, reply: jute.Reply) -> tuple[int, bytes | None]:
        if reply.error == jute.NO_NODE:
            return -1, None
        if reply.error:
            raise self._failed(reply.error)
        blob, stat = jute.data_of(reply.body)
        return stat.version, blob

    async def swap(self, changes: Sequence[tuple[str, int, bytes | None]]) -> Swapped:
        """One multi. To assert that a node does not exist, create it (and delete it again if nothing is written)."""
        requests: list[bytes] = []
        for key, version, blob in changes:
            path = self._paths.node(key)
            if version < 0:
                requests.append(jute.create(path, blob or b"", self._acl))
                if blob is None:
                    requests.append(jute.delete(path))
            elif blob is None:
                requests.append(jute.check(path, version))
            else:
                requests.append(jute.set_data(path, blob, version))
        request = jute.multi(requests)
        if len(request) > NODE_BYTES_MAX:
            raise Unsupported(f"ZooKeeper takes about a megabyte a write, not {len(request)} bytes")
        reply = await self._client.write(request)
        failure = jute.failure(jute.results_of(reply.body)) if reply.body else (0, reply.error)
        if failure is None:
            return Swapped(tuple(version if blob is None else version + 1 for _, version, blob in changes))
        if failure[1] in _CHANGED:
            return Swapped(None)
        raise self._failed(failure[1])

    async def keys(self) -> list[str]:
        (reply,) = await self._client.read(self._paths.root, jute.get_children(self._paths.names))
        if reply.error == jute.NO_NODE:
            return []
        if reply.error:
            raise self._failed(reply.error)
        return [self._paths.key(child) for child in jute.children_of(reply.body)[0]]

    async def close(self) -> None:
        self._client.close()

    def _failed(self, error: int) -> FencedError:
        if error in (jute.NO_AUTH, jute.AUTH_FAILED):
            return Misconfigured(f"{self._client.url}: no right to the nodes below {self._paths.root}")
        return Unavailable(f"{self._client.url}: the server refused with error {error}")


class NodeCells(ManyCells, Protocol):
    """Cells in nodes, by whatever client."""

    async def open(self) -> None:
        """Create the nodes above the cells."""


class ZooKeeperMarks(CellGuard):
    """Marks and values, one node for each name."""

    traits = TRAITS
    kind = "a guard over ZooKeeper"
    remembers = True
    cells: NodeCells

    async def open(self) -> None:
        version, _ = await self.cells.get(CONFIG)
        if version < 0:
            await self.cells.open()
        await super().open()


class ZooKeeperValues(ZooKeeperMarks):
    """Values under names, on our own connections."""

    @classmethod
    def at(cls, url: str, runtime: Runtime) -> ZooKeeperValues:
        where, options = split_options(url)
        address = ZooKeeperAddress(where)
        acl = jute.acl([("auth", "") if address.authenticated else ("world", "anyone")])
        client = ZooKeeperClient(address, runtime)
        cells = ZooKeeperCells(client, NodePaths(root_below(address.chroot)), acl)
        return cls(cells, runtime, address.url, **options)
