"""Starts the holder processes of a drill, exchanges messages with them, stops, resumes and always ends them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from fenced.drills.worker import HolderSetup
from fenced.runtime.clocks import now

PATIENCE_SECONDS = 60.0
"""How long any step of a drill may take, in addition to the waits that the scenario itself contains."""
START_SECONDS = 60.0
"""How long a program may take to load what it needs: a second, unless the machine is very busy."""
END_SECONDS = 2.0
STOP_SECONDS = 5.0
POLL_SECONDS = 0.001

Message: TypeAlias = dict[str, Any]


class CouldNotRun(Exception):
    """The drill could not run, so it has shown nothing."""


@dataclass(frozen=True, slots=True)
class Start:
    """How a holder process is started: another program than our own, and what its environment has as well."""

    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    wrong_clock: bool = False
    """Its messages get the times of the drill: when it got a command, and when it answered."""


class HolderProcess:
    """One holder process."""

    def __init__(self, setup: HolderSetup, folder: Path, start: Start) -> None:
        self.holder = setup.holder
        self.stopped_at: float | None = None
        self._wrong_clock = start.wrong_clock
        self._told_at = 0.0
        self._partial = b""
        self._errors = folder / f"{setup.holder}.err"
        with open(self._errors, "wb") as errors:
            self.popen = subprocess.Popen(
                start.command or [sys.executable, "-P", "-m", "fenced.drills.worker", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **start.environment},
                process_group=0,  # Ctrl-C reaches only the drill, which then ends its holders
            )
        self._send(asdict(setup))

    def send(self, command: str, **details: object) -> None:
        """Write a command to the pipe. A stopped process reads it after it is resumed."""
        self._send({"do": command, **details})

    def _send(self, message: Message) -> None:
        assert self.popen.stdin is not None
        self._told_at = now()
        try:
            self.popen.stdin.write(json.dumps(message).encode() + b"\n")
            self.popen.stdin.flush()
        except OSError:
            raise self.ended_error() from None

    def fileno(self) -> int:
        assert self.popen.stdout is not None
        return self.popen.stdout.fileno()

    def messages(self) -> Iterator[Message]:
        """The complete messages that have arrived."""
        data = os.read(self.fileno(), 1 << 16)
        if not data:
            raise self.ended_error()
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if self._wrong_clock:
                message |= {"began": self._told_at, "time": now()}
            yield message

    def ended_error(self) -> CouldNotRun:
        """The error for a process that ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout=END_SECONDS)
        lines = self._errors.read_text(errors="replace").strip().splitlines() if self._errors.exists() else []
        why = f": {lines[-1]}" if lines else ""
        return CouldNotRun(f"holder {self.holder} ended by itself (status {self.popen.returncode}){why}")

    def stop(self) -> float:
        """Send SIGSTOP to the process and to all that it has started, and return when it has stopped."""
        for pid in [self.popen.pid, *descendants(self.popen.pid)]:
            os.kill(pid, signal.SIGSTOP)
        self.stopped_at = now()
        until = self.stopped_at + STOP_SECONDS
        what = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
        while os.waitid(os.P_PID, self.popen.pid, what) is None:
            if now() > until:
                raise CouldNotRun(f"holder {self.holder} could not be stopped")
            time.sleep(POLL_SECONDS)
        return self.stopped_at

    def resume(self, *, below: bool = False) -> float:
        """Send SIGCONT; returns the time at which the pause began. `below`: not to the process itself, but to what it
        has started: a scheduler may choose that order."""
        assert self.stopped_at is not None
        began = self.stopped_at
        for pid in reversed(descendants(self.popen.pid)):
            os.kill(pid, signal.SIGCONT)
        if not below:
            self.stopped_at = None
            os.kill(self.popen.pid, signal.SIGCONT)
        return began

    def end(self, grace: float) -> None:
        """Let the process end by itself for `grace` seconds, then kill and reap it."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        with contextlib.suppress(OSError):
            self.popen.stdin.close()
        try:
            self.popen.wait(timeout=grace)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.popen.stdout.close()


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and theirs; parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


class HolderProcesses:
    """All holder processes of one drill, and the messages that they sent."""

    def __init__(self, folder: Path) -> None:
        self.processes: dict[str, HolderProcess] = {}
        self._folder = folder
        self._selector = selectors.DefaultSelector()
        self._received: deque[tuple[HolderProcess, Message]] = deque()

    def start(self, starts: Iterable[tuple[HolderSetup, Start]]) -> None:
        """Start holders, and return when all of them are ready."""
        started = []
        for setup, start in starts:
            process = self.processes[setup.holder] = HolderProcess(setup, self._folder, start)
            self._selector.register(process, selectors.EVENT_READ)
            started.append(process)
        for process in started:
            self.expect(process, "ready", START_SECONDS)

    def kill(self, holder: str) -> float:
        """Kill a holder, as a crash does: nothing more is expected of it."""
        process = self.processes.pop(holder)
        self._selector.unregister(process)
        process.popen.kill()
        killed = now()
        process.end(grace=END_SECONDS)
        return killed

    def __getitem__(self, holder: str) -> HolderProcess:
        return self.processes[holder]

    def next_message(self, until: float) -> tuple[HolderProcess, Message] | None:
        """The next message of any holder, or None if `until` is reached first."""
        while not self._received:
            left = until - now()
            self._collect(left)
            if left <= 0 and not self._received:
                return None
        process, message = self._received.popleft()
        if message["event"] == "failed":
            raise CouldNotRun(f"holder {process.holder}: {message['why']}")
        return process, message

    def keep(self, received: Sequence[tuple[HolderProcess, Message]]) -> None:
        """Put messages back, in front of all others: somebody else waits for them."""
        self._received.extendleft(reversed(received))

    def sleep_until(self, until: float) -> None:
        """Sleep, keep messages for later, and raise CouldNotRun as soon as a holder ends."""
        while (left := until - now()) > 0:
            self._collect(left)

    def _collect(self, seconds: float) -> None:
        for key, _ in self._selector.select(max(0.0, seconds)):
            assert isinstance(key.fileobj, HolderProcess)
            process = key.fileobj
            self._received.extend((process, message) for message in process.messages())

    def expect(
        self, process: HolderProcess, event: str | tuple[str, ...], within: float = PATIENCE_SECONDS
    ) -> Message:
        """The next message of `process`, which must be `event`, or one of several."""
        received = self.next_message(now() + within)
        if received is None:
            raise CouldNotRun(f"holder {process.holder} did not say {event!r} within {within:g} s")
        sender, message = received
        if sender is not process:  # keep the message of another holder for later
            found = self.expect(process, event, within)
            self._received.appendleft(received)
            return found
        if message["event"] not in ((event,) if isinstance(event, str) else event):
            why = f": {message['why']}" if message.get("why") else ""
            raise CouldNotRun(f"holder {process.holder} said {message['event']!r}, not {event!r}{why}")
        return message

    def end(self, grace: float) -> None:
        """End every process; kill those that are stopped or do not end within `grace` seconds."""
        for process in self.processes.values():
            if process.stopped_at is not None or grace <= 0:
                process.popen.kill()
            elif process.popen.stdin is not None:
                with contextlib.suppress(OSError):
                    process.popen.stdin.close()
        for process in self.processes.values():
            process.end(grace)
        self._selector.close()

    def __enter__(self) -> HolderProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(grace=END_SECONDS if exc is None else 0.0)
