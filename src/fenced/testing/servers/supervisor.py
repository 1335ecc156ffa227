"""Runs one server, and sees to it that nothing of it outlives us or whoever asked for it.

A program of its own: `supervisor.py PARENT USER REMOVE COMMAND...` starts the command, as USER unless that is
empty, and writes its pid to stdout. When the server ends, what it leaves behind of processes is killed, and
the supervisor ends with the server's exit code: when it is gone, all is gone. When PARENT ends, however it
ends, the server is killed and the folder REMOVE, unless empty, is removed.

The supervisor is a process because only a parent gets to know reliably: orphans of a killed server, also
stopped ones, become its children (it is a subreaper), and the server's own tie to its parent's death belongs
to the *thread* that started it, which in a test program may end early. Here there is one thread only.
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
    """In the child: the server itself, which does not outlive the supervisor either."""
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
