"""Values under names, as files of a guarded folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fenced.contracts import Runtime, Trait
from fenced.errors import Misuse, redacted, shown
from fenced.guards.files import disk
from fenced.guards.files.folder import GuardedFolder, Marked, Place
from fenced.guards.shared.cellguard import CellGuard
from fenced.guards.shared.cells import CONFIG, Swapped
from fenced.guards.shared.guardedcells import AUDIT_LOCAL, MODE_LAG
from fenced.guards.shared.options import options_in

TRAITS = (
    AUDIT_LOCAL,
    MODE_LAG,
    Trait("one-machine", "For the processes of one machine: a network file system is refused."),
    Trait("synced-writes", "Contents and mark are on the disk before a write returns."),
    Trait(
        "stopped-writer-blocks", "A process stopped between its mark and its rename blocks that name alone."
    ),
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
        if key == CONFIG:
            config = self.folder.configuration()
            return config, config
        with self.folder.locked(key):
            marked = self.folder.marked(key)
            if marked is None:
                return None, None
            return marked.header, marked.header + b"\n" + self._contents(marked)

    async def swap(self, changes: Sequence[tuple[str, bytes | None, bytes | None]]) -> Swapped:
        ((key, version, blob),) = changes
        assert blob is not None
        return await self._runtime.call(self._swap, key, version, blob)

    def _swap(self, key: str, version: bytes | None, blob: bytes) -> Swapped:
        with self.folder.locked(key):
            if key == CONFIG:
                if self.folder.configuration() != version:
                    return Swapped(None)
                self.folder.configure(blob)
                return Swapped((blob,))
            header, _, value = blob.partition(b"\n")
            before = self.folder.marked(key)
            if (before and before.header) != version:
                return Swapped(None)
            place, contents = self._planned(key, version, header, value)
            self.folder.commit(key, Marked(header, json.loads(header)[3][-1], place), contents)
            return Swapped((header,))

    # What FileGuard does in another way.

    def _contents(self, marked: Marked) -> bytes:
        return disk.read(f"{self.folder.top}/{marked.place.path}") or b""

    def _planned(
        self, key: str, version: bytes | None, header: bytes, value: bytes
    ) -> tuple[Place, bytes | None]:
        """Where the contents of a name are, and what is written there; None leaves them as they are."""
        path = self.folder.file("values", key).removeprefix(f"{self.folder.top}/")
        changed = version is None or json.loads(version)[0] != json.loads(header)[0]
        return Place(path), value if changed else None

    async def keys(self) -> list[str]:
        return await self._runtime.call(self.folder.keys)

    async def close(self) -> None:
        return


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
    return Path(os.path.realpath(path))
