"""Cutting the power: a file system in a file holds only what was synced. kill -9 alone shows nothing.

ext4 on a loop device over a file in memory: the process is killed, the file is copied at once, and the copy is
what a disk would hold after the cut. Needs root, mkfs.ext4 and loop devices.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fenced.runtime import clocks
from fenced.stores.sqlite.authority.store import Store

RUNS = 12
MEGABYTES = 48

HOLDER = """
import sys, fenced
if sys.argv[2] == "unsynced":  # the control: what would be lost if grants were not synced
    from fenced.stores.sqlite.authority import connecting
    prepare = connecting.StoreConnection.prepare
    connecting.StoreConnection.prepare = lambda self, durable: prepare(self, False)
client = fenced.Client(f"sqlite:///{sys.argv[1]}/leases.db")
number = 0
while True:
    number += 1
    with client.hold(f"name/{number % 50}") as lease:
        print(lease.token, flush=True)
"""


@contextmanager
def mounted(image: Path, point: Path) -> Iterator[Path]:
    point.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


def cut(folder: Path, seconds: float, how: str) -> tuple[int, int]:
    """Let a holder run, cut the power; (the last token it had been given, the last the disk knows)."""
    image = folder / "disk"
    with image.open("wb") as file:
        file.truncate(MEGABYTES * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    with mounted(image, folder / "before") as point:
        log = folder / "acknowledged"
        with log.open("wb") as acknowledged:
            holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(point), how], stdout=acknowledged)
            time.sleep(seconds)
            os.kill(holder.pid, signal.SIGKILL)
            shutil.copyfile(image, folder / "after.disk")
            holder.wait()
    whole_lines = log.read_bytes().rpartition(b"\n")[0].split()
    with mounted(folder / "after.disk", folder / "after") as point:
        store = Store(point / "leases.db", "default", clocks.now_ns)
        standing = store.open()
        store.close()
    return int(whole_lines[-1]), standing.last_token


def cuts(how: str, count: int) -> list[dict[str, int]]:
    figures = []
    for number in range(count):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            acknowledged, survived = cut(Path(folder), 0.7 + 0.13 * number, how)
        lost = max(0, acknowledged - survived)
        figures.append({"acknowledged": acknowledged, "survived": survived, "lost": lost})
    return figures


def run() -> dict[str, Any]:
    """No token that was handed out may be unknown to the disk; without the sync many are, or nothing was shown."""
    synced, unsynced = cuts("synced", RUNS), cuts("unsynced", 3)
    return {
        "synced": synced,
        "lost": sum(figure["lost"] for figure in synced),
        "control_unsynced": unsynced,
        "control_lost": sum(figure["lost"] for figure in unsynced),
    }
