"""Programs of several versions of fenced, each in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import fenced

HERE = Path(__file__).parent
NEW = Path(fenced.__file__).parents[1]


class Failed(Exception):
    """A program got an error. The text begins with its class."""


def unpack_old(folder: Path) -> Path:
    """The code of fenced 0.1."""
    with tarfile.open(HERE / "fixtures" / "fenced-0.1.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not there before Python 3.11.4
        archive.extractall(folder)
    return folder


def plant(folder: Path, file: str, right: str, wrong: str) -> Path:
    """A copy of our code with one text replaced."""
    shutil.copytree(NEW / "fenced", folder / "fenced")
    path = folder / "fenced" / file
    text = path.read_text()
    assert text.count(right) == 1, (file, right, text.count(right))
    path.write_text(text.replace(right, wrong))
    return folder


class Process:
    """A process with the code of one version. Its methods are those of `program.Host`."""

    def __init__(self, code: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "program.py")],
            env={**os.environ, "PYTHONPATH": str(code)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failed(f"the program ended with {self._process.wait()}")
        told = json.loads(line)
        if "error" in told:
            raise Failed(f"{told['error']}: {told['says']}")
        answer: dict[str, Any] = told["answer"]
        if "error" in answer:
            raise Failed(f"{answer['error']}: {answer['says']}")
        inner: dict[str, Any] = answer.get("answer", answer)
        return inner

    def call(self, request: str, *arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([request, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class CrewMember:
    """One program. Its methods are those of `program.Program`."""

    def __init__(self, process: Process, authority: str, namespace: str) -> None:
        self._process = process
        started = process.call("start", authority, namespace)
        self._number, self.version = started["number"], started["version"]

    def call(self, request: str, *arguments: Any) -> dict[str, Any]:
        return self._process.call("ask", self._number, request, *arguments)

    def work_on(self, rounds: int) -> None:
        """Wait until its work in the background has gone on for so many rounds."""
        goal = self.call("rounds")["rounds"] + rounds
        while self.call("rounds")["rounds"] < goal:
            for request in ("work", "write"):
                self.call("fail", request)
            time.sleep(0.01)


class Crew:
    """The programs of a test: one process for each version."""

    def __init__(self) -> None:
        self._processes: dict[Path, Process] = {}

    def process(self, code: Path) -> Process:
        if code not in self._processes:
            self._processes[code] = Process(code)
        return self._processes[code]

    def close(self) -> None:
        for process in self._processes.values():
            process.close()


def judge(log: Path) -> int:
    """No two holders of a name overlapped, no token repeated, and tokens of a name rose. Returns how many."""
    open_now: dict[str, int] = {}
    last: defaultdict[str, int] = defaultdict(int)
    seen: set[int] = set()
    for line in log.read_text().splitlines():
        name, number, word = line.split()
        token = int(number)
        if word == "begin":
            assert name not in open_now, f"{name}: token {token} began before {open_now[name]} had ended"
            assert token > last[name], f"{name}: token {token} came after {last[name]}"
            assert token not in seen, f"token {token} repeated"
            open_now[name] = last[name] = token
            seen.add(token)
        else:
            assert open_now.pop(name) == token, f"{name}: {token} ended"
    assert not open_now
    return len(seen)
