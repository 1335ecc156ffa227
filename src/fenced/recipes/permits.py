"""Semaphores and read-write leases, from names alone.

    with Semaphore(client, "pool", 3).hold() as permit:     # permit.name is pool#0, pool#1 or pool#2
        ...

Permit i of `pool` is the name `pool#i`, so there are never more than there are names, and each has tokens of its own: a
guard fences what belongs to that permit (a shard, a folder, a seat), and nothing that cannot tell permits apart. Who
wants one first takes the gate, the name `pool`: a fair queue. Its holder alone looks for a free permit. So permits are
granted in the order of the gate's queue. They cost the same however many wait, because a look at `pool#...` does not
read that queue.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

from fenced.client.announcing import Announces, announcers
from fenced.client.contexts import AsyncLeaseContext, LeaseContext
from fenced.client.faces import AsyncClient, Client
from fenced.client.leases import AsyncLease, Lease
from fenced.client.values import AsyncValues, Values
from fenced.core.acquiring import LeaseEngine, LeaseRequest
from fenced.core.holding import GrantState
from fenced.errors import Misuse, NotGranted, shown
from fenced.values import timing
from fenced.values.model import NAMES_MAX, NameView, check_name
from fenced.values.timing import Seconds

__all__ = ["AsyncReadWrite", "AsyncSemaphore", "ReadWrite", "Semaphore"]


def __dir__() -> list[str]:
    return __all__


LOOK_FIRST, LOOK_MAX = 0.05, 1.0
"""For how long the gate's holder waits for one permit, before it looks whether another one is free."""


@dataclass(frozen=True)
class PermitRequest:
    """Any one of the permits. What a context acquires, as it acquires a `LeaseRequest`."""

    name: str
    limit: int
    ttl: float
    wait: float | None

    @classmethod
    def checked(cls, name: str, limit: int, ttl: Seconds, wait: Seconds | None) -> PermitRequest:
        if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit < NAMES_MAX:
            raise Misuse(f"a limit is a whole number from 1 to {NAMES_MAX - 1}, not {shown(limit)}")
        check_name(f"{name}#{limit - 1}")
        return cls(name, limit, timing.check_ttl(ttl), timing.check_wait(wait))

    @property
    def gate(self) -> str:
        return self.name

    @property
    def permits(self) -> list[str]:
        return [f"{self.name}#{number}" for number in range(self.limit)]

    async def granted_by(self, engine: LeaseEngine) -> GrantState:
        began = engine.runtime.now()
        until = math.inf if self.wait is None else began + self.wait
        gate = await engine.acquire(LeaseRequest((self.gate,), self.ttl, self.wait))
        try:
            return await self._any(engine, gate.token, until)
        finally:
            await engine.release_at_exit(gate, raised=True)

    async def _any(self, engine: LeaseEngine, turn: int, until: float) -> GrantState:
        """The first permit that is free. Only the gate's holder is here, so nobody else waits for a permit."""
        look = LOOK_FIRST
        while True:
            taken = await self._taken(engine)
            if free := [name for name in self.permits if name not in taken]:
                with contextlib.suppress(NotGranted):
                    # An earlier holder of the gate, which has lost it, was faster.
                    return await engine.acquire(LeaseRequest((free[turn % len(free)],), self.ttl, 0.0))
            # Waiting for the one that was granted first: it is the likeliest to be given back first. If another one is,
            # the next look finds it.
            first = min(taken, key=lambda name: taken[name], default=self.permits[0])
            left = until - engine.runtime.now()
            try:
                return await engine.acquire(LeaseRequest((first,), self.ttl, max(0.0, min(look, left))))
            except NotGranted:
                if left <= look:
                    raise
                look = min(2 * look, LOOK_MAX)

    async def _taken(self, engine: LeaseEngine) -> dict[str, int]:
        """The permits that are held or kept, and the tokens of their holders."""
        wanted = set(self.permits)
        views: list[NameView] = await engine.authority.survey(after=f"{self.name}#", limit=self.limit)
        return {
            view.name: view.held_by.token if view.held_by else 0
            for view in views
            if view.name in wanted and (view.held_by or view.free_in > 0)
        }


def _waiting(request: PermitRequest, wait: Seconds | None) -> PermitRequest:
    return PermitRequest(request.name, request.limit, request.ttl, timing.check_wait(wait))


def _no_values() -> Misuse:
    return Misuse("say where the shared value is kept: ReadWrite(..., values=fenced.Values(URL))")


