"""Values under names, as files of a guarded folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fenced.errors import FencedError, Indeterminate, Misuse, redacted, shown
from fenced.guards.cellguard import CellGuard
from fenced.guards.cells import CONFIG, Swapped
from fenced.guards.options import options_in
from fenced.guards.remembered import AUDIT_LAGS
from fenced.stores.files.guard import disk
from fenced.stores.files.guard.disk import translating
from fenced.stores.files.guard.folder import GuardedFolder
from fenced.stores.files.guard.locked import LockedName, Marked, file_of, value_path
from fenced.values.contracts import MODE_LAG, Runtime, Trait

TRAITS = (
    AUDIT_LAGS,
    MODE_LAG,
    Trait("one-machine", "For the processes of one machine: a network file system is refused."),
    Trait("synced-writes", "Contents and mark are on the disk before a write returns."),
    Trait(
        "stopped-writer-blocks", "A process stopped while it has the lock of a name blocks that name alone."
    ),
    Trait("one-user", "All programs of a guarded folder run as one user; a `.fenced` of others is refused."),
    Trait("cooperative", "Anyone who may write to the folder can replace a file without the guard."),
)


class FileCells:
    """Cells of a guarded folder. The version of a cell is its header; that of the configuration, the whole of it."""

    def __init__(self, folder: GuardedFolder, runtime: Runtime) -> None:
        self.folder = folder
        self._runtime = runtime

    async def get(self, key: str) -> tuple[bytes | None, bytes | None]:
        return await self._runtime.call(self._get, key)

    def _get(self, key: str) -> tuple[bytes | None, bytes | None]:
        with translating(self.folder.private):
            if key == CONFIG:
                config = self.folder.configuration()
                return config, config
            # Locking makes the mark file, and a look should make nothing. Without it nothing is committed.
            if disk.status(f"{self.folder.private}/marks/{file_of(key)}.mark") is None:
                return None, None
            with self.folder.locked(key) as name:
                header = name.header
                return (None, None) if header is None else (header, header + b"\n" + self._contents(name))

    async def swap(self, changes: Sequence[tuple[str, bytes | None, bytes | None]]) -> Swapped:
        ((key, version, blob),) = changes
        assert blob is not None
        return await self._runtime.call(self._swap, key, version, blob)

    def _swap(self, key: str, version: bytes | None, blob: bytes) -> Swapped:
        with translating(self.folder.private), self.folder.locked(key) as name:
            if key == CONFIG:
                if self.folder.configuration() != version:
                    return Swapped(None)
                self.folder.configure(blob, self._runtime.secret())
                return Swapped((blob,))
            if name.header != version:
                return Swapped(None)
            header, _, value = blob.partition(b"\n")
            self._change(name, key, header, value)
            return Swapped((header,))

    async def keys(self) -> list[str]:
        return await self._runtime.call(self._keys)

    def _keys(self) -> list[str]:
        with translating(self.folder.private):
            return self.folder.keys()

    async def close(self) -> None:
        return

    # What FileGuard does in another way.

    def _contents(self, name: LockedName) -> bytes:
        return name.contents()

    def _change(self, name: LockedName, key: str, header: bytes, value: bytes) -> None:
        marked = Marked(header, key, self._runtime.secret(), value_path(file_of(key)))
        if name.marked and name.header and json.loads(name.header)[0] == json.loads(header)[0]:
            name.raise_mark(marked._replace(path=name.marked.path))  # the value stays as it is
            return
        with self.folder.entered() as room:
            new = self.folder.prepare(room, key, marked.operation, value)
            try:
                name.replace(marked, marked.operation, marked.path)
            except (OSError, FencedError) as error:
                if not isinstance(error, Indeterminate):  # then the next process completes or removes it
                    disk.remove(new, room.private)
                raise


class FileValues(CellGuard):
    """Values under names, one file each, below `.fenced/values` of a folder."""

    traits = TRAITS
    kind = "a guard over files"

    @classmethod
    def at(cls, url: str, runtime: Runtime) -> FileValues:
        return cls(FileCells(GuardedFolder(folder_of(url)), runtime), runtime, url, **options_in(url))

    async def open(self) -> None:
        assert isinstance(self.cells, FileCells)
        await self._runtime.call(self.cells.folder.open)
        await super().open()


def folder_of(url: str) -> Path:
    """The absolute path behind `file:///absolute/folder`, links resolved."""
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.scheme != "file" or parts.netloc or not path.startswith("/") or "\0" in path:
        raise Misuse(f"a guarded folder's address is file:///absolute/path, not {shown(redacted(url))}")
    return Path(disk.real_path(path))
