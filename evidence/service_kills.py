"""Two instances of the service, killed by turns under 16 clients, each a second after the other is back.

Each client has the addresses of both, and takes and releases leases of a few names. Looked for: a token that was
granted twice or fell, a lease that was lost although its client renewed it, an error that a client saw, a long wait.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import threading
import time
from collections import Counter
from typing import Any

import fenced
from fenced.testing.servers import PostgresqlServer, ServiceServer

CLIENTS = 16
NAMES = 4
TTL = 10.0
SECONDS = 60.0


class Crew:
    """The clients, and what they have seen."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._last: dict[str, int] = {}
        self.tokens: list[int] = []
        self.waits: list[float] = []
        self.seen: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(CLIENTS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        chance = random.Random(number)
        with fenced.Client(self._url) as client:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    lease = client.acquire(f"name-{chance.randrange(NAMES)}", ttl=TTL, wait=6 * TTL)
                    self._note(lease, time.monotonic() - began)
                    time.sleep(chance.random() * 0.3)
                    lease.check()
                    lease.release()
                except fenced.FencedError as error:
                    self.seen[type(error).__name__] += 1

    def _note(self, lease: fenced.Lease, waited: float) -> None:
        """Called while the lease is held, so the notes of one name are in the order of its grants."""
        with self._lock:
            (name,) = lease.names
            self.seen["falls"] += lease.token <= self._last.get(name, 0)
            self._last[name] = lease.token
            self.tokens.append(lease.token)
            self.waits.append(waited)


def killed(store: str, seconds: float) -> dict[str, Any]:
    """What the clients of two instances saw while these were killed by turns."""
    with ServiceServer(store=store) as one, ServiceServer(store=store) as two:
        crew = Crew(f"http://{one.host}:{one.port},{two.host}:{two.port}")
        crew.start()
        end, kills = time.monotonic() + seconds, 0
        for instance in itertools.cycle((one, two)):
            if time.monotonic() >= end:
                break
            time.sleep(1.0)
            instance.kill()
            kills += 1
            instance.start()
        crew.stop()
    repeated = len(crew.tokens) - len(set(crew.tokens))
    falls = crew.seen.pop("falls", 0)
    return {
        "kills": kills,
        "grants": len(crew.tokens),
        "tokens repeated": repeated,
        "tokens that fell": falls,
        "errors that clients saw": dict(crew.seen),
        "longest wait, s": round(max(crew.waits), 1),
        "ttl, s": TTL,
    }


def run(seconds: float = SECONDS) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, PostgresqlServer() as server:
        return {
            "sqlite": killed(f"sqlite://{folder}/leases.db", seconds),
            "postgresql": killed(server.url(server.create_database()), seconds),
        }
