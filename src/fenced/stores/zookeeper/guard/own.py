"""Transactions of your own kazoo client behind a fence: one multi checks the token and writes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from fenced.client.guarding import ClientGuard, Fences, credential, is_announced, stamp_of
from fenced.errors import Conflict, Indeterminate, Misconfigured, Misuse, Unavailable, Unsupported, shown
from fenced.guards.cells import Swapped
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.zookeeper.guard.values import NODE_BYTES_MAX, TRAITS, NodePaths, ZooKeeperMarks, root_below
from fenced.values.decision import Rule

__all__ = ["ZooKeeperGuard"]

T = TypeVar("T")


class ZooKeeperGuard(ClientGuard["_KazooMarks"]):
    """Transactions of kazoo clients. The marks are below `root`, in each client's chroot.

        guard = ZooKeeperGuard()
        with client.hold("stock/42") as lease:
            with guard.transaction(kazoo, lease, "stock/42") as tx:
                data, stat = kazoo.get("/stock/42")
                tx.set_data("/stock/42", b"7", version=stat.version)

    `tx` is kazoo's own transaction. The guard commits it at the end of the block, and `tx.results` has the results;
    None if their reply was lost, and the mark has shown that the transaction happened. A stale holder's block raises
    StaleToken, and nothing of it was written. Threads may share a guard.
    """

    traits = TRAITS

    def __init__(
        self, *, root: str = root_below(""), rule: Rule | None = None, mode: str = "enforce"
    ) -> None:
        if not root.startswith("/") or root.endswith("/"):
            raise Misuse(f"root is a path like /shop/fenced-guard, not {shown(root)}")
        super().__init__()
        self._paths = NodePaths(root)
        self._rule = rule
        self._mode = mode

    def announce(self, client: Any, fence: Fences, *names: str) -> None:
        """Raise the marks, before anything is read: an older holder's transaction is refused from now on."""
        marks = self._of(client)
        step(marks.ready())
        step(marks.announce(credential(fence, names, announcing=True)))

    @contextmanager
    def transaction(self, client: Any, fence: Fences, *names: str) -> Iterator[Any]:
        """Announce; then give kazoo's transaction, and commit it at the end of the block, behind the fence.

        Without `names`, all names of the lease. Conflict: an operation of the block failed, such as one with an old
        version; the message names it.
        """
        marks = self._of(client)
        step(marks.ready())
        if not is_announced(fence, names, marks):
            step(marks.announce(credential(fence, names, announcing=True)))
        transaction = client.transaction()
        transaction.commit = transaction.commit_async = _committed_by_the_guard
        yield transaction
        transaction.results = None if transaction.operations else []
        if transaction.operations:
            stamp = stamp_of(fence, marks.kind)
            step(marks.write_with(stamp, names or stamp.names, transaction))

    def _made(self, client: Any) -> _KazooMarks:
        if not hasattr(client, "ensure_path"):
            raise Misuse(f"give the guard a kazoo client that is started, not {shown(client)}")
        cells = KazooCells(weakref.proxy(client), self._paths)
        return _KazooMarks(
            cells, BlockingRuntime(), "zookeeper:kazoo", rule=self._rule, mode=self._mode, own_client=True
        )


def _committed_by_the_guard(*_: object) -> None:
    raise Misuse("the guard commits this transaction at the end of the block, behind the fence")


