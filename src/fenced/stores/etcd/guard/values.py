"""Values under names in etcd: one key for each name, beside the key of the configuration."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fenced.errors import Conflict, Indeterminate, LeaseLost, Unavailable, Unsupported
from fenced.guards.cellguard import CellGuard
from fenced.guards.cells import Swapped
from fenced.guards.options import split_options
from fenced.guards.remembered import AUDIT_LAGS
from fenced.runtime import forking
from fenced.stores.etcd.address import EtcdAddress
from fenced.stores.etcd.claimkeys import claimed_by, still_claimed
from fenced.stores.etcd.wire import messages
from fenced.stores.etcd.wire.cluster import EtcdWire, LeaseGone, NoSpace
from fenced.stores.etcd.wire.messages import (
    IF,
    THEN,
    TXN_OPS_MAX,
    TxnReply,
    absent,
    get,
    modified_at,
    put,
    txn,
)
from fenced.stores.etcd.wire.protobuf import message
from fenced.values import timing
from fenced.values.contracts import MANY_NAMES, Runtime, Trait
from fenced.values.model import check_name

ROOT = "fenced-guard/"
TRAITS = (
    MANY_NAMES,
    AUDIT_LAGS,
    Trait(
        "one-transaction",
        "Marks, configuration and writes are compared and written in one etcd transaction: a mode binds at once.",
    ),
    Trait("cooperative", "Anyone who may write to the keys can change them without the guard."),
)


@dataclass(slots=True)
class EtcdWrites:
    """What a caller writes in the transaction that compares its fence: a part of the request, and how much is in it."""

    request: bytes = b""
    compares: int = 0
    operations: int = 0
    grant: str = ""
    """Which must still hold the claims that `claim` has added."""

    def compare(self, compare: bytes) -> None:
        self.request += message(IF, compare)
        self.compares += 1

    def then(self, operation: bytes) -> None:
        self.request += message(THEN, operation)
        self.operations += 1

    def claim(self, claims: Sequence[bytes], grant: str) -> None:
        """Compare that a grant still holds these keys of the authority; the failing branch returns them."""
        self.grant = grant
        for key in claims:
            for compare in still_claimed(key, grant):
                self.compare(compare)
        self.request += txn((), (), map(get, claims))


class EtcdCells:
    """Keys below a prefix. The version of a cell is the revision that wrote it; 0: there is none."""

    def __init__(self, wire: EtcdWire, runtime: Runtime, prefix: str) -> None:
        self.start = (ROOT + check_name(prefix)).encode() + b"\0"
        self.end = self.start[:-1] + b"\1"
        self.wire = wire
        self._runtime = runtime
        forking.register(self)

    def _before_fork(self) -> None:
        return

    def _forked(self) -> None:
        self.wire.forked()

    def key(self, key: str) -> bytes:
        return self.start + key.encode()

    async def get(self, key: str) -> tuple[int, bytes | None]:
        return (await self.get_many([key]))[0]

    async def get_many(self, keys: Sequence[str]) -> list[tuple[int, bytes | None]]:
        found: list[tuple[int, bytes | None]] = []
        for at in range(0, len(keys), TXN_OPS_MAX):
            request = txn((), [get(self.key(key)) for key in keys[at : at + TXN_OPS_MAX]])
            found += _cells(await self.read(request))
        return found

    async def read(self, request: bytes) -> TxnReply:
        """A transaction that only reads: without a reply nothing has happened."""
        try:
            until = self._runtime.now() + timing.CALL_SECONDS
            return TxnReply(await self.wire.call(messages.TXN, request, until))
        except Indeterminate as error:
            raise Unavailable(str(error)) from error

    async def swap(
        self, changes: Sequence[tuple[str, int, bytes | None]], writes: EtcdWrites | None = None
    ) -> Swapped:
        """The failing branch returns the cells, so one reply shows whether a cell or the caller's compare differs."""
        writes, versions, puts = writes or EtcdWrites(), [], []
        for key, version, blob in changes:
            versions.append((key, version))
            if blob is not None:
                puts.append(put(self.key(key), blob))
        request, unchanged = _compared(self.start, tuple(versions))
        request += writes.request + txn((), puts) if puts else writes.request
        operations = len(puts) + writes.operations
        if len(changes) + writes.compares > TXN_OPS_MAX or operations > TXN_OPS_MAX:
            raise Unsupported(f"etcd takes {TXN_OPS_MAX} compares and {TXN_OPS_MAX} operations a transaction")
        if not operations:
            reply = await self.read(request)
        else:
            # Sent once: repeated after a lost reply it would fail its own compares, and look like a conflict.
            until = self._runtime.now() + timing.CALL_SECONDS
            try:
                reply = TxnReply(await self.wire.call(messages.TXN, request, until, repeatable=False))
            except NoSpace as error:  # a member with less space than others may refuse what was carried out
                raise Indeterminate(str(error)) from error
            except LeaseGone as error:
                raise Conflict(
                    f"the etcd lease of a put does not exist; nothing was written: {error}"
                ) from error
        if reply.succeeded:
            return unchanged if not puts else _swapped(changes, reply.header.revision)
        found = _cells(reply)
        if all(cell[0] == change[1] for cell, change in zip(found, changes, strict=False)):
            raise _unmet(writes.grant, found[len(changes) :])
        return Swapped(None, {key: cell for (key, _, _), cell in zip(changes, found, strict=False)})

    async def keys(self) -> list[str]:
        request = txn((), [get(self.start, self.end, keys=True)])
        return [kv.key.removeprefix(self.start).decode() for kv in (await self.read(request)).found[0].kvs]

    async def close(self) -> None:
        self.wire.close()


