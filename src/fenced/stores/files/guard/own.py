"""Replace and append to files, and replace folders, under a lease."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable, Iterator
from os import PathLike, stat_result
from os.path import basename, dirname, relpath
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from fenced.client.guarding import Fences, credential, names_of, stamp_of
from fenced.errors import FencedError, Indeterminate, Misuse, shown
from fenced.guards.cellguard import CellGuard
from fenced.guards.cells import key_of
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.files.guard import disk
from fenced.stores.files.guard.disk import PRIVATE, translating
from fenced.stores.files.guard.folder import GuardedFolder
from fenced.stores.files.guard.locked import LockedName, Marked, Room, file_of
from fenced.stores.files.guard.values import TRAITS, FileCells
from fenced.values.decision import Rule
from fenced.values.model import Stamp, check_name

__all__ = ["FileGuard", "FilePath"]

FilePath = str | PathLike[str]


class _Target(NamedTuple):
    """A file or folder of the caller."""

    relative: str
    path: str
    status: stat_result | None
    """None: there is none yet."""
    name: str
    """The name of its lease."""
    key: str


class FileGuard:
    """The files below a folder. The lease of a file has the name `prefix` + its path in the folder.

        guard = FileGuard("/srv/reports", prefix="reports/")
        with client.hold("reports/daily.csv") as lease:
            rows = guard.read(lease, "daily.csv")
            with guard.replace(lease, "daily.csv") as file:
                file.write(...)

    A write by a stale holder raises StaleToken, and the file, the mark and the folder stay as they are. Every method
    blocks; in an asyncio program call it by `asyncio.to_thread`. Threads may share a guard.
    """

    traits = TRAITS

    def __init__(
        self, folder: FilePath, *, prefix: str = "", rule: Rule | None = None, mode: str = "enforce"
    ) -> None:
        runtime = BlockingRuntime()
        self._folder = GuardedFolder(Path(disk.real_path(folder)))
        self._prefix = prefix
        self._cells = _JudgedCells(self._folder, runtime)
        self._marks = _FileMarks(self._cells, runtime, f"file://{self._folder.top}", rule=rule, mode=mode)
        self._new_id = runtime.secret
        self._opened = False

    def name_for(self, path: FilePath) -> str:
        """The name to lease for a file."""
        return self._target(path).name

    @contextlib.contextmanager
    def replace(self, fence: Fences | None, path: FilePath) -> Iterator[BinaryIO]:
        """A new file to write to. It takes the place of the old one at the end of the `with` block, or not at all.

        The new one gets the mode and, if this process may do that, the owner of the old one.
        """
        target = self._target(path, "file")
        with self._replacing(fence, target) as descriptor:
            file = disk.as_file(descriptor, "wb", closes=False)
            try:
                yield file
                with translating(target.path):
                    file.flush()
            finally:
                with contextlib.suppress(OSError):
                    file.close()  # after an error it may have a rest that cannot be written

    def write(self, fence: Fences | None, path: FilePath, contents: bytes) -> None:
        """Replace a file by these contents."""
        target = self._target(path, "file")
        with self._replacing(fence, target) as descriptor, translating(target.path):
            disk.write_all(descriptor, contents, 0)

    def append(self, fence: Fences | None, path: FilePath, contents: bytes) -> None:
        """Append to a file, all of `contents` or nothing."""
        target, operation = self._target(path, "file"), self._new_id()
        with translating(target.path), self._folder.locked(target.key) as name:
            self._judge(fence, target, operation)
            header = name.judged or name.header or b""
            name.append(Marked(header, target.key, operation, target.relative), contents)

    @contextlib.contextmanager
    def replace_folder(self, fence: Fences | None, path: FilePath) -> Iterator[Path]:
        """A new, empty folder to fill. At the end of the `with` block a symbolic link at `path` leads to it.

        The folder before it is kept until the next one has replaced this one, for programs that read it meanwhile.
        """
        target, committing = self._target(path, "folder"), False
        file = file_of(target.key)
        trees, new = f"trees/{file}", f"new/{file}"
        with self._folder.entered() as room:
            with translating(target.path):
                disk.check_parent(room.top, target.relative)
                disk.make_folder(trees, room.private, 0o711)
                disk.make_folder(new, room.private)
                operation, tree = self._until_made(
                    lambda id_: disk.make_locked(f"{trees}/{id_}", room.private)
                )
            try:
                with disk.FullDisk(target.path):
                    yield Path(self._folder.private, trees, operation)
                with translating(target.path):
                    disk.sync_tree(tree)
                    with self._folder.locked_in(room, file, operation) as name:
                        self._judge(fence, target, operation)
                        before = basename(disk.read_link(target.path) or "")
                        committing = True
                        leads_to = relpath(
                            f"{self._folder.private}/{trees}/{operation}", dirname(target.path)
                        )
                        disk.link_to(leads_to, f"{new}/{operation}", room.private)
                        name.replace(_marked(name, target, operation), operation, target.relative)
                        self._sweep(room, trees, {operation, before})
            except FencedError as failure:
                committing = committing and isinstance(failure, Indeterminate)
                raise
            finally:
                if not committing:  # as for a file: an interrupted commit may have happened
                    disk.remove(f"{new}/{operation}", room.private)
                    disk.remove(f"{trees}/{operation}", room.private)
                disk.close(tree)

    def read(self, fence: Fences, path: FilePath) -> bytes:
        """Announce, then read the whole file. FileNotFoundError: there is none."""
        self.announce(fence, path)
        with self._reading(path) as (name, parent):
            return disk.read(name, parent)

    def open(self, fence: Fences, path: FilePath) -> BinaryIO:
        """Announce, then open the file for reading. FileNotFoundError: there is none."""
        self.announce(fence, path)
        with self._reading(path) as (name, parent):
            return disk.open_to_read(name, parent)

    @contextlib.contextmanager
    def _reading(self, path: FilePath) -> Iterator[tuple[str, int]]:
        """The name of a file, and a descriptor of its folder."""
        target = self._target(path)
        try:
            with self._folder.entered() as room:
                parent = disk.open_parent(room.top, target.relative)
                try:
                    yield basename(target.relative), parent
                finally:
                    disk.close(parent)
        except FileNotFoundError:
            raise  # what a program expects of a file that it may have to make first
        except OSError as error:
            raise disk.translated(error, target.path) from error

    def announce(self, fence: Fences, *paths: FilePath) -> None:
        """Raise the marks of files, before anything is read: an older holder's write is refused from now on.

        Without paths these are the files of all names of the lease.
        """
        for path in paths or [self._path_of(name) for name in names_of(fence)]:
            target = self._target(path)
            with translating(target.path), self._folder.locked(target.key) as name:
                step(self._marks.announce(credential(fence, (target.name,), announcing=True)))
                if (marked := _marked(name, target, self._new_id())) is not None:
                    name.raise_mark(marked)

    def _path_of(self, name: str) -> str:
        if not name.startswith(self._prefix):
            raise Misuse(f"{name} is not the name of a file of this guard: these begin with {self._prefix}")
        return name.removeprefix(self._prefix)

    @contextlib.contextmanager
    def _replacing(self, fence: Fences | None, target: _Target) -> Iterator[int]:
        """A `with` block with the descriptor of a new file. The file replaces the old one at the end, or not at all."""
        file, committing = file_of(target.key), False
        with self._folder.entered() as room:
            with translating(target.path):
                disk.check_parent(room.top, target.relative)
                operation, descriptor = self._create(room, target)
            try:
                with disk.FullDisk(target.path):
                    yield descriptor
                with translating(target.path):
                    disk.sync(descriptor)
                    with self._folder.locked_in(room, file, operation) as name:
                        self._judge(fence, target, operation)
                        committing = True
                        name.replace(_marked(name, target, operation), operation, target.relative)
            except FencedError as failure:
                committing = committing and isinstance(failure, Indeterminate)
                raise
            finally:
                # An interrupted commit may have happened: the next process that takes the lock completes or removes it.
                if not committing:
                    disk.remove(f"new/{file}/{operation}", room.private)
                # This unlocks the file: until now no other process took it for a dead writer's.
                disk.close(descriptor)

    def _create(self, room: Room, target: _Target) -> tuple[str, int]:
        """A new file, with the rights of the one that it will replace."""
        operation, descriptor = self._until_made(
            lambda id_: self._folder.create(room, target.key, id_, 0o666)
        )
        try:
            if target.status is not None:
                disk.copy_rights(target.status, descriptor)
        except BaseException:
            disk.remove(f"new/{file_of(target.key)}/{operation}", room.private)
            disk.close(descriptor)
            raise
        return operation, descriptor

    def _until_made(self, make: Callable[[str], int | None]) -> tuple[str, int]:
        """Make something under a new id, until no other process took it for a dead writer's before it was locked."""
        while True:
            operation = self._new_id()
            if (descriptor := make(operation)) is not None:
                return operation, descriptor

    def _judge(self, fence: Fences | None, target: _Target, operation: str) -> None:
        """Raise the refusal, if the write is refused. The caller has the lock."""
        stamp = None if fence is None else stamp_of(fence, self._marks.kind)
        step(self._marks.write_step(stamp, target.name, operation))

    def _sweep(self, room: Room, trees: str, kept: set[str]) -> None:
        """Remove trees, except for those of live writers. The folder is replaced by now: nothing may fail any more."""
        with contextlib.suppress(OSError):
            for name in disk.listed(trees, room.private):
                if name not in kept:
                    disk.remove_if_dead(f"{trees}/{name}", room.private)

    def _target(self, path: FilePath, wanted: Literal["file", "folder", None] = None) -> _Target:
        """Where a path leads, links resolved, except for the links that lead to folders of ours."""
        given, top = disk.text_of(path), self._folder.top
        if not self._opened:
            self._folder.open(self._prefix)
            step(self._marks.open())
            self._opened = True
        with translating(given):
            found = disk.resolved(top, given)
            relative = found.removeprefix(f"{top}/")
            if relative == found:
                raise Misuse(f"a guarded file lies in {top}, and {shown(given)} does not")
            if PRIVATE in relative.split("/"):
                raise Misuse(f"{PRIVATE} belongs to the guard")
            name = check_name(self._prefix + relative)
            self._folder.check_path(relative)
            status = disk.status(found)
        if status is not None and wanted is not None:
            if wanted == "folder" and not stat.S_ISLNK(status.st_mode):
                raise Misuse(f"{found} was not made by replace_folder(); move it away first")
            if wanted == "file" and not stat.S_ISREG(status.st_mode):
                raise Misuse(f"{found} is not a file; replace_folder() replaces a folder")
        return _Target(relative, found, status, name, key_of(name))


def _marked(name: LockedName, target: _Target, operation: str) -> Marked | None:
    """What the mark file says after an operation; None: the mark stays as it is."""
    return Marked(name.judged, target.key, operation, target.relative) if name.judged else None


class _JudgedCells(FileCells):
    """Cells whose swap writes nothing: FileGuard writes the new header with the contents, under the same lock."""

    def _contents(self, name: LockedName) -> bytes:
        return b""

    def _change(self, name: LockedName, key: str, header: bytes, value: bytes) -> None:
        name.judged = header


class _FileMarks(CellGuard):
    """The marks of a FileGuard."""

    traits = TRAITS
    kind = "a guard over files"

    def cells_of_decisions(self) -> FileCells:
        assert isinstance(self.cells, FileCells)
        return FileCells(self.cells.folder, self._runtime)

    async def write_step(self, stamp: Stamp | None, name: str, operation: str) -> None:
        await self._operate(stamp, {name: None}, operation=operation)


def __dir__() -> list[str]:
    return __all__
