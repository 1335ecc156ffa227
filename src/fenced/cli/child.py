"""The child of `fenced run`: in a process group of its own, so that all of it can be told and killed."""

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
    """A running command. It is not reaped before `status`, so its group id cannot become another's."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it; FileNotFoundError or another OSError if it cannot be executed."""
        self._terminal = os.isatty(_STDIN)
        self._owns_terminal = self._terminal and _in_foreground()
        # Ignored until the end: who is not in the foreground may neither take the terminal nor write to it.
        self._old_ttou = signal.signal(signal.SIGTTOU, signal.SIG_IGN) if self._terminal else None
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                process_group=0,
                close_fds=False,  # what the caller opened for the command (a shell's <(...)) is the command's
                preexec_fn=self._prepare(),  # noqa: PLW1509 (nothing else can tie its life to ours)
            )
        except BaseException:
            self._restore()
            raise
        self.pid = self._process.pid

    def _prepare(self) -> Callable[[], None]:
        """What the child does between fork and exec. All it needs is loaded before."""
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        parent = os.getpid()

        def prepare() -> None:
            if prctl is not None:
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)  # it died before the line above
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
        """Kill all of the group, and the command itself should it have left it."""
        self.send(signal.SIGKILL)
        with suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)

    def pause(self) -> None:
        """Stop it and take the terminal back: the shell is to have it next."""
        self.send(signal.SIGSTOP)
        self._take_terminal()

    def resume(self) -> None:
        """Let it go on, in the foreground if that is where we are."""
        if self._terminal and _in_foreground():
            self._owns_terminal = True
            with suppress(OSError):
                os.tcsetpgrp(_STDIN, self.pid)
        self.send(signal.SIGCONT)

    def status(self) -> int:
        """Wait for its end; its exit status as a shell counts it."""
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
    except OSError:  # a terminal, but not ours
        return False
