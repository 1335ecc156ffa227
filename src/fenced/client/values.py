"""Values and AsyncValues: small values under names, behind a guard, by URL."""

from __future__ import annotations

from fenced.client import registry
from fenced.client.guarding import Fences, credential
from fenced.runtime.blocking import step
from fenced.values.contracts import Versioned
from fenced.values.model import check_realm


class AsyncValues:
    """Small values under names, behind a guard, for asyncio. Opens at first use."""

    def __init__(self, url: str) -> None:
        from fenced.runtime.aio import AioRuntime

        self._runtime = AioRuntime()
        self._guard = registry.guard(url, self._runtime)
        self._opened = False

    async def _ready(self) -> None:
        if not self._opened:
            await self._guard.open()
            self._opened = True

    async def announce(self, fence: Fences, *names: str) -> None:
        """Raise the marks to this fence's token, durably, before anything is read."""
        await self._ready()
        await self._guard.announce(credential(fence, names, announcing=True))

    async def read(self, fence: Fences, name: str) -> Versioned:
        """Announce, then read: a `Versioned(value, version)`."""
        await self._ready()
        return await self._guard.read(credential(fence, announcing=True), name)

    async def peek(self, name: str, at_least: int = 0) -> Versioned:
        """Read without a lease; Contended while no token as high as `at_least` has been seen."""
        await self._ready()
        return await self._guard.peek(name, at_least)

    async def write(self, fence: Fences, name: str, value: bytes, expect: int | None = None) -> int:
        """Write if admitted, and only over version `expect` if given; returns the new version."""
        await self._ready()
        return await self._guard.write(credential(fence), name, value, expect=expect)

    async def write_many(self, fence: Fences, values: dict[str, bytes]) -> None:
        """Write several names in one atomic step: all admitted, or none. Unsupported without the trait `many-names`."""
        await self._ready()
        await self._guard.write_many(credential(fence), values)

    async def set_mode(self, mode: str, pattern: str = "*") -> None:
        """Set the mode, the stage of the rollout, of the names that match."""
        await self._ready()
        await self._guard.set_mode(mode, pattern)

    async def adopt(self, realm: str) -> None:
        """Trust this authority (`lease.realm`) from now on, and no other."""
        await self._ready()
        await self._guard.adopt(check_realm(realm))

    async def close(self) -> None:
        """Disconnect."""
        await self._guard.close()
        self._runtime.close()

    async def __aenter__(self) -> AsyncValues:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


# generated: the blocking twins of the asyncio classes above, by `python -m release.twins`


class Values:
    """Small values under names, behind a guard. Opens at first use."""

    def __init__(self, url: str) -> None:
        from fenced.runtime.blocking import BlockingRuntime

        self._runtime = BlockingRuntime()
        self._guard = registry.guard(url, self._runtime)
        self._opened = False

    def _ready(self) -> None:
        if not self._opened:
            step(self._guard.open())
            self._opened = True

    def announce(self, fence: Fences, *names: str) -> None:
        """Raise the marks to this fence's token, durably, before anything is read."""
        self._ready()
        step(self._guard.announce(credential(fence, names, announcing=True)))

    def read(self, fence: Fences, name: str) -> Versioned:
        """Announce, then read: a `Versioned(value, version)`."""
        self._ready()
        return step(self._guard.read(credential(fence, announcing=True), name))

    def peek(self, name: str, at_least: int = 0) -> Versioned:
        """Read without a lease; Contended while no token as high as `at_least` has been seen."""
        self._ready()
        return step(self._guard.peek(name, at_least))

    def write(self, fence: Fences, name: str, value: bytes, expect: int | None = None) -> int:
        """Write if admitted, and only over version `expect` if given; returns the new version."""
        self._ready()
        return step(self._guard.write(credential(fence), name, value, expect=expect))

    def write_many(self, fence: Fences, values: dict[str, bytes]) -> None:
        """Write several names in one atomic step: all admitted, or none. Unsupported without the trait `many-names`."""
        self._ready()
        step(self._guard.write_many(credential(fence), values))

    def set_mode(self, mode: str, pattern: str = "*") -> None:
        """Set the mode, the stage of the rollout, of the names that match."""
        self._ready()
        step(self._guard.set_mode(mode, pattern))

    def adopt(self, realm: str) -> None:
        """Trust this authority (`lease.realm`) from now on, and no other."""
        self._ready()
        step(self._guard.adopt(check_realm(realm)))

    def close(self) -> None:
        """Disconnect."""
        step(self._guard.close())
        self._runtime.close()

    def __enter__(self) -> Values:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# end
