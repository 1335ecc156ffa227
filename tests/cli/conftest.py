"""The command line as its users run it, one database per test."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest

from fenced.cli import main

T = TypeVar("T")


class CommandLine:
    """Runs `fenced` against the test's own database."""

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
        """Run to the end: in a process if it runs a command or needs options of one, else here, which is faster."""
        if options or "run" in args[:1]:
            process = self.start(*args, **options)
            stdout, stderr = process.communicate(timeout=120)
            ended = subprocess.CompletedProcess(args, process.returncode, stdout, stderr)
        else:
            ended = self._run_here(args)
        assert "Traceback" not in (ended.stderr or "")
        return ended

    def _run_here(self, args: Sequence[str]) -> subprocess.CompletedProcess[str]:
        stdout, stderr = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
        with (
            mock.patch.dict(os.environ, self.environment, clear=True),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
            pytest.raises(SystemExit) as ended,
        ):
            main(args)
        printed = []
        for stream in (stdout, stderr):
            stream.seek(0)
            printed.append(stream.read())
        assert isinstance(ended.value.code, int)
        return subprocess.CompletedProcess(args, ended.value.code, *printed)

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
            process.communicate(timeout=90)


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
