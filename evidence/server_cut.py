"""Cutting the power under a server: PostgreSQL and Redis on a disk that holds only what was synced.

As in `power_cut`; the clients live on, and what they were told is compared with what the restarted server knows.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from evidence.power_cut import mounted
from fenced_testkit.servers import PostgresqlServer, RedisServer

RUNS = 6
CONTROLS = 2
MEGABYTES = 256

HOLDER = """
import sys, fenced
client = fenced.Client(sys.argv[1], guarantee="best-effort")
number = 0
while True:
    number += 1
    with client.hold(f"name/{number % 50}") as lease:
        print(lease.token, flush=True)
"""

AnyServer = PostgresqlServer | RedisServer


@dataclass(frozen=True)
class Kind:
    """A server, settings under which it loses tokens, and how to find the last grant that it knows."""

    make: Callable[[Path, Mapping[str, str]], AnyServer]
    weak: Mapping[str, str]
    last: Callable[[Any], int]


def _last_in_postgresql(server: PostgresqlServer) -> int:
    """By the grants' own rows: the sequence alone runs ahead of what it has handed out."""
    ((last,),) = server.execute("SELECT coalesce(max(token), 0) FROM fenced.attempt")
    return int(last)


def _last_in_redis(server: RedisServer) -> int:
    with redis.Redis.from_url(server.url()) as client:
        return int(client.hget("fenced:{default}:meta", "token") or 0)


KINDS = {
    "postgresql": Kind(
        lambda folder, settings: PostgresqlServer(settings, folder=folder),
        {"fsync": "off"},
        _last_in_postgresql,
    ),
    "redis": Kind(
        lambda folder, settings: RedisServer(settings, folder=folder),
        {"appendfsync": "everysec"},
        _last_in_redis,
    ),
}


def cut(kind: Kind, settings: Mapping[str, str], folder: Path, seconds: float) -> dict[str, Any]:
    image = folder / "disk"
    with image.open("wb") as file:
        file.truncate(MEGABYTES * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    log = folder / "acknowledged"
    with mounted(image, folder / "before") as point, log.open("wb") as acknowledged:
        point.chmod(0o755)
        server = kind.make(point / "server", settings)
        server.start()
        command = [sys.executable, "-c", HOLDER, server.url()]
        # It ends in an error.
        holder = subprocess.Popen(command, stdout=acknowledged, stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        server.kill()
        shutil.copyfile(image, folder / "after.disk")
        holder.kill()
        holder.wait()
    told = int(log.read_bytes().rpartition(b"\n")[0].split()[-1])
    with mounted(folder / "after.disk", folder / "after") as point:
        again = kind.make(point / "server", settings)
        try:
            again.start()
            known = kind.last(again)
        except Exception as error:  # noqa: BLE001 - the control may have damaged its files
            return {"acknowledged": told, "survived": 0, "lost": told, "why": type(error).__name__}
        finally:
            if again.running:
                again.stop()
    return {"acknowledged": told, "survived": known, "lost": max(0, told - known)}


def cuts(kind: Kind, settings: Mapping[str, str], count: int) -> list[dict[str, Any]]:
    figures = []
    for number in range(count):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            Path(folder).chmod(0o755)
            figures.append(cut(kind, settings, Path(folder), 2.0 + 0.17 * number))
    return figures


def run() -> dict[str, Any]:
    """No grant that a client was told may be unknown to the server; with weak settings some are."""
    found: dict[str, Any] = {}
    for name, kind in KINDS.items():
        strong, weak = cuts(kind, {}, RUNS), cuts(kind, kind.weak, CONTROLS)
        found[name] = {
            "cuts": strong,
            "lost": sum(figure["lost"] for figure in strong),
            "control": dict(kind.weak),
            "control_cuts": weak,
            "control_lost": sum(figure["lost"] for figure in weak),
        }
    return found
