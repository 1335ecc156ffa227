"""The program's objects, under their marks: small ones in the cell itself, large ones under a key that the cell names.

    config=cell                   rule, modes and realm
    n/NAME=cell                   mark and contents of a name
    payloads/TOKEN-ID/NAME=cell   contents of a large object; never changed

A large object is uploaded under a new key, which nobody reads yet. The swap of the cell is its commit point. What a
refused writer has uploaded is deleted at once; what a dead one has uploaded stays until `sweep`.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import BinaryIO

from fenced.errors import AlreadyApplied, Conflict, Contended, Misuse, Refused, shown
from fenced.guards.cells import Cell, key_of
from fenced.guards.guardedcells import SEEN_BYTES_MAX
from fenced.stores.objects.guard.boto import BotoBucket
from fenced.stores.objects.guard.buckets import Bucket
from fenced.stores.objects.guard.cells import ObjectMarks, decoded, path_of
from fenced.values.contracts import Runtime
from fenced.values.decision import Ruling, Verdict, rule_on
from fenced.values.model import Credential, check_name

SMALL_BYTES = SEEN_BYTES_MAX - 1024
"""Larger contents are not in the cell: each new token rewrites it, and the guard remembers small ones alone."""
_DELETED = b"\0fenced-deleted\n"
_LARGE = b"\0fenced-large\n"
_PAYLOADS = "payloads/"


@dataclass(slots=True)
class ObjectChange:
    """An object that is being changed. Assign to `body`; None deletes it."""

    name: str
    version: int
    before: bytes | None
    _after: bytes | None = None
    assigned: bool = False

    @property
    def body(self) -> bytes | None:
        """The contents: as they were read, or as they were assigned since. None if there is no such object."""
        return self._after if self.assigned else self.before

    @body.setter
    def body(self, body: bytes | None) -> None:
        self._after, self.assigned = body if body is None else check_body(body), True


class GuardedObjects:
    """What both faces do, written once."""

    def __init__(self, marks: ObjectMarks, bucket: Bucket, runtime: Runtime) -> None:
        self.marks = marks
        self.runtime = runtime
        self._bucket = bucket

    async def announce(self, credential: Credential, name: str) -> None:
        await self.marks.ready()
        await self.marks.announced(credential, check_name(name))

    async def begin(self, credential: Credential, name: str) -> ObjectChange:
        """Announce, then read."""
        await self.marks.ready()
        cell = await self.marks.announced(credential, check_name(name))
        return ObjectChange(name, cell.version, await self._whole(name, cell.value))

    async def commit(self, credential: Credential | None, change: ObjectChange) -> None:
        """Write what was assigned, if nobody has written since it was read."""
        if change.assigned:
            await self._write(credential, change.name, change.body, change.version)

    async def write(self, credential: Credential | None, name: str, body: bytes | None) -> None:
        await self.marks.ready()
        await self._write(credential, check_name(name), body if body is None else check_body(body), None)

    async def upload(self, credential: Credential, name: str, file: BinaryIO) -> None:
        await self.marks.ready()
        await self._upload(credential, check_name(name), file, None)

    async def download(self, credential: Credential, name: str, file: BinaryIO) -> None:
        """Announce, then write it to a file, in parts. KeyError: there is no such object."""
        await self.marks.ready()
        cell = await self.marks.announced(credential, check_name(name))
        async for part in self._parts(name, cell.value):
            await self.runtime.call(file.write, part)

    async def peek(self, name: str) -> bytes | None:
        await self.marks.ready()
        return await self._whole(name, (await self.marks.peek(name)).value)

    async def sweep(self) -> int:
        """Delete what holders have left that were overtaken; returns how many objects and uploads.

        An upload below the mark of its name can never be named by the cell: its writer would be refused. So nothing is
        deleted where the mode lets such writers through, and nothing of the newest holder. Other guard objects notice a
        new mode within a second: sweep later than that.
        """
        await self.marks.ready()
        found = [(path, "") for path in await self._bucket.keys(_PAYLOADS)]
        if isinstance(self._bucket, BotoBucket):
            found += await self._bucket.unfinished(_PAYLOADS)
        modes = (await self.marks.fresh_config()).mode_of
        cells: dict[str, Cell] = {}
        swept = 0
        for path, upload in found:
            token, name = _parse(path)
            verdict = Verdict.STALE if token else Verdict.MISSING
            if rule_on(verdict, modes(name), name) is not Ruling.REFUSE:
                continue
            if name not in cells:  # after the list: whoever names an upload later has a token above this mark
                cells[name] = Cell.unpacked(name, (await self.marks.cells.get(key_of(name)))[1])
            mark = cells[name].mark
            if mark is None or token >= mark.token or _large(cells[name].value) == path:
                continue
            if upload:
                assert isinstance(self._bucket, BotoBucket)
                await self._bucket.abort(path, upload)
            else:
                await self._bucket.delete(path)
            swept += 1
        return swept

    async def _write(
        self, credential: Credential | None, name: str, body: bytes | None, expect: int | None
    ) -> None:
        if body is not None and (len(body) > SMALL_BYTES or body.startswith((_DELETED, _LARGE))):
            await self._upload(credential, name, io.BytesIO(body), expect)
        else:
            await self.marks.write(credential, name, _DELETED if body is None else body, expect=expect)

    async def _upload(
        self, credential: Credential | None, name: str, file: BinaryIO, expect: int | None
    ) -> None:
        operation = self.marks.new_id()
        token = 0 if credential is None else credential.stamps[0].token
        path = path_of(f"{_PAYLOADS}{token}-{operation}/{name}")
        await self._bucket.upload(path, file)
        try:
            await self.marks.write_as(operation, credential, name, _LARGE + path.encode(), expect)
        except (Refused, AlreadyApplied, Conflict, Contended):  # after other errors the cell may name it
            await self._bucket.delete(path)
            raise

    async def _whole(self, name: str, value: bytes | None) -> bytes | None:
        if value is None or value == _DELETED:
            return None
        return b"".join([part async for part in self._parts(name, value)])

    async def _parts(self, name: str, value: bytes | None) -> AsyncIterator[bytes]:
        path = _large(value)
        if value is None or value == _DELETED:
            raise KeyError(name)
        if path is None:
            yield value
            return
        try:
            async for part in self._bucket.download(path):
                yield part
        except KeyError:
            raise Contended(f"{name}: it was replaced and swept while it was read; read it again") from None


def check_body(body: object) -> bytes:
    if not isinstance(body, bytes):
        raise Misuse(f"the contents of an object are bytes, not {shown(body)}")
    return body


def _large(value: bytes | None) -> str | None:
    """The path of a large object's contents."""
    return value.removeprefix(_LARGE).decode() if value is not None and value.startswith(_LARGE) else None


def _parse(path: str) -> tuple[int, str]:
    """The token and the name in the path of a large object's contents."""
    made, _, name = decoded(path).removeprefix(_PAYLOADS).partition("/")
    return int(made.partition("-")[0]), name
