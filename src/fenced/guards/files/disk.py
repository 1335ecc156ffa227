"""Files that are synced, locked and removed; and what errors of the operating system mean."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator

from fenced.errors import FencedError, Indeterminate, Misconfigured, Unavailable

PREVIOUS = "previous"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def translated(error: OSError, path: str, *, unknown: bool = False) -> FencedError:
    """Our error for one of the operating system. `unknown`: the write may have happened."""
    if unknown:
        return Indeterminate(f"{path}: whether the write has happened is unknown: {error}")
    if error.errno in _FULL:
        return Unavailable(
            f"the disk under {path} is full ({error}); nothing was changed: free some space and try again"
        )
    if error.errno == errno.EIO:
        return Unavailable(f"the disk under {path} failed: {error}; nothing was changed")
    return Misconfigured(f"{path} cannot be used: {error}")


@contextlib.contextmanager
def translating(path: str, *, unknown: bool = False) -> Iterator[None]:
    """Turn errors of the operating system into ours."""
    try:
        yield
    except OSError as error:
        raise translated(error, path, unknown=unknown) from error


def raise_if_full(error: BaseException | None, path: str) -> None:
    """After the caller's own writes: a full disk is reported as everywhere, other errors are the caller's."""
    if isinstance(error, OSError) and error.errno in _FULL:
        raise translated(error, path) from error


def opened(path: str, flags: int) -> int:
    """Open a file; its folders are made if they are missing."""
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o666)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, flags | os.O_CLOEXEC, 0o666)


def try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def create(path: str, like: os.stat_result | None) -> int:
    """A new file that is locked while its writer lives, so that others can tell whether it is dead.

    It gets the mode of the file that it will replace, and its owner if this process may do that.
    """
    while True:
        descriptor = opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            # Another process may have removed it between these two lines, since it was not locked yet: create it again.
            if try_lock(descriptor) and (status := os.fstat(descriptor)).st_nlink:
                if like is not None:
                    _copy_rights(like, descriptor, status)
                return descriptor
        except BaseException:
            remove(path)
            os.close(descriptor)
            raise
        os.close(descriptor)


def _copy_rights(old: os.stat_result, descriptor: int, new: os.stat_result) -> None:
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        with contextlib.suppress(OSError):
            os.fchown(descriptor, old.st_uid, old.st_gid)
    if old.st_mode != new.st_mode:
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def lock_folder(path: str) -> int:
    """Lock a new folder while its writer lives."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def remove_if_dead(path: str) -> None:
    """Remove a writer's file or tree, unless the writer still has it locked. The caller has the lock of its name."""
    if os.path.islink(path):
        if os.path.basename(path) != PREVIOUS:
            remove(path)  # made under the lock that the caller has now: its writer is dead
        return
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if try_lock(descriptor):
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                remove(path)
    finally:
        os.close(descriptor)


def remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def read(path: str) -> bytes | None:
    """A whole file; None if there is none."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def write_synced(path: str, body: bytes) -> None:
    descriptor = opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(descriptor, body, 0)
        os.fsync(descriptor)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def append_synced(target: str, body: bytes, offset: int) -> None:
    """Write at an offset, in place of whatever follows it."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(descriptor, offset)
        write_all(descriptor, body, offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if offset == 0:
        sync_folder(os.path.dirname(target))  # the file may be new


def write_all(descriptor: int, body: bytes, offset: int) -> None:
    view = memoryview(body)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def sync_folder(path: str) -> None:
    """Sync a folder, so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(tree: str) -> None:
    """Sync every file and folder below."""
    for folder, _, names in os.walk(tree):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        sync_folder(folder)


def listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
