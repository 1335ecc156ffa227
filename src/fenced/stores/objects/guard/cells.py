"""Cells as objects of a bucket: mark, value and newest operations in one body, replaced by comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, unquote

from fenced.errors import FencedError, Indeterminate, Misconfigured
from fenced.guards.cellguard import CellGuard
from fenced.guards.cells import CONFIG, Cell, Config, Swapped, key_of
from fenced.guards.remembered import AUDIT_LAGS
from fenced.stores.objects.guard.buckets import Bucket
from fenced.values.contracts import MODE_LAG, Trait
from fenced.values.model import Credential

TRAITS = (
    AUDIT_LAGS,
    MODE_LAG,
    Trait("token-in-body", "Mark and operation are in the body, so no two versions have the same ETag."),
    Trait("deletes-leave-a-mark", "A deleted object leaves a small one that keeps its mark."),
    Trait("conditions-proven", "A store that ignores the conditions of a PUT is refused when it is opened."),
    Trait("cooperative", "Anyone who may write to the bucket can replace an object without the guard."),
)
_SUFFIX = "=cell"


class ObjectCells:
    """An object for each cell. Its version is the one that the store gives it."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    async def get(self, key: str) -> tuple[Any, bytes | None]:
        return await self.bucket.get(path_of(key)) or (None, None)

    async def swap(self, changes: Sequence[tuple[str, Any, bytes | None]]) -> Swapped:
        ((key, version, blob),) = changes
        assert blob is not None
        new = await self.bucket.put(path_of(key), blob, version)
        return Swapped(None if new is None else (new,))

    async def keys(self) -> list[str]:
        return [CONFIG, *map(decoded, await self.bucket.keys(key_of("")))]

    async def close(self) -> None:
        return


class ObjectMarks(CellGuard):
    """Marks and small values, one object for each name."""

    traits = TRAITS
    kind = "a guard over objects"
    cells: ObjectCells

    def __init__(self, cells: ObjectCells, *arguments: Any, **options: Any) -> None:
        super().__init__(cells, *arguments, **options)
        # Where each refusal counts as unknown, every cell is read first: one that is remembered may be so old that
        # nobody can tell any more whether the write was among those since then.
        self.remembers = cells.bucket.tells_retries

    async def open(self) -> None:
        await prove(self.cells.bucket, self._new_id())
        await super().open()

    def new_id(self) -> str:
        """An operation's id, for a caller that needs it before it writes."""
        return self._new_id()

    async def fresh_config(self) -> Config:
        return (await self._config(fresh=True)).config

    async def announced(self, credential: Credential, name: str) -> Cell:
        """Announce, then read."""
        return (await self._operate(self._stamp_in(credential), {name: None}, announce=True))[name]

    async def write_as(
        self, operation: str, credential: Credential | None, name: str, value: bytes, expect: int | None
    ) -> None:
        """Write, as the operation with this id."""
        await self._operate(self._stamp_in(credential), {name: value}, expect=expect, operation=operation)


def path_of(key: str) -> str:
    """Where a cell is. Some stores take a backslash, a plus or an encoded character for another one, and in some
    `orders` cannot be an object beside `orders/42`; so each has a suffix, which no encoded name ends with."""
    return f"{encoded(key)}{_SUFFIX}"


def encoded(text: str) -> str:
    return quote(text, safe="/!*'()").replace("%", "=")


def decoded(path: str) -> str:
    return unquote(path.removesuffix(_SUFFIX).replace("=", "%"))


async def prove(bucket: Bucket, unique: str) -> None:
    """Misconfigured unless the store refuses a PUT whose condition does not hold.

    The guard deletes by a PUT too, so this is all that it depends on.
    """
    key = f"probe/{unique}"
    first = await _put(bucket, key, b"1", None)
    try:
        second = await _put(bucket, key, b"2", first) if first is not None else None
        if second is None:
            raise Misconfigured("the object store refused a PUT whose condition holds")
        for condition, version in (("If-None-Match: *", None), ("If-Match with an old ETag", first)):
            try:
                ignored = await bucket.put(key, b"3", version) is not None
            except Indeterminate:  # a client that retries: what the store has now decides
                found = await bucket.get(key)
                ignored = found is None or found[1] == b"3"
            if ignored:
                raise Misconfigured(
                    f"this object store ignores {condition} on PUT: it cannot refuse a stale holder. "
                    "Use a store with conditional writes"
                )
    finally:
        with contextlib.suppress(FencedError):  # what stays is a few bytes
            await bucket.delete(key)


async def _put(bucket: Bucket, key: str, body: bytes, version: Any) -> Any:
    """Put, and after a refusal look whether the object has this body: the request may have been repeated on its way."""
    with contextlib.suppress(Indeterminate):
        if (new := await bucket.put(key, body, version)) is not None:
            return new
    found = await bucket.get(key)
    return found[0] if found is not None and found[1] == body else None
