"""The processes of a drill: started, told, listened to, stopped and resumed, and ended without fail."""

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
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from fenced.drills.worker import Part
from fenced.runtime.clocks import now

PATIENCE_SECONDS = 20.0
"""How long any step of a drill may take beyond what the story itself asks for."""
END_SECONDS = 2.0
STOP_SECONDS = 5.0
POLL_SECONDS = 0.001

Message: TypeAlias = dict[str, Any]


class CouldNotRun(Exception):
    """The drill could not be carried out, so it has shown nothing."""


class Member:
    """One holder process."""

    def __init__(self, part: Part, folder: Path) -> None:
        self.holder = part.holder
        self.stopped_at: float | None = None
        self._partial = b""
        self._errors = folder / f"{part.holder}.err"
        with open(self._errors, "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fenced.drills.worker", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                process_group=0,  # Ctrl-C is for the drill, which then ends its holders itself
            )
        self._send(asdict(part))

    def tell(self, command: str, **details: object) -> None:
        """Put a command into the pipe; a stopped process finds it there when it wakes up."""
        self._send({"do": command, **details})

    def _send(self, message: Message) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise self.gone() from None

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def messages(self) -> Iterator[Message]:
        """The whole lines that have arrived."""
        data = os.read(self.fileno(), 1 << 16)
        if not data:
            raise self.gone()
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            yield json.loads(line)

    def gone(self) -> CouldNotRun:
        """What to say of a process that ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=END_SECONDS)
        said = self._errors.read_text(errors="replace").strip().splitlines() if self._errors.exists() else []
        why = f": {said[-1]}" if said else ""
        return CouldNotRun(f"holder {self.holder} ended by itself (status {self.process.returncode}){why}")

    def stop(self) -> float:
        """SIGSTOP; returns when the process really stands still."""
        os.kill(self.process.pid, signal.SIGSTOP)
        self.stopped_at = now()
        until = self.stopped_at + STOP_SECONDS
        what = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
        while os.waitid(os.P_PID, self.process.pid, what) is None:
            if now() > until:
                raise CouldNotRun(f"holder {self.holder} could not be stopped")
            time.sleep(POLL_SECONDS)
        return self.stopped_at

    def resume(self) -> float:
        """SIGCONT; returns when the pause began."""
        assert self.stopped_at is not None
        began, self.stopped_at = self.stopped_at, None
        os.kill(self.process.pid, signal.SIGCONT)
        return began

    def end(self, grace: float) -> None:
        """Let the process end by itself for `grace` seconds, then kill and reap it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=grace)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Crew:
    """All holders of one drill, and the one ear for them."""

    def __init__(self, parts: Iterable[Part], folder: Path) -> None:
        self.members: dict[str, Member] = {}
        self._selector = selectors.DefaultSelector()
        self._heard: deque[tuple[Member, Message]] = deque()
        try:
            for part in parts:
                member = self.members[part.holder] = Member(part, folder)
                self._selector.register(member, selectors.EVENT_READ)
            for member in self.members.values():
                self.expect(member, "ready")
        except BaseException:
            self.end(grace=0.0)
            raise

    def __getitem__(self, holder: str) -> Member:
        return self.members[holder]

    def listen(self, until: float) -> tuple[Member, Message] | None:
        """The next message, or None when `until` has come."""
        while not self._heard:
            left = until - now()
            self._collect(left)
            if left <= 0 and not self._heard:
                return None
        member, message = self._heard.popleft()
        if message["event"] == "failed":
            raise CouldNotRun(f"holder {member.holder}: {message['why']}")
        return member, message

    def rest(self, until: float) -> None:
        """Let time go by; messages are kept for later, and a holder that ends is noticed at once."""
        while (left := until - now()) > 0:
            self._collect(left)

    def _collect(self, seconds: float) -> None:
        for key, _ in self._selector.select(max(0.0, seconds)):
            assert isinstance(key.fileobj, Member)
            member = key.fileobj
            self._heard.extend((member, message) for message in member.messages())

    def expect(self, member: Member, event: str, within: float = PATIENCE_SECONDS) -> Message:
        """The next message of `member`, which must be `event`."""
        heard = self.listen(now() + within)
        if heard is None:
            raise CouldNotRun(f"holder {member.holder} did not say {event!r} within {within:g} s")
        speaker, message = heard
        if speaker is not member:  # the others have their say later
            found = self.expect(member, event, within)
            self._heard.appendleft(heard)
            return found
        if message["event"] != event:
            why = f": {message['why']}" if message.get("why") else ""
            raise CouldNotRun(f"holder {member.holder} said {message['event']!r}, not {event!r}{why}")
        return message

    def end(self, grace: float) -> None:
        """End every process; those that are stopped or stubborn are killed."""
        for member in self.members.values():
            if member.stopped_at is not None or grace <= 0:
                member.process.kill()
            elif member.process.stdin is not None:
                with contextlib.suppress(OSError):
                    member.process.stdin.close()
        for member in self.members.values():
            member.end(grace)
        self._selector.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(grace=END_SECONDS if exc is None else 0.0)
