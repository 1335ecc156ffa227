"""Every system call of the guard over files, and what errors of the operating system mean.

No other module of this guard makes any: the tests let each call here fail in turn, and the process die at each in turn.

`at` is the descriptor of an open folder, from which a path begins. The last part of a path is never followed if it is
a symbolic link. So whoever may write into the guarded folder cannot lead this process elsewhere by links.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from typing import BinaryIO, NoReturn

from fenced.errors import FencedError, Indeterminate, Misconfigured, Misuse, Unavailable, shown

PRIVATE = ".fenced"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_NO_FILE = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO)
_LATER = (errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOLCK)
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | _SAFE


# Errors.


def translated(error: OSError, path: str) -> FencedError:
    """Our error for one of the operating system that changed nothing."""
    if error.errno in _FULL:
        return Unavailable(
            f"the disk under {path} is full ({error}); nothing was changed: free some space and try again"
        )
    if error.errno in _LATER:
        return Unavailable(f"{path} cannot be used now: {error}; nothing was changed")
    if error.errno == errno.ENAMETOOLONG:
        return Misuse(f"{shown(path)} is too long for a path: {error.strerror}")
    return Misconfigured(f"{path} cannot be used: {error}; nothing was changed")


def unknown(error: OSError, path: str) -> FencedError:
    return Indeterminate(f"{path}: whether the write has happened is unknown: {error}")


class translating:  # noqa: N801 - it reads as a verb where it is used
    """A `with` block that turns errors of the operating system into ours."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, OSError):
            raise translated(error, self._path) from error


class FullDisk(translating):
    """The same for the caller's own writes: a full disk is reported as everywhere, other errors are the caller's."""

    __slots__ = ()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise translated(error, self._path) from error


# Paths of the caller.


def text_of(path: str | os.PathLike[str]) -> str:
    """A path as the operating system can take it."""
    given = os.fspath(path)
    try:
        if isinstance(given, str) and b"\0" not in os.fsencode(given):
            return given
    except UnicodeEncodeError:
        pass
    raise Misuse(f"a path is a str that a file can have, not {shown(given)}")


def real_path(path: str | os.PathLike[str]) -> str:
    """A path without symbolic links."""
    given = text_of(path)
    with translating(given):
        return os.path.realpath(given)


def resolved(top: str, given: str) -> str:
    """Where a path leads, links resolved, except for a last part that is a link to a tree of this guard."""
    folder, name = os.path.split(os.path.join(top, given))
    if name in ("", ".", ".."):
        return ""
    found = os.path.join(folder if folder == top else os.path.realpath(folder), name)
    if os.path.islink(found):
        leads_to = os.path.realpath(found)
        return found if leads_to.startswith(f"{top}/{PRIVATE}/trees/") else leads_to
    return found


def status(path: str, at: int | None = None) -> os.stat_result | None:
    """None: there is nothing."""
    try:
        return os.lstat(path, dir_fd=at)
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_guarded(folder: str) -> bool:
    """Whether this user has a guard on a folder. What others have made may be there only to keep us out."""
    found = status(f"{folder}/{PRIVATE}")
    return found is not None and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


# Folders.


def open_folder(path: str, at: int | None = None) -> int:
    return os.open(path, _FOLDER, dir_fd=at)


def open_private(path: str, at: int) -> int:
    """A folder that nobody else can write to: what is found in it decides where this process writes."""
    descriptor = open_folder(path, at)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise Misconfigured(
                f"{path} belongs to another user (its id is {found.st_uid}), who could lead the writes of this process "
                "elsewhere: run all programs of a guarded folder as one user"
            )
        if found.st_mode & 0o022:
            raise Misconfigured(
                f"other users may write to {path}, and could lead the writes of this process elsewhere: "
                "see who has, then run `chmod -R go-w` on it"
            )
    except BaseException:
        close(descriptor)
        raise
    return descriptor


def make_folder(path: str, at: int, mode: int = 0o700) -> None:
    """Make a folder, if it is missing."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, mode, dir_fd=at)


def make_locked(path: str, at: int) -> int | None:
    """A new folder that is locked while its writer lives; None: as for `create`."""
    os.mkdir(path, dir_fd=at)
    try:
        descriptor = open_folder(path, at)
        try:
            if try_lock(descriptor) and os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            close(descriptor)
            raise
    except FileNotFoundError:
        return None
    except BaseException:
        remove(path, at)
        raise
    close(descriptor)
    return None


def open_parent(top: int, path: str) -> int:
    """The folder of a file, from the guarded folder on. A link on the way is refused.

    It may have been put there since the path was resolved.
    """
    parts = path.split("/")[:-1]
    descriptor = os.dup(top)
    try:
        for number, part in enumerate(parts, 1):
            try:
                descriptor, above = open_folder(part, descriptor), descriptor
            except OSError as error:
                if error.errno not in _NO_FOLDER:
                    raise
                raise Misconfigured(f"{'/'.join(parts[:number])} is not a folder; create it first") from error
            close(above)
    except BaseException:
        close(descriptor)
        raise
    return descriptor


def check_parent(top: int, path: str) -> None:
    """Refuse a path whose folder does not exist, before anything is made for it."""
    close(open_parent(top, path))


def listed(path: str, at: int) -> list[str]:
    try:
        descriptor = open_folder(path, at)
    except FileNotFoundError:
        return []
    try:
        return os.listdir(descriptor)
    finally:
        close(descriptor)


def sync_tree(tree: int) -> None:
    """Sync every file and folder below."""
    for _, _, names, folder in os.fwalk(".", dir_fd=tree, onerror=_raise):
        for name in names:
            found = status(name, folder)
            if found is not None and stat.S_ISREG(found.st_mode):
                descriptor = os.open(name, os.O_RDONLY | _SAFE, dir_fd=folder)
                try:
                    os.fsync(descriptor)
                finally:
                    close(descriptor)
        os.fsync(folder)


def _raise(error: OSError) -> NoReturn:
    raise error


# Locks. The kernel's: they end with their process.


def try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_if_dead(path: str, at: int) -> None:
    """Remove a writer's file, link or tree, unless the writer still has it locked. The caller has its name's lock.

    What cannot be removed is left for the next process that has the lock.
    """
    with contextlib.suppress(OSError):
        found = os.lstat(path, dir_fd=at)
        if stat.S_ISLNK(found.st_mode):
            os.unlink(path, dir_fd=at)  # made under the lock that the caller has now: its writer is dead
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _SAFE, dir_fd=at)
        try:
            if not try_lock(descriptor):
                return
            if stat.S_ISDIR(found.st_mode):
                shutil.rmtree(path, dir_fd=at)
            else:
                os.unlink(path, dir_fd=at)
        finally:
            close(descriptor)


# Files.


def open_mark(path: str, at: int) -> int:
    """A mark file. O_DSYNC: whoever locks it next and finds a page finds one that is on the disk."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_DSYNC | _SAFE, 0o600, dir_fd=at)


