"""What the tests of FileGuard share: stamps, what is in a folder, and processes that are forked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fenced.values.model import Stamp

REALM = "00000000000000aa"
NAME = "daily.csv"


def stamp(token: int, seq: int = 1, name: str = NAME) -> Stamp:
    return Stamp(REALM, (name,), token, seq, f"{token:032x}")


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every file and link below a folder, but for what the guard has counted and recorded."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if (path.is_symlink() or path.is_file()) and "%01audit" not in str(path)
    }


def unfinished(folder: Path) -> list[str]:
    """What writers have left."""
    return [path for path in contents(folder) if ".fenced/new/" in path or path.endswith(".new")]


def fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a child must not continue as a second pytest
            os._exit(1)
    return pid


def forked(work: Callable[[], object]) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(fork(work), 0)[1])
