"""A row authority and a cell guard as another distribution would ship them: nothing in fenced knows them.

Both keep everything in one file, which each operation reads and writes whole under a lock. They import what
`CONTRIBUTING.md` names: the row algorithm, and the guard over cells.
"""

from __future__ import annotations

import fcntl
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from fenced.guards.cellguard import CellGuard
from fenced.guards.cells import Swapped
from fenced.guards.remembered import AUDIT_LAGS
from fenced.leases.dictionaries import MemoryRows
from fenced.leases.local_wakeups import LocalWakeups
from fenced.leases.rows import NS, AttemptRow, LeaseAlgorithm
from fenced.leases.rules import NAMESPACE_ORDER
from fenced.runtime import clocks
from fenced.values.contracts import MODE_LAG, Runtime, Trait
from fenced.values.decision import Rule
from fenced.values.model import (
    Ask,
    AskAnswer,
    NameView,
    ReleaseAnswer,
    RenewAnswer,
    Standing,
    check_name,
    grant_id,
)

T = TypeVar("T")


@contextmanager
def stored(path: Path, first: Callable[[], T]) -> Iterator[list[T]]:
    """What is in a file, in a list of one. It is written back at the end of the block, unless that raises."""
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed: the block is one step for all processes
        file.seek(0)
        data = file.read()
        held = [pickle.loads(data) if data else first()]
        yield held
        after = pickle.dumps(held[0])
        file.seek(0)
        file.truncate()
        file.write(after)


_clients: dict[Path, WeakSet[ToyAuthority]] = {}


class ToyAuthority:
    """Leases in a file. Waiters of the same process are notified, and those of others poll."""

    traits: tuple[Trait, ...] = (NAMESPACE_ORDER,)

    def __init__(self, path: Path, runtime: Runtime, clock: Callable[[], float] = clocks.now) -> None:
        self.url = f"toyrows:{path}"
        self._path = path
        self._runtime = runtime
        self._clock = clock
        self._wakeups = LocalWakeups(runtime)

    @classmethod
    def at(cls, url: str, runtime: Runtime, namespace: str) -> ToyAuthority:
        return cls(Path(f"{url.removeprefix('toyrows:')}-{namespace}"), runtime)

    def _do(self, work: Callable[[LeaseAlgorithm], T]) -> T:
        with stored(self._path, MemoryRows) as (rows,):
            return work(LeaseAlgorithm(rows, int(self._clock() * NS)))

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        _clients.setdefault(self._path, WeakSet()).add(self)
        with stored(self._path, MemoryRows) as (rows,):
            return Standing(sha256(bytes(self._path)).hexdigest()[:16], rows.token)

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        return self._do(lambda algorithm: algorithm.ask(ask))

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        publics = [grant_id(secret) for secret in secrets]
        return self._do(lambda algorithm: algorithm.renew(publics))

    async def release(self, secret: str, until: float | None = None, *, keep: float = 0.0) -> ReleaseAnswer:
        return self._ended(lambda algorithm: algorithm.release(secret, keep))

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        return self._ended(lambda algorithm: algorithm.withdraw(secret))

    def _ended(self, work: Callable[[LeaseAlgorithm], tuple[T, list[AttemptRow]]]) -> T:
        answer, heads = self._do(work)
        for head in heads:
            for client in list(_clients[self._path]):
                client._wakeups.add(head.id)
        return answer

    async def next_wakeups(self, until: float) -> list[str]:
        return await self._wakeups.next(until)

    def interrupt(self) -> None:
        self._wakeups.interrupt()

    async def survey(
        self, *, after: str = "", limit: int = 1000, until: float | None = None
    ) -> list[NameView]:
        return self._do(lambda algorithm: algorithm.survey(after, limit))

    async def observe(self, name: str, until: float | None = None) -> NameView:
        return self._do(lambda algorithm: algorithm.observe(check_name(name)))

    async def force_release(self, name: str, token: int, until: float | None = None) -> int | None:
        return self._ended(lambda algorithm: algorithm.force_release(check_name(name), token))

    async def raise_floor(self, above: int, until: float | None = None) -> int:
        return self._do(lambda algorithm: algorithm.raise_floor(above))

    async def tidy(self, until: float | None = None) -> int:
        return self._do(lambda algorithm: algorithm.tidy())

    async def close(self) -> None:
        return

    def abandon(self) -> None:
        return

    def before_fork(self) -> None:
        return

    def forked(self) -> None:
        return


class ToyCells:
    """Cells in a file: key to version and blob."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def get(self, key: str) -> tuple[int, bytes | None]:
        with stored(self._path, dict[str, Any]) as (blobs,):
            found: tuple[int, bytes | None] = blobs.get(key, (0, None))
            return found

    async def swap(self, changes: Sequence[tuple[str, int, bytes | None]]) -> Swapped:
        ((key, version, blob),) = changes
        with stored(self._path, dict[str, Any]) as (blobs,):
            if blobs.get(key, (0, None))[0] != version:
                return Swapped(None)
            blobs[key] = version + 1, blob
            return Swapped((version + 1,))

    async def keys(self) -> list[str]:
        with stored(self._path, dict[str, Any]) as (blobs,):
            return list(blobs)

    async def close(self) -> None:
        return


class ToyValues(CellGuard):
    """Values under names in a file."""

    traits: tuple[Trait, ...] = (
        Trait("mandatory", "Every write goes through the guard."),
        AUDIT_LAGS,
        MODE_LAG,
    )
    kind = "a toy guard"

    def __init__(
        self, path: Path, runtime: Runtime, *, rule: Rule | None = None, mode: str = "enforce"
    ) -> None:
        super().__init__(ToyCells(path), runtime, f"toycells:{path}", rule=rule, mode=mode)

    @classmethod
    def at(cls, url: str, runtime: Runtime) -> ToyValues:
        return cls(Path(url.removeprefix("toycells:")), runtime)
