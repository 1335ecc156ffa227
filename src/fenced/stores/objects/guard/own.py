"""Objects of S3 and stores like it, replaced under a lease through the program's own client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, BinaryIO

from fenced.client.guarding import Fences, credential, names_of
from fenced.errors import Misuse, shown
from fenced.runtime.aio import AioRuntime
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.objects.guard.boto import BotoBucket
from fenced.stores.objects.guard.buckets import Bucket, ObstoreBucket
from fenced.stores.objects.guard.cells import TRAITS, ObjectCells, ObjectMarks
from fenced.stores.objects.guard.contents import GuardedObjects, ObjectChange
from fenced.stores.objects.guard.policy import bucket_policy
from fenced.values.contracts import Runtime
from fenced.values.decision import Rule
from fenced.values.model import Credential

__all__ = ["AsyncObjectGuard", "ObjectChange", "ObjectGuard", "bucket_policy"]


class _OnObjects:
    """What both guards share: where the objects are, and the options of their marks."""

    traits = TRAITS

    def __init__(
        self,
        store: Any,
        bucket: str | None = None,
        *,
        prefix: str = "",
        rule: Rule | None = None,
        mode: str = "enforce",
    ) -> None:
        self._runtime: Runtime = self._new_runtime()
        self._objects = _objects(store, bucket, prefix, rule, mode, self._runtime)

    def _new_runtime(self) -> Runtime:
        return BlockingRuntime()


class ObjectGuard(_OnObjects):
    """Objects below a prefix of a bucket. The lease of an object has the object's name.

        guard = ObjectGuard(boto3.client("s3"), "shop", prefix="guarded/")
        with client.hold("reports/daily.csv") as lease:
            with guard.change(lease, "reports/daily.csv") as report:
                report.body = (report.body or b"") + b"2,12\\n"

    `store` is a client of boto3, with the name of the bucket, or a store of obstore, without one. A write by a stale
    holder raises StaleToken, and the object stays as it is. Every method blocks; threads may share a guard.
    """

    @contextlib.contextmanager
    def change(self, fence: Fences, name: str) -> Iterator[ObjectChange]:
        """Announce and read an object; what the block assigns to `body` is written at its end, None deletes it.

        Conflict: somebody else has written since it was read, in a mode that lets stale writers through, or under the
        same lease.
        """
        change = step(self._objects.begin(_announcing(fence, name), name))
        yield change
        if change.assigned:
            step(self._objects.commit(credential(fence, (name,)), change))

    def read(self, fence: Fences, name: str) -> bytes | None:
        """Announce, then read the whole object. None if there is none."""
        return step(self._objects.begin(_announcing(fence, name), name)).body

    def peek(self, name: str) -> bytes | None:
        """Read the whole object without a lease. None if there is none."""
        return step(self._objects.peek(name))

    def announce(self, fence: Fences, *names: str) -> None:
        """Raise the marks of objects, before anything is read: an older holder's write is refused from now on.

        Without names these are the objects of all names of the lease.
        """
        for name in names or names_of(fence):
            step(self._objects.announce(_announcing(fence, name), name))

    def write(self, fence: Fences | None, name: str, body: bytes) -> None:
        """Replace or create an object."""
        step(self._objects.write(_carried(fence, name), name, body))

    def delete(self, fence: Fences | None, name: str) -> None:
        """Delete an object. A small one stays in its place, with the mark, so that older holders are still refused."""
        step(self._objects.write(_carried(fence, name), name, None))

    def upload(self, fence: Fences, name: str, file: BinaryIO) -> None:
        """Replace or create an object by the contents of a file, of any size, in parts.

        It announces first, so that a stale holder uploads nothing.
        """
        step(self._objects.announce(_announcing(fence, name), name))
        step(self._objects.upload(credential(fence, (name,)), name, file))

    def download(self, fence: Fences, name: str, file: BinaryIO) -> None:
        """Announce, then write the object to a file, in parts. KeyError: there is no such object."""

        async def parts() -> None:
            async for part in self._objects.download(_announcing(fence, name), name):
                file.write(part)

        step(parts())

    def sweep(self) -> int:
        """Delete what overtaken holders have uploaded and never completed; returns how many objects and uploads."""
        return step(self._objects.sweep())

    def close(self) -> None:
        """Nothing to close: the client is the program's."""

    def __enter__(self) -> ObjectGuard:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncObjectGuard(_OnObjects):
    """Objects below a prefix of a bucket, for asyncio. The lease of an object has the object's name.

    `store` is a client of aiobotocore, aioboto3 or boto3, with the name of the bucket, or a store of obstore, without
    one. Calls of boto3 and obstore run in threads.
    """

    _runtime: AioRuntime

    def _new_runtime(self) -> Runtime:
        return AioRuntime()

    @contextlib.asynccontextmanager
    async def change(self, fence: Fences, name: str) -> AsyncIterator[ObjectChange]:
        """Announce and read an object; what the block assigns to `body` is written at its end, None deletes it.

        Conflict: somebody else has written since it was read, in a mode that lets stale writers through, or under the
        same lease.
        """
        change = await self._objects.begin(_announcing(fence, name), name)
        yield change
        if change.assigned:
            await self._objects.commit(credential(fence, (name,)), change)

    async def read(self, fence: Fences, name: str) -> bytes | None:
        """Announce, then read the whole object. None if there is none."""
        return (await self._objects.begin(_announcing(fence, name), name)).body

    async def peek(self, name: str) -> bytes | None:
        """Read the whole object without a lease. None if there is none."""
        return await self._objects.peek(name)

    async def announce(self, fence: Fences, *names: str) -> None:
        """Raise the marks of objects, before anything is read: an older holder's write is refused from now on.

        Without names these are the objects of all names of the lease.
        """
        for name in names or names_of(fence):
            await self._objects.announce(_announcing(fence, name), name)

    async def write(self, fence: Fences | None, name: str, body: bytes) -> None:
        """Replace or create an object."""
        await self._objects.write(_carried(fence, name), name, body)

    async def delete(self, fence: Fences | None, name: str) -> None:
        """Delete an object. A small one stays in its place, with the mark, so that older holders are still refused."""
        await self._objects.write(_carried(fence, name), name, None)

    async def upload(self, fence: Fences, name: str, file: BinaryIO) -> None:
        """Replace or create an object by the contents of a file, of any size, in parts.

        It announces first, so that a stale holder uploads nothing.
        """
        await self._objects.announce(_announcing(fence, name), name)
        await self._objects.upload(credential(fence, (name,)), name, file)

    async def download(self, fence: Fences, name: str, file: BinaryIO) -> None:
        """Announce, then write the object to a file, in parts. KeyError: there is no such object."""
        async for part in self._objects.download(_announcing(fence, name), name):
            await self._runtime.call(file.write, part)

    async def sweep(self) -> int:
        """Delete what overtaken holders have uploaded and never completed; returns how many objects and uploads."""
        return await self._objects.sweep()

    async def close(self) -> None:
        """End the threads that call the store. The client stays open: it is the program's."""
        self._runtime.close()

    async def __aenter__(self) -> AsyncObjectGuard:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _announcing(fence: Fences, name: str) -> Credential:
    return credential(fence, (name,), announcing=True)


def _carried(fence: Fences | None, name: str) -> Credential | None:
    return None if fence is None else credential(fence, (name,))


def _objects(
    store: Any, bucket: str | None, prefix: str, rule: Rule | None, mode: str, runtime: Runtime
) -> GuardedObjects:
    below = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
    here: Bucket
    if type(store).__module__.startswith("obstore"):
        if bucket is not None:
            raise Misuse("a store of obstore has its bucket already; leave `bucket` out")
        here = ObstoreBucket(store, below, runtime)
    elif hasattr(store, "put_object") and bucket is not None:
        here = BotoBucket(store, bucket, below, runtime)
    else:
        raise Misuse(
            "give a guard a client of boto3 or aiobotocore and the name of a bucket, or a store of obstore, "
            f"not {shown(store)}"
        )
    address = f"s3://{bucket}/{below}" if bucket else f"{type(store).__name__}/{below}"
    marks = ObjectMarks(ObjectCells(here), runtime, address, rule=rule, mode=mode)
    return GuardedObjects(marks, here)


def __dir__() -> list[str]:
    return __all__
