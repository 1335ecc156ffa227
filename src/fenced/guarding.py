"""Guard and AsyncGuard: the guards of named values, by URL. Thin twins over the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fenced import registry
from fenced.client import AsyncLease, Lease
from fenced.contracts import Versioned
from fenced.errors import Misuse, shown
from fenced.model import Stamp, check_realm
from fenced.proofs import Proof
from fenced.runtime.blocking import BlockingRuntime, step

if TYPE_CHECKING:
    from fenced.runtime.aio import AioRuntime

Fence = Lease | AsyncLease | Stamp | Proof
"""What an operation is fenced with: the lease that makes the next stamp, or a stamp as it is, or proven."""


def write_stamp(fence: object) -> Stamp:
    """The stamp of a write: a lease makes its next one, a stamp is sent as it is."""
    if isinstance(fence, (Lease, AsyncLease)):
        return fence.next_stamp()
    if isinstance(fence, Stamp):
        return fence
    if isinstance(fence, Proof):
        return fence.stamp
    raise _no_fence(fence)


def announcement(fence: object) -> Stamp:
    """The stamp of an announcement by this fence."""
    if isinstance(fence, Stamp):
        return fence.announcing()
    if isinstance(fence, Lease | AsyncLease):
        return fence.announcement()
    if isinstance(fence, Proof):
        return fence.stamp.announcing()
    raise _no_fence(fence)


def _no_fence(fence: object) -> Misuse:
    hint = ""
    if fence is None:
        hint = " (did try_hold give None?)"
    elif hasattr(fence, "__enter__") or hasattr(fence, "__aenter__"):
        hint = "; enter it first: with client.hold(...) as lease"
    return Misuse(f"a guard is told the lease that hold() gave, or a stamp, not {shown(fence)}{hint}")


class Guard:
    """Named values behind a guard. Opens at first use."""

    def __init__(self, url: str) -> None:
        self._guard = registry.guard(url, BlockingRuntime())
        self._opened = False

    def _ready(self) -> None:
        if not self._opened:
            step(self._guard.open())
            self._opened = True

    def announce(self, fence: Fence, *names: str) -> None:
        """Raise the marks to this fence's token, durably, before anything is read."""
        self._ready()
        step(self._guard.announce(announcement(fence), *names))

    def read(self, fence: Fence, name: str) -> Versioned:
        """Announce, then read."""
        self._ready()
        return step(self._guard.read(announcement(fence), name))

    def peek(self, name: str, at_least: int = 0) -> Versioned:
        """Read without a lease; Contended while no token as high as `at_least` has been seen."""
        self._ready()
        return step(self._guard.peek(name, at_least))

    def write(self, fence: Fence, name: str, value: str, expect: int | None = None) -> int:
        """Write if admitted, and only over version `expect` if given; returns the new version."""
        self._ready()
        return step(self._guard.write(write_stamp(fence), name, value, expect=expect))

    def write_many(self, fence: Fence, values: dict[str, str]) -> None:
        """Write several names in one atomic step: all admitted, or none."""
        self._ready()
        step(self._guard.write_many(write_stamp(fence), values))

    def set_mode(self, mode: str, pattern: str = "*") -> None:
        """Switch the stage of the rollout for the names that match."""
        self._ready()
        step(self._guard.set_mode(mode, pattern))

    def adopt(self, realm: str) -> None:
        """Trust this authority (`lease.realm`) from now on, and no other."""
        self._ready()
        step(self._guard.adopt(check_realm(realm)))

    def close(self) -> None:
        step(self._guard.close())

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncGuard:
    """Named values behind a guard, for asyncio. Opens at first use."""

    def __init__(self, url: str) -> None:
        from fenced.runtime.aio import AioRuntime

        self._runtime: AioRuntime = AioRuntime()
        self._guard = registry.guard(url, self._runtime)
        self._opened = False

    async def _ready(self) -> None:
        if not self._opened:
            await self._guard.open()
            self._opened = True

    async def announce(self, fence: Fence, *names: str) -> None:
        """Raise the marks to this fence's token, durably, before anything is read."""
        await self._ready()
        await self._guard.announce(announcement(fence), *names)

    async def read(self, fence: Fence, name: str) -> Versioned:
        """Announce, then read."""
        await self._ready()
        return await self._guard.read(announcement(fence), name)

    async def peek(self, name: str, at_least: int = 0) -> Versioned:
        """Read without a lease; Contended while no token as high as `at_least` has been seen."""
        await self._ready()
        return await self._guard.peek(name, at_least)

    async def write(self, fence: Fence, name: str, value: str, expect: int | None = None) -> int:
        """Write if admitted, and only over version `expect` if given; returns the new version."""
        await self._ready()
        return await self._guard.write(write_stamp(fence), name, value, expect=expect)

    async def write_many(self, fence: Fence, values: dict[str, str]) -> None:
        """Write several names in one atomic step: all admitted, or none."""
        await self._ready()
        await self._guard.write_many(write_stamp(fence), values)

    async def set_mode(self, mode: str, pattern: str = "*") -> None:
        """Switch the stage of the rollout for the names that match."""
        await self._ready()
        await self._guard.set_mode(mode, pattern)

    async def adopt(self, realm: str) -> None:
        """Trust this authority (`lease.realm`) from now on, and no other."""
        await self._ready()
        await self._guard.adopt(check_realm(realm))

    async def close(self) -> None:
        await self._guard.close()
        self._runtime.close()

    async def __aenter__(self) -> AsyncGuard:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
