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
from fenced.errors import FencedError, Indeterminate, Misuse, shown
from fenced.guarding import Fences, credential, names_of, stamp_of
from fenced.guards.files import disk
from fenced.guards.files.disk import translated, translating
from fenced.guards.files.folder import PRIVATE, GuardedFolder, Marked, Place
from fenced.guards.files.values import TRAITS, FileCells
from fenced.guards.shared.cellguard import CellGuard
from fenced.guards.shared.cells import key_of, mark_in
from fenced.guards.shared.guardedcells import LAG_SECONDS
from fenced.model import Stamp, check_name
from fenced.runtime.blocking import BlockingRuntime, step

__all__ = ["FileGuard", "FilePath"]

FilePath = str | os.PathLike[str]


class _Target(NamedTuple):
    """A file or folder of the caller."""

    relative: str
    path: str
    status: os.stat_result | None
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
        self,
        folder: str | os.PathLike[str],
        *,
        prefix: str = "",
        rule: Rule | None = None,
        mode: str = "enforce",
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
        with _Replacing(self, fence, path) as descriptor:
            file = os.fdopen(descriptor, "wb", closefd=False)
            try:
                yield file
                file.flush()
            finally:
                with contextlib.suppress(OSError):
                    file.close()  # after an error it may have a rest that cannot be written

    def write(self, fence: Fences | None, path: FilePath, contents: bytes) -> None:
        """Replace a file by these contents."""
        with _Replacing(self, fence, path) as descriptor:
            disk.write_all(descriptor, contents, 0)

    def append(self, fence: Fences | None, path: FilePath, contents: bytes) -> None:
        """Append to a file, all of `contents` or nothing.

        After a power cut the file may end with a part of an append that had not returned.
        """
        target, operation = self._target(path, "file"), self._new_id()
        with self._folder.locked(target.key):
            place = Place(target.relative, disk.size_of(target.path))
            if self._judge(fence, target, operation, place, contents):
                self._folder.append(target.key, target.relative, contents)

    @contextlib.contextmanager
    def replace_folder(self, fence: Fences | None, path: FilePath) -> Iterator[Path]:
        """A new, empty folder to fill. At the end of the `with` block a symbolic link at `path` leads to it.

        The folder before it is kept until the next one has replaced this one, for programs that read it meanwhile.
        """
        target, operation = self._target(path, "folder"), self._new_id()
        tree = f"{self._folder.file('trees', target.key)}/{operation}"
        with translating(tree):
            os.makedirs(tree)
            descriptor = disk.lock_folder(tree)
        link, committing = self._folder.new_path(target.key, operation), False
        try:
            try:
                yield Path(tree)
                disk.sync_tree(tree)
            except OSError as error:
                disk.raise_if_full(error, tree)
                raise
            with self._folder.locked(target.key):
                before = os.path.realpath(target.path)
                with translating(link):
                    os.makedirs(os.path.dirname(link), exist_ok=True)
                    os.symlink(os.path.relpath(tree, os.path.dirname(target.path)), link)
                committing = True
                self._write(fence, target, operation)
                self._folder.keep_previous(target.key, os.path.basename(before))
                self._folder.sweep_trees(target.key)
        except FencedError as failure:
            committing = committing and isinstance(failure, Indeterminate)
            raise
        finally:
            if not committing:  # as for a file: an interrupted commit may have happened
                disk.remove(link)
                shutil.rmtree(tree, ignore_errors=True)
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
        outermost = self._folder.lock(target.key, operation)
        try:
            if self._judge(fence, target, operation, place, None):
                self._folder.finish(target.key, operation, place)
        except OSError as error:
            raise translated(error, target.path) from error
        finally:
            if outermost:
                self._folder.unlock(target.key)

    def _judge(
        self, fence: Fences | None, target: _Target, operation: str, place: Place, contents: bytes | None
    ) -> bool:
        """Raise the refusal, if the write is refused. If the mark rises, the write is carried out with it.

        Returns whether the mark stays as it is, and the write is still to be carried out. The caller has the lock.
        """
        stamp = None if fence is None else stamp_of(fence, self._marks.kind)
        if self._marks.stays(self._folder.marked(target.key), stamp, target.name):
            return True
        self._cells.plans[target.key] = place, contents  # no other thread uses it: the name is locked
        step(self._marks.write_step(stamp, target.name, operation))
        marked = self._folder.marked(target.key)
        if marked is None or marked.operation != operation:
            return True
        if self._folder.is_pending(target.key):  # an error came between the mark and the contents
            with translating(target.path, unknown=True):
                self._folder.finish(target.key, operation, place)
        return False

    def _target(self, path: FilePath, wanted: Literal["file", "folder", None] = None) -> _Target:
        """Where a path leads, links resolved, except for the links that lead to folders of ours."""
        if not self._opened:
            self._folder.open()
            step(self._marks.open())
            self._opened = True
        top, given = self._folder.top, os.fspath(path)
        found, status = _without_links(top, given) or self._resolved(given)
        relative = found.removeprefix(f"{top}/")
        if relative == found:
            raise self._elsewhere(given)
        if relative.partition("/")[0] == PRIVATE:
            raise Misuse(f"{PRIVATE} belongs to the guard")
        if status is not None and wanted is not None:
            if wanted == "folder" and not stat.S_ISLNK(status.st_mode):
                raise Misuse(f"{found} was not made by replace_folder(); move it away first")
            if wanted == "file" and not stat.S_ISREG(status.st_mode) and os.path.isdir(found):
                raise Misuse(f"{found} is a folder; replace_folder() replaces it")
        name = check_name(self._prefix + relative)
        return _Target(relative, found, status, name, key_of(name))

    def _resolved(self, given: str) -> tuple[str, os.stat_result | None]:
        """Where a path leads, and its status."""
        top = self._folder.top
        folder, name = os.path.split(os.path.join(top, given))
        if name in ("", ".", ".."):
            raise self._elsewhere(given)
        found = os.path.join(os.path.realpath(folder), name)
        if os.path.islink(found) and not os.path.realpath(found).startswith(f"{top}/{PRIVATE}/trees/"):
            found = os.path.realpath(found)
        return found, _status(found)

    def _elsewhere(self, given: str) -> Misuse:
        return Misuse(f"a guarded file lies in {self._folder.top}, and {shown(given)} does not")


