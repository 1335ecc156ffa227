"""Two instances of the service, one of them killed every second under 16 clients, or stopped by SIGTERM.

Each client has the addresses of both. It takes leases of a few names: most of them are released soon, some are held for
two ttls and so live by their renewals, and some are left to expire, as by a client that died. Looked for: a token that
was granted twice or fell, a lease that was lost although its client renewed it, an error that a client saw, and a name
that was free, or whose lease had expired, and was not granted to a waiter.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import fenced
from fenced_testkit.servers import EtcdServer, PostgresqlServer, ServiceServer

CLIENTS = 16
NAMES = 8
TTL = 4.0
SECONDS = 75.0
EVERY = 1.0


class Crew:
    """The clients, and what they have seen."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._last: dict[str, int] = {}
        self._free_at: dict[str, float] = {}
        self.tokens: list[int] = []
        self.waits: list[float] = []
        """How long each name was free, or its lease over, until the next waiter had it."""
        self.seen: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(CLIENTS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        chance, names = random.Random(number), [f"name-{number}" for number in range(NAMES)]
        left: dict[str, float] = {}
        with fenced.Client(self._url, guarantee="best-effort") as client:
            while not self._stop.is_set():
                name = chance.choice([name for name in names if left.get(name, 0.0) < time.monotonic()])
                what = chance.choices(("soon", "renewed", "expires"), (40, 2, 1))[0]
                try:
                    self._hold(client, name, what, chance.random() * 0.3)
                    if what == "expires":
                        # A thread may not ask for a name that it holds.
                        left[name] = time.monotonic() + 2 * TTL
                except fenced.FencedError as error:
                    self.errors[type(error).__name__] += 1

    def _hold(self, client: fenced.Client, name: str, what: str, seconds: float) -> None:
        began = time.monotonic()
        lease = client.acquire(name, ttl=TTL, wait=60 * TTL, max_hold=TTL if what == "expires" else None)
        self._note(name, lease.token, began)
        self.seen[what] += 1
        if what == "expires":
            # It is renewed until then, so it ends up to a ttl later: the wait is measured too long, if at all.
            self._free_at[name] = time.monotonic() + lease.ttl
            return
        end = time.monotonic() + (2 * TTL if what == "renewed" else seconds)
        while time.monotonic() < end and not self._stop.is_set():
            lease.check()
            time.sleep(0.05)
        self._free_at[name] = time.monotonic()  # before it, since another thread may have the name at once
        lease.release()

    def _note(self, name: str, token: int, began: float) -> None:
        """Called while the lease is held, so the notes of one name are in the order of its grants."""
        with self._lock:
            self.seen["falls"] += token <= self._last.get(name, 0)
            self._last[name] = token
            self.tokens.append(token)
            self.waits.append(time.monotonic() - max(began, self._free_at.get(name, 0.0)))


def killed(
    store: str, seconds: float, end: Callable[[ServiceServer], None] = ServiceServer.kill
) -> dict[str, Any]:
    """What the clients of two instances saw while these were ended by turns, as soon as the other one was back."""
    options = ("--guarantee", "best-effort")
    with (
        ServiceServer(store=store, options=options) as one,
        ServiceServer(store=store, options=options) as two,
    ):
        crew = Crew(f"http://{one.host}:{one.port},{two.host}:{two.port}")
        crew.start()
        began, kills, longest_start = time.monotonic(), 0, 0.0
        for instance in itertools.cycle((one, two)):
            due = began + (kills + 1) * EVERY
            if due >= began + seconds:
                break
            time.sleep(max(0.0, due - time.monotonic()))
            end(instance)
            kills += 1
            start = time.monotonic()
            instance.start()
            longest_start = max(longest_start, time.monotonic() - start)
        took = time.monotonic() - began
        crew.stop()
    return {
        "ended": kills,
        "seconds": round(took, 1),
        "longest start of an instance, s": round(longest_start, 2),
        "grants": len(crew.tokens),
        "held for two ttls": crew.seen["renewed"],
        "left to expire": crew.seen["expires"],
        "tokens repeated": len(crew.tokens) - len(set(crew.tokens)),
        "tokens that fell": crew.seen["falls"],
        "leases lost": crew.errors.pop("LeaseLost", 0),
        "other errors that clients saw": dict(crew.errors),
        "longest time from free to granted, s": round(max(crew.waits), 2),
        "ttl, s": TTL,
    }


def run(seconds: float = SECONDS) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, PostgresqlServer() as postgresql, EtcdServer() as etcd:
        return {
            "sqlite": killed(f"sqlite://{folder}/leases.db", seconds),
            "postgresql": killed(postgresql.url(postgresql.create_database()), seconds),
            "etcd": killed(etcd.url(), seconds),
            "sqlite, stopped by SIGTERM": killed(
                f"sqlite://{folder}/stopped.db", seconds, ServiceServer.stop
            ),
        }
