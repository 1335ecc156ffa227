"""The memory of one instance of the service over the ledger, after each minute of thirty at full rate.

What a client has settled is forgotten, whatever else it holds. So the memory does not grow with the pairs.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from bench.interleaved import Effort
from bench.service import CLIENTS, SECONDS, Generator
from fenced_testkit.servers import ServiceServer

MINUTES = 30


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        # The generator runs for its seconds times this share.
        load = Generator(Path(folder), Effort(60.0 / SECONDS))
        with ServiceServer(Path(folder) / "service") as server:
            minutes = [_minute(load, server) for _ in range(MINUTES)]
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return {
        "clients": CLIENTS,
        "minutes": minutes,
        "pairs": sum(minute["pairs"] for minute in minutes),
        "megabytes_on_disk": round(size / 2**20),
    }


def _minute(load: Generator, server: ServiceServer) -> dict[str, Any]:
    found = load("lease", server, CLIENTS)
    pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
    return {
        "pairs": round(found.pairs * 60),
        "megabytes": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
    }
