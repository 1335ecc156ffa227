"""A guarded folder: marks, locks and new contents of its files, all below `.fenced` in that folder.

    .fenced/config          rule, modes and realm
    .fenced/marks/KEY.mark  the mark of a name; the second line says where its contents are
    .fenced/locks/KEY.lock  locked while a mark or its file changes; never replaced, never deleted
    .fenced/new/KEY/ID      new contents, before they are renamed to their place
    .fenced/trees/KEY/ID    folders, to which a symbolic link at their place leads

A write is fenced by the lock of its name: while a process has it, no other can read the mark, judge or rename. The
lock is the kernel's (`flock`), so it ends with its process. If a write raises a mark, the new mark file is the commit
point: its rename decides. What the write still has to do after that (the rename of the contents) is done by the next
process that takes the lock, if the writer has died. A write that leaves the mark as it is has one commit point, the
rename of its contents.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from fenced.errors import Contended, FencedError, Indeterminate, Misconfigured, Unavailable
from fenced.runtime import forking
from fenced.runtime.machine import NETWORK, boot_id, mount_of

PRIVATE = ".fenced"
LOCK_SECONDS = 10.0
"""How long a caller waits for the lock of a name."""
_POLL_SECONDS = 0.002
_PART = 200
"""How many characters of a key one file name has: file systems allow 255."""
_PREVIOUS = "previous"
_OPERATION = re.compile("[0-9a-f]{32}")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Place(NamedTuple):
    """Where the contents of a name are."""

    path: str
    """Relative to the folder."""
    offset: int | None = None
    """The write appends at this offset. None: it replaces the whole file."""


class Marked(NamedTuple):
    """What a mark file says: the cell's header, its newest operation, and where that operation's contents belong."""

    header: bytes
    operation: str
    place: Place


class GuardedFolder:
    """The files below `.fenced`. Every method blocks; one object may be used by many threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._private = path / PRIVATE
        self._held = threading.local()
        self.file = lru_cache(maxsize=4096)(self._file)

    def open(self) -> None:
        """Make what is missing, and clean up after writers that died."""
        if not self.path.is_dir():
            raise Misconfigured(f"the folder {self.path} does not exist; create it first")
        kind = mount_of(self.path)[1]
        if kind in NETWORK:
            raise Misconfigured(
                f"{self.path} lies on a network file system ({kind}), whose locks do not always exclude other "
                "machines: guard a folder on a local disk"
            )
        with self.translated(self._private):
            for part in ("marks", "locks", "new", "trees"):
                (self._private / part).mkdir(parents=True, exist_ok=True)
        for key in {*self.keys("new"), *self.keys("trees")}:
            with self.locked(key):  # this finishes or removes what a dead writer left
                self.sweep_trees(key)

    # Keys and their files.

    def _file(self, part: str, key: str, suffix: str = "") -> Path:
        """A key's file. Long keys are split into folders, whose names have no suffix: no key is another's folder."""
        return self._private / part / (_file_name(key) + suffix)

    def keys(self, part: str = "marks") -> list[str]:
        top = self._private / part
        if part == "marks":
            found = set(top.rglob("*.mark"))
        else:  # a folder for each key, with files or trees that are named by operations
            found = {path.parent for path in top.rglob("*") if _OPERATION.fullmatch(path.name)}
        return sorted(unquote("".join(path.relative_to(top).parts).removesuffix(".mark")) for path in found)

    # The lock of a name.

    @contextlib.contextmanager
    def locked(self, key: str, mine: str = "") -> Iterator[None]:
        """Exclude every other process and thread from this key, then complete what a dead writer has begun.

        `mine` is the operation of the caller, whose new contents are left as they are.

        Taking it again in the same thread does nothing. `forking.enter` delays a fork until the lock is released: a
        child would inherit the descriptor, and with it the lock.
        """
        held: dict[str, int] = self._held.__dict__
        if key in held:
            yield
            return
        outermost = not held
        if outermost:
            forking.enter()
        try:
            with self.translated(self._private):
                held[key] = self._lock(key)
            try:
                with self.translated(self._private):
                    self._recover(key, held[key], mine)
                yield
            finally:
                os.close(held.pop(key))  # this also unlocks it
        finally:
            if outermost:
                forking.leave()

    def _lock(self, key: str) -> int:
        path = self.file("locks", key, ".lock")
        descriptor = _opened(path, os.O_RDWR | os.O_CREAT)
        try:
            until = time.monotonic() + LOCK_SECONDS
            while not _try_lock(descriptor):
                if time.monotonic() >= until:
                    raise Contended(
                        f"another process has had {path} locked for {LOCK_SECONDS:g} s; a process that is stopped "
                        f"while it writes blocks the others: `fuser {path}` finds it"
                    )
                time.sleep(_POLL_SECONDS)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _recover(self, key: str, lock: int, mine: str) -> None:
        """Complete the write that was committed, undo an append that was not, and remove what dead writers left."""
        self._undo_append(lock)
        names = _listed(self.file("new", key))
        if names in ([], [mine]):
            return
        marked = self.marked(key)
        if marked is not None and marked.operation in names:
            self.finish(key, marked.operation, marked.place)
        for name in names:
            remove_if_dead(self.new_path(key, name))

    def sweep_trees(self, key: str) -> None:
        """Remove the trees of a folder, except for the current one and the one before it. The caller has the lock."""
        marked = self.marked(key)
        current = os.path.basename(os.path.realpath(self.path / marked.place.path)) if marked else ""
        trees = self.file("trees", key)
        for name in _listed(trees):
            if name not in (current, self._previous(key)):
                remove_if_dead(trees / name)

    def _previous(self, key: str) -> str:
        with contextlib.suppress(OSError):
            return os.readlink(self.file("trees", key) / _PREVIOUS)
        return ""

    def keep_previous(self, key: str, tree: str) -> None:
        """Keep a tree that was replaced until the next one is, for programs that read it. The caller has the lock."""
        link = self.file("trees", key) / _PREVIOUS
        link.unlink(missing_ok=True)
        os.symlink(tree, link)

    # Marks.

    def marked(self, key: str) -> Marked | None:
        path = self.file("marks", key, ".mark")
        try:
            return _parsed(_read(path))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise Misconfigured(f"{path} is not a mark file: restore it") from error

    def commit(self, key: str, marked: Marked, contents: bytes | None = None) -> None:
        """Replace the mark file, and write the contents of its operation. The caller has the lock.

        The rename of the mark file is the commit point. Contents that another call has prepared in `new_path` are
        moved to their place, too.
        """
        path = self.file("marks", key, ".mark")
        prepared = self.new_path(key, marked.operation)
        with self.translated(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if contents is not None:
                (self.path / marked.place.path).parent.mkdir(parents=True, exist_ok=True)
                write_synced(prepared, contents)
            new = self.new_path(key, "mark")  # one name is enough: the lock excludes other writers
            write_synced(new, marked.header + b"\n" + json.dumps([marked.operation, *marked.place]).encode())
        with self.translated(path, unknown=True):
            os.replace(new, path)
            sync_folder(path.parent)
            self.finish(key, marked.operation, marked.place)

    # Contents.

    def new_path(self, key: str, operation: str) -> Path:
        return self.file("new", key) / operation

    def finish(self, key: str, operation: str, place: Place) -> None:
        """Move the new contents of an operation to their place, if they are still waiting. The caller has the lock."""
        if not operation:
            return  # the configuration has no contents
        new = self.new_path(key, operation)
        target = self.path / place.path
        try:
            if place.offset is not None:
                _append(target, new.read_bytes(), place.offset)
                new.unlink()
                # If `new` were found again after a power cut, it would cut off what was appended later.
                sync_folder(new.parent)
            else:
                os.replace(new, target)
                sync_folder(target.parent)
        except FileNotFoundError:
            if os.path.lexists(new):
                raise  # the folder of the target has gone

    def append(self, key: str, path: str, body: bytes) -> None:
        """Append under a mark that stays as it is. The caller has the lock.

        The offset is noted in the lock file first: if this process dies, the next one cuts off what it has written.
        """
        lock: int = self._held.__dict__[key]
        target = self.path / path
        offset = size_of(target)
        with self.translated(target):
            _write_all(lock, json.dumps([boot_id(), path, offset]).encode(), 0)
            try:
                _append(target, body, offset)
            except OSError:
                if target.exists():
                    os.truncate(target, offset)
                raise
            finally:
                os.ftruncate(lock, 0)

    def _undo_append(self, lock: int) -> None:
        noted = os.pread(lock, 65536, 0)
        if not noted:
            return
        with contextlib.suppress(
            ValueError, FileNotFoundError
        ):  # the note itself was cut: nothing was written yet
            boot, path, offset = json.loads(noted)
            # A note of another boot is not believed: the append may have been acknowledged before the power failed.
            if boot == boot_id():
                os.truncate(self.path / path, offset)
        os.ftruncate(lock, 0)

    @contextlib.contextmanager
    def translated(self, path: Path, *, unknown: bool = False) -> Iterator[None]:
        """Turn an error of the operating system into ours. `unknown`: the write may have happened."""
        try:
            yield
        except FencedError:
            raise
        except OSError as error:
            raise _translated(error, path, unknown) from error


def _translated(error: OSError, path: Path, unknown: bool) -> FencedError:
    if unknown:
        return Indeterminate(f"{path}: whether the write has happened is unknown: {error}")
    if error.errno in _FULL:
        return Unavailable(
            f"the disk under {path} is full ({error}); nothing was changed: free some space and try again"
        )
    if error.errno == errno.EIO:
        return Unavailable(f"the disk under {path} failed: {error}; nothing was changed")
    return Misconfigured(f"{path} cannot be used: {error}")


def _file_name(key: str) -> str:
    text = quote(key, safe=" @+=,").replace(".", "%2E")
    return "/".join(text[at : at + _PART] for at in range(0, len(text), _PART))


@contextlib.contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Around the caller's own writes: a full disk is reported as everywhere, other errors are the caller's."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise _translated(error, path, unknown=False) from error


@lru_cache(maxsize=256)
def _parsed(text: bytes) -> Marked:
    """What a mark file says; the same ones are read again and again."""
    header, _, rest = text.partition(b"\n")
    operation, *place = json.loads(rest)
    return Marked(header, operation, Place(*place))


def _read(path: Path) -> bytes:
    """A whole file, as `Path.read_bytes` does it, in fewer steps."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        body = os.read(descriptor, 65536)
        while len(body) % 65536 == 0 and (more := os.read(descriptor, 65536)):
            body += more
        return body
    finally:
        os.close(descriptor)


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _opened(path: Path, flags: int) -> int:
    """Open a file; its folders are made if they are missing."""
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o666)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags | os.O_CLOEXEC, 0o666)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def create(path: Path) -> int:
    """A new file that is locked while its writer lives, so that others can tell whether it is dead."""
    while True:
        descriptor = _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        # Another process may have removed it between these two lines, since it was not locked yet: create it again.
        if _try_lock(descriptor) and os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def lock_folder(path: Path) -> int:
    """Lock a new folder while its writer lives."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def remove_if_dead(path: Path) -> None:
    """Remove a writer's file or tree, unless the writer still has it locked."""
    if path.is_symlink():
        if path.name != _PREVIOUS:
            path.unlink(missing_ok=True)  # made under the lock that we have: its writer is dead
        return
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if _try_lock(descriptor):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def write_synced(path: Path, body: bytes) -> None:
    descriptor = _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        _write_all(descriptor, body, 0)
        os.fsync(descriptor)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def _append(target: Path, body: bytes, offset: int) -> None:
    """Write at an offset, in place of whatever follows it."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(descriptor, offset)
        _write_all(descriptor, body, offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if offset == 0:
        sync_folder(target.parent)  # the file may be new


def _write_all(descriptor: int, body: bytes, offset: int) -> None:
    view = memoryview(body)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def sync_folder(path: Path) -> None:
    """Sync a folder, so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(tree: Path) -> None:
    """Sync every file and folder below."""
    for folder, _, names in os.walk(tree):
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        sync_folder(Path(folder))


def _listed(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []
