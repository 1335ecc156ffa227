"""What all servers have in common: a folder, a port, a supervised process tree, and ways to break it."""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from fenced.drills.relay.ports import HOST, free_port
from fenced_testkit.servers import supervisor

PATIENCE_SECONDS = 90.0
"""How long a server may take to start, to stop, or to catch up."""
POLL_SECONDS = 0.01


FOLDER_VARIABLE = "FENCED_SERVERS_FOLDER"
"""Where servers get their temporary folders; by default where the system has them.

On a file system in memory nothing waits for a disk. A killed server finds its data there again.
"""


class MissingProgram(RuntimeError):
    """A program that the server needs is not installed."""


class ServerFailed(RuntimeError):
    """A server did not start, stop or reach a state within `PATIENCE_SECONDS`."""


class Endpoint(Protocol):
    """Where something answers: a server, or a proxy in front of it."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...


class Startable(ABC):
    """One server or several, started at the beginning of a `with` block and removed after it."""

    @property
    def running(self) -> bool:
        return False

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        if not self.running:
            try:
                self.start()
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Server(Startable):
    """One server, stopped or running; its folder and its port stay the same from start to start.

    Without `folder` it makes a temporary one, and removes it on leaving the context. A folder that was given
    stays; the user that the server runs as must be able to reach it.
    """

    name = "server"
    stop_signal = signal.SIGTERM
    on_disk = False
    """Whether its files are on a disk, even if those of other servers are kept in memory."""

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, user: str | None = None) -> None:
        self.host = HOST
        self.port = free_port()
        self._user = user
        self._owns_folder = folder is None
        self.folder = Path(
            folder
            or tempfile.mkdtemp(
                prefix=f"fenced-{self.name}-",
                dir=None if self.on_disk else os.environ.get(FOLDER_VARIABLE) or None,
            )
        ).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.own(self.folder)
        self.log = self.folder / "log"
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._made_by = os.getpid()
        atexit.register(self._at_exit)

    # For subclasses.

    @abstractmethod
    def command(self) -> list[str]:
        """The program and its arguments, running in the foreground."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether the server answers; called repeatedly while it starts."""

    def prepare(self) -> None:
        """Write what the server needs before each start."""

    def own(self, path: Path) -> None:
        """Give a path to the user that the server runs as."""
        if self._user is not None:
            entry = pwd.getpwnam(self._user)
            for part in [path, *path.rglob("*")]:
                os.chown(part, entry.pw_uid, entry.pw_gid, follow_symlinks=False)

    # For tests.

    @property
    def pid(self) -> int:
        """The server's main process."""
        if not self.running:
            raise ServerFailed(f"{self.name} is not running")
        return self._pid

    @property
    def running(self) -> bool:
        return self._supervisor is not None and self._supervisor.poll() is None

    def start(self) -> None:
        """Start, and return when the server answers."""
        if self.running:
            raise ServerFailed(f"{self.name} is running already")
        self.prepare()
        remove = str(self.folder) if self._owns_folder else ""
        program = [
            sys.executable,
            "-I",
            "-S",
            supervisor.__file__,
            str(os.getpid()),
            self._user or "",
            remove,
        ]
        with open(self.log, "ab") as log:
            self._supervisor = subprocess.Popen(
                [*program, *self.command()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches only the tests, which then end their servers
                cwd="/",
                env=_environment(),
            )
        assert self._supervisor.stdout is not None
        with self._supervisor.stdout as output:
            self._pid = int(output.readline() or 0)
        try:
            self.wait_until(self._answers_or_ended, "answers")
        except BaseException:
            self.kill()
            raise

    def _answers_or_ended(self) -> bool:
        if not self.running:
            raise ServerFailed(f"{self.name} ended while starting:\n{self.log_tail()}")
        return self.answers()

    def stop(self) -> None:
        """Stop gracefully, and return when all its processes are gone."""
        if not self.running:
            return
        self.thaw()
        self._signal([self._pid], self.stop_signal)
        self._wait_gone()

    def kill(self) -> None:
        """Send SIGKILL to every process of the server, and return when they have ended."""
        if self.running:
            self._signal(self._processes(), signal.SIGKILL)
            self._wait_gone()

    def restart(self) -> None:
        self.stop()
        self.start()

    def freeze(self) -> None:
        """Send SIGSTOP to every process of the server, and return when all of them have stopped.

        The kernel still accepts connections and buffers bytes for it.
        """
        _ = self.pid
        self.wait_until(self._stopped, "all of its processes are stopped")

    def _stopped(self) -> bool:
        moving = [pid for pid in self._processes() if _state(pid) not in "TZX"]
        self._signal(moving, signal.SIGSTOP)
        return not moving

    def thaw(self) -> None:
        """End a freeze."""
        if self.running:
            self._signal(self._processes(), signal.SIGCONT)

    def close(self) -> None:
        """End the server, and remove the folder if it is a temporary one."""
        atexit.unregister(self._at_exit)
        if self._owns_folder:
            self.kill()
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            self.stop()

    def _at_exit(self) -> None:
        if os.getpid() == self._made_by:  # not in a child that a test has forked
            self.close()

    # Waiting and signalling.

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > limit:
                raise ServerFailed(
                    f"{self.name}: not within {PATIENCE_SECONDS:g} s: {what}\n{self.log_tail()}"
                )
            time.sleep(POLL_SECONDS)

    def log_tail(self, lines: int = 20) -> str:
        """The end of what the server has written, for messages."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _wait_gone(self) -> None:
        assert self._supervisor is not None
        try:
            self._supervisor.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise ServerFailed(f"{self.name} does not stop:\n{self.log_tail()}") from None

    def _processes(self) -> list[int]:
        """The server and its descendants, parents first: a stopped process starts no new children."""
        children: dict[int, list[int]] = {}
        for pid, parent in supervisor.parents():
            children.setdefault(parent, []).append(pid)
        found = [self._pid]
        for pid in found:
            found.extend(children.get(pid, []))
        return found

    def _signal(self, pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _state(pid: int) -> str:
    try:
        return supervisor.stat(pid)[0]
    except OSError:
        return "X"


def _environment() -> dict[str, str]:
    """Without the keys of the user's AWS account, by which some servers would admit that user alone."""
    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}


def find_program(program: str, package: str, *folders: Path) -> str:
    """Where a program is; `MissingProgram` says what installs it."""
    places = [*map(str, folders), os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"]
    found = shutil.which(program, path=os.pathsep.join(places))
    if found is None:
        raise MissingProgram(f"{program} is not installed here; this does it: apt-get install -y {package}")
    return found


def user_unless_root(*names: str) -> str | None:
    """For servers that refuse to run as root: the first of these system users, or None when we are not root."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in names if name in known), None)


def run_program(command: list[str], user: str | None = None) -> None:
    """Run a helper program to its end; if it fails, the error contains its output."""
    entry = pwd.getpwnam(user) if user is not None else None
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        cwd="/",
        user=entry.pw_uid if entry else None,
        group=entry.pw_gid if entry else None,
        extra_groups=[] if entry else None,
    )
    if done.returncode != 0:
        raise ServerFailed(f"{command[0]} failed:\n{done.stdout.decode(errors='replace')}")
