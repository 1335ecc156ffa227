"""A guarded folder: marks, locks and new contents of its files, all below `.fenced` in that folder.

    .fenced/config          rule, modes and realm
    .fenced/marks/KEY.mark  the mark of a name, and where its contents are (see pages.py). The file is locked while
                            the mark or the contents change; it is never replaced, never deleted
    .fenced/new/KEY/ID      new contents, before they are renamed to their place
    .fenced/trees/KEY/ID    folders, to which a symbolic link at their place leads

A write is fenced by the lock of its name: while a process has it, no other can read the mark, judge or rename. The
lock is the kernel's (`flock`), so it ends with its process. If a write raises a mark, the new page of the mark file is
the commit point. What the write still has to do after that (the rename of the contents) is done by the next process
that takes the lock, if the writer has died. A write that leaves the mark as it is has one commit point, the rename of
its contents.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from fenced.errors import Contended, Misconfigured
from fenced.guards.files import disk, pages
from fenced.guards.files.disk import sync_folder, translated, translating
from fenced.runtime import forking
from fenced.runtime.machine import NETWORK, boot_id, mount_of

PRIVATE = ".fenced"
LOCK_SECONDS = 10.0
"""How long a caller waits for the lock of a name."""
_POLL_SECONDS = 0.002
_PART = 200
"""How many characters of a key one file name has: file systems allow 255."""
_REMEMBERED_MAX = 4096
_OPERATION = re.compile("[0-9a-f]{32}")


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


class _Held:
    """The lock of a name that a thread has, and what the mark file says meanwhile: no other can change it."""

    __slots__ = ("descriptor", "marked", "page", "pending")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.pending = False
        self.page: pages.Page | None = None
        self.marked: Marked | None = None


class GuardedFolder:
    """The files below `.fenced`. Every method blocks; one object may be used by many threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.top = str(path)
        self._private = f"{path}/{PRIVATE}"
        self._config = f"{self._private}/config"
        self._locks = threading.local()
        self._swept: dict[str, int] = {}
        """For names whose new contents have all been moved or removed: the number of the mark's page at that time."""
        self.file = lru_cache(maxsize=_REMEMBERED_MAX)(self._file)

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
        with translating(self._private):
            for part in ("marks", "new", "trees"):
                os.makedirs(f"{self._private}/{part}", exist_ok=True)
        for key in {*self.keys("new"), *self.keys("trees")}:
            with self.locked(key):  # this finishes or removes what a dead writer left
                self.sweep_trees(key)

    # Keys and their files.

    def _file(self, part: str, key: str, suffix: str = "") -> str:
        """A key's file. Long keys are split into folders, whose names have no suffix: no key is another's folder."""
        return f"{self._private}/{part}/{_file_name(key)}{suffix}"

    def keys(self, part: str = "marks") -> list[str]:
        top = Path(self._private, part)
        if part == "marks":
            found = set(top.rglob("*.mark"))
        else:  # a folder for each key, with files or trees that are named by operations
            found = {path.parent for path in top.rglob("*") if _OPERATION.fullmatch(path.name)}
        return sorted(unquote("".join(path.relative_to(top).parts).removesuffix(".mark")) for path in found)

    # The lock of a name.

    @contextlib.contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """A `with` block that has the lock of a name."""
        outermost = self.lock(key)
        try:
            yield
        finally:
            if outermost:
                self.unlock(key)

    def lock(self, key: str, mine: str = "") -> bool:
        """Exclude every other process and thread from this key, then complete what a dead writer has begun.

        `mine` is the operation of the caller, whose new contents are left as they are. False: this thread has the
        lock already, and the caller does not release it.
        """
        locks: dict[str, _Held] = self._locks.__dict__
        if key in locks:
            return False
        if not locks:
            # This delays a fork until the lock is released: a child would inherit the descriptor, and with it the lock.
            forking.enter()
        try:
            held = locks[key] = _Held(self._lock(key))
            self._read(key, held)
            if not self._is_swept(key, held.page):
                self._recover(key, held.marked, mine)
        except BaseException as error:
            self.unlock(key)
            if isinstance(error, OSError):
                raise translated(error, self._private) from error
            raise
        return True

    def unlock(self, key: str) -> None:
        locks: dict[str, _Held] = self._locks.__dict__
        if (held := locks.pop(key, None)) is not None:
            os.close(held.descriptor)  # this also unlocks it
        if not locks:
            forking.leave()

    def _lock(self, key: str) -> int:
        path = self.file("marks", key, ".mark")
        descriptor = disk.opened(path, os.O_RDWR | os.O_CREAT)
        try:
            until = 0.0
            while not disk.try_lock(descriptor):
                until = until or time.monotonic() + LOCK_SECONDS
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

    def _read(self, key: str, held: _Held) -> None:
        """Read the mark, and undo an append that was not complete."""
        text = os.pread(held.descriptor, pages.END + pages.SIZE, 0)
        try:
            held.page = pages.newest(text)
            held.marked = held.page and _parsed(held.page.body)
        except (ValueError, TypeError) as error:
            path = self.file("marks", key, ".mark")
            raise Misconfigured(f"{path} is not a mark file: restore it") from error
        if len(text) > pages.END:
            self._undo_append(held.descriptor, text[pages.END :])

    def _is_swept(self, key: str, page: pages.Page | None) -> bool:
        """Whether no committed contents wait for their rename: this process saw so, and the mark is still the same.

        The contents of a page are renamed once, so they cannot wait again. A writer that dies without raising the
        mark may leave a file, which is removed under the next mark.
        """
        number = self._swept.pop(
            key, None
        )  # not there while a write is under way: if it fails, `new` is listed
        return page is not None and page.number == number

    def _recover(self, key: str, marked: Marked | None, mine: str) -> None:
        """Complete the write that was committed, and remove what dead writers left."""
        names = disk.listed(self.file("new", key))
        if names in ([], [mine]):
            return
        if marked is not None and marked.operation in names:
            self.finish(key, marked.operation, marked.place)
        for name in names:
            disk.remove_if_dead(self.new_path(key, name))

    def sweep_trees(self, key: str) -> None:
        """Remove the trees of a folder, except for the current one and the one before it. The caller has the lock."""
        marked = self.marked(key)
        current = os.path.basename(os.path.realpath(self.path / marked.place.path)) if marked else ""
        trees = self.file("trees", key)
        for name in disk.listed(trees):
            if name not in (current, self._previous(key)):
                disk.remove_if_dead(f"{trees}/{name}")

    def _previous(self, key: str) -> str:
        with contextlib.suppress(OSError):
            return os.readlink(f"{self.file('trees', key)}/{disk.PREVIOUS}")
        return ""

    def keep_previous(self, key: str, tree: str) -> None:
        """Keep a tree that was replaced until the next one is, for programs that read it. The caller has the lock."""
        link = f"{self.file('trees', key)}/{disk.PREVIOUS}"
        disk.remove(link)
        os.symlink(tree, link)

    # The configuration.

    def configuration(self) -> bytes | None:
        """The configuration needs no lock to be read: it is one file, which is replaced by a rename."""
        with translating(self._config):
            return disk.read(self._config)

    def configure(self, body: bytes) -> None:
        """Replace the configuration. The caller has its lock."""
        with translating(self._config):
            disk.write_synced(new := f"{self._config}.new", body)
        with translating(self._config, unknown=True):
            os.replace(new, self._config)
            sync_folder(self._private)

    # Marks.

    def marked(self, key: str) -> Marked | None:
        """What the mark file says. The caller has the lock."""
        held: _Held = self._locks.__dict__[key]
        return held.marked

    def commit(self, key: str, marked: Marked, contents: bytes | None = None) -> None:
        """Raise the mark, and write the contents of its operation. The caller has the lock.

        The page of the mark file is the commit point. Contents that another call has prepared in `new_path` are
        moved to their place, too.
        """
        path = self.file("marks", key, ".mark")
        if contents is not None:
            with translating(path):
                os.makedirs(os.path.dirname(f"{self.top}/{marked.place.path}"), exist_ok=True)
                disk.write_synced(self.new_path(key, marked.operation), contents)
        self._write_page(path, self._locks.__dict__[key], marked)
        with translating(path, unknown=True):
            self.finish(key, marked.operation, marked.place)

    def _write_page(self, path: str, held: _Held, marked: Marked) -> None:
        body = marked.header + b"\n" + json.dumps([marked.operation, *marked.place]).encode()
        if held.page is None:
            with translating(path):
                sync_folder(os.path.dirname(path))  # before the first page: a mark lies in a file that stays
        try:
            held.page = pages.write(path, held.page, body)
        except OSError as error:
            found = pages.newest(os.pread(held.descriptor, pages.END, 0))
            raise translated(error, path, unknown=found is not None and found.body == body) from error
        held.marked, held.pending = marked, True

    def is_pending(self, key: str) -> bool:
        """Whether the mark has risen, and its contents are not at their place yet. The caller has the lock."""
        held: _Held = self._locks.__dict__[key]
        return held.pending

    # Contents.

    def new_path(self, key: str, operation: str) -> str:
        return f"{self.file('new', key)}/{operation}"

    def finish(self, key: str, operation: str, place: Place) -> None:
        """Move the new contents of an operation to their place, if they are still waiting. The caller has the lock."""
        new = self.new_path(key, operation)
        target = f"{self.top}/{place.path}"
        try:
            if place.offset is None:
                os.replace(new, target)
                self._sync(target.rpartition("/")[0])
            elif (body := disk.read(new)) is not None:
                disk.append_synced(target, body, place.offset)
                os.unlink(new)
                # If `new` were found again after a power cut, it would cut off what was appended later.
                sync_folder(os.path.dirname(new))
        except FileNotFoundError:
            if os.path.lexists(new):
                raise  # the folder of the target has gone
        held: _Held = self._locks.__dict__[key]
        # Not with the first write under a mark: the second one lists `new`, and removes what dead writers left.
        if held.page is not None and not held.pending:
            if len(self._swept) >= _REMEMBERED_MAX:
                self._swept.clear()
            self._swept[key] = held.page.number
        held.pending = False

    @staticmethod
    def _sync(folder: str) -> None:
        """Sync a folder after a rename. If that fails, the write has happened, but may not survive a power cut."""
        try:
            sync_folder(folder)
        except OSError as error:
            raise translated(error, folder, unknown=True) from error

    def append(self, key: str, path: str, body: bytes) -> None:
        """Append under a mark that stays as it is. The caller has the lock.

        The offset is noted in the mark file first, behind the pages: if this process dies, the next one cuts off
        what it has written.
        """
        lock = self._locks.__dict__[key].descriptor
        target = f"{self.top}/{path}"
        offset = disk.size_of(target)
        note = json.dumps([boot_id(), path, offset]).encode()
        with translating(target):
            disk.write_all(lock, note, pages.END)
            try:
                disk.append_synced(target, body, offset)
            except BaseException:
                self._undo_append(lock, note)
                raise
            os.ftruncate(lock, pages.END)

    def _undo_append(self, lock: int, noted: bytes) -> None:
        # ValueError: the note itself was cut, so nothing was written yet.
        with contextlib.suppress(ValueError, FileNotFoundError):
            boot, path, offset = json.loads(noted)
            # A note of another boot is not believed: the append may have been acknowledged before the power failed.
            if boot == boot_id():
                os.truncate(f"{self.top}/{path}", offset)
        os.ftruncate(lock, pages.END)


def _file_name(key: str) -> str:
    text = quote(key, safe=" @+=,").replace(".", "%2E")
    return "/".join(text[at : at + _PART] for at in range(0, len(text), _PART))


@lru_cache(maxsize=256)
def _parsed(body: bytes) -> Marked:
    """What a mark file says; the same ones are read again and again."""
    header, _, rest = body.partition(b"\n")
    operation, *place = json.loads(rest)
    return Marked(header, operation, Place(*place))
