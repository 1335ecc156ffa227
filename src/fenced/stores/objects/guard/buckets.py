"""What the guard asks of an object store, and the stores of obstore.

A conditional PUT has three outcomes: it was done, it was refused, or that is unknown. A client that retries by itself
can report "refused" about its own success, if the reply to its first request was lost. So a refusal counts only if the
client has sent the request once; otherwise the outcome is unknown, and the caller reads the object again.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, BinaryIO, NoReturn, Protocol, TypeVar

from fenced.errors import FencedError, Indeterminate, Misconfigured, Misuse, Unavailable
from fenced.values.contracts import Runtime

T = TypeVar("T")

_used_in: dict[str, int] = {}
"""The process that used obstore first."""

PART_BYTES = 8 * 1024 * 1024
"""How much of a large object is sent or received at once."""


class Bucket(Protocol):
    """Objects under keys. Versions are the store's own; equal ones mean equal contents."""

    tells_retries: bool
    """Whether `put` can tell the refusal of its only request from that of a retry by its client. Otherwise each
    refusal is Indeterminate."""

    async def get(self, key: str) -> tuple[Any, bytes] | None:
        """The version and the body of an object, or None."""

    async def put(self, key: str, body: bytes, version: Any) -> Any:
        """Replace an object that still has this version, or create it (None); returns the new version.

        None: the store refused, and nothing was written. Indeterminate: that is unknown.
        """

    async def upload(self, key: str, file: BinaryIO) -> None:
        """Create a large object, in parts. If it fails, no parts are left, as far as the store can be reached."""

    def download(self, key: str) -> AsyncIterator[bytes]:
        """The body of a large object in parts. KeyError: there is none."""

    async def delete(self, key: str) -> None: ...

    async def keys(self, prefix: str) -> list[str]: ...


class ObstoreBucket:
    """A store of obstore: S3Store, GCSStore, AzureStore, MemoryStore ..."""

    def __init__(self, store: Any, prefix: str, runtime: Runtime) -> None:
        import obstore

        self._obstore = obstore
        self._store = store
        self._prefix = prefix
        self._runtime = runtime
        retries = getattr(store, "retry_config", {"max_retries": 0})  # a store in memory has none
        self.tells_retries = (retries or {"max_retries": 10})["max_retries"] == 0

    async def get(self, key: str) -> tuple[Any, bytes] | None:
        return await self._reading(self._get, key)

    def _get(self, path: str) -> tuple[Any, bytes]:
        found = self._obstore.get(self._store, path)
        return _version(found.meta), bytes(found.bytes())

    async def put(self, key: str, body: bytes, version: Any) -> Any:
        mode = "create" if version is None else dict(version)
        try:
            done = await self._call(self._put, self._prefix + key, body, mode)
        except (
            self._obstore.exceptions.AlreadyExistsError,
            self._obstore.exceptions.PreconditionError,
        ) as error:
            if self.tells_retries:
                return None
            raise Indeterminate("the object store refused, perhaps after a retry by its client") from error
        except FileNotFoundError as error:
            if version is not None:  # it was deleted; the caller reads again
                return None
            raise Misconfigured("there is no such bucket; create it first") from error
        except self._obstore.exceptions.BaseError as error:
            self._fail(error, Indeterminate)
        return _version(done)

    def _put(self, path: str, body: bytes, mode: Any) -> Any:
        # A multipart upload cannot have a condition here.
        return self._obstore.put(self._store, path, body, mode=mode, use_multipart=False)

    async def upload(self, key: str, file: BinaryIO) -> None:
        try:  # obstore aborts what it could not complete
            await self._call(self._upload, self._prefix + key, file)
        except self._obstore.exceptions.BaseError as error:
            self._fail(error, Unavailable)

    def _upload(self, path: str, file: BinaryIO) -> None:
        self._obstore.put(self._store, path, file, chunk_size=part_bytes(file))

    async def download(self, key: str) -> AsyncIterator[bytes]:
        found = await self._reading(self._stream, key)
        if found is None:
            raise KeyError(key)
        while (part := await self._reading(lambda _: next(found, None), key)) is not None:
            yield bytes(part)

    def _stream(self, path: str) -> Any:
        return iter(self._obstore.get(self._store, path).stream(min_chunk_size=PART_BYTES))

    async def delete(self, key: str) -> None:
        await self._reading(lambda path: self._obstore.delete(self._store, path), key)

    async def keys(self, prefix: str) -> list[str]:
        return await self._reading(self._list, prefix) or []

    def _list(self, prefix: str) -> list[str]:
        found = [one["path"] for part in self._obstore.list(self._store, prefix or None) for one in part]
        return [path.removeprefix(self._prefix) for path in found]

    async def _reading(self, work: Callable[[str], T], key: str) -> T | None:
        """Run what may be repeated; None if the object is missing."""
        try:
            return await self._call(work, self._prefix + key)
        except FileNotFoundError:
            return None
        except self._obstore.exceptions.BaseError as error:
            self._fail(error, Unavailable)

    async def _call(self, work: Callable[..., T], *arguments: Any) -> T:
        """obstore's threads do not exist in a forked child, where every request would wait for ever."""
        if _used_in.setdefault("process", os.getpid()) != os.getpid():
            raise Misuse(
                "obstore was used before this process was forked, and does not work here: use boto3, or start "
                "processes in another way than by fork"
            )
        return await self._runtime.call(work, *arguments)

    def _fail(self, error: Exception, kind: type[FencedError]) -> NoReturn:
        errors = self._obstore.exceptions
        said = short(error)
        if isinstance(error, errors.PermissionDeniedError | errors.UnauthenticatedError):
            raise Misconfigured(f"the object store denies access: {said}") from error
        if isinstance(error, errors.NotSupportedError):
            raise Misconfigured(f"the object store lacks conditional writes: {said}") from error
        raise kind(f"the object store did not answer: {said}") from error


def _version(found: Any) -> tuple[tuple[str, str], ...]:
    """S3 and Azure compare the ETag, Google Cloud Storage the version."""
    return tuple((part, found[part]) for part in ("e_tag", "version") if found[part] is not None)


def short(error: Exception) -> str:
    """What obstore says first; the rest is XML and its source."""
    return re.split(r"\n|: <\?xml", str(error))[0]


def part_bytes(file: BinaryIO) -> int:
    """How large the parts of an upload are: a store takes at most 10,000 of them."""
    if not file.seekable():
        return PART_BYTES
    here = file.tell()
    size = file.seek(0, 2) - here
    file.seek(here)
    return max(PART_BYTES, size // 9_000 + 1)
