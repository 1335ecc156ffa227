"""What tests and their programs do with a file of leases. Without pytest, which takes long to import."""

from __future__ import annotations

import secrets
import sqlite3
from pathlib import Path

from fenced.runtime import clocks
from fenced.stores.sqlite.authority.store import Store
from fenced.values.model import Ask, Granted, Holder

HOLDER = Holder("0" * 32, "label", "host", 1)


def opened(path: Path) -> Store:
    store = Store(path, "default", clocks.now_ns)
    store.open()
    return store


def tokens_of(store: Store, count: int) -> list[int]:
    """So many grants, each released again."""
    tokens = []
    for _ in range(count):
        secret = secrets.token_hex(16)
        answer = store.ask(Ask(secret, ("orders",), 10.0, HOLDER), "")
        assert isinstance(answer, Granted)
        tokens.append(answer.token)
        store.release(secret)
    return tokens


def checkpoint(path: Path) -> None:
    """Carry what is in the log over into the file, as SQLite does now and then."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
