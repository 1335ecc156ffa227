"""Transactions on etcd behind a fence: the token is compared in the same transaction as your own compares and puts."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from fenced.client import registry

try:
    import hpack  # noqa: F401 - reads the headers of HTTP/2
except ImportError as error:
    raise registry.needs_package("fenced.etcd", error) from error

from fenced.client.guarding import ClientGuard, CollectsWrites, Fences, credential, is_announced, stamp_of
from fenced.errors import Misuse, Unsupported, shown
from fenced.guards.cells import CONFIG, key_of
from fenced.runtime.blocking import step
from fenced.stores.etcd.address import EtcdAddress
from fenced.stores.etcd.claimkeys import ClaimKeys
from fenced.stores.etcd.guard.values import ROOT, TRAITS, EtcdCells, EtcdValues, EtcdWrites
from fenced.stores.etcd.wire.cluster import EtcdWire
from fenced.stores.etcd.wire.messages import absent, delete, get, modified_at, put, txn
from fenced.values.decision import Rule
from fenced.values.model import Credential

__all__ = [
    "AsyncEtcdClient",
    "AsyncEtcdGuard",
    "AsyncEtcdTransaction",
    "EtcdClient",
    "EtcdCompares",
    "EtcdGuard",
    "EtcdTransaction",
    "EtcdValue",
]


_PRIVATE = ROOT.encode()


class EtcdValue(NamedTuple):
    """A value, and the revision that wrote it, for `expect`. None and 0: there is no such key."""

    value: bytes | None
    revision: int


@dataclass(frozen=True, slots=True)
class EtcdCompares:
    """Compares for a transaction of another client: while they hold, the lease was not overtaken."""

    compares: tuple[tuple[bytes, str, str, int], ...]
    """Key, target, result and revision of each: `(key, "MOD", "EQUAL", 17)`."""

    def json(self) -> list[dict[str, Any]]:
        """For `compare` of etcd's JSON gateway, such as `etcd3gw.client().transaction`."""
        return [
            {
                "key": base64.b64encode(key).decode(),
                "target": target,
                "result": result,
                "mod_revision": revision,
            }
            for key, target, result, revision in self.compares
        ]

    def messages(self) -> list[bytes]:
        """For gRPC: each is an `etcdserverpb.Compare`, read by its `FromString`."""
        return [_at(key, revision) for key, _, _, revision in self.compares]


class _Collected(CollectsWrites):
    """Puts and deletes that are sent at the end of the block."""

    def __init__(
        self, guard: _EtcdMarks, fence: Fences, names: tuple[str, ...], still_held: bool, namespace: str
    ) -> None:
        self._guard = guard
        self._fence = fence
        self._names = names
        self._still_held = still_held
        self._namespace = namespace
        self._writes = EtcdWrites()

    async def _begin(self) -> None:
        self._enter()
        if not is_announced(self._fence, self._names, self._guard):
            await self._guard.ready()
            await self._guard.announce(credential(self._fence, self._names, announcing=True))

    async def _end(self, kind: type[BaseException] | None) -> None:
        if kind is not None:
            return
        stamp, writes = stamp_of(self._fence, self._guard.kind), self._writes
        names = self._names or stamp.names
        if self._still_held:
            claims = ClaimKeys(self._namespace)
            writes.claim([claims.claim(name) for name in names], stamp.grant)
        if writes.request:
            await self._guard.write_with(stamp, names, writes)

    def put(self, key: bytes, value: bytes, lease: int = 0) -> None:
        """Put at the end of the block. `lease`: the id of an etcd lease."""
        self._writes.then(put(_writable(key), value, lease))

    def delete(self, key: bytes) -> None:
        """Delete at the end of the block."""
        self._writes.then(delete(_writable(key)))

    def expect(self, key: bytes, revision: int) -> None:
        """Conflict at the end of the block, unless this revision was the last that wrote the key; 0: no such key."""
        self._writes.compare(_at(_checked(key), revision))


