"""Runs one server, and makes sure that none of its processes outlives the server or the tests.

A separate program: `supervisor.py PARENT USER REMOVE COMMAND...` starts the command, as USER unless that is empty,
and writes its pid to stdout. When the server ends, the supervisor kills the processes that it left behind and ends
with the server's exit code: when the supervisor has ended, all have. When PARENT ends in any way, the supervisor kills
the server and removes the folder REMOVE, unless that is empty.

It is a process for two reasons. Orphans of a killed server, even stopped ones, become its children, because it is a
subreaper. And a parent-death signal depends on the *thread* that started the server, which in a test program may end
early; the supervisor has one thread.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import select
import shutil
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
IPC_RMID = 0


def main() -> int:
    parent, user, remove, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become a subreaper")
    parent_fd = os.pidfd_open(int(parent))
    if os.getppid() != int(parent):
        return 1  # it ended before we could watch it
    server = os.fork()
    if server == 0:
        _become(libc, user, command)
    os.write(sys.stdout.fileno(), f"{server}\n".encode())
    os.close(sys.stdout.fileno())
    orphaned = _wait(parent_fd, os.pidfd_open(server))
    if orphaned:
        os.kill(server, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    _reap()
    _remove_segments(libc, server)
    if orphaned and remove:
        shutil.rmtree(remove, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _become(libc: ctypes.CDLL, user: str, command: list[str]) -> None:
    """In the child: run the server. The kernel kills it when the supervisor ends."""
    try:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        if user:
            entry = pwd.getpwnam(user)
            os.initgroups(user, entry.pw_gid)
            os.setgid(entry.pw_gid)
            os.setuid(entry.pw_uid)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after setuid, which would undo it
        os.execv(command[0], command)  # noqa: S606 - no shell, on purpose
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(127)


def _wait(parent_fd: int, server_fd: int) -> bool:
    """Until either ends; True when it was the parent."""
    poll = select.poll()
    poll.register(parent_fd, select.POLLIN)
    poll.register(server_fd, select.POLLIN)
    return parent_fd in dict(poll.poll())


def _reap() -> None:
    """Kill what the server left behind, until no child and no orphan is left."""
    while True:
        for pid, parent in parents():
            if parent == os.getpid():
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _remove_segments(libc: ctypes.CDLL, server: int) -> None:
    """System V memory that the server made and nobody uses any more: PostgreSQL's outlives a kill."""
    for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
        _key, segment, _mode, _size, creator, _last, users, *_ = line.split()
        if int(creator) == server and users == "0":
            libc.shmctl(int(segment), IPC_RMID, None)


def parents() -> list[tuple[int, int]]:
    """Every process that there is, with its parent."""
    found = []
    for folder in os.listdir("/proc"):
        if folder.isdigit():
            try:
                found.append((int(folder), int(stat(int(folder))[1])))
            except OSError:
                continue  # it ended meanwhile
    return found


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name: first the state, then the parent."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


if __name__ == "__main__":
    sys.exit(main())
