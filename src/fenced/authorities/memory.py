"""An authority in dictionaries, for one process. Its answers are the oracle for the other authorities."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar
from urllib.parse import urlsplit

from fenced.authorities.shared.dictionaries import MemoryRows
from fenced.authorities.shared.local_wakeups import LocalWakeups
from fenced.authorities.shared.rows import NS, AttemptRow, LeaseAlgorithm
from fenced.authorities.shared.rules import NAMESPACE_ORDER
from fenced.contracts import Runtime, Trait
from fenced.errors import Misuse, shown
from fenced.model import (
    Ask,
    AskAnswer,
    NameView,
    ReleaseAnswer,
    RenewAnswer,
    Standing,
    check_name,
    grant_id,
)
from fenced.runtime import clocks


class MemoryStore:
    """One namespace for the clients of one process.

    The lock makes each call one transaction. Nothing under it waits, so it is never held for long.
    """

    algorithm: type[LeaseAlgorithm] = LeaseAlgorithm
    rows_type: type[MemoryRows] = MemoryRows

    def __init__(self, clock: Callable[[], float], *, realm: str | None = None) -> None:
        self.clock = clock
        self.realm = realm or secrets.token_hex(8)
        self.rows = self.rows_type()
        self.listeners: list[Callable[[str], None]] = []
        self._lock = threading.Lock()

    def _begin(self) -> LeaseAlgorithm:
        """Called with the lock held, so that the clock is read after it was taken."""
        return self.algorithm(self.rows, int(self.clock() * NS))

    def _notify(self, heads: list[AttemptRow]) -> None:
        """Called without the lock: a listener may call the store. Wake-ups are hints: their order does not matter."""
        for head in heads:
            for listener in list(self.listeners):
                listener(head.id)

    def ask(self, ask: Ask) -> AskAnswer:
        with self._lock:
            return self._begin().ask(ask)

    def renew(self, secrets: Sequence[str]) -> list[RenewAnswer]:
        with self._lock:
            return self._begin().renew([grant_id(secret) for secret in secrets])

    def release(self, secret: str, keep: float = 0.0) -> ReleaseAnswer:
        with self._lock:
            answer, heads = self._begin().release(secret, keep)
        self._notify(heads)
        return answer

    def withdraw(self, secret: str) -> ReleaseAnswer:
        with self._lock:
            answer, heads = self._begin().withdraw(secret)
        self._notify(heads)
        return answer

    def force_release(self, name: str, token: int) -> int | None:
        with self._lock:
            minted, heads = self._begin().force_release(name, token)
        self._notify(heads)
        return minted

    def raise_floor(self, above: int) -> int:
        with self._lock:
            return self._begin().raise_floor(above)

    def tidy(self) -> int:
        with self._lock:
            return self._begin().tidy()

    def survey(self, after: str, limit: int) -> list[NameView]:
        with self._lock:
            return self._begin().survey(after, limit)

    def observe(self, name: str) -> NameView:
        with self._lock:
            return self._begin().observe(check_name(name))


_STORES: dict[tuple[int, str, str], MemoryStore] = {}
"""The stores of this process, by process id, name and namespace. So a forked child finds none of its parent's."""


def _shared_store(name: str, namespace: str) -> MemoryStore:
    # `setdefault` is one step: two threads that ask at the same time get the same store.
    return _STORES.setdefault((os.getpid(), name, namespace), MemoryStore(clocks.now))


def _name_in(url: str) -> str:
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise Misuse(f"a memory authority is memory: or memory:NAME, not {shown(url)}")
    return parts.netloc + parts.path


class MemoryAuthority:
    """One client's access to a MemoryStore."""

    traits: ClassVar[tuple[Trait, ...]] = (
        NAMESPACE_ORDER,
        Trait(
            "one-process",
            "All clients of one process with the same address share one store; nothing survives the process.",
        ),
        Trait(
            "realm-per-store",
            "Every new store is a new realm, so guards refuse its predecessor's stamps.",
        ),
    )
    url: str = "memory:"

    def __init__(
        self, store: MemoryStore, runtime: Runtime, reopen: Callable[[], MemoryStore] | None = None
    ) -> None:
        self._store = store
        self._runtime = runtime
        self._reopen = reopen or (lambda: type(store)(store.clock))
        self._wakeups = LocalWakeups(runtime)
        self._listens = False

    @classmethod
    def at(cls, url: str, runtime: Runtime, namespace: str) -> MemoryAuthority:
        reopen = partial(_shared_store, _name_in(url), namespace)
        made = cls(reopen(), runtime, reopen)
        made.url = url
        return made

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        if not self._listens:  # a client opens before it asks, so it misses no wake-up of its waiters
            self._store.listeners.append(self._wakeups.add)
            self._listens = True
        return Standing(self._store.realm, self._store.rows.token)

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        return self._store.ask(ask)

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        return self._store.renew(secrets)

    async def release(self, secret: str, until: float | None = None, *, keep: float = 0.0) -> ReleaseAnswer:
        return self._store.release(secret, keep)

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        return self._store.withdraw(secret)

    async def next_wakeups(self, until: float) -> list[str]:
        return await self._wakeups.next(until)

    def interrupt(self) -> None:
        self._wakeups.interrupt()

    async def survey(
        self, *, after: str = "", limit: int = 1000, until: float | None = None
    ) -> list[NameView]:
        return self._store.survey(after, limit)

    async def observe(self, name: str, until: float | None = None) -> NameView:
        return self._store.observe(name)

    async def force_release(self, name: str, token: int, until: float | None = None) -> int | None:
        return self._store.force_release(check_name(name), token)

    async def raise_floor(self, above: int, until: float | None = None) -> int:
        return self._store.raise_floor(above)

    async def tidy(self, until: float | None = None) -> int:
        return self._store.tidy()

    async def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        if self._wakeups.add in self._store.listeners:
            self._store.listeners.remove(self._wakeups.add)
        self._listens = False

    def before_fork(self) -> None:
        return

    def forked(self) -> None:
        """Start with an empty store, which is a new realm: no other process would see changes of an inherited copy."""
        self._store = self._reopen()
        self._listens = False