class KazooCells:
    """The same nodes as ZooKeeperCells, through a kazoo client."""

    def __init__(self, client: Any, paths: NodePaths) -> None:
        self._client = client
        self._paths = paths

    async def open(self) -> None:
        self._reading(self._client.ensure_path, self._paths.names)

    async def get(self, key: str) -> tuple[int, bytes | None]:
        return (await self.get_many([key]))[0]

    async def get_many(self, keys: Sequence[str]) -> list[tuple[int, bytes | None]]:
        self._reading(self._client.sync, self._paths.root)  # the member catches up with the leader
        return [self._reading(self._get, self._paths.node(key)) for key in keys]

    def _get(self, path: str) -> tuple[int, bytes | None]:
        from kazoo.exceptions import NoNodeError  # type: ignore[import-untyped]

        try:
            blob, stat = self._client.get(path)
        except NoNodeError:
            return -1, None
        return stat.version, blob

    async def swap(self, changes: Sequence[tuple[str, int, bytes | None]], writes: Any = None) -> Swapped:
        """One multi, the fence first: if one of its checks fails, a cell has changed; a later failure is a conflict."""
        multi = self._compared(changes)
        ours = len(multi.operations)
        multi.operations += writes.operations if writes is not None else []
        _check_size(multi.operations)
        results = self._committed(multi)
        failed = _failure(results)
        if failed is not None and failed < ours and not isinstance(results[failed], _changed()):
            raise Misconfigured(f"kazoo: {results[failed]!r} for a node below {self._paths.root}")
        if failed is None:
            if writes is not None:
                writes.results = results[ours:]
            return Swapped(tuple(version if blob is None else version + 1 for _, version, blob in changes))
        if failed < ours:
            return Swapped(None)
        operation = multi.operations[failed]
        raise Conflict(
            f"operation {failed - ours} of the transaction ({type(operation).__name__} of {operation.path}) failed: "
            f"{type(results[failed]).__name__}; nothing was written"
        )

    def _compared(self, changes: Sequence[tuple[str, int, bytes | None]]) -> Any:
        """A multi that fails unless each cell has this version, and writes the new ones."""
        multi = self._client.transaction()
        for key, version, blob in changes:
            path = self._paths.node(key)
            if version < 0:
                multi.create(path, blob or b"")
                if blob is None:
                    multi.delete(path)
            elif blob is None:
                multi.check(path, version)
            else:
                multi.set_data(path, blob, version)
        return multi

    def _committed(self, multi: Any) -> Sequence[Any]:
        from kazoo import exceptions  # type: ignore[import-untyped]

        try:
            results: Sequence[Any] = multi.commit()
            return results
        except exceptions.ConnectionClosedError as error:
            raise Unavailable(f"the kazoo client is not connected: {error!r}") from error
        except (exceptions.KazooException, self._client.handler.timeout_exception) as error:
            raise Indeterminate(f"kazoo: {error!r}") from error

    def _reading(self, function: Callable[[str], T], path: str) -> T:
        from kazoo.exceptions import AuthFailedError, KazooException, NoAuthError

        try:
            return function(path)
        except (NoAuthError, AuthFailedError) as error:
            raise Misconfigured(f"kazoo: no right to {path}: {error!r}") from error
        except (KazooException, self._client.handler.timeout_exception) as error:
            raise Unavailable(f"kazoo: {error!r}") from error

    async def keys(self) -> list[str]:
        children = self._reading(self._client.get_children, self._paths.names)
        return [self._paths.key(child) for child in children]

    async def close(self) -> None:
        return


class _KazooMarks(ZooKeeperMarks):
    """The marks on one kazoo client."""

    cells: KazooCells

    async def _commit(self, changes: list[tuple[str, Any, bytes | None]], writes: Any) -> Swapped:
        return await self.cells.swap(changes, writes)


def _changed() -> tuple[type[Exception], ...]:
    """What a check of the fence fails with if the cell is another one by now."""
    from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError

    return BadVersionError, NodeExistsError, NoNodeError


def _failure(results: Sequence[object]) -> int | None:
    """Which operation failed first; those before it were rolled back, those after it were not tried."""
    from kazoo.exceptions import RolledBackError

    for index, result in enumerate(results):
        if isinstance(result, Exception) and not isinstance(result, RolledBackError):
            return index
    return None


def _check_size(operations: Sequence[Any]) -> None:
    size = sum(len(operation.path) + len(getattr(operation, "data", b"") or b"") for operation in operations)
    if size > NODE_BYTES_MAX:
        raise Unsupported(f"ZooKeeper takes about a megabyte a transaction, not {size} bytes")


def __dir__() -> list[str]:
    return __all__
