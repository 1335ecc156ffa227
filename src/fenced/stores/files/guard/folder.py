"""A guarded folder: marks, locks and new contents of its files, all below `.fenced` in that folder.

    .fenced/config          rule, modes and realm
    .fenced/prefix          a link whose text is the prefix of the names
    .fenced/marks/KEY.mark  the mark of a name, and what is under way there (see pages.py and locked.py). The file is
                            locked while the mark or the contents change; it is never replaced, never deleted
    .fenced/new/KEY/ID      new contents, before they are renamed to their place
    .fenced/trees/KEY/ID    folders, to which a symbolic link at their place leads
    .fenced/values/KEY      values under names

A write is fenced by the lock of its name: while a process has it, no other can read the mark, judge or rename. The
lock is the kernel's (`flock`), so it ends with its process.

What is in `.fenced` says where this process writes. So it must belong to the user of this process, and nobody else may
write there; others can only pass through to the trees.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fenced.errors import Contended, FencedError, Misconfigured
from fenced.guards.cells import CONFIG
from fenced.runtime import forking
from fenced.runtime.machine import NETWORK, mount_of
from fenced.stores.files.guard import disk
from fenced.stores.files.guard.disk import PRIVATE, translating
from fenced.stores.files.guard.locked import LockedName, Room, file_of, pages_in, parsed

LOCK_SECONDS = 10.0
"""How long a caller waits for the lock of a name."""
_POLL_SECONDS = 0.002
_PARTS = {"marks": 0o700, "new": 0o700, "values": 0o700, "trees": 0o711}
"""Folders of `.fenced`, and the rights of users. Links lead other users to the trees."""
_log = logging.getLogger("fenced")


class GuardedFolder:
    """The files below `.fenced`. Every method blocks; one object may be used by many threads."""

    def __init__(self, path: Path) -> None:
        self.top = str(path)
        self.private = f"{path}/{PRIVATE}"
        self._locks = threading.local()

    # Opening.

    def open(self, prefix: str | None = None) -> None:
        """Make what is missing, and clean up after writers that died."""
        if (kind := mount_of(Path(self.top))[1]) in NETWORK:
            raise Misconfigured(
                f"{self.top} lies on a network file system ({kind}), whose locks do not always exclude other "
                "machines: guard a folder on a local disk"
            )
        with translating(self.private):
            for parent in Path(self.top).parents:
                self._check(str(parent))
            self._make()
            with self.entered() as room:
                if prefix is not None:
                    self._bind(room, prefix)
                for file in disk.listed("new", room.private):
                    self._clean_up(room, file)

    def _make(self) -> None:
        try:
            top = disk.open_folder(self.top)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Misconfigured(f"the folder {self.top} does not exist; create it first") from error
        try:
            disk.make_folder(PRIVATE, top, 0o711)
            private = disk.open_private(PRIVATE, top)
            try:
                for part, mode in _PARTS.items():
                    disk.make_folder(part, private, mode)
                    disk.close(disk.open_private(part, private))
                disk.sync(private)
            finally:
                disk.close(private)
            disk.sync(top)
        finally:
            disk.close(top)

    def check_path(self, relative: str) -> None:
        """Refuse a file that another guard has, too: by two marks two holders could write at the same time."""
        while "/" in relative:
            relative = relative.rpartition("/")[0]
            self._check(f"{self.top}/{relative}")

    def _check(self, folder: str) -> None:
        if disk.is_guarded(folder):
            raise Misconfigured(
                f"{folder} has a guard of its own, and {self.top} another: a file would have two marks; guard one of "
                f"the two folders, and remove the {PRIVATE} of the other"
            )

    def _bind(self, room: Room, prefix: str) -> None:
        """Refuse another prefix: a file would have a mark under each of its names."""
        with contextlib.suppress(FileExistsError):
            disk.link_to(f"prefix:{prefix}", "prefix", room.private)  # a link is made together with its text
            disk.sync(room.private)
        found = (disk.read_link("prefix", room.private) or "").partition(":")[2]
        if found != prefix:
            raise Misconfigured(
                f"the names of {self.top} begin with {found!r}, not {prefix!r}: use one prefix"
            )

    def _clean_up(self, room: Room, file: str) -> None:
        """Complete or remove what a dead writer left. A name that is in use is left to its user."""
        try:
            with self.locked_in(room, file, patience=0):
                pass
        except Contended:
            pass
        except (OSError, FencedError) as error:
            _log.warning("what a writer left in %s/new/%s stays for now: %s", self.private, file, error)

    @contextlib.contextmanager
    def entered(self) -> Iterator[Room]:
        """A `with` block that has the folder and `.fenced` open."""
        with translating(self.private):
            top = disk.open_folder(self.top)
        try:
            with translating(self.private):
                private = disk.open_private(PRIVATE, top)
            try:
                yield Room(top, private)
            finally:
                disk.close(private)
        finally:
            disk.close(top)

    def keys(self) -> list[str]:
        """The keys of all names that have a mark."""
        found = []
        with self.entered() as room:
            for name in disk.listed("marks", room.private):
                file, descriptor = name.removesuffix(".mark"), disk.open_mark(f"marks/{name}", room.private)
                try:
                    pages = pages_in(descriptor, file)
                finally:
                    disk.close(descriptor)
                if pages and (marked := parsed(pages[0].body, file)).header:
                    found.append(marked.key)
        return sorted(found)

    # The lock of a name.

    @contextlib.contextmanager
    def locked(self, key: str) -> Iterator[LockedName]:
        """A `with` block that has the lock of a name. What a dead writer has begun is completed or undone first."""
        locks: dict[str, LockedName] = self._locks.__dict__
        if (file := file_of(key)) in locks:  # an outer block of this thread has it
            yield locks[file]
            return
        with self.entered() as room, self.locked_in(room, file) as name:
            yield name

    @contextlib.contextmanager
    def locked_in(
        self, room: Room, file: str, mine: str = "", patience: float | None = None
    ) -> Iterator[LockedName]:
        """The same for a caller that has the folder open. Its own operation, `mine`, is left as it is."""
        locks: dict[str, LockedName] = self._locks.__dict__
        outermost = not locks
        if outermost:
            # This delays a fork until the lock is released: a child would inherit the descriptor, and with it the lock.
            # Not for a further lock of this thread: a fork that waits for the first one would never end.
            forking.enter()
        try:
            descriptor = disk.open_mark(f"marks/{file}.mark", room.private)
            try:
                self._wait(descriptor, file, LOCK_SECONDS if patience is None else patience)
                name = LockedName(room, file, descriptor)
                name.recover(mine)
                locks[file] = name
                try:
                    yield name
                finally:
                    del locks[file]
            finally:
                disk.close(descriptor)  # this also unlocks it
        finally:
            if outermost:
                forking.leave()

    def _wait(self, descriptor: int, file: str, patience: float) -> None:
        until = 0.0
        while not disk.try_lock(descriptor):
            until = until or time.monotonic() + patience
            if time.monotonic() >= until:
                path = f"{self.private}/marks/{file}.mark"
                raise Contended(
                    f"another process has had {path} locked for {patience:g} s; a process that is stopped while it "
                    f"writes blocks the others: `fuser {path}` finds it"
                )
            time.sleep(_POLL_SECONDS)

    # The configuration.

    def configuration(self) -> bytes | None:
        """The configuration needs no lock to be read: it is one file, which is replaced by a rename."""
        with self.entered() as room, contextlib.suppress(FileNotFoundError):
            return disk.read(CONFIG, room.private)
        return None

    def configure(self, body: bytes, operation: str) -> None:
        """Replace the configuration. The caller has its lock."""
        with self.entered() as room:
            new = self.prepare(room, CONFIG, operation, body)
            try:
                disk.rename(new, room.private, CONFIG, room.private)
            except BaseException:
                disk.remove(new, room.private)
                raise
            try:
                disk.sync(room.private)
            except OSError as error:
                raise disk.unknown(error, self.private) from error

    # New contents.

    def create(self, room: Room, key: str, operation: str, mode: int = 0o600) -> int | None:
        """A new file, locked while its writer lives; None: it was removed before it was locked."""
        folder = f"new/{file_of(key)}"
        try:
            return disk.create(f"{folder}/{operation}", room.private, mode)
        except FileNotFoundError:
            disk.make_folder(folder, room.private)
            return disk.create(f"{folder}/{operation}", room.private, mode)

    def prepare(self, room: Room, key: str, operation: str, body: bytes) -> str:
        """Write new contents; returns their path. The caller has the lock of the name, so nobody removes them."""
        path, descriptor = f"new/{file_of(key)}/{operation}", self.create(room, key, operation)
        assert descriptor is not None
        try:
            disk.write_all(descriptor, body, 0)
            disk.sync(descriptor)
        except BaseException:
            disk.remove(path, room.private)
            raise
        finally:
            disk.close(descriptor)
        return path
