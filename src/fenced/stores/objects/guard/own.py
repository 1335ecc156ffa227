"""Objects of S3 and stores like it, replaced under a lease through the program's own client."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any, BinaryIO

from fenced.client.guarding import ClientGuard, Fences, credential, names_of
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


class _BorrowedStore(ObstoreBucket):
    """A store of obstore that the program keeps: this has a weak reference, and every operation has the store."""

    @property
    def _store(self) -> Any:
        return self._reference()

    @_store.setter
    def _store(self, store: Any) -> None:
        self._reference = weakref.ref(store)


class _OnObjects(ClientGuard[GuardedObjects]):
    """What both guards share: where the objects are, and the options of their marks."""

    traits = TRAITS

    def __init__(
        self,
        bucket: str | None = None,
        *,
        prefix: str = "",
        rule: Rule | None = None,
        mode: str = "enforce",
    ) -> None:
        super().__init__()
        self._bucket = bucket
        self._below = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
        self._rule = rule
        self._mode = mode

    def _new_runtime(self) -> Runtime:
        raise NotImplementedError

    def _made(self, client: Any) -> GuardedObjects:
        runtime, bucket, below = self._new_runtime(), self._bucket, self._below
        here: Bucket
        if type(client).__module__.startswith("obstore"):
            if bucket is not None:
                raise Misuse("a store of obstore has its bucket already; leave `bucket` out")
            here = _BorrowedStore(client, below, runtime)
        elif hasattr(client, "put_object") and bucket is not None:
            here = BotoBucket(weakref.proxy(client), bucket, below, runtime)
        else:
            raise Misuse(
                "give a guard the name of a bucket and a client of boto3 or aiobotocore, or a store of obstore, "
                f"not {shown(client)}"
            )
        address = f"s3://{bucket}/{below}" if bucket else f"{type(client).__name__}/{below}"
        marks = ObjectMarks(
            ObjectCells(here), runtime, address, rule=self._rule, mode=self._mode, own_client=True
        )
        return GuardedObjects(marks, here, runtime)


class AsyncObjectGuard(_OnObjects):
    """Objects below a prefix of a bucket. The lease of an object has the object's name.

        guard = AsyncObjectGuard("shop", prefix="guarded/")
        async with client.hold("reports/daily.csv") as lease:
            async with guard.change(s3, lease, "reports/daily.csv") as report:
                report.body = (report.body or b"") + b"2,12\\n"

    A guard with the name of a bucket works on a client of boto3, under asyncio also on one of aiobotocore or aioboto3.
    A guard without it works on a store of obstore. Under asyncio calls of boto3 and obstore run in threads. A write by
    a stale holder raises StaleToken, and the object stays as it is. Tasks may share a guard.
    """

    def _new_runtime(self) -> Runtime:
        return AioRuntime()

    @contextlib.asynccontextmanager
    async def change(self, client: Any, fence: Fences, name: str) -> AsyncIterator[ObjectChange]:
        """Announce and read an object; what the block assigns to `body` is written at its end, None deletes it.

        Conflict: somebody else has written since it was read, in a mode that lets stale writers through, or under the
        same lease.
        """
        change = await self._of(client).begin(_announcing(fence, name), name)
        yield change
        if change.assigned:
            await self._of(client).commit(credential(fence, (name,)), change)

    async def read(self, client: Any, fence: Fences, name: str) -> bytes | None:
        """Announce, then read the whole object. None if there is none."""
        return (await self._of(client).begin(_announcing(fence, name), name)).body

    async def peek(self, client: Any, name: str) -> bytes | None:
        """Read the whole object without a lease. None if there is none."""
        return await self._of(client).peek(name)

    async def announce(self, client: Any, fence: Fences, *names: str) -> None:
        """Raise the marks of objects, before anything is read: an older holder's write is refused from now on.

        Without names these are the objects of all names of the lease.
        """
        for name in names or names_of(fence):
            await self._of(client).announce(_announcing(fence, name), name)

    async def write(self, client: Any, fence: Fences | None, name: str, body: bytes) -> None:
        """Replace or create an object."""
        await self._of(client).write(_carried(fence, name), name, body)

    async def delete(self, client: Any, fence: Fences | None, name: str) -> None:
        """Delete an object. A small one stays in its place, with the mark, so that older holders are still refused."""
        await self._of(client).write(_carried(fence, name), name, None)

    async def upload(self, client: Any, fence: Fences, name: str, file: BinaryIO) -> None:
        """Replace or create an object by the contents of a file, of any size, in parts.

        It announces first, so that a stale holder uploads nothing.
        """
        await self._of(client).announce(_announcing(fence, name), name)
        await self._of(client).upload(credential(fence, (name,)), name, file)

    async def download(self, client: Any, fence: Fences, name: str, file: BinaryIO) -> None:
        """Announce, then write the object to a file, in parts. KeyError: there is no such object."""
        await self._of(client).download(_announcing(fence, name), name, file)

    async def sweep(self, client: Any) -> int:
        """Delete what overtaken holders have uploaded and never completed; returns how many objects and uploads."""
        return await self._of(client).sweep()


# generated: the blocking twins of the asyncio classes above, by `python -m release.twins`


class ObjectGuard(_OnObjects):
    """Objects below a prefix of a bucket. The lease of an object has the object's name.

        guard = ObjectGuard("shop", prefix="guarded/")
        with client.hold("reports/daily.csv") as lease:
            with guard.change(s3, lease, "reports/daily.csv") as report:
                report.body = (report.body or b"") + b"2,12\\n"

    A guard with the name of a bucket works on a client of boto3, under asyncio also on one of aiobotocore or aioboto3.
    A guard without it works on a store of obstore. Under asyncio calls of boto3 and obstore run in threads. A write by
    a stale holder raises StaleToken, and the object stays as it is. Threads may share a guard.
    """

    def _new_runtime(self) -> Runtime:
        return BlockingRuntime()

    @contextlib.contextmanager
    def change(self, client: Any, fence: Fences, name: str) -> Iterator[ObjectChange]:
        """Announce and read an object; what the block assigns to `body` is written at its end, None deletes it.

        Conflict: somebody else has written since it was read, in a mode that lets stale writers through, or under the
        same lease.
        """
        change = step(self._of(client).begin(_announcing(fence, name), name))
        yield change
        if change.assigned:
            step(self._of(client).commit(credential(fence, (name,)), change))

    def read(self, client: Any, fence: Fences, name: str) -> bytes | None:
        """Announce, then read the whole object. None if there is none."""
        return step(self._of(client).begin(_announcing(fence, name), name)).body

    def peek(self, client: Any, name: str) -> bytes | None:
        """Read the whole object without a lease. None if there is none."""
        return step(self._of(client).peek(name))

    def announce(self, client: Any, fence: Fences, *names: str) -> None:
        """Raise the marks of objects, before anything is read: an older holder's write is refused from now on.

        Without names these are the objects of all names of the lease.
        """
        for name in names or names_of(fence):
            step(self._of(client).announce(_announcing(fence, name), name))

    def write(self, client: Any, fence: Fences | None, name: str, body: bytes) -> None:
        """Replace or create an object."""
        step(self._of(client).write(_carried(fence, name), name, body))

    def delete(self, client: Any, fence: Fences | None, name: str) -> None:
        """Delete an object. A small one stays in its place, with the mark, so that older holders are still refused."""
        step(self._of(client).write(_carried(fence, name), name, None))

    def upload(self, client: Any, fence: Fences, name: str, file: BinaryIO) -> None:
        """Replace or create an object by the contents of a file, of any size, in parts.

        It announces first, so that a stale holder uploads nothing.
        """
        step(self._of(client).announce(_announcing(fence, name), name))
        step(self._of(client).upload(credential(fence, (name,)), name, file))

    def download(self, client: Any, fence: Fences, name: str, file: BinaryIO) -> None:
        """Announce, then write the object to a file, in parts. KeyError: there is no such object."""
        step(self._of(client).download(_announcing(fence, name), name, file))

    def sweep(self, client: Any) -> int:
        """Delete what overtaken holders have uploaded and never completed; returns how many objects and uploads."""
        return step(self._of(client).sweep())


# end


def _announcing(fence: Fences, name: str) -> Credential:
    return credential(fence, (name,), announcing=True)


def _carried(fence: Fences | None, name: str) -> Credential | None:
    return None if fence is None else credential(fence, (name,))


def __dir__() -> list[str]:
    return __all__
