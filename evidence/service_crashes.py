"""The service with its store on its own disk: `kill -9` under load, and power cuts.

Sixteen clients take leases. Then the process is killed; for a power cut the new one gets a copy of the disk, which has
only what was synced (`power_cut`). Every lease that a client was granted and did not release must still be its own,
under the same token, and no token may be granted twice.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evidence.power_cut import MEGABYTES, mounted
from fenced.errors import FencedError
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.service.address import service_address
from fenced.stores.service.authority.authority import ServiceAuthority
from fenced.values.model import Ask, Granted, Holder
from fenced_testkit.servers import ServiceServer

CLIENTS = 16
CRASHES = 20
STORES = ("sqlite", "ledger")
CONTROL = """
import os, sys
from fenced.stores.sqlite.authority import connecting
prepare = connecting.StoreConnection.prepare
connecting.StoreConnection.prepare = lambda self, durable: prepare(self, False)
os.fdatasync = os.fsync = lambda file: None
from fenced.__main__ import main
sys.exit(main())
"""
"""The control: what would be lost if grants were not synced."""


class UnsyncedServer(ServiceServer):
    def command(self) -> list[str]:
        python, _, _, *arguments = super().command()
        return [python, "-c", CONTROL, *arguments]


@dataclass
class Leases:
    """What the clients were granted, by attempt, and which of these they began to release."""

    granted: dict[str, tuple[Ask, int]] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)

    def held(self) -> list[tuple[Ask, int]]:
        return [lease for secret, lease in self.granted.items() if secret not in self.released]


class Load:
    """Clients that take leases of ever new names, and release half of them, until the service is gone."""

    def __init__(self, url: str, leases: Leases) -> None:
        self._url = url
        self._leases = leases
        self._threads = [threading.Thread(target=self._work) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        runtime = BlockingRuntime()
        service = ServiceAuthority(service_address(self._url), runtime)
        holder = Holder(runtime.secret(), "evidence", "host", 1)
        try:
            step(service.open())
            while True:
                ask = Ask(runtime.secret(), (f"name/{runtime.secret()}",), 3600.0, holder)
                answer = step(service.ask(ask))
                assert isinstance(answer, Granted)
                self._leases.granted[ask.secret] = (ask, answer.token)
                if runtime.random() < 0.5:
                    self._leases.released.add(ask.secret)
                    step(service.release(ask.secret))
        except FencedError:  # the service is gone
            step(service.close())


def lost(url: str, leases: Leases) -> int:
    """How many of the leases are not what they were."""
    service = ServiceAuthority(service_address(url), BlockingRuntime())
    step(service.open(until=time.monotonic() + 60))
    count = 0
    for ask, token in leases.held():
        answer = step(service.ask(ask))
        count += not (isinstance(answer, Granted) and answer.token == token)
    step(service.close())
    return count


def twice(every: Sequence[Leases]) -> int:
    """How many tokens of one store were granted again."""
    tokens = [token for leases in every for _, token in leases.granted.values()]
    return len(tokens) - len(set(tokens))


def figures(
    every: Sequence[Leases], repeated: int, missing: int, restarts: Sequence[float]
) -> dict[str, Any]:
    return {
        "crashes": len(every),
        "grants": sum(len(leases.granted) for leases in every),
        "tokens twice": repeated,
        "leases looked for": sum(len(leases.held()) for leases in every),
        "leases lost": missing,
        "longest restart, s": round(max(restarts), 2),
    }


def started(server: ServiceServer) -> float:
    began = time.monotonic()
    server.start()
    return time.monotonic() - began


def loaded(server: ServiceServer, seconds: float) -> tuple[Load, Leases]:
    """Clients that have been working for so long."""
    leases = Leases()
    load = Load(server.url(), leases)
    while not leases.granted:
        time.sleep(0.01)
    time.sleep(seconds)
    return load, leases


def kills(store: str) -> dict[str, Any]:
    every: list[Leases] = []
    restarts: list[float] = []
    missing = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        ServiceServer(store=f"{store}://{folder}/leases.db") as server,
    ):
        for number in range(CRASHES):
            load, leases = loaded(server, 0.3 + 0.05 * number)
            server.kill()
            load.join()
            restarts.append(started(server))
            missing += lost(server.url(), leases)
            every.append(leases)
    return figures(every, twice(every), missing, restarts)


def cut(store: str, folder: Path, seconds: float, kind: type[ServiceServer]) -> tuple[Leases, int, float]:
    """Cut the power once; what was granted, how many of these leases are lost, and how long the restart took."""
    image, copy = folder / "disk", folder / "after.disk"
    with image.open("wb") as file:
        file.truncate(MEGABYTES * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    with mounted(image, folder / "before") as point, kind(store=f"{store}://{point}/leases.db") as server:
        load, leases = loaded(server, seconds)
        server.kill()
        shutil.copyfile(image, copy)
        load.join()
    with mounted(copy, folder / "after") as point:
        server = kind(store=f"{store}://{point}/leases.db")
        took = started(server)
        with server:
            return leases, lost(server.url(), leases), took


def cuts(store: str, count: int, kind: type[ServiceServer] = ServiceServer) -> dict[str, Any]:
    found = []
    for number in range(count):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            found.append(cut(store, Path(folder), 0.3 + 0.05 * number, kind))
    every, missing, restarts = zip(*found, strict=True)
    return figures(every, sum(twice([leases]) for leases in every), sum(missing), restarts)


def run() -> dict[str, Any]:
    return {
        store: {
            "kills": kills(store),
            "power_cuts": cuts(store, CRASHES),
            "control_unsynced": cuts(store, 2, UnsyncedServer),
        }
        for store in STORES
    }