def create(path: str, at: int, mode: int) -> int | None:
    """A new file that is locked while its writer lives, so that others can tell whether it is dead.

    None: another process took it for a dead writer's before it was locked.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, mode, dir_fd=at)
    try:
        if try_lock(descriptor) and os.fstat(descriptor).st_nlink:
            return descriptor
    except BaseException:
        remove(path, at)
        close(descriptor)
        raise
    close(descriptor)
    return None


def copy_rights(old: os.stat_result, descriptor: int) -> None:
    """Give a new file the mode of the old one, and its owner if this process may do that."""
    new = os.fstat(descriptor)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        with contextlib.suppress(OSError):
            os.fchown(descriptor, old.st_uid, old.st_gid)
    if old.st_mode != new.st_mode:
        os.fchmod(descriptor, old.st_mode & 0o777)  # without the rights of its owner for whoever runs it


def open_file(path: str, at: int, flags: int = os.O_RDONLY) -> int:
    """A regular file of the caller. Opening something else could wait for ever, or do something."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | _SAFE, 0o666, dir_fd=at)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Misuse(f"{shown(path)} is not a file")
    except BaseException:
        close(descriptor)
        raise
    return descriptor


def size_of(path: str, at: int) -> int | None:
    """The size of a regular file of the caller; None: there is none."""
    if (found := status(path, at)) is None:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise Misuse(f"{shown(path)} is not a file")
    return found.st_size


def open_to_read(path: str, at: int) -> BinaryIO:
    descriptor = open_file(path, at)
    try:
        return as_file(descriptor, "rb", closes=True)
    except BaseException:
        close(descriptor)
        raise


def as_file(descriptor: int, mode: str, *, closes: bool) -> BinaryIO:
    return os.fdopen(descriptor, mode, closefd=closes)  # type: ignore[return-value]


def read(path: str, at: int) -> bytes:
    """A whole file."""
    descriptor = open_file(path, at)
    try:
        return read_all(descriptor)
    finally:
        close(descriptor)


def read_start(descriptor: int, size: int) -> bytes:
    """The first bytes of a file; fewer, if it has fewer."""
    return os.pread(descriptor, size, 0)


def read_all(descriptor: int) -> bytes:
    found, offset = [], 0
    while part := os.pread(descriptor, 1 << 20, offset):
        found.append(part)
        offset += len(part)
    return b"".join(found)


def write_all(descriptor: int, body: bytes, offset: int) -> None:
    view = memoryview(body)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def append_at(path: str, at: int, body: bytes, offset: int) -> None:
    """Write at an offset, which is the end of the file. The file is made if it is missing."""
    descriptor = open_file(path, at, os.O_WRONLY | os.O_CREAT)
    try:
        write_all(descriptor, body, offset)
        os.fsync(descriptor)
    finally:
        close(descriptor)


def cut(path: str, at: int, size: int | None) -> None:
    """Undo an append; None: there was no file. One that has gone, or is no file any more, needs no undoing."""
    if size is None:
        unlink(path, at)
        os.fsync(at)
        return
    try:
        descriptor = open_file(path, at, os.O_WRONLY)
    except Misuse:
        return
    except OSError as error:
        if error.errno in _NO_FILE:
            return
        raise
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        close(descriptor)


def link_to(target: str, path: str, at: int) -> None:
    os.symlink(target, path, dir_fd=at)


def read_link(path: str, at: int | None = None) -> str | None:
    """Where a link leads; None if there is none."""
    try:
        return os.readlink(path, dir_fd=at)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.EINVAL:  # it is no link
            return None
        raise


def rename(old: str, old_at: int, new: str, new_at: int) -> None:
    os.rename(old, new, src_dir_fd=old_at, dst_dir_fd=new_at)


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def remove(path: str, at: int) -> None:
    """Remove a file or a tree if possible. What stays belongs to a dead writer for the next process."""
    with contextlib.suppress(OSError):
        found = os.lstat(path, dir_fd=at)
        if stat.S_ISDIR(found.st_mode):
            shutil.rmtree(path, dir_fd=at)
        else:
            os.unlink(path, dir_fd=at)


def unlink(path: str, at: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path, dir_fd=at)


def close(descriptor: int) -> None:
    """Close, and with it unlock. Linux closes it even if it reports an error."""
    with contextlib.suppress(OSError):
        os.close(descriptor)