class AsyncEtcdTransaction(_Collected):
    """Puts and deletes that are sent at the end of the `async with` block, all of them or none."""

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._end(kind)

    async def get(self, key: bytes) -> EtcdValue:
        """Read a key now. The token was announced before."""
        return await self._guard.look(_checked(key))


class _EtcdMarks(EtcdValues):
    """The marks of an EtcdGuard. A cell has no value: the caller's keys are elsewhere."""

    async def look(self, key: bytes) -> EtcdValue:
        first = (await self.cells.read(txn((), [get(key)]))).found[0].first
        return EtcdValue(None, 0) if first is None else EtcdValue(first.value, first.modified)

    async def compares(self, carried: Credential) -> EtcdCompares:
        await self.ready()
        while True:
            await self.announce(carried)
            known = await self._config()
            if known.config.rule != "retry":
                raise Unsupported(
                    f"rule {known.config.rule} counts each write in the mark; use transaction(), which writes it"
                )
            (stamp,) = carried.stamps
            compares = [(self.cells.key(CONFIG), known.version)]
            for name in carried.names or stamp.names:
                version, cell = self._seen.get(name) or await self._cell(name)
                if cell.mark is not None and cell.mark.grant == stamp.grant:
                    compares.append((self.cells.key(key_of(name)), version))
                elif known.config.mode_of(name).refuses(name):
                    break  # overtaken since the announcement: the next one is refused
            else:
                return EtcdCompares(tuple((key, "MOD", "EQUAL", revision) for key, revision in compares))


class _EtcdClient:
    """What both clients share: the connections."""

    def __init__(self, url: str) -> None:
        address = EtcdAddress(url)
        self._url = address.url
        self._runtime = self._new_runtime()
        self._wire = EtcdWire(address, self._runtime)

    def _new_runtime(self) -> Any:
        raise NotImplementedError


class AsyncEtcdClient(_EtcdClient):
    """Connections to one etcd cluster, `etcd://h1,h2,h3`, for the guards of an asyncio program."""

    def _new_runtime(self) -> Any:
        from fenced.runtime.aio import AioRuntime

        return AioRuntime()

    async def close(self) -> None:
        """Disconnect."""
        self._wire.close()
        self._runtime.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class _OnEtcd(ClientGuard[_EtcdMarks]):
    """What both guards share: where the marks are, and their options."""

    traits = TRAITS
    _client: type[_EtcdClient]

    def __init__(
        self,
        *,
        prefix: str = "default",
        namespace: str = "default",
        rule: Rule | None = None,
        mode: str = "enforce",
    ) -> None:
        """`namespace`: of the authority on the same etcd, for `still_held`."""
        super().__init__()
        self._prefix = prefix
        self._namespace = namespace
        self._rule = rule
        self._mode = mode

    def _made(self, client: Any) -> _EtcdMarks:
        if not isinstance(client, self._client):
            raise Misuse(
                f"give an {type(self).__name__} an {self._client.__name__}(url), not {shown(client)}"
            )
        cells = EtcdCells(client._wire, client._runtime, self._prefix)
        address = f"{client._url}?prefix={self._prefix}"
        return _EtcdMarks(cells, client._runtime, address, rule=self._rule, mode=self._mode, own_client=True)


