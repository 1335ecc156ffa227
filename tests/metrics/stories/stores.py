"""Stores that the exporter looks at: a guarded table in PostgreSQL, and its authority in the same database."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import psycopg

import fenced
from fenced.proofs import HmacKey
from fenced.runtime.blocking import step
from fenced.sql import Guard
from fenced.stores.postgresql.guard.engine import ENGINE
from fenced.values.model import Stamp
from tests.metrics.stories.history import History

ROOT = Path(__file__).parents[3]
GUARD = "public.orders"


class Exporter:
    """`fenced exporter`. Its addresses are in the environment, because `ps` shows the words of a command."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        command = [sys.executable, "-m", "fenced", "exporter", "--every", "0.3", "--listen", "127.0.0.1:0"]
        stores = {"FENCED_GUARD": f"shop={url}", "FENCED_AUTHORITY": f"leases={url}"}
        process = subprocess.Popen(
            command, cwd=ROOT, text=True, stderr=subprocess.PIPE, env={**os.environ, **stores}
        )
        assert process.stderr is not None
        stack.callback(process.stderr.close)
        stack.callback(process.wait)
        stack.callback(process.kill)
        found = re.search(r"127\.0\.0\.1:(\d+)/metrics", process.stderr.readline())
        assert found is not None
        self.port = int(found[1])
        threading.Thread(target=process.stderr.read, daemon=True).start()


class Stores:
    """What happens to the table, and what it is like at the end."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self.url, self.stack = url, stack
        self.guard = Guard(table="orders", name="orders/{id}")
        self.db = stack.enter_context(psycopg.connect(url, autocommit=True))
        self.client = stack.enter_context(fenced.Client(url))
        self.db.execute("CREATE TABLE orders (id int PRIMARY KEY, qty int)")
        self.guard.install(self.db, mode="enforce")
        for pattern, mode in (("orders/8", "require"), ("orders/9", "shadow")):
            self.guard.set_mode(self.db, mode, pattern)

    def write(self, row: int) -> Stamp:
        """Its stamp."""
        with self.client.hold(f"orders/{row}") as lease, self.guard.transaction(self.db, lease) as tx:
            tx.execute("INSERT INTO orders VALUES (%s, 1) ON CONFLICT DO NOTHING", [row])
            return lease.bare_stamp()

    def late(self, row: int) -> None:
        """A write by a holder whose successor has written."""
        stale = self.write(row)
        self.write(row)
        with suppress(fenced.StaleToken), self.guard.transaction(self.db, stale) as tx:
            tx.execute("UPDATE orders SET qty = 9 WHERE id = %s", [row])

    def play(self) -> History:
        found, of = History(), {"guard": GUARD}
        self.late(1)
        found.note("refusals_total", kind="stale", source="guard", **of)
        self.late(9)
        found.note("let_through_total", kind="stale", **of)
        self.db.execute("UPDATE orders SET qty = 2 WHERE id = 1")
        found.note("unstamped_total", ruling="count", source="guard", **of)
        self.write(8)
        with suppress(psycopg.Error):
            self.db.execute("UPDATE orders SET qty = 3 WHERE id = 8")  # its record is rolled back with it
        found.note("refusals_total", kind="unrecorded", source="guard", **of)
        with psycopg.connect(self.url) as locks:
            locks.execute("LOCK TABLE fenced_guard.record IN ACCESS EXCLUSIVE MODE")
            self.late(9)
        found.note("guard_unrecorded_total")
        return found

    def settle(self) -> int:
        """The state that the gauges must show: held, waited for, overridden, broken. Returns the last token."""
        operator = ENGINE.operator(self.db)
        step(operator.add_key(HmacKey("shop-1", b"k" * 32)))
        step(operator.override("orders", "orders/7", 600.0, "to see it"))
        self.db.execute("ALTER TABLE orders DISABLE TRIGGER fenced_update")
        old = self.stack.enter_context(psycopg.connect(self.url))
        old.execute("INSERT INTO orders VALUES (99, 1)")  # older than the next change of a mode
        self.guard.set_mode(self.db, "canary(10%)", "orders/6", wait=0)
        held = self.client.acquire("orders/held", ttl=600)
        other = self.stack.enter_context(fenced.Client(self.url))
        waiter = threading.Thread(target=lambda: other.acquire("orders/held").release())
        waiter.start()
        self.stack.callback(waiter.join)
        self.stack.callback(held.release)
        return held.token
