"""Replace and append to files, and replace folders, under a lease."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from fenced.decision import Rule
from fenced.errors import Misuse, shown
from fenced.guarding import Fences, credential, names_of
from fenced.guards.files.folder import (
    PRIVATE,
    GuardedFolder,
    Marked,
    Place,
    create,
    full_disk,
    lock_folder,
    size_of,
    sync_tree,
)
from fenced.guards.files.values import TRAITS, FileCells
from fenced.guards.shared.cellguard import CellGuard
from fenced.guards.shared.cells import key_of
from fenced.model import Credential, check_name
from fenced.runtime.blocking import BlockingRuntime, step

FilePath = str | os.PathLike[str]


class _Target(NamedTuple):
    """A file or folder of the caller."""

    relative: str
    path: Path
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
        self, folder: str | os.PathLike[str], *, prefix: str = "", rule: Rule = "retry", mode: str = "enforce"
    ) -> None:
        runtime = BlockingRuntime()
        self._folder = GuardedFolder(Path(os.path.realpath(folder)))
        self._prefix = prefix
        self._cells = _PlannedCells(self._folder, runtime)
        self._marks = _FileMarks(self._cells, runtime, f"file://{self._folder.path}", rule=rule, mode=mode)
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
        target, operation = self._target(path, "file"), self._new_id()
        new = self._folder.new_path(target.key, operation)
        with self._folder.translated(new):
            _copy_rights(target.path, descriptor := create(new))
        file = os.fdopen(descriptor, "wb", closefd=False)
        try:
            with full_disk(target.path):
                yield file
                file.flush()
                os.fsync(descriptor)
            self._write(fence, target, operation)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        finally:
            with contextlib.suppress(OSError):
                file.close()  # after an error it may have a rest that cannot be written
            os.close(descriptor)  # this unlocks it; until now no other process took it for a dead writer's

    def write(self, fence: Fences | None, path: FilePath, contents: bytes) -> None:
        """Replace a file by these contents."""
        with self.replace(fence, path) as file:
            file.write(contents)

    def append(self, fence: Fences | None, path: FilePath, contents: bytes) -> None:
        """Append to a file, all of `contents` or nothing.

        After a power cut the file may end with a part of an append that had not returned.
        """
        target, operation = self._target(path, "file"), self._new_id()
        with self._folder.locked(target.key):
            offset = size_of(target.path)
            self._judge(fence, target, operation, Place(target.relative, offset), contents)
            marked = self._folder.marked(target.key)
            if marked is None or marked.operation != operation:  # the mark stays: nothing was written yet
                self._folder.append(target.key, target.relative, contents)

    @contextlib.contextmanager
    def replace_folder(self, fence: Fences | None, path: FilePath) -> Iterator[Path]:
        """A new, empty folder to fill. At the end of the `with` block a symbolic link at `path` leads to it.

        The folder before it is kept until the next one has replaced this one, for programs that read it meanwhile.
        """
        target, operation = self._target(path, "folder"), self._new_id()
        tree = self._folder.file("trees", target.key) / operation
        with self._folder.translated(tree):
            tree.mkdir(parents=True)
            descriptor = lock_folder(tree)
        try:
            with full_disk(tree):
                yield tree
                sync_tree(tree)
            with self._folder.locked(target.key):
                before = os.path.realpath(target.path)
                link = self._folder.new_path(target.key, operation)
                with self._folder.translated(link):
                    link.parent.mkdir(parents=True, exist_ok=True)
                    os.symlink(os.path.relpath(tree, target.path.parent), link)
                try:
                    self._write(fence, target, operation)
                finally:
                    link.unlink(missing_ok=True)
                self._folder.keep_previous(target.key, os.path.basename(before))
                self._folder.sweep_trees(target.key)
        except BaseException:
            if os.path.realpath(target.path) != str(tree):
                shutil.rmtree(tree, ignore_errors=True)
            raise
        finally:
            os.close(descriptor)

    def read(self, fence: Fences, path: FilePath) -> bytes:
        """Announce, then read the whole file."""
        with self.open(fence, path) as file:
            return file.read()

    def open(self, fence: Fences, path: FilePath) -> BinaryIO:
        """Announce, then open the file for reading."""
        self.announce(fence, path)
        return open(self._target(path).path, "rb")

    def announce(self, fence: Fences, *paths: FilePath) -> None:
        """Raise the marks of files, before anything is read: an older holder's write is refused from now on.

        Without paths these are the files of all names of the lease.
        """
        for path in paths or [self._path_of(name) for name in names_of(fence)]:
            target = self._target(path)
            with self._folder.locked(target.key):
                self._cells.plans[target.key] = Place(target.relative), None
                step(self._marks.announce(credential(fence, (target.name,), announcing=True)))

    def _path_of(self, name: str) -> str:
        if not name.startswith(self._prefix):
            raise Misuse(f"{name} is not the name of a file of this guard: these begin with {self._prefix}")
        return name.removeprefix(self._prefix)

    def _write(self, fence: Fences | None, target: _Target, operation: str) -> None:
        """Judge, and move the new contents to their place, while no other process can do either."""
        place = Place(target.relative)
        with self._folder.locked(target.key, operation):
            self._judge(fence, target, operation, place, None)
            with self._folder.translated(target.path):
                # Does nothing if that was done when the mark was raised.
                self._folder.finish(target.key, operation, place)

    def _judge(
        self, fence: Fences | None, target: _Target, operation: str, place: Place, contents: bytes | None
    ) -> None:
        """Raise the refusal, if the write is refused. If the mark rises, the write is carried out with it."""
        self._cells.plans[target.key] = place, contents  # no other thread uses it: the name is locked
        carried = None if fence is None else credential(fence, (target.name,))
        step(self._marks.write_step(carried, target.name, operation))

    def _target(self, path: FilePath, wanted: Literal["file", "folder", None] = None) -> _Target:
        """Where a path leads, links resolved, except for the links that lead to folders of ours."""
        if not self._opened:
            self._folder.open()
            step(self._marks.open())
            self._opened = True
        top = str(self._folder.path)
        given = os.path.join(top, path)
        found = os.path.join(os.path.realpath(os.path.dirname(given)), os.path.basename(given))
        if os.path.islink(found) and not os.path.realpath(found).startswith(f"{top}/{PRIVATE}/trees/"):
            found = os.path.realpath(found)
        relative = found.removeprefix(top + "/")
        if relative == found or os.path.basename(given) in ("", ".", ".."):
            raise Misuse(f"a guarded file lies in {top}, and {shown(os.fspath(path))} does not")
        if relative.split("/")[0] == PRIVATE:
            raise Misuse(f"{PRIVATE} belongs to the guard")
        if wanted == "folder" and os.path.lexists(found) and not os.path.islink(found):
            raise Misuse(f"{found} was not made by replace_folder(); move it away first")
        if wanted == "file" and os.path.isdir(found):
            raise Misuse(f"{found} is a folder; replace_folder() replaces it")
        name = check_name(self._prefix + relative)
        return _Target(relative, Path(found), name, key_of(name))


class _PlannedCells(FileCells):
    """Cells whose contents are written by FileGuard."""

    def __init__(self, folder: GuardedFolder, runtime: BlockingRuntime) -> None:
        super().__init__(folder, runtime)
        self.plans: dict[str, tuple[Place, bytes | None]] = {}
        """For each name that is being written: where its contents are, and the contents if they are appended."""

    def _contents(self, marked: Marked) -> bytes:
        return b""

    def _planned(
        self, key: str, version: bytes | None, header: bytes, value: bytes
    ) -> tuple[Place, bytes | None]:
        return self.plans[key]


class _FileMarks(CellGuard):
    """The marks of a FileGuard."""

    traits = TRAITS
    kind = "a guard over files"

    async def write_step(self, carried: Credential | None, name: str, operation: str) -> None:
        await self._operate(carried, {name: None}, operation=operation)


def _copy_rights(source: Path, descriptor: int) -> None:
    """Give a new file the mode of the file that it replaces, and its owner if this process may do that."""
    try:
        status = source.stat()
    except FileNotFoundError:
        return
    os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
    with contextlib.suppress(OSError):
        os.fchown(descriptor, status.st_uid, status.st_gid)
