"""The command line as its users run it: real processes, one database per test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class CommandLine:
    """Runs `python -m fenced` against the test's own database."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = folder / "leases.db"
        self.url = f"sqlite:///{self.database}"
        self.environment = {**os.environ, "FENCED_AUTHORITY": self.url}
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "fenced", *args],
            **{
                "env": self.environment,
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                "start_new_session": True,
                **options,
            },
        )
        self._started.append(process)
        return process

    def __call__(self, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run to the end. Whatever happens, nobody is shown a traceback."""
        process = self.start(*args, **options)
        stdout, stderr = process.communicate(timeout=120)
        assert "Traceback" not in (stderr or "")
        return subprocess.CompletedProcess(args, process.returncode, stdout, stderr)

    def run_script(self, name: str, script: str, *args: str, **options: Any) -> subprocess.Popen[str]:
        """`fenced run` a Python script, and return once it has written the file `ready`."""
        command = [sys.executable, "-c", script, str(self.folder)]
        process = self.start("run", name, *args, "--", *command, **options)
        self.until((self.folder / "ready").exists)
        return process

    def until(self, condition: Callable[[], T], seconds: float = 60.0) -> T:
        give_up = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < give_up, f"waited {seconds} s in vain"
            time.sleep(0.005)
        return value

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=10)


@pytest.fixture
def fenced(tmp_path: Path) -> Iterator[CommandLine]:
    line = CommandLine(tmp_path)
    yield line
    line.close()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def alive() -> Iterator[Callable[[int], bool]]:
    """Whether a process runs. What was asked about is killed when the test ends."""
    asked: set[int] = set()

    def ask(pid: int) -> bool:
        asked.add(pid)
        return _alive(pid)

    yield ask
    for pid in asked:
        if _alive(pid):
            os.kill(pid, signal.SIGKILL)