class _Replacing:
    """A `with` block with the descriptor of a new file. The file replaces the old one at the end, or not at all."""

    __slots__ = ("_descriptor", "_fence", "_guard", "_new", "_operation", "_target")

    def __init__(self, guard: FileGuard, fence: Fences | None, path: FilePath) -> None:
        self._guard = guard
        self._fence = fence
        self._target = guard._target(path, "file")
        self._operation = guard._new_id()
        self._new = guard._folder.new_path(self._target.key, self._operation)

    def __enter__(self) -> int:
        try:
            self._descriptor = disk.create(self._new, self._target.status)
        except OSError as error:
            raise translated(error, self._new) from error
        return self._descriptor

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        committing = False
        try:
            if error is None:
                os.fsync(self._descriptor)
                committing = True
                self._guard._write(self._fence, self._target, self._operation)
            else:
                disk.raise_if_full(error, self._target.path)
        except OSError as failure:
            disk.raise_if_full(failure, self._target.path)
            raise
        except FencedError as failure:
            committing = committing and isinstance(failure, Indeterminate)
            raise
        finally:
            # An interrupted commit may have happened: the next process that takes the lock completes or removes it.
            if not committing:
                disk.remove(self._new)
            # This unlocks the file: until now no other process took it for a dead writer's.
            os.close(self._descriptor)


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

    def stays(self, marked: Marked | None, stamp: Stamp | None, name: str) -> bool:
        """Whether a mark admits a write and stays as it is, nearly always. False: `write_step` judges in full."""
        known = self._known
        if marked is None or stamp is None or known is None:
            return False
        if known.config.realm is None or self._runtime.now() - known.at > LAG_SECONDS:
            return False
        return self._admits(known.config, mark_in(marked.header), stamp, name)

    async def write_step(self, stamp: Stamp | None, name: str, operation: str) -> None:
        await self._operate(stamp, {name: None}, operation=operation)


def _without_links(top: str, given: str) -> tuple[str, os.stat_result | None] | None:
    """The path of a file and its status, if nothing on the way from the folder is a link, as nearly always."""
    found, status = top, None
    for part in given.split("/"):
        found = f"{found}/{part}"
        status = _status(found)
        if part in ("", ".", "..") or (status is not None and stat.S_ISLNK(status.st_mode)):
            return None
    return found, status


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def __dir__() -> list[str]:
    return __all__