@lru_cache(maxsize=1024)
def _compared(start: bytes, versions: tuple[tuple[str, int], ...]) -> tuple[bytes, Swapped]:
    """The part of a request that compares cells and, if that fails, returns them. A holder sends it many times.

    Also what the swap returns if it succeeds and writes to none of them.
    """
    keys = [(start + key.encode(), version) for key, version in versions]
    compares = [modified_at(key, version) if version else absent(key) for key, version in keys]
    unchanged = Swapped(tuple(version for _, version in versions))
    return txn(compares, (), [get(key) for key, _ in keys]), unchanged


def _swapped(changes: Sequence[tuple[str, int, bytes | None]], revision: int) -> Swapped:
    return Swapped(tuple(version if blob is None else revision for _, version, blob in changes))


def _cells(reply: TxnReply) -> list[tuple[int, bytes | None]]:
    firsts = [found.first for found in reply.found]
    return [(0, None) if first is None else (first.modified, first.value) for first in firsts]


def _unmet(grant: str, claims: list[tuple[int, bytes | None]]) -> Conflict | LeaseLost:
    """All cells were as they had been read, so the caller's own compares have failed."""
    for _, claim in claims:
        if claim is None or not claim.startswith(claimed_by(grant)):
            return LeaseLost(
                "the authority no longer has this lease (still_held); nothing was written", reason="expired"
            )
    return Conflict("a key was changed meanwhile: a compare of this transaction failed; nothing was written")


class EtcdValues(CellGuard):
    """Values under names, one key each."""

    traits = TRAITS
    kind = "a guard over etcd"
    remembers = True
    cells: EtcdCells

    @classmethod
    def at(cls, url: str, runtime: Runtime) -> EtcdValues:
        where, options = split_options(url, "prefix")
        address, prefix = EtcdAddress(where), options.pop("prefix", "default")
        cells = EtcdCells(EtcdWire(address, runtime), runtime, prefix)
        return cls(cells, runtime, f"{address.url}?prefix={prefix}", **options)

    def _commit(
        self, changes: list[tuple[str, Any, bytes | None]], writes: EtcdWrites | None
    ) -> Coroutine[Any, Any, Swapped]:
        return self.cells.swap(changes, writes)
