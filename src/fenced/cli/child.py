"""The child of `fenced run`: in a separate process group, so that signals reach all of its processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from fenced.cli.output import complain

_PR_SET_PDEATHSIG = 1
_STDIN = 0


class Child:
    """A running command. Only `status` reaps it, so until then no other process can get its id."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the command; FileNotFoundError or another OSError if it cannot be executed."""
        self._terminal = os.isatty(_STDIN)
        self._owns_terminal = self._terminal and _in_foreground()
        # Ignored until the end: a background process that takes the terminal or writes to it gets SIGTTOU.
        self._old_ttou = signal.signal(signal.SIGTTOU, signal.SIG_IGN) if self._terminal else None
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                process_group=0,
                close_fds=False,  # the command may use files that the caller opened for it (a shell's <(...))
                preexec_fn=self._prepare(),  # noqa: PLW1509 (only this can make the kernel kill it when we die)
            )
        except BaseException:
            self._restore()
            raise
        self.pid = self._process.pid

    def _prepare(self) -> Callable[[], None]:
        """What the child does between fork and exec. Everything it needs is loaded before the fork."""
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        parent = os.getpid()

        def prepare() -> None:
            if prctl is not None:
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)  # the parent died before prctl
            if self._owns_terminal:
                with suppress(OSError):
                    os.tcsetpgrp(_STDIN, os.getpgrp())
            if self._old_ttou is not None:
                signal.signal(signal.SIGTTOU, self._old_ttou)

        return prepare

    def has_ended(self) -> bool:
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended is not None

    def has_stopped(self) -> bool:
        """Whether it has stopped since the last call while it had the terminal: Ctrl-Z."""
        try:
            stopped = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG)
        except ChildProcessError:  # it has ended
            return False
        return self._owns_terminal and stopped is not None

    def send(self, signum: int) -> None:
        """Signal the whole group."""
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:
            return
        except PermissionError as error:
            complain(f"cannot send {signal.Signals(signum).name} to the command: {error}")

    def kill(self) -> None:
        """Kill the whole group, and the command itself in case it has left the group."""
        self.send(signal.SIGKILL)
        with suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)

    def pause(self) -> None:
        """Stop the command and take the terminal back, so that the shell can have it."""
        self.send(signal.SIGSTOP)
        self._take_terminal()

    def resume(self) -> None:
        """Continue the command, in the foreground if we are there."""
        if self._terminal and _in_foreground():
            self._owns_terminal = True
            with suppress(OSError):
                os.tcsetpgrp(_STDIN, self.pid)
        self.send(signal.SIGCONT)

    def status(self) -> int:
        """Wait for the command to end; its exit status as in a shell: 128 + n for signal n."""
        code = self._process.wait()
        self._restore()
        return code if code >= 0 else 128 - code

    def _restore(self) -> None:
        self._take_terminal()
        if self._old_ttou is not None:
            signal.signal(signal.SIGTTOU, self._old_ttou)

    def _take_terminal(self) -> None:
        if self._owns_terminal:
            self._owns_terminal = False
            with suppress(OSError):  # the terminal may be gone
                os.tcsetpgrp(_STDIN, os.getpgrp())


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:  # not our controlling terminal
        return False
