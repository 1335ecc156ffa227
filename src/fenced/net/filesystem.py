"""Where a database file may be (not a mount point itself, not hard-linked, not on a network, on a disk), and its clock.

SQLite keeps its write-ahead log beside the file, by name. A file that is opened under two names gets two
logs, and two processes mint the same tokens (seen with a single-file bind mount).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from fenced.errors import Misconfigured, Misuse, redacted, shown
from fenced.runtime import clocks
from fenced.runtime.machine import IN_MEMORY, NETWORK, mount_of

FileId = tuple[int, int]
"""Device and inode: they identify the file, whatever its name is."""
NO_FILE: FileId = (0, 0)

_TIME_OFFSETS = Path("/proc/self/timens_offsets")
_URL = re.compile(r"(?P<scheme>[a-z]+):///(?P<path>[^?#]+)")


def path_of(url: str, scheme: str, what: str) -> Path:
    """The absolute path behind `scheme:///relative.db` or `scheme:////absolute.db`, links resolved."""
    found = _URL.fullmatch(url)
    if found is None or found["scheme"] != scheme or "\0" in url or found["path"] == ":memory:":
        raise Misuse(f"{what} is {scheme}:///path/to/file.db, not {shown(redacted(url))}")
    try:
        os.fsencode(url)
    except UnicodeEncodeError:
        raise Misuse(f"this is not a path of the file system: {shown(url)}") from None
    return Path(os.path.realpath(found["path"]))


def check_file(path: Path, *, create: bool) -> None:
    """Raise Misconfigured unless there is a file, or one may be made, at a place where it may be."""
    if not path.parent.is_dir():
        raise Misconfigured(f"the folder {path.parent} does not exist; create it first")
    if path.is_dir():
        raise Misconfigured(f"{path} is a folder; name a file in it")
    if not create and not path.exists():
        raise Misconfigured(f"there is no file {path}; the first lease would create it")
    check_place(path)


def check_place(path: Path) -> None:
    """Raise Misconfigured where two processes could see two different databases behind one name."""
    point, kind = mount_of(path)
    if point == str(path):
        raise Misconfigured(
            f"{path} is itself a mount point; mount the folder that contains it instead, "
            "or other processes keep another log beside the same file and mint the same tokens"
        )
    if kind in NETWORK:
        raise Misconfigured(
            f"{path} lies on a network file system ({kind}); SQLite is for the processes of one "
            "machine: use a local disk, or another authority"
        )
    try:
        links = os.stat(path).st_nlink
    except FileNotFoundError:
        return
    if links > 1:
        raise Misconfigured(
            f"{path} has {links} hard links; each name gets its own log, and tokens repeat: remove the others"
        )


def doubts_about(path: Path, what: str = "tokens") -> tuple[str, ...]:
    """How the tokens or marks in a file could be lost by where it is."""
    _, kind = mount_of(path)
    if kind not in IN_MEMORY:
        return ()
    return (
        f"{path} is kept in memory ({kind}), and a reboot or a power cut loses all its {what}; put it on a disk",
    )


def file_id(path: str) -> FileId:
    try:
        status = os.stat(path)
    except OSError:
        return NO_FILE
    return status.st_dev, status.st_ino


def share(path: Path, database: Path, mode: int) -> None:
    """Give a file beside the database the database's group and these rights: its users need both."""
    with contextlib.suppress(OSError):
        os.chown(path, -1, os.stat(database).st_gid)
    os.chmod(path, mode)


def clock_offset_ns() -> int:
    """What this process's time namespace adds to CLOCK_BOOTTIME; 0 outside of one."""
    try:
        lines = _TIME_OFFSETS.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        clock, seconds, nanoseconds = line.split()
        if clock in ("boottime", "7"):
            return int(seconds) * 10**9 + int(nanoseconds)
    return 0


def machine_clock() -> Callable[[], int]:
    """Nanoseconds since boot, the same for all processes of this machine."""
    offset = clock_offset_ns()
    return clocks.now_ns if offset == 0 else lambda: clocks.now_ns() - offset
