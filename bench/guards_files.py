"""What a guard over files costs: a guarded replacement against the same without a guard, turn by turn."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.figures import Figure, ratio
from bench.interleaved import Effort, medians
from fenced.files import FileGuard
from fenced.values.model import Stamp

ROUNDS = 1000
BODY = b"x" * 4096
PLAIN = "temporary file, fsync, rename, fsync of the folder"


def run(folder: Path, effort: Effort) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(dir=folder) as top:
        here = Path(top)
        guard = FileGuard(here)
        tokens = itertools.count(2)
        counts = itertools.count(1)

        def plain() -> None:
            path = here / f"plain.{next(counts)}"
            with path.open("wb") as file:
                file.write(BODY)
                file.flush()
                os.fsync(file.fileno())
            os.replace(path, here / "plain")
            descriptor = os.open(here, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(descriptor)
            os.close(descriptor)

        def same() -> None:
            guard.write(_stamp("same", 1), "same", BODY)

        def newer() -> None:
            guard.write(_stamp("newer", next(tokens)), "newer", BODY)

        for key, what, action, target in (
            ("files_same", "replace a file of 4 KB, the same token", same, 1.1),
            ("files_new", "the same, a new token each", newer, 2.5),
        ):
            theirs, ours = medians(plain, action, rounds=effort.of(ROUNDS), warm_up=effort.size(10))
            yield ratio(key, what, ours, theirs, target=target, against=PLAIN)


def _stamp(name: str, token: int) -> Stamp:
    return Stamp("00000000000000aa", (name,), token, None, f"{token:032x}")
