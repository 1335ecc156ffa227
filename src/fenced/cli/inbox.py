"""One pipe for everything that can happen while a child runs: signals, its end, the loss of the lease.

The interpreter's signal handler writes the number of a signal into the pipe; `interrupt` writes 0. So there is one
place to wait, and nothing is polled.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
JOB_CONTROL = (signal.SIGCHLD, signal.SIGTSTP, signal.SIGCONT)


class Stopped(BaseException):
    """A signal came before there was a child to forward it to."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Inbox:
    """Catches signals from `with` on. Until `listen()`, the first one raises Stopped."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)
        self._before: dict[signal.Signals, Any] = {}
        self._old_wakeup_fd = -1
        self._listening = False

    def __enter__(self) -> Inbox:
        self._old_wakeup_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for signum in FORWARDED:
            self._catch(signum)
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, before in self._before.items():
            signal.signal(signum, before)
        signal.set_wakeup_fd(self._old_wakeup_fd)
        os.close(self._read)
        os.close(self._write)

    def _catch(self, signum: signal.Signals) -> None:
        # Signals that the caller ignores stay ignored, as after nohup; except SIGCHLD, which reports our child's end.
        if signal.getsignal(signum) is not signal.SIG_IGN or signum == signal.SIGCHLD:
            self._before[signum] = signal.signal(signum, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if not self._listening:
            self._listening = True  # a second signal must not interrupt the withdrawal
            raise Stopped(signum)

    def listen(self) -> None:
        """From now on signals are for the child, and `wait` returns them."""
        self._listening = True
        for signum in JOB_CONTROL:
            self._catch(signum)

    def interrupt(self, *_: object) -> None:
        """Make `wait` return. May be called from any thread."""
        with suppress(OSError):  # the pipe is full: `wait` returns anyway
            os.write(self._write, b"\0")

    def wait(self, seconds: float) -> int:
        """The next signal; 0 after `interrupt`, or when `seconds` have passed."""
        self._poll.poll(max(0.0, seconds) * 1000)
        try:
            return os.read(self._read, 1)[0]
        except BlockingIOError:
            return 0

    def stop(self, group: bool) -> None:
        """Stop this process, or its whole group, as Ctrl-Z does; return when it is continued."""
        caught = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(0 if group else os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, caught)
        # In an orphaned group, which no shell could continue, the kernel ignores SIGTSTP, and no SIGCONT follows.
        os.write(self._write, bytes([signal.SIGCONT]))
