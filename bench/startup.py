"""How long a shell waits for `fenced run` on top of its command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.figures import Figure
from bench.interleaved import Effort, medians

ROUNDS = 15


def run(folder: Path, effort: Effort) -> Iterator[Figure]:
    program = Path(sys.executable).with_name("fenced")
    authority = f"sqlite:///{folder}/startup.db"
    command = [str(program), "run", "startup", "--authority", authority, "--", "true"]
    # As installed: compiled once, not at every start.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}

    def fenced_run() -> None:
        subprocess.run(command, check=True, env=environment)

    def bare_python() -> None:
        subprocess.run([sys.executable, "-c", "pass"], check=True)

    ours, bare = medians(fenced_run, bare_python, rounds=effort.of(ROUNDS), warm_up=effort.size(2))
    detail = f"a bare `python -c pass` takes {bare * 1e3:.0f} ms"
    yield Figure("startup", "fenced run NAME -- true", ours * 1e3, "ms", 150.0, detail)
