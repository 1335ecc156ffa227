"""What tests and their programs do with a file of leases. Without pytest, which takes long to import."""

from __future__ import annotations

import secrets
import sqlite3
from pathlib import Path

from fenced.leases.rowauthority import Kind
from fenced.runtime import clocks
from fenced.stores.sqlite.authority.connecting import Deadline
from fenced.stores.sqlite.authority.store import Store
from fenced.values.model import Ask, AskAnswer, Granted, Holder, ReleaseAnswer, RenewAnswer, grant_id

HOLDER = Holder("0" * 32, "label", "host", 1)


class OneStore(Store):
    """A store whose operations are called in plain code."""

    def ask(self, ask: Ask, wake: str = "") -> AskAnswer:
        return self.transact(lambda algorithm: (algorithm.ask(ask, wake), ()), Kind.MINTS)[0]

    def renew(self, secrets: list[str], deadline: Deadline | None = None) -> list[RenewAnswer]:
        publics = [grant_id(secret) for secret in secrets]
        return self.transact(lambda algorithm: (algorithm.renew(publics), ()), Kind.RENEWS, deadline)[0]

    def release(self, secret: str) -> ReleaseAnswer:
        return self.transact(lambda algorithm: algorithm.release(secret), Kind.ENDS)[0]

    def raise_floor(self, above: int) -> int:
        return self.transact(lambda algorithm: (algorithm.raise_floor(above), ()), Kind.MINTS)[0]


def opened(path: Path) -> OneStore:
    store = OneStore(path, "default", clocks.now_ns)
    store.open()
    return store


def tokens_of(store: OneStore, count: int) -> list[int]:
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
