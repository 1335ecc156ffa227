"""An authority in dictionaries, for one process. Its answers are the oracle for the other authorities."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, TypeVar
from urllib.parse import urlsplit

from fenced.errors import FencedError, Misuse, Unavailable, shown
from fenced.leases.dictionaries import MemoryRows
from fenced.leases.local_wakeups import LocalWakeups
from fenced.leases.rowauthority import Kind, RowAuthority, Work
from fenced.leases.rows import NS, AttemptRow, LeaseAlgorithm
from fenced.leases.rules import NAMESPACE_ORDER
from fenced.runtime import clocks
from fenced.values.contracts import Runtime, Trait
from fenced.values.model import Standing

T = TypeVar("T")


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
        self._refusal = ""
        """Why nothing is done any more."""

    def transact(self, work: Work[T]) -> T:
        """Wakes without the lock: a listener may call the store. Wake-ups are hints: their order does not matter."""
        answer, heads = self._locked(work)
        for head in heads:
            for listener in list(self.listeners):
                listener(head.id)
        return answer

    def _locked(self, work: Work[T]) -> tuple[T, Sequence[AttemptRow]]:
        with self._lock:
            if self._refusal:
                raise Unavailable(self._refusal)
            try:
                # The clock is read after the lock was taken: what waited for the lock revives nothing that has expired.
                return work(self.algorithm(self.rows, int(self.clock() * NS)))
            except FencedError:
                raise  # an answer: the algorithm refuses before it changes anything
            except BaseException as error:
                # In the middle of a change: a name could have two holders from now on, or none for ever.
                why = f"nothing is granted since a change was interrupted ({error!r}): restart the process"
                self._refusal = f"memory: {why}"
                raise


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


class MemoryAuthority(RowAuthority):
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

    async def _transact(self, work: Work[T], until: float | None, kind: Kind) -> T:
        return self._store.transact(work)

    async def next_wakeups(self, until: float) -> list[str]:
        return await self._wakeups.next(until)

    def interrupt(self) -> None:
        self._wakeups.interrupt()

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