class AsyncEtcdGuard(_OnEtcd):
    """Transactions on etcd, for names whose marks are below a prefix.

        etcd, guard = AsyncEtcdClient("etcd://localhost"), AsyncEtcdGuard()
        async with client.hold("stock/42") as lease:
            async with guard.transaction(etcd, lease, "stock/42") as tx:
                stock = await tx.get(b"stock/42")
                tx.put(b"stock/42", b"7")

    A stale holder's block raises StaleToken, and nothing of it was written. Tasks may share a guard.
    """

    _client = AsyncEtcdClient

    async def announce(self, client: AsyncEtcdClient, fence: Fences, *names: str) -> None:
        """Raise the marks, before anything is read: an older holder's transaction is refused from now on."""
        marks = self._of(client)
        await marks.ready()
        await marks.announce(credential(fence, names, announcing=True))

    def transaction(
        self, client: AsyncEtcdClient, fence: Fences, *names: str, still_held: bool = False
    ) -> AsyncEtcdTransaction:
        """Announce; then collect puts and deletes, and send them at the end of the block, behind the fence.

        Without `names`, all names of the lease. `still_held`: also compare that the authority, on the same etcd, still
        has the lease; LeaseLost if not.
        """
        return AsyncEtcdTransaction(self._of(client), fence, names, still_held, self._namespace)

    async def compares(self, client: AsyncEtcdClient, fence: Fences, *names: str) -> EtcdCompares:
        """Announce, and return the compares to put into a transaction of another client.

        If that transaction fails, call this again: it raises StaleToken if the lease was overtaken. If it returns the
        same compares, another compare of the transaction has failed.
        """
        return await self._of(client).compares(credential(fence, names, announcing=True))


# generated: the blocking twins of the asyncio classes above, by `python -m release.twins`


class EtcdTransaction(_Collected):
    """Puts and deletes that are sent at the end of the `with` block, all of them or none."""

    def __enter__(self) -> Self:
        step(self._begin())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        step(self._end(kind))

    def get(self, key: bytes) -> EtcdValue:
        """Read a key now. The token was announced before."""
        return step(self._guard.look(_checked(key)))


class EtcdClient(_EtcdClient):
    """Connections to one etcd cluster, `etcd://h1,h2,h3`, for the guards of a program."""

    def _new_runtime(self) -> Any:
        from fenced.runtime.blocking import BlockingRuntime

        return BlockingRuntime()

    def close(self) -> None:
        """Disconnect."""
        self._wire.close()
        self._runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class EtcdGuard(_OnEtcd):
    """Transactions on etcd, for names whose marks are below a prefix.

        etcd, guard = EtcdClient("etcd://localhost"), EtcdGuard()
        with client.hold("stock/42") as lease:
            with guard.transaction(etcd, lease, "stock/42") as tx:
                stock = tx.get(b"stock/42")
                tx.put(b"stock/42", b"7")

    A stale holder's block raises StaleToken, and nothing of it was written. Threads may share a guard.
    """

    _client = EtcdClient

    def announce(self, client: EtcdClient, fence: Fences, *names: str) -> None:
        """Raise the marks, before anything is read: an older holder's transaction is refused from now on."""
        marks = self._of(client)
        step(marks.ready())
        step(marks.announce(credential(fence, names, announcing=True)))

    def transaction(
        self, client: EtcdClient, fence: Fences, *names: str, still_held: bool = False
    ) -> EtcdTransaction:
        """Announce; then collect puts and deletes, and send them at the end of the block, behind the fence.

        Without `names`, all names of the lease. `still_held`: also compare that the authority, on the same etcd, still
        has the lease; LeaseLost if not.
        """
        return EtcdTransaction(self._of(client), fence, names, still_held, self._namespace)

    def compares(self, client: EtcdClient, fence: Fences, *names: str) -> EtcdCompares:
        """Announce, and return the compares to put into a transaction of another client.

        If that transaction fails, call this again: it raises StaleToken if the lease was overtaken. If it returns the
        same compares, another compare of the transaction has failed.
        """
        return step(self._of(client).compares(credential(fence, names, announcing=True)))


# end


def _at(key: bytes, revision: int) -> bytes:
    return modified_at(key, revision) if revision else absent(key)


def _writable(key: object) -> bytes:
    if not isinstance(key, bytes) or not key or key.startswith(_PRIVATE):
        raise Misuse(f"{shown(_checked(key))} belongs to the guard")
    return key


def _checked(key: object) -> bytes:
    if not isinstance(key, bytes) or not key:
        raise Misuse(f"a key of etcd is bytes, such as b'stock/42', not {shown(key)}")
    return key


def __dir__() -> list[str]:
    return __all__
