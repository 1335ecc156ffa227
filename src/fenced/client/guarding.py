"""Values and AsyncValues: small values under names, behind a guard, by URL. Twins over the contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fenced.client import registry
from fenced.client.leases import AsyncLease, Lease
from fenced.errors import LeaseLost, Misuse, shown
from fenced.guards.answers import entered_again, one_stamp
from fenced.proofs import Proof
from fenced.runtime.blocking import step
from fenced.values.contracts import Runtime, Versioned
from fenced.values.model import Credential, Stamp, check_name, check_realm


class StampedGrant(Protocol):
    """What makes the stamps of an operation, and knows until when: a grant, or a claim under one."""

    runtime: Runtime
    realm: str
    names: tuple[str, ...]
    token: int
    grant: str
    hold_until: float | None
    released: bool

    def next_stamp(self) -> Stamp: ...
    def announcement(self) -> Stamp: ...
    def error_if_lost(self) -> LeaseLost | None: ...


class ClaimFence:
    """A claimed row: guards take it where they take a lease."""

    _grant: StampedGrant


Fence = Lease | AsyncLease | Stamp | Proof | ClaimFence
"""What an operation is fenced with: the lease that makes the next stamp, or a stamp as it is, or a proven one."""
Fences = Fence | Sequence[Fence]
"""One of these, or several at once."""
_LEASES = (Lease, AsyncLease, ClaimFence)


def credential(
    fence: Fences, names: tuple[str, ...] = (), *, announcing: bool = False, still_held: bool = False
) -> Credential:
    """What this operation carries to a guard: the stamps of the fences, and the proofs if there are any.

    A lease makes its next stamp; `announcing`, it makes one with seq 0. Leases are renewed while a transaction runs,
    so only `max_hold` limits how long it may idle.
    """
    chosen = tuple(map(check_name, names))
    if isinstance(fence, _LEASES):  # nearly always
        grant = fence._grant
        stamp = grant.announcement() if announcing else grant.next_stamp()
        left = None if grant.hold_until is None else grant.hold_until - grant.runtime.now()
        return Credential((stamp,), chosen, left, still_held, lost=grant.error_if_lost)
    if isinstance(fence, Stamp):
        return Credential((fence.announcing() if announcing else fence,), chosen, None, still_held)
    several = isinstance(fence, Sequence)
    fences: Sequence[Fence] = fence if several else (fence,)  # type: ignore[assignment]
    if not fences:
        raise Misuse("give a guard the lease that hold() returned, or a list of at least one")
    leases = [one for one in fences if isinstance(one, _LEASES)]
    limits = [limit for limit in map(_hold_left, leases) if limit is not None]
    proofs = tuple(one.text if isinstance(one, Proof) else "-" for one in fences)
    return Credential(
        tuple(_stamp(one, announcing) for one in fences),
        chosen,
        min(limits, default=None),
        still_held,
        proofs if any(isinstance(one, Proof) for one in fences) else (),
        lambda: next(filter(None, (lease._grant.error_if_lost() for lease in leases)), None),
    )


def stamp_of(fence: Fences, guard: str, *, announcing: bool = False) -> Stamp:
    """What this operation carries to a guard that takes one lease at a time, and nothing else of a credential."""
    if isinstance(fence, _LEASES):  # nearly always
        return fence._grant.announcement() if announcing else fence._grant.next_stamp()
    if isinstance(fence, Stamp) and fence.names and not announcing:
        return fence
    return one_stamp(credential(fence, announcing=announcing), guard)


class EnteredOnce:
    """A block that is entered once: it has one stamp, and sends at its end what it has collected."""

    _entered = False

    def _enter(self) -> None:
        if self._entered:
            raise entered_again()
        self._entered = True


class CollectsWrites(EnteredOnce):
    """A block whose writes are sent at its end. The blocking class has methods of its own in place of these."""

    def __enter__(self) -> Any:
        raise Misuse(f"an {type(self).__name__} is entered by: async with guard.transaction(...) as tx")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...


class Announcer(Protocol):
    """A guard object that remembers for which leases it has raised marks."""

    def has_announced(self, grant: str, names: tuple[str, ...]) -> bool:
        """Whether it has raised the marks of all these names for this lease."""


def is_announced(fence: Fences, names: tuple[str, ...], marks: Announcer) -> bool:
    """Whether this guard object has raised the marks for this lease before: then nothing is sent before a read.

    False also for a released lease, or several: their credential is made next, and raises what is wrong.
    """
    if isinstance(fence, _LEASES):
        grant = fence._grant
        return not grant.released and marks.has_announced(grant.grant, names or grant.names)
    return isinstance(fence, Stamp) and marks.has_announced(fence.grant, names or fence.names)


def _stamp(fence: object, announcing: bool) -> Stamp:
    if isinstance(fence, _LEASES):
        return fence._grant.announcement() if announcing else fence._grant.next_stamp()
    stamp = fence.stamp if isinstance(fence, Proof) else fence
    if not isinstance(stamp, Stamp):
        raise _no_fence(fence)
    return stamp.announcing() if announcing else stamp


def _hold_left(lease: Lease | AsyncLease | ClaimFence) -> float | None:
    grant = lease._grant
    return None if grant.hold_until is None else grant.hold_until - grant.runtime.now()


def _no_fence(fence: object) -> Misuse:
    hint = ""
    if fence is None:
        hint = " (did try_hold give None?)"
    elif hasattr(fence, "__enter__") or hasattr(fence, "__aenter__"):
        hint = "; enter it first: with client.hold(...) as lease"
    return Misuse(f"give a guard the lease that hold() returned, or a stamp, not {shown(fence)}{hint}")


def names_of(fence: Fences) -> tuple[str, ...]:
    """Every name that the fences cover."""
    stamps = credential(fence, announcing=True).stamps
    return tuple(dict.fromkeys(name for stamp in stamps for name in stamp.names))


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