class _Slots:
    """A reader holds one slot; a writer holds the gate and all of them. Both wait in the gate's queue."""

    def __init__(self, name: str, readers: int, ttl: Seconds) -> None:
        self._slots = PermitRequest.checked(name, readers, ttl, None)

    def _read(self, wait: Seconds | None) -> PermitRequest:
        return _waiting(self._slots, wait)

    def _write(self, wait: Seconds | None) -> LeaseRequest:
        return LeaseRequest.checked([self.value_name, *self._slots.permits], self._slots.ttl, wait)

    @property
    def value_name(self) -> str:
        """The name of the value that `load` and `store` read and write."""
        return self._slots.gate

    def _all(self, value: bytes) -> dict[str, bytes]:
        # A reader has raised the mark of its own slot and of no other: only a write under every name meets it.
        return {self.value_name: value, **dict.fromkeys(self._slots.permits, b"")}


class AsyncSemaphore:
    """At most `limit` holders at once, each with a permit of its own."""

    def __init__(
        self, client: AsyncClient, name: str, limit: int, *, ttl: Seconds = timing.TTL_DEFAULT
    ) -> None:
        self._client = client
        self._request = PermitRequest.checked(name, limit, ttl, None)

    def hold(
        self, *, wait: Seconds | None = None, guards: Iterable[Announces] = ()
    ) -> AsyncLeaseContext[AsyncLease]:
        """`async with semaphore.hold() as permit:` any free permit, in the order of the calls."""
        return AsyncLeaseContext(self._client, _waiting(self._request, wait), announcers(guards))


class AsyncReadWrite(_Slots):
    """Many readers or one writer, first come first served. A writer that was overtaken is refused by `store`."""

    def __init__(
        self,
        client: AsyncClient,
        name: str,
        *,
        values: AsyncValues | None = None,
        readers: int = 16,
        ttl: Seconds = timing.TTL_DEFAULT,
    ) -> None:
        """`values`: where `load` and `store` keep the shared value."""
        super().__init__(name, readers, ttl)
        self._client = client
        self._values: AsyncValues | None = values

    def read(self, *, wait: Seconds | None = None) -> AsyncLeaseContext[AsyncLease]:
        """`async with rw.read() as lease:` shared with other readers, at most `readers` at once."""
        return AsyncLeaseContext(self._client, self._read(wait), ())

    def write(self, *, wait: Seconds | None = None) -> AsyncLeaseContext[AsyncLease]:
        """`async with rw.write() as lease:` alone. Write by `store`, or under all names of the lease."""
        return AsyncLeaseContext(self._client, self._write(wait), ())

    async def load(self, lease: AsyncLease) -> bytes | None:
        """Announce the reader, which keeps earlier writers out from now on, and read."""
        if self._values is None:
            raise _no_values()
        await self._values.announce(lease)
        return (await self._values.peek(self.value_name)).value

    async def store(self, lease: AsyncLease, value: bytes) -> None:
        """Write under every name, in one step: StaleToken if any reader or writer has come since."""
        if self._values is None:
            raise _no_values()
        await self._values.write_many(lease, self._all(value))


# generated: the blocking twins of the asyncio classes above, by `python -m release.twins`


class Semaphore:
    """At most `limit` holders at once, each with a permit of its own."""

    def __init__(self, client: Client, name: str, limit: int, *, ttl: Seconds = timing.TTL_DEFAULT) -> None:
        self._client = client
        self._request = PermitRequest.checked(name, limit, ttl, None)

    def hold(self, *, wait: Seconds | None = None, guards: Iterable[Announces] = ()) -> LeaseContext[Lease]:
        """`with semaphore.hold() as permit:` any free permit, in the order of the calls."""
        return LeaseContext(self._client, _waiting(self._request, wait), announcers(guards))


class ReadWrite(_Slots):
    """Many readers or one writer, first come first served. A writer that was overtaken is refused by `store`."""

    def __init__(
        self,
        client: Client,
        name: str,
        *,
        values: Values | None = None,
        readers: int = 16,
        ttl: Seconds = timing.TTL_DEFAULT,
    ) -> None:
        """`values`: where `load` and `store` keep the shared value."""
        super().__init__(name, readers, ttl)
        self._client = client
        self._values: Values | None = values

    def read(self, *, wait: Seconds | None = None) -> LeaseContext[Lease]:
        """`with rw.read() as lease:` shared with other readers, at most `readers` at once."""
        return LeaseContext(self._client, self._read(wait), ())

    def write(self, *, wait: Seconds | None = None) -> LeaseContext[Lease]:
        """`with rw.write() as lease:` alone. Write by `store`, or under all names of the lease."""
        return LeaseContext(self._client, self._write(wait), ())

    def load(self, lease: Lease) -> bytes | None:
        """Announce the reader, which keeps earlier writers out from now on, and read."""
        if self._values is None:
            raise _no_values()
        self._values.announce(lease)
        return self._values.peek(self.value_name).value

    def store(self, lease: Lease, value: bytes) -> None:
        """Write under every name, in one step: StaleToken if any reader or writer has come since."""
        if self._values is None:
            raise _no_values()
        self._values.write_many(lease, self._all(value))


# end
