"""`python -m fenced.drills.bound PID COMMAND...` becomes COMMAND, which the kernel kills when process PID ends.

A stopped process cannot detect that the drill has ended, and the programs of users look for nothing of the kind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. It stays so when another program is executed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def bound(command: Sequence[str]) -> list[str]:
    """The command that runs `command` bound to this process."""
    return [sys.executable, "-P", "-m", "fenced.drills.bound", str(os.getpid()), *command]


def main() -> None:
    parent, *command = sys.argv[1:]
    die_with_parent(int(parent))
    try:
        os.execvp(command[0], command)  # noqa: S606 (a list, and the caller's own command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
